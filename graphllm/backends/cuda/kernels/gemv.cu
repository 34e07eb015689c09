// GEMV: linears of few tokens. A warp computes a few rows of the matrix.
//
// FORMAT: a struct of formats.cuh or of dot.cuh. INTEGER: int8 activations, else
// float32. TOKENS: tokens computed together. ROWS: rows of a warp. DEPTH: items of each row in flight.
// GATED: compute act(first) * second of two matrices of one shape. NEXT: when the next kernel may
// start; 0: at once, 1: after the first weight loads, 2: at the end. WARPS: warps of a block. RESIDENT:
// blocks that must fit into the registers of a multiprocessor.
//
// For one token only: ROW_LANES: lanes that share a row; if fewer than 32, a warp takes ROWS rows for each
// group of them, so that all lanes have items of a shallow matrix. SHARED_BY: warps that share the depth of
// a row. AHEAD: request the next items before multiplying the current ones. STAGED: copy the activations
// (int8) to shared memory, where reading them does not queue behind weight loads. NORM_AFTER, NORM_BEFORE: the linear is before
// or after a norm, see split_norm.cuh; one before a norm has blocks of 32 rows.

#define LONE (TOKENS == 1)
// Whether pointers to the next items are kept, instead of indexes: a third fewer instructions for int8
// activations. Plain weights are limited by memory.
#ifndef POINTERS
#define POINTERS (LONE && INTEGER)
#endif
#include "dot.cuh"
#include "matrices.cuh"
#include "split_norm.cuh"

#if LONE
#define BOUNDS __launch_bounds__(WARP * WARPS, RESIDENT)
#else  // with bounds the compiler would spill registers
#define BOUNDS
#endif
#define STREAMS (GATED ? 2 : 1)  // matrices that a warp reads
static_assert(ROW_LANES == WARP || SHARED_BY == 1, "groups of lanes share no rows");
static_assert(LONE || !NORM_BEFORE && !NORM_AFTER, "norms of one token");

// y = x w^T for up to three matrices of one format and depth k, whose rows are numbered consecutively.
extern "C" __global__ void BOUNDS gemv(const u8* x, i64 x_stride, const i64* live, int k,
                                         Matrices all, int act SPLIT_NORM TIMESTAMPS) {
    RECORD_TIMESTAMPS
    if (NEXT == 0) launch_next();
    constexpr int GROUPS = WARP / ROW_LANES;  // of lanes, numbered like warps
    const int items = k / FORMAT::ITEM, lane = threadIdx.x % ROW_LANES, warp = threadIdx.x / ROW_LANES;
    const int start = lane + ROW_LANES * DEPTH * (warp % SHARED_BY);
    int place = (int)(blockIdx.x * (WARPS * GROUPS / SHARED_BY) + warp / SHARED_BY) * ROWS, row = place;
    Matrix m = all.m[0];
    if (!GATED) find_matrix<ROWS>(all, row, m);
    bool idle = row >= m.rows;
    if (GROUPS > 1 && idle) row = 0, m = all.m[0];  // results are not stored
    if (GROUPS > 1) idle = __all_sync(FULL, idle);
    if (idle && !STAGED) return;
    FORMAT w[AHEAD + 1][STREAMS][DEPTH][ROWS];
    constexpr int STEP = ROW_LANES * DEPTH * SHARED_BY;
#if POINTERS
    Planes next[STREAMS][ROWS];  // of the items to load next
#pragma unroll
    for (int s = 0; s < STREAMS; s++)
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const size_t first = (size_t)min(row + r, (int)m.rows - 1) * items + start;
            next[s][r] = FORMAT::item(s ? all.m[1].w : m.w, first);
        }
#endif
    auto load = [&](FORMAT (&to)[STREAMS][DEPTH][ROWS], int at) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++)
            if (at + ROW_LANES * d < items)
#pragma unroll
                for (int s = 0; s < STREAMS; s++)
#pragma unroll
                    for (int r = 0; r < ROWS; r++) {
#if POINTERS
                        Planes p = next[s][r];
                        advance<FORMAT>(p, ROW_LANES * d);
                        to[s][d][r].load(p);
#else
                        size_t i = (size_t)min(row + r, (int)m.rows - 1) * items + at + ROW_LANES * d;
                        to[s][d][r].load(FORMAT::item(s ? all.m[1].w : m.w, i));
#endif
                    }
#if POINTERS
#pragma unroll
        for (int s = 0; s < STREAMS; s++)
#pragma unroll
            for (int r = 0; r < ROWS; r++) advance<FORMAT>(next[s][r], STEP);
#endif
    };
    if (!idle) load(w[0], start);  // weights do not depend on previous kernels
    if (NEXT == 1) launch_next();
    const int first = blockIdx.y * TOKENS, tokens = (int)*live;
    wait_for_previous();
    // Whether rows are aligned to 16 bytes; a single row always is.
    const bool aligned = TOKENS == 1 || ((u64)x % 16 == 0 && x_stride % 16 == 0);
    if (first >= tokens) return;
    const u8* lone = x;
#if NORM_BEFORE
    SplitNormFactor norm_factor(split_norm);
#elif NORM_AFTER
    // The first warp stores all rows of the block, and requests early what it needs for that.
    const int first_row = (int)blockIdx.x * WARP, own_row = first_row + threadIdx.x % WARP;
    const bool stores = threadIdx.x < WARP;
    const float norm_weight = stores ? load_l2(split_norm.weight + own_row) : 0.f;
    const float bias = stores && m.bias ? m.bias[own_row] : 0.f;
    const float residual = stores && m.residual ? load_l2((const float*)m.residual + own_row) : 0.f;
#endif
#if STAGED
    DYNAMIC_SHARED(uint4, staged);
    // int8, and for each block of 32 a scale and a sum, or for each of 256 a scale and 16 sums
    constexpr bool PER_ROW = IntegerSum<FORMAT>::value;
    copy_to_shared(staged, x, PER_ROW ? k : FORMAT::BLOCK == 32 ? k + k / 4 : k + k / 64 + k / 8);
    __syncthreads();
    if (idle) return;
    lone = (const u8*)staged;
#endif
    typedef SumOf<FORMAT> Sum;
    Sum sums[STREAMS][ROWS][TOKENS] = {};
#if LONE
    typedef Activations<FORMAT> Row;
    Row a[DEPTH];  // shared by all rows
    RowPlace place_x = Row::place(lone, k, start);
    auto load_activations = [&](int at) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            RowPlace p = POINTERS ? place_x : Row::place(lone, k, at + ROW_LANES * d);
            if (POINTERS) Row::advance(p, ROW_LANES * d);
            if (at + ROW_LANES * d < items) a[d].load(p, aligned);
        }
        if (POINTERS) Row::advance(place_x, STEP);
    };
#else
    auto load_activations = [](int at) {};
#endif
    auto multiply = [&](const FORMAT (&by)[STREAMS][DEPTH][ROWS], int at) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            int j = at + ROW_LANES * d;
            if (j >= items) break;
#pragma unroll
            for (int s = 0; s < STREAMS; s++)
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
#if LONE
                    sums[s][r][0] += product(by[s][d][r], lane, a[d]);
#else
                    typename FORMAT::Values u;
                    by[s][d][r].unpack(j, u);
#pragma unroll
                    for (int t = 0; t < TOKENS; t++) {
                        const u8* token = x + min(first + t, tokens - 1) * x_stride;
                        sums[s][r][t] += dot<FORMAT>(u, token, k, j, aligned);
                    }
#endif
                }
        }
    };
    for (int at = start; at < items; at += STEP) {
#if AHEAD
        load_activations(at);
        load(w[1], at + STEP);
        multiply(w[0], at);
        if ((at += STEP) >= items) break;
        load_activations(at);
        load(w[0], at + STEP);
        multiply(w[1], at);
#else
        if (at != start) load(w[0], at);
        load_activations(at);
        multiply(w[0], at);
#endif
    }
#if LONE
    // Every lane gets one of the sums, so that a warp's rows are finished together.
    constexpr int SUMS = STREAMS * ROWS, EACH = ROW_LANES / SUMS;  // lanes with the same sum
    const int mine = lane / EACH, r = mine % ROWS;
    Sum total = warp_sums<SUMS, ROW_LANES>(&sums[0][0][0], lane);
#if NORM_BEFORE
    const float factor = norm_factor.get(split_norm);
#endif
#if SHARED_BY > 1
    __shared__ Sum parts[WARPS][SUMS];
    if (lane % EACH == 0) parts[warp][mine] = total;
    __syncthreads();
    if (warp % SHARED_BY) return;
#pragma unroll
    for (int other = 1; other < SHARED_BY; other++) total += parts[warp + other][mine];
#endif
#if NORM_AFTER
    static_assert(WARPS * GROUPS / SHARED_BY * ROWS == WARP, "a block of int8");
    __shared__ float results[WARP];
    if (lane % EACH == 0) results[place - first_row + r] = scaled(total, m.w, row + r, x, k);
    __syncthreads();
    if (!stores) return;
    const float value = results[threadIdx.x] + bias + residual;
    ((float*)all.m[0].y)[own_row] = value;
    store_norm_block(split_norm, value, norm_weight, first_row);
#elif GATED
    const Matrix& up = all.m[1];
    const Sum second = __shfl_down_sync(FULL, total, ROW_LANES / 2);
    if (lane % EACH || lane >= ROW_LANES / 2 || place + r >= m.rows) return;
    float sum = scaled(total, m.w, row + r, x, k), other = scaled(second, up.w, row + r, x, k);
#if NORM_BEFORE
    sum *= factor, other *= factor;
#endif
    if (m.bias) sum += m.bias[row + r];
    if (up.bias) other += up.bias[row + r];
    ((float*)(m.y + first * m.y_stride))[row + r] = activate(act, sum) * other;
#else
    if (lane % EACH) return;
    asm volatile("" : "+r"(place));  // find the matrix again: keeping its fields would take 20 registers
    row = place, m = all.m[0];
    find_matrix<ROWS>(all, row, m);
    if (row + r >= m.rows) return;
    float result = scaled(total, m.w, row + r, x, k);
#if NORM_BEFORE
    result *= factor;
#endif
    finish(m, first, row + r, result);
#endif
#else
#pragma unroll
    for (int s = 0; s < STREAMS; s++)
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int t = 0; t < TOKENS; t++) sums[s][r][t] = warp_sum(sums[s][r][t]);
    if (lane) return;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            if (row + r >= m.rows || first + t >= tokens) continue;
#if GATED
            const Matrix& up = all.m[1];
            const u8* token = x + (first + t) * x_stride;
            float gate = scaled(sums[0][r][t], m.w, row + r, token, k);
            float other = scaled(sums[1][r][t], up.w, row + r, token, k);
            if (m.bias) gate += m.bias[row + r];
            if (up.bias) other += up.bias[row + r];
            ((float*)(m.y + (first + t) * m.y_stride))[row + r] = activate(act, gate) * other;
#else
            finish(m, first + t, row + r, scaled(sums[0][r][t], m.w, row + r, x + (first + t) * x_stride, k));
#endif
        }
#endif
}
