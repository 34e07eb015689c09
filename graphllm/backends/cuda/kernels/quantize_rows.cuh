#pragma once
// Rows of int8 or e4m3 with one scale, stored by a block; see quantize.cuh. A thread has eight adjacent
// elements at a time.

#include "quantize.cuh"

__device__ __forceinline__ bool has_row_scale(int kind) { return kind == A8_ROW || kind == F8_ROW; }

// The scale of a row from the bits of each thread's largest absolute value.
__device__ __forceinline__ BlockScale row_scale(int kind, u32 most) {
    return BlockScale(block_max(most), kind == A8_ROW ? ROW_STEPS : E4M3_STEPS);
}

// Store eight elements; return the sum of the int8.
__device__ __forceinline__ int store_elements(int kind, const float* v, const BlockScale& scale, u8* to) {
    const uint2 q = kind == A8_ROW ? quantised8<true>(v, scale.inverse) : e4m3_of8(v, scale.inverse);
    *(uint2*)to = q;
    return kind == A8_ROW ? sum8(q) : 0;
}

// Store what follows the elements: the scale, the sum of all int8, and zeros up to 32 bytes.
__device__ __forceinline__ void store_tail(int kind, const BlockScale& scale, int sum, u8* row, int width) {
    if (kind == A8_ROW) sum = block_sum(sum);
    if (threadIdx.x >= 8) return;
    const u32 value = threadIdx.x == 0 ? __float_as_uint(scale.d) : threadIdx.x == 1 ? (u32)sum : 0;
    ((u32*)(row + width))[threadIdx.x] = value;
}
