// Mixture of experts: routing, sorting pairs by expert, and the weighted sum. The products are in
// experts_gemv.cu, experts_gemm.cu and experts_unaligned.cu.

#include "expert_choice.cuh"

// The largest of `count` keys (the first of equal ones) that comes after `last` in this order: the key,
// with the complement of its index below it. All lanes of a warp take part.
__device__ __forceinline__ u64 largest(const u32* keys, int count, u64 last = ~0ull) {
    u64 top = 0;
    for (int i = threadIdx.x % WARP; i < count; i += WARP) {
        u64 here = (u64)keys[i] << 32 | ~(u32)i;
        if (here < last && here > top) top = here;
    }
    const u32 key = warp_max((u32)(top >> 32));
    return (u64)key << 32 | warp_max(top >> 32 == key ? (u32)top : 0);
}

__device__ __forceinline__ int index_of(u64 top) { return (int)~(u32)top; }

// Call `f(place, column)` for the columns of the `k` largest keys, by the first lane of the block's first
// warp; only that warp continues afterwards. All warps score groups, and the first one chooses.
// `worth`: room for `groups` keys.
template <class F>
__device__ __forceinline__ void choose(u32* keys, u32* worth, int columns, int k, int groups, int kept,
                                       int best, F f) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, size = columns / groups;
    __syncthreads();
    if (groups > 1) {
        for (int g = warp; g < groups; g += blockDim.x / WARP) {
            u64 top = largest(keys + g * size, size);
            float total = number_of((u32)(top >> 32));
            for (int i = 1; i < best; i++) {
                top = largest(keys + g * size, size, top);
                total += number_of((u32)(top >> 32));
            }
            if (lane == 0) worth[g] = key_of(total);
        }
        __syncthreads();
    }
    if (warp) return;
    if (groups > 1) {  // kept groups get worth 0; the keys of all others are cleared
        for (int i = 0; i < kept; i++) {
            int g = index_of(largest(worth, groups));
            __syncwarp();
            if (lane == 0) worth[g] = 0;
            __syncwarp();
        }
        for (int i = lane; i < columns; i += WARP)
            if (worth[i / size]) keys[i] = 0;
        __syncwarp();
    }
    u64 top = ~0ull;
    for (int j = 0; j < k; j++) {
        top = largest(keys, columns, top);
        if (lane == 0) f(j, index_of(top));
    }
    __syncwarp();
}

// A block computes one row.
extern "C" __global__ void top_k(const u8* x, i64 stride, const float* bias, int* out,
                                 const i64* live, int columns, int k, int groups, int kept,
                                 int best TIMESTAMPS) {
    RECORD_TIMESTAMPS
    DYNAMIC_SHARED(u32, keys);
    u32* worth = keys + columns;
    const i64 rows = begin(live);
    if (blockIdx.x >= rows) return;
    const float* from = (const float*)(x + blockIdx.x * stride);
    for (int i = threadIdx.x; i < columns; i += blockDim.x)
        keys[i] = key_of(bias ? from[i] + bias[i] : from[i]);
    choose(keys, worth, columns, k, groups, kept, best,
           [=](int j, int column) { out[(i64)blockIdx.x * k + j] = column; });
}

// A thread computes one of the `k` results of a row.
extern "C" __global__ void pick(const u8* x, i64 stride, const int* ids, float* out,
                                const i64* live, int columns, int k TIMESTAMPS) {
    RECORD_TIMESTAMPS
    const i64 rows = begin(live), i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= rows * k) return;
    const int id = ids[i];
    const bool known = 0 <= id && id < columns;
    out[i] = known ? ((const float*)(x + i / k * stride))[id] : NOT_A_NUMBER;
}

// A warp computes one row.
extern "C" __global__ void sum_norm(const u8* x, i64 stride, float* out, const i64* live, int width,
                                    float eps TIMESTAMPS) {
    RECORD_TIMESTAMPS
    const i64 rows = begin(live);
    const i64 row = (i64)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (row >= rows) return;
    const float* from = (const float*)(x + row * stride);
    float sum = 0;
    for (int i = threadIdx.x % WARP; i < width; i += WARP) sum += from[i];
    sum = warp_sum(sum) + eps;
    for (int i = threadIdx.x % WARP; i < width; i += WARP) out[row * width + i] = from[i] / sum;
}

// Softmax of values in shared memory, by the `all` threads of a block or of a warp; this thread is number
// `lane`.
template <class R, class S>
__device__ __forceinline__ void soften(float* v, int count, int lane, int all, R most, S sum) {
    float top = -INFINITE, total = 0;
    for (int i = lane; i < count; i += all) top = fmaxf(top, v[i]);
    top = most(top);
    for (int i = lane; i < count; i += all) total += v[i] = expf(v[i] - top);
    total = sum(total);
    for (int i = lane; i < count; i += all) v[i] /= total;
}

// `route` without groups of experts, for at most 32 P of them and at most 32 chosen ones. A block of P warps
// computes a row: each warp all scores, whose sums need no barrier then, and each thread the rank of one.
template <int P>
__device__ __forceinline__ void route_row(const u8* x, i64 stride, const float* bias, u8* ids,
                                          u8* weights, i64 ids_stride, i64 weights_stride,
                                          const i64* live, int columns, int k, int score,
                                          int normalised, float eps, float factor) {
    __shared__ u64 keys[WARP * P];
    __shared__ int chosen_ids[WARP];
    __shared__ float chosen_scores[WARP];
    const int lane = threadIdx.x % WARP, own = threadIdx.x;
    const float correction = bias && own < columns ? bias[own] : 0.f;
    const float* from = (const float*)(x + blockIdx.x * stride);
    launch_next();
    const i64 rows = *(volatile const i64*)live;
#pragma unroll 1
    for (int pass = first_pass(); pass < 2; pass++) {
        if (pass) wait_for_previous();
        if (blockIdx.x >= rows) continue;
        float v[P], top = -INFINITE, total = 0, mine = 0;
#pragma unroll
        for (int i = 0; i < P; i++)
            v[i] = lane + WARP * i < columns ? load_l2(from + lane + WARP * i) : -INFINITE;
        if (score == SIGMOID) {
#pragma unroll
            for (int i = 0; i < P; i++) v[i] = 1.f / (1.f + expf(-v[i]));
        } else if (score == SOFTMAX) {
#pragma unroll
            for (int i = 0; i < P; i++) top = fmaxf(top, v[i]);
            top = warp_max(top);
#pragma unroll
            for (int i = 0; i < P; i++) {
                v[i] = lane + WARP * i < columns ? expf(v[i] - top) : 0.f;
                total += v[i];
            }
            total = warp_sum(total);
#pragma unroll
            for (int i = 0; i < P; i++) v[i] /= total;
        }
#pragma unroll
        for (int i = 0; i < P; i++)
            if (own == lane + WARP * i) mine = v[i];
        // Of equal scores the first one is larger. Keys of columns that do not exist are zero.
        const u64 key = own < columns ? (u64)key_of(bias ? mine + correction : mine) << 32 | ~(u32)own : 0;
        keys[own] = key;
        __syncthreads();
        int rank = 0;
#pragma unroll 16
        for (int i = 0; i < WARP * P; i++) rank += keys[i] > key;
        if (rank < k) chosen_ids[rank] = own, chosen_scores[rank] = mine;
        __syncthreads();
        if (own >= WARP) continue;
        const bool live_lane = lane < k;
        float chosen = live_lane ? chosen_scores[lane] : 0.f;
        if (score == CHOSEN) {
            top = warp_max(live_lane ? chosen : -INFINITE);
            chosen = live_lane ? expf(chosen - top) : 0.f;
            chosen /= warp_sum(chosen);
        }
        total = normalised ? warp_sum(live_lane ? chosen : 0.f) + eps : 1.f;
        if (!live_lane || !pass) continue;
        ((int*)(ids + blockIdx.x * ids_stride))[lane] = chosen_ids[lane];
        ((float*)(weights + blockIdx.x * weights_stride))[lane] = chosen / total * factor;
    }
}

#define ROUTE(P)                                                                                \
    extern "C" __global__ void route_##P(const u8* x, i64 stride, const float* bias, u8* ids,   \
                                         u8* weights, i64 ids_stride, i64 weights_stride,       \
                                         const i64* live, int columns, int k, int score,        \
                                         int normalised, float eps, float factor TIMESTAMPS) {  \
        RECORD_TIMESTAMPS                                                                       \
        route_row<P>(x, stride, bias, ids, weights, ids_stride, weights_stride, live, columns,  \
                     k, score, normalised, eps, factor);                                        \
    }
ROUTE(1)
ROUTE(2)
ROUTE(4)
ROUTE(8)

// Expert ids and weights of a row from the router's logits: the ops top_k and pick with scoring and
// normalization. A block computes one row. `normalised`: divide the weights by their sum plus `eps`.
extern "C" __global__ void route(const u8* x, i64 stride, const float* bias, u8* ids, u8* weights,
                                 i64 ids_stride, i64 weights_stride, const i64* live, int columns,
                                 int k, int groups, int kept, int best, int score, int normalised,
                                 float eps, float factor TIMESTAMPS) {
    RECORD_TIMESTAMPS
    DYNAMIC_SHARED(u32, keys);
    u32* worth = keys + columns;
    float *scores = (float*)(worth + groups), *chosen = scores + columns;
    const i64 rows = begin(live);
    if (blockIdx.x >= rows) return;
    const float* from = (const float*)(x + blockIdx.x * stride);
    for (int i = threadIdx.x; i < columns; i += blockDim.x)
        scores[i] = score == SIGMOID ? 1.f / (1.f + expf(-from[i])) : from[i];
    if (score == SOFTMAX)
        soften(scores, columns, threadIdx.x, blockDim.x, [](float v) { return block_max(v); },
               [](float v) { return block_sum(v); });
    for (int i = threadIdx.x; i < columns; i += blockDim.x)
        keys[i] = key_of(bias ? scores[i] + bias[i] : scores[i]);
    int* to = (int*)(ids + blockIdx.x * ids_stride);
    choose(keys, worth, columns, k, groups, kept, best,
           [=](int j, int column) { to[j] = column, chosen[j] = scores[column]; });
    const int lane = threadIdx.x;
    if (lane >= WARP) return;
    if (score == CHOSEN)
        soften(chosen, k, lane, WARP, [](float v) { return warp_max(v); },
               [](float v) { return warp_sum(v); });
    float total = 1;
    if (normalised) {
        total = 0;
        for (int i = lane; i < k; i += WARP) total += chosen[i];
        total = warp_sum(total) + eps;
    }
    float* out = (float*)(weights + blockIdx.x * weights_stride);
    for (int i = lane; i < k; i += WARP) out[i] = chosen[i] / total * factor;
}

// A block computes one row (x) and some columns of it (y), a thread one column. r: residual, or null.
extern "C" __global__ void combine(const u8* y, i64 stride, const u8* weights, i64 weights_stride,
                                   const u8* r, i64 r_stride, float* out, const i64* live,
                                   int each, int width TIMESTAMPS) {
    RECORD_TIMESTAMPS
    const i64 rows = begin(live), row = blockIdx.x;
    const int column = blockIdx.y * blockDim.x + threadIdx.x;
    if (row >= rows || column >= width) return;
    const float* from = (const float*)(y + row * stride) + column;
    const float* weight = (const float*)(weights + row * weights_stride);
    const float residual = r ? ((const float*)(r + row * r_stride))[column] : 0.f;
    float sum = 0;
#pragma unroll 1
    for (int at = 0; at < each; at += 8) {
        float values[8], factors[8];  // all in flight at once
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (at + j < each) values[j] = from[(i64)(at + j) * width], factors[j] = weight[at + j];
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (at + j < each) sum = fmaf(values[j], factors[j], sum);
    }
    out[row * width + column] = r ? residual + sum : sum;
}

// A warp's pairs, and the number of them for each matrix.
struct Part {
    const u8* ids;
    i64 stride;
    int each, first, end, matrices;
    int* counts;
};

// Call f(pair, its matrix, number of pairs of that matrix before it) for each pair, and count pairs.
template <class F> __device__ __forceinline__ void visit(const Part& part, F f) {
    const int lane = threadIdx.x % WARP;
    for (int at = part.first; at < part.end; at += WARP) {
        const int pair = at + lane, id = pair < part.end ? id_of(part.ids, part.stride, part.each, pair) : 0;
        const int matrix = (u32)id < (u32)part.matrices ? id : part.matrices;
        const u32 same = __match_any_sync(FULL, pair < part.end ? matrix : -1);
        const int before = __popc(same & ((1u << lane) - 1));
        const bool live = pair < part.end;
        if (live) f(pair, matrix, part.counts[matrix] + before);
        __syncwarp();
        if (live && before == 0) part.counts[matrix] += __popc(same);
        __syncwarp();
    }
}

// Replace the number of pairs of each matrix by their start in sorted order, and make groups. One warp.
__device__ __forceinline__ void make_groups(int* counts, int buckets, int size, Group* groups,
                                            int most) {
    const int lane = threadIdx.x % WARP;
    int first = 0, made = 0;  // pairs and groups of previous matrices
    for (int at = 0; at < buckets; at += WARP) {
        const int m = at + lane, count = m < buckets ? counts[m] : 0;
        const int parts = (count + size - 1) / size;
        int pairs = count, through = parts;  // inclusive sums over lanes
#pragma unroll
        for (int o = 1; o < WARP; o <<= 1) {
            const int p = __shfl_up_sync(FULL, pairs, o), g = __shfl_up_sync(FULL, through, o);
            if (lane >= o) pairs += p, through += g;
        }
        const int start = first + pairs - count;
        if (m < buckets) counts[m] = start;
        const int each = parts ? count / parts : 0, more = parts ? count % parts : 0;
        for (int i = 0; i < parts; i++)
            groups[made + through - parts + i] = {m, start + i * each + min(i, more),
                                                  each + (i < more), 0};
        first += __shfl_sync(FULL, pairs, WARP - 1);
        made += __shfl_sync(FULL, through, WARP - 1);
    }
    for (int i = made + lane; i < most; i += WARP) groups[i].count = 0;
}

// Sort pairs by matrix into `order`, and divide them into groups of at most `size`. One block. Groups of
// one matrix differ by at most one pair. Ids out of range count as one more matrix; unused groups are
// empty.
extern "C" __global__ void __launch_bounds__(1024)
    group(const u8* ids, i64 stride, const i64* live, int each, int matrices, int size, Group* groups,
          int most, int* order TIMESTAMPS) {
    RECORD_TIMESTAMPS
    DYNAMIC_SHARED(int, counts);  // per warp and matrix, then of all warps
    const int warp = threadIdx.x / WARP, warps = blockDim.x / WARP, buckets = matrices + 1;
    int* const begins = counts + warps * buckets;
    for (int i = threadIdx.x; i < warps * buckets; i += blockDim.x) counts[i] = 0;
    const int pairs = (int)begin(live) * each;
    const int share = (pairs + blockDim.x - 1) / blockDim.x * WARP;
    const Part part = {ids, stride, each, warp * share, min(pairs, (warp + 1) * share), matrices,
                       counts + warp * buckets};
    __syncthreads();
    visit(part, [](int, int, int) {});
    __syncthreads();
    for (int m = threadIdx.x; m < buckets; m += blockDim.x) {  // exclusive sums over warps
        int sum = 0;
        for (int w = 0; w < warps; w++) {
            const int own = counts[w * buckets + m];
            counts[w * buckets + m] = sum;
            sum += own;
        }
        begins[m] = sum;
    }
    __syncthreads();
    if (warp == 0) make_groups(begins, buckets, size, groups, most);
    __syncthreads();
    visit(part, [=](int pair, int matrix, int before) { order[begins[matrix] + before] = pair; });
}
