#pragma once
// Stores elements of a head to a pool of keys or values. POOL: 0 float32, 1 float16, 2 q8_0, 3 q4_0, 4 fp8.

#include "quantize.cuh"

#ifndef POOL
#define POOL 1
#endif
#define HEAD_SCALE (POOL == 4)  // a head has one scale

struct Pool {
    u8* at;
    i64 stride;  // bytes between slots
    const int* slot;  // slot of each token; negative: do not store
    int head_bytes, padding;
};

// The scale of a head, if it has one, from the bits of its largest magnitude.
__device__ __forceinline__ BlockScale head_scale(u32 most) { return BlockScale(HEAD_SCALE ? most : 0, E4M3_STEPS); }

// Store element i of a block of q8_0 or q4_0, which the lanes of a warp hold in order. Rounding is that of
// graphllm.formats.quantization.quantise; the declaration of kv_write says what becomes of values that are
// not finite or almost zero.
__device__ __forceinline__ void store_q8_0(u8* block, int i, float x) {
    u32 most = warp_max(abs_bits(x));
    bool finite = most < 0x7f800000u, held = finite && most >= 0x0d800000u;  // 2^-100
    float d = held ? __fdiv_rn(__uint_as_float(most), 127.f) : 0.f;
    float scaled = held ? __fmul_rn(x, __frcp_rn(d)) : 0.f;
    block[2 + i] = (u8)(int)truncf(__fadd_rn(scaled, copysignf(0.5f, scaled)));
    if (i == 0) *(u16*)block = finite ? to_f16(d) : 0x7e00;
}

__device__ __forceinline__ void store_q4_0(u8* block, int i, float x) {
    u32 most = warp_max(abs_bits(x));
    bool finite = most < 0x7f800000u, held = finite && most >= 0x0d800000u;
    // The first element of the largest magnitude becomes -8.
    int first = __ffs(__ballot_sync(FULL, abs_bits(x) == most)) - 1;
    float d = held ? __fmul_rn(__shfl_sync(FULL, x, first), -0.125f) : -0.f;
    float scaled = held ? __fmul_rn(x, __frcp_rn(d)) : 0.f;
    int q = (int)fminf(__fadd_rn(scaled, 8.5f), 15.f), upper = __shfl_down_sync(FULL, q, 16);
    if (i < 16) block[2 + i] = (u8)(q | upper << 4);
    if (i == 0) *(u16*)block = finite ? to_f16(d) : 0x7e00;
}

// Store element i of a head. Lane l of a warp holds an element i of which i % 32 is l, and in blocks of 32
// those of one block. `scale`: of the head.
__device__ __forceinline__ void store_kv(const Pool& pool, i64 slot, int head, int i, float x,
                                         const BlockScale& scale) {
    u8* to = pool.at + slot * pool.stride + head * (i64)pool.head_bytes;
#if POOL == 0
    ((float*)to)[i] = x;
#elif POOL == 1
    ((u16*)to)[i] = to_f16(x);
#elif POOL == 2
    store_q8_0(to + i / 32 * 34, i % 32, x);
#elif POOL == 3
    store_q4_0(to + i / 32 * 18, i % 32, x);
#else
    to[i] = scale.inverse == 0.f ? 0 : (u8)two_e4m3(__fmul_rn(x, scale.inverse), 0.f);
    if (i == 0) *(float*)(to + pool.head_bytes - 4) = scale.d;
#endif
}
