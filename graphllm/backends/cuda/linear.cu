// Matrix products with weights, for 2 to 8 tokens: a warp goes along a few rows of the matrix.
//
// FORMAT: a struct of blocks.cuh or products.cuh. INTEGER: activations are quantised, else float32.
// TOKENS: taken at a time; ROWS: of a matrix, to a warp; DEPTH: items of each row that are on their way
// at a time.

#include "matrices.cuh"
#include "products.cuh"

// y = x w^T for up to three matrices of one format and depth k: their rows, one after another.
extern "C" __global__ void linear(const u8* x, i64 x_stride, const i64* live, int k, Matrices all) {
    launch_next();
    const int items = k / FORMAT::ITEM, lane = threadIdx.x % WARP;
    int row = (int)(blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP) * ROWS;
    Matrix m = all.m[0];
#pragma unroll
    for (int i = 1; i < 3; i++) {
        int above = ((int)m.rows + ROWS - 1) / ROWS * ROWS;
        if (row >= above) row -= above, m = all.m[i];
    }
    if (row >= m.rows) return;
    FORMAT w[DEPTH][ROWS];
    auto load = [&](int at) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++)
            if (at + WARP * d < items)
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    size_t i = (size_t)min(row + r, (int)m.rows - 1) * items + at + WARP * d;
                    w[d][r].load(m.w, i);
                }
    };
    load(lane);  // weights are constants: there is no need to wait for the kernel before
    const int first = blockIdx.y * TOKENS, tokens = (int)*live;
    wait_for_previous();
    const bool wide = (u64)x % 16 == 0 && x_stride % 16 == 0;
    if (first >= tokens) return;
    float sums[ROWS][TOKENS] = {};
    for (int at = lane; at < items; at += WARP * DEPTH) {
        if (at != lane) load(at);
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            int j = at + WARP * d;
            if (j >= items) break;
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                typename FORMAT::Values u;
                w[d][r].unpack(j, u);
#pragma unroll
                for (int t = 0; t < TOKENS; t++) {
                    const u8* token = x + min(first + t, tokens - 1) * x_stride;
                    sums[r][t] += dot<FORMAT>(u, token, k, j, wide);
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            float value = warp_sum(sums[r][t]);
            if (lane == 0 && row + r < m.rows && first + t < tokens)
                finish(m, first + t, row + r, value);
        }
}
