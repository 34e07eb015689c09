// Matrix products with weights, for few tokens: a warp goes along a few rows of the matrix.
//
// FORMAT: a struct of blocks.cuh or of dot.cuh. INTEGER: activations are quantised, else
// float32. TOKENS: taken at a time; ROWS: of a matrix, to a warp; DEPTH: items of each row that are
// on their way at a time. GATED: two matrices of one shape give act(first) * second. NEXT: when the
// kernel after this one may begin: 0: at once, 1: when the first weights are asked for, 2: at the end.
// SHARED_BY: warps that share the depth of a row; more than one for a lone token only.

#include "dot.cuh"
#include "matrices.cuh"

#define WARPS 4
#define STREAMS (GATED ? 2 : 1)  // matrices that a warp reads at a time

// y = x w^T for up to three matrices of one format and depth k: their rows, one after another.
extern "C" __global__ void linear(const u8* x, i64 x_stride, const i64* live, int k, Matrices all,
                                  int act STAMPS) {
    STAMPED
    if (NEXT == 0) launch_next();
    const int items = k / FORMAT::ITEM, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int start = lane + WARP * DEPTH * (warp % SHARED_BY);
    int row = (int)(blockIdx.x * (WARPS / SHARED_BY) + warp / SHARED_BY) * ROWS;
    Matrix m = all.m[0];
    if (!GATED) find_matrix<ROWS>(all, row, m);
    if (row >= m.rows) return;
    FORMAT w[STREAMS][DEPTH][ROWS];
    auto load = [&](int at) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++)
            if (at + WARP * d < items)
#pragma unroll
                for (int s = 0; s < STREAMS; s++)
#pragma unroll
                    for (int r = 0; r < ROWS; r++) {
                        size_t i = (size_t)min(row + r, (int)m.rows - 1) * items + at + WARP * d;
                        w[s][d][r].load(s ? all.m[1].w : m.w, i);
                    }
    };
    load(start);  // weights are constants: there is no need to wait for the kernel before
    if (NEXT == 1) launch_next();
    const int first = blockIdx.y * TOKENS, tokens = (int)*live;
    wait_for_previous();
    // Whether rows begin at multiples of 16 bytes; a lone one always does.
    const bool wide = TOKENS == 1 || ((u64)x % 16 == 0 && x_stride % 16 == 0);
    if (first >= tokens) return;
    float sums[STREAMS][ROWS][TOKENS] = {};
    for (int at = start; at < items; at += WARP * DEPTH * SHARED_BY) {
        if (at != start) load(at);
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            int j = at + WARP * d;
            if (j >= items) break;
#pragma unroll
            for (int s = 0; s < STREAMS; s++)
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    typename FORMAT::Values u;
                    w[s][d][r].unpack(j, u);
#pragma unroll
                    for (int t = 0; t < TOKENS; t++) {
                        const u8* token = x + min(first + t, tokens - 1) * x_stride;
                        sums[s][r][t] += dot<FORMAT>(u, token, k, j, wide);
                    }
                }
        }
    }
#pragma unroll
    for (int s = 0; s < STREAMS; s++)
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int t = 0; t < TOKENS; t++) sums[s][r][t] = warp_sum(sums[s][r][t]);
#if SHARED_BY > 1
    __shared__ float parts[WARPS][STREAMS][ROWS];
#pragma unroll
    for (int s = 0; s < STREAMS; s++)
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (lane == 0) parts[warp][s][r] = sums[s][r][0];
    __syncthreads();
    if (warp % SHARED_BY) return;
#pragma unroll
    for (int s = 0; s < STREAMS; s++)
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int other = 1; other < SHARED_BY; other++)
                sums[s][r][0] += parts[warp + other][s][r];
#endif
    if (lane) return;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            if (row + r >= m.rows || first + t >= tokens) continue;
#if GATED
            const Matrix& up = all.m[1];
            float gate = sums[0][r][t], other = sums[1][r][t];
            if (m.bias) gate += m.bias[row + r];
            if (up.bias) other += up.bias[row + r];
            ((float*)(m.y + (first + t) * m.y_stride))[row + r] = activate(act, gate) * other;
#else
            finish(m, first + t, row + r, sums[0][r][t]);
#endif
        }
}
