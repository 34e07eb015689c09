#pragma once
// Copies of rows of logits by several blocks each, in blockIdx.y order.

// Columns of a block, a multiple of 4.
__device__ __forceinline__ int columns_of(int width) {
    return (width + 4 * gridDim.y - 1) / (4 * gridDim.y) * 4;
}

// Copy columns `first`, a multiple of 4, to `last` of a row, by all threads of a block.
__device__ __forceinline__ void copy_columns(const float* from, float* to, int first, int last) {
    const bool aligned = ((u64)from | (u64)to) % 16 == 0;
    const int vectors = aligned && first < last ? (last - first) / 4 : 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < vectors; i += blockDim.x)
        ((float4*)(to + first))[i] = ((const float4*)(from + first))[i];
#pragma unroll 4
    for (int i = first + 4 * vectors + threadIdx.x; i < last; i += blockDim.x) to[i] = from[i];
}
