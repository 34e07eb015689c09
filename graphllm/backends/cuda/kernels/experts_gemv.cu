// Expert products of few pairs: a warp computes a few rows of a matrix for one pair, as in gemv.cu for
// one token. Pairs are adjacent in the grid, so pairs of one expert find its rows in the L2 cache.
//
// FORMAT: a struct of formats.cuh or of dot.cuh. INTEGER: int8 activations, else float32, or
// HALVES. ROWS, DEPTH, NEXT, RESIDENT: as in gemv.cu. GATED: act(first) * second of two matrices. FLOATS:
// with INTEGER, the activations are float32, which each block quantizes in shared memory.

#define LONE 1
#include "dot.cuh"
#include "experts.cuh"

#define WARPS 4
// Pointers take registers.
#define POINTERS (RESIDENT == 0)
#if RESIDENT
#define BOUNDS __launch_bounds__(WARP * WARPS, RESIDENT)
#else
#define BOUNDS
#endif
#define STREAMS (GATED ? 2 : 1)  // matrices that a warp reads

// ALIGNED: rows of x are aligned to 16 bytes.
template <bool ALIGNED> __device__ __forceinline__ void multiply(const Experts& e) {
    if (NEXT == 0 && !e.ids) launch_next();
    const int items = e.depth / FORMAT::ITEM, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int pair = blockIdx.x, row = (int)(blockIdx.y * WARPS + warp) * ROWS;
    const i64 tokens = *(volatile const i64*)e.live;
    if (e.ids && !e.ids_ready) wait_and_launch_next(NEXT < 2);  // the ids must be complete first
    int matrix = pair % e.each;
    if (e.ids && pair / e.each < tokens) matrix = id_of(e.ids, e.ids_stride, e.each, pair);
    const bool useful = pair / e.each < tokens && row < e.rows, there = useful && exists(e, matrix);
    FORMAT w[STREAMS][DEPTH][ROWS];
    size_t first[ROWS];  // items
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        first[r] = ((size_t)matrix * e.rows + min(row + r, e.rows - 1)) * items + lane;
#if POINTERS
    Planes next[STREAMS][ROWS];  // of the items to load next
#pragma unroll
    for (int s = 0; s < STREAMS; s++)
#pragma unroll
        for (int r = 0; r < ROWS; r++) next[s][r] = FORMAT::item(s ? e.up : e.w, first[r]);
#endif
    auto load = [&](int at) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++)
            if (at + WARP * d < items)
#pragma unroll
                for (int s = 0; s < STREAMS; s++)
#pragma unroll
                    for (int r = 0; r < ROWS; r++) {
#if POINTERS
                        Planes p = next[s][r];
                        advance<FORMAT>(p, WARP * d);
                        w[s][d][r].load(p);
#else
                        w[s][d][r].load(FORMAT::item(s ? e.up : e.w, first[r] + (at - lane + WARP * d)));
#endif
                    }
#if POINTERS
#pragma unroll
        for (int s = 0; s < STREAMS; s++)
#pragma unroll
            for (int r = 0; r < ROWS; r++) advance<FORMAT>(next[s][r], WARP * DEPTH);
#endif
    };
    if (there) load(lane);
    if (NEXT == 1 && !e.ids) launch_next();
    if (!e.ids) wait_for_previous();
    if (e.ids && e.ids_ready) wait_and_launch_next(NEXT < 2);
#if FLOATS
    DYNAMIC_SHARED(uint4, staged);
    const u8* x = (const u8*)staged;
    if (pair / e.each < tokens)
        quantise_row<FORMAT::BLOCK>((const float*)row_of(e, pair), (u8*)staged, e.depth);
    __syncthreads();
#else
    const u8* x = row_of(e, pair);
#endif
    if (!useful) return;
    float sums[STREAMS][ROWS] = {};
    typedef Activations<FORMAT> Row;
    RowPlace place_x = Row::place(x, e.depth, lane);
    for (int at = lane; there && at < items; at += WARP * DEPTH) {
        if (at != lane) load(at);
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            int j = at + WARP * d;
            if (j >= items) break;
            Row a;
            RowPlace p = place_x;
            Row::advance(p, WARP * d);
            a.load(p, ALIGNED);
#pragma unroll
            for (int s = 0; s < STREAMS; s++)
#pragma unroll
                for (int r = 0; r < ROWS; r++) sums[s][r] += product(w[s][d][r], lane, a);
        }
        Row::advance(place_x, WARP * DEPTH);
    }
    // Every lane gets one of the sums, so that a warp's rows are finished together.
    constexpr int EACH = ROWS == 3 ? 4 : ROWS, SUMS = STREAMS * EACH, LANES = WARP / SUMS;
    float all[SUMS] = {};
#pragma unroll
    for (int s = 0; s < STREAMS; s++)
#pragma unroll
        for (int r = 0; r < ROWS; r++) all[s * EACH + r] = sums[s][r];
    const int r = lane / LANES % EACH;
    const float sum = warp_sums<SUMS>(all, lane), up = __shfl_down_sync(FULL, sum, WARP / 2);
    if (lane % LANES || (GATED && lane >= WARP / 2) || r >= ROWS || row + r >= e.rows) return;
#if GATED
    finish_gated(e, pair, matrix, row + r, sum, up);
#else
    finish(e, pair, matrix, row + r, sum);
#endif
}

extern "C" __global__ void BOUNDS aligned(Experts e TIMESTAMPS) {
    RECORD_TIMESTAMPS
    multiply<true>(e);
}

#if INTEGER && !FLOATS
extern "C" __global__ void BOUNDS unaligned(Experts e TIMESTAMPS) {
    RECORD_TIMESTAMPS
    multiply<false>(e);
}
#endif
