// Products of each row with a matrix of its own, for few rows: a warp goes along a few rows of a matrix
// for one pair, as in linear.cu for one token. Pairs are neighbours in the grid, so that those of one
// expert find its rows in the second-level cache.
//
// FORMAT: a struct of blocks.cuh or of dot.cuh. INTEGER: activations are quantised, else float32, or
// HALVES. ROWS, DEPTH, NEXT: as in linear.cu.

#include "dot.cuh"
#include "experts.cuh"

#define WARPS 4

// WIDE: rows of x begin at multiples of 16 bytes.
template <bool WIDE> __device__ __forceinline__ void multiply(const Experts& e) {
    if (NEXT == 0) launch_next();
    const int items = e.depth / FORMAT::ITEM, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int pair = blockIdx.x, row = (int)(blockIdx.y * WARPS + warp) * ROWS;
    const i64 tokens = *(volatile const i64*)e.live;
    int matrix = pair % e.each;
    if (e.ids) {  // which matrix it is must be known first
        wait_for_previous();
        if (pair / e.each < tokens) matrix = e.ids[pair];
    }
    const bool useful = pair / e.each < tokens && row < e.rows, there = useful && exists(e, matrix);
    FORMAT w[DEPTH][ROWS];
    auto load = [&](int at) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++)
            if (at + WARP * d < items)
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    size_t place = (size_t)matrix * e.rows + min(row + r, e.rows - 1);
                    w[d][r].load(e.w, place * items + at + WARP * d);
                }
    };
    if (there) load(lane);
    if (NEXT == 1) launch_next();
    if (!e.ids) wait_for_previous();
    if (!useful) return;
    const u8* x = row_of(e, pair);
    float sums[ROWS] = {};
    for (int at = lane; there && at < items; at += WARP * DEPTH) {
        if (at != lane) load(at);
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            int j = at + WARP * d;
            if (j >= items) break;
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                typename FORMAT::Values u;
                w[d][r].unpack(j, u);
                sums[r] += dot<FORMAT>(u, x, e.depth, j, WIDE);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        sums[r] = warp_sum(sums[r]);
        if (lane || row + r >= e.rows) continue;
        if (there)
            finish(e, pair, matrix, row + r, sums[r]);
        else
            e.y[(i64)pair * e.rows + row + r] = NOT_A_NUMBER;
    }
}

extern "C" __global__ void wide(Experts e STAMPS) {
    STAMPED
    multiply<true>(e);
}

#if INTEGER
extern "C" __global__ void narrow(Experts e STAMPS) {
    STAMPED
    multiply<false>(e);
}
#endif
