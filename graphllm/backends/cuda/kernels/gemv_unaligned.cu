// Linears with plain weights whose rows are not multiples of 16 bytes. A warp computes a row of the
// matrix; threads load single elements.
//
// FORMAT: 0 float32, 1 float16, 2 bfloat16.

#include "matrices.cuh"

__device__ __forceinline__ float weight(const u8* row, int at) {
#if FORMAT == 0
    return ((const float*)row)[at];
#elif FORMAT == 1
    return from_f16(((const u16*)row)[at]);
#else
    return from_bf16(((const u16*)row)[at]);
#endif
}

// Grid: (groups of rows of the matrices, tokens).
extern "C" __global__ void gemv(const u8* x, i64 x_stride, const i64* live, int k,
                                  Matrices all TIMESTAMPS) {
    RECORD_TIMESTAMPS
    const i64 rows = begin(live);
    int row = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, token = blockIdx.y;
    Matrix m = all.m[0];
    find_matrix<1>(all, row, m);
    if (row >= m.rows || token >= rows) return;
    const u8* from = m.w.a + (i64)row * k * (FORMAT ? 2 : 4);
    const float* values = (const float*)(x + token * x_stride);
    float sum = 0;
    for (int i = threadIdx.x % WARP; i < k; i += WARP) sum = fmaf(weight(from, i), values[i], sum);
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) finish(m, token, row, sum);
}
