// Expert products with plain weights whose rows are not multiples of 16 bytes. A warp computes a row of
// a matrix; threads load single elements. FORMAT: 0 float32, 1 float16, 2 bfloat16.

#include "experts.cuh"

__device__ __forceinline__ float number(int kind, const u8* row, int at) {
    if (kind == 0) return ((const float*)row)[at];
    u16 h = ((const u16*)row)[at];
    return kind == 1 ? from_f16(h) : from_bf16(h);
}

// Grid: (pairs, groups of rows of the matrix).
extern "C" __global__ void multiply(Experts e TIMESTAMPS) {
    RECORD_TIMESTAMPS
    const i64 tokens = *(volatile const i64*)e.live;
    wait_and_launch_next();
    const int pair = blockIdx.x, row = blockIdx.y * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (pair / e.each >= tokens || row >= e.rows) return;
    const int matrix = e.ids ? id_of(e.ids, e.ids_stride, e.each, pair) : pair % e.each;
    float sum = 0;
    if (exists(e, matrix)) {
        const u8 *from = e.w.a + ((i64)matrix * e.rows + row) * e.depth * (FORMAT ? 2 : 4);
        const u8* x = row_of(e, pair);
        for (int i = threadIdx.x % WARP; i < e.depth; i += WARP)
            sum = fmaf(number(FORMAT, from, i), number(e.kind, x, i), sum);
        sum = warp_sum(sum);
    }
    if (threadIdx.x % WARP == 0) finish(e, pair, matrix, row, sum);
}
