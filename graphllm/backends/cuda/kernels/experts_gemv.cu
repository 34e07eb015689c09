// Expert products of few pairs: a warp computes a few rows of a matrix for one pair, as in gemv.cu for
// one token. Pairs are adjacent in the grid, so pairs of one expert find its rows in the L2 cache.
//
// FORMAT: a struct of formats.cuh or of dot.cuh. INTEGER: int8 activations, else float32, or
// HALVES. ROWS, DEPTH, NEXT, RESIDENT: as in gemv.cu. GATED: act(first) * second of two matrices. FLOATS:
// with INTEGER, the activations are float32, which each block quantizes in shared memory. SUMMED: warp j
// of a block computes the rows of the block for pair j of one token, and the block adds them up. CHOICE:
// with GATED, each block chooses the experts of one token itself, of at most 32 CHOICE. One more row of
// blocks stores the choice.
//
// The launch with SUMMED that follows one with CHOICE reads the ids speculatively, before its wait: they were stored
// before it could start, but are certain to be visible only after the wait. Then it reads them again, and multiplies
// again if they differ.

#define LONE 1
#include "dot.cuh"
#include "expert_choice.cuh"

#if SUMMED
#define WARPS MOST_SUMMED
#else
#define WARPS 4
#endif
// Pointers take registers.
#define POINTERS (RESIDENT == 0)
#if RESIDENT
#define BOUNDS __launch_bounds__(WARP * WARPS, RESIDENT)
#else
#define BOUNDS
#endif
#define STREAMS (GATED ? 2 : 1)  // matrices that a warp reads

#if SUMMED
// A result of one pair, and the weight of its expert.
struct Product {
    float value, weight;
};

// Store the weighted sum of all pairs' results of row + threadIdx.x, with the residual.
__device__ __forceinline__ void store_total(const Experts& e, const Product (*products)[ROWS], int row,
                                            float residual) {
    const int r = threadIdx.x;
    if (r >= ROWS || row + r >= e.rows) return;
    float sum = 0;
    for (int j = 0; j < e.each; j++) sum = fmaf(products[j][r].value, products[j][r].weight, sum);
    ((float*)e.y)[row + r] = residual + sum;
}
#endif

#if CHOICE
// The expert of a pair, by all threads of a block. Lets the next kernel start after the wait. Before that, a warm-up pass.
__device__ __forceinline__ int chosen_expert(const Experts& e, int pair) {
    __shared__ int chosen;
#pragma unroll 1
    for (int pass = 0; pass < 2; pass++) {
        if (pass) wait_and_launch_next();
        if (threadIdx.x < WARP) {
            const int expert = ExpertChoice<CHOICE>(e).with_rank(pair);
            if (expert >= 0) chosen = expert;
        }
        __syncthreads();
    }
    return chosen;
}

// Store the choice, by one warp, and then let the next kernel start.
__device__ __forceinline__ void store_choice(const Experts& e) {
    __shared__ float chosen[WARP];
    wait_for_previous();
    const ExpertChoice<CHOICE> choice(e);
    choice.top(e.each, [&](int rank, int expert, float score) {
        e.chosen[rank] = expert, chosen[rank] = score;
    });
    __threadfence();
    __syncwarp();
    launch_next();
    const int lane = threadIdx.x % WARP;
    const float weight = choice.weight(e, chosen[lane]);
    if (lane < e.each) e.chosen_weights[lane] = weight;
}
#endif

#if SUMMED
// Store the results of a pair with `matrix`, by a warp, in the order of `multiply`. x: the row of activations.
template <bool ALIGNED>
__device__ __forceinline__ void multiply_again(const Experts& e, const u8* x, int matrix, int row, Product* products,
                                               float weight) {
    typedef Activations<FORMAT> Row;
    const int items = e.depth / FORMAT::ITEM, lane = threadIdx.x % WARP;
#pragma unroll 1
    for (int r = 0; r < ROWS; r++) {
        const int own = min(row + r, e.rows - 1);
        const size_t first = ((size_t)matrix * e.rows + own) * items;
        float sum = 0;
#pragma unroll 1
        for (int j = lane; exists(e, matrix) && j < items; j += WARP) {
            FORMAT w;
            Row a;
            w.load(FORMAT::item(e.w, first + j));
            a.load(Row::place(x, e.depth, j), ALIGNED);
            sum += product(w, lane, a);
        }
        sum = warp_sum(sum) + bias_of(e, e.bias, matrix, own);
        if (lane == 0) products[r] = {sum, exists(e, matrix) ? weight : NOT_A_NUMBER};
    }
}
#endif

// ALIGNED: rows of x are aligned to 16 bytes.
template <bool ALIGNED> __device__ __forceinline__ void multiply(const Experts& e) {
#if CHOICE
    if (blockIdx.y + 1 == gridDim.y) {
        if (blockIdx.x == 0 && threadIdx.x < WARP) store_choice(e);
        return;
    }
    const int matrix = chosen_expert(e, blockIdx.x);
#else
    if (NEXT == 0 && !e.ids) launch_next();
#endif
    const int items = e.depth / FORMAT::ITEM, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int pair = SUMMED ? warp : blockIdx.x;
    const int row = (int)(SUMMED ? blockIdx.y : blockIdx.y * WARPS + warp) * ROWS;
    const i64 tokens = *(volatile const i64*)e.live;
#if !CHOICE
    if (e.ids && !e.ids_ready) wait_and_launch_next(NEXT < 2);  // the ids must be complete first
    int matrix = pair % e.each;
    if (e.ids && pair / e.each < tokens) matrix = id_of(e.ids, e.ids_stride, e.each, pair);
#endif
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
#if !CHOICE
    if (NEXT == 1 && !e.ids) launch_next();
    if (!e.ids) wait_for_previous();
    if (e.ids && e.ids_ready) wait_and_launch_next(NEXT < 2);
#endif
#if SUMMED
    const int certain = *((const volatile int*)e.ids + pair);  // not needed before the products are complete
#endif
#if FLOATS
    DYNAMIC_SHARED(uint4, staged);
    u8* own = (u8*)staged + (SUMMED ? warp * e.quantised_nbytes : 0);
    const u8* x = own;
    if (pair / e.each < tokens)
        quantise_row<FORMAT::BLOCK, SUMMED ? 1 : WARPS>((const float*)row_of(e, pair), own, e.depth);
    __syncthreads();
#else
    const u8* x = row_of(e, pair);
#endif
    if (!SUMMED && !useful) return;
    // Every lane gets one of the sums, so that a warp's rows are finished together.
    constexpr int EACH = ROWS == 3 ? 4 : ROWS > 4 ? 8 : ROWS, SUMS = STREAMS * EACH, LANES = WARP / SUMS;
    const int r = lane / LANES % EACH;
    // Requested before the products.
    const float* biases = GATED && lane >= WARP / 2 ? e.up_bias : e.bias;
    const float bias = bias_of(e, biases, matrix, min(row + r, e.rows - 1));
#if SUMMED
    __shared__ Product products[MOST_SUMMED][ROWS];
    const float weight = e.weights[pair];
    const float residual = e.residual[min(row + (int)threadIdx.x, e.rows - 1)];
#endif
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
    float all[SUMS] = {};
#pragma unroll
    for (int s = 0; s < STREAMS; s++)
#pragma unroll
        for (int r = 0; r < ROWS; r++) all[s * EACH + r] = sums[s][r];
    const float sum = bias + warp_sums<SUMS>(all, lane), up = __shfl_down_sync(FULL, sum, WARP / 2);
#if SUMMED
    if (certain != matrix)
        multiply_again<ALIGNED>(e, x, certain, row, products[pair], weight);
    else if (lane % LANES == 0 && r < ROWS)
        products[pair][r] = {sum, exists(e, matrix) ? weight : NOT_A_NUMBER};
    __syncthreads();
    if (useful) store_total(e, products, row, residual);
    return;
#endif
    if (lane % LANES || (GATED && lane >= WARP / 2) || r >= ROWS || row + r >= e.rows) return;
#if GATED
    store_gated(e, pair, matrix, row + r, sum, up);
#else
    store(e, pair, matrix, row + r, sum);
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
