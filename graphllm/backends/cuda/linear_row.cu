// Matrix products with weights, for one token: a warp goes along neighbouring rows of a matrix, and has
// the next items on their way while it multiplies.
//
// FORMAT: a struct of blocks.cuh or products.cuh. INTEGER: activations are quantised, else float32.
// LINES: rows at a time; DEPTH: items of each that a thread loads at a time. GATED: two matrices of one
// shape, of which LINES, 2, are the same row; they give act(first) * second. BLOCKS: that a processor
// has room for.

#include "matrices.cuh"
#include "products.cuh"

#define STEP (WARP * DEPTH)
#ifndef UNROLL
#define UNROLL 2
#endif
#define TOGETHER (GATED ? 1 : LINES)  // rows of one matrix at a time

// A group of rows, the matrix that it is in, and the item of it that is loaded next.
struct Place {
    int group, at, row, matrix;

    // Group `group` of all.
    __device__ __forceinline__ void find(const Matrices& all) {
        row = group * TOGETHER, matrix = 0;
        int rows = (int)all.m[0].rows;
#pragma unroll
        for (int i = 1; !GATED && i < 3; i++) {
            int above = (rows + TOGETHER - 1) / TOGETHER * TOGETHER;
            if (row >= above) row -= above, matrix = i, rows = (int)all.m[i].rows;
        }
    }
};

__device__ __forceinline__ const Matrix& matrix_of(const Matrices& all, int i) {
    return i == 0 ? all.m[0] : i == 1 ? all.m[1] : all.m[2];
}

typedef FORMAT Chunk[DEPTH][LINES];

__device__ __forceinline__ void load(Chunk& w, const Place& from, const Matrices& all, int items) {
    const Matrix& m = matrix_of(all, from.matrix);
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
        int j = min(from.at + (int)threadIdx.x % WARP + WARP * d, items - 1);
#pragma unroll
        for (int l = 0; l < LINES; l++) {
            int own = GATED ? from.row : min(from.row + l, (int)m.rows - 1);
            w[d][l].load(GATED && l ? all.m[1].w : m.w, (size_t)own * items + j);
        }
    }
}

__device__ __forceinline__ void multiply(const Chunk& w, float (&sums)[LINES], const u8* x, int k,
                                         int at, int items) {
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
        int j = at + (int)threadIdx.x % WARP + WARP * d;
        if (at + STEP > items && j >= items) break;
#pragma unroll
        for (int l = 0; l < LINES; l++) {
            typename FORMAT::Values u;
            w[d][l].unpack(j, u);
            sums[l] += dot<FORMAT>(u, x, k, j, true);
        }
    }
}

__device__ __forceinline__ void finish_lines(const Place& now, const Matrices& all,
                                             const float (&sums)[LINES], int act) {
    const Matrix& m = matrix_of(all, now.matrix);
    float values[LINES];
#pragma unroll
    for (int l = 0; l < LINES; l++) values[l] = warp_sum(sums[l]);
    if (threadIdx.x % WARP) return;
#if GATED
    float gate = values[0], up = values[1];
    if (m.bias) gate += m.bias[now.row];
    if (all.m[1].bias) up += all.m[1].bias[now.row];
    ((float*)m.y)[now.row] = activate(act, gate) * up;
#else
#pragma unroll
    for (int l = 0; l < LINES; l++)
        if (now.row + l < m.rows) finish(m, 0, now.row + l, values[l]);
#endif
}

// y = x w^T for up to three matrices of one format and depth k. A warp does `each` groups of rows of
// the `groups` that there are.
extern "C" __global__ void __launch_bounds__(128, BLOCKS)
    linear(const u8* x, const i64* live, int k, Matrices all, int groups, int each, int act) {
    launch_next();
    const int items = k / FORMAT::ITEM;
    const int warp = (int)(blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP);
    const int end = min(groups, (warp + 1) * each);
    Place next = {warp * each, 0, 0, 0};
    if (next.group >= end) return;
    next.find(all);
    Chunk w;
    load(w, next, all, items);  // weights are constants: no need to wait for the kernel before
    const bool none = *live == 0;
    wait_for_previous();
    if (none) return;
    Place now = next;
    float sums[LINES] = {};
#pragma unroll UNROLL
    while (now.group < end) {
        Chunk own;
#pragma unroll
        for (int d = 0; d < DEPTH; d++)
#pragma unroll
            for (int l = 0; l < LINES; l++) own[d][l] = w[d][l];
        next.at += STEP;
        if (next.at >= items) {
            next.at = 0;
            if (++next.group < end) next.find(all);
        }
        if (next.group < end) load(w, next, all, items);
        multiply(own, sums, x, k, now.at, items);
        if (next.at == 0) {
            finish_lines(now, all, sums, act);
#pragma unroll
            for (int l = 0; l < LINES; l++) sums[l] = 0;
        }
        now = next;
    }
}
