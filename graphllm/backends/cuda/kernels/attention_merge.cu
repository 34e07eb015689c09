// Merges the partial results of each of many queries in ascending order of keys, and stores them as `target` requests.
// Those of few: attention_merge_few.cu.
//
// WIDTH: elements of a value.
//
// The factors of all partial results follow from their largest logits. A warp computes those of a head, so
// that the chain of each result consists of additions and multiplications alone.

#include "attention.cuh"
#include "quantize.cuh"

#define THREADS 256
#define VECTOR 4  // adjacent results of a thread
#define RESULTS (VECTOR * THREADS)  // of a block
constexpr int WARPS = THREADS / WARP, RESIDENT = 3;  // blocks of a multiprocessor
constexpr int PARTIAL = WIDTH + 4;  // floats of a partial result: sums, top, total
constexpr int BATCH = 4;  // partial results that a thread loads together
constexpr int MOST_HEADS = RESULTS / WIDTH + 2;  // of a block
constexpr int EACH = (MOST_HEADS + WARPS - 1) / WARPS;  // of a warp

// Factors with which a partial result is added to its split, and the split to the result, see `Merge`.
struct __align__(16) Factors {
    float keep, share, split_keep, split_share;
};

struct Shared {
    Factors factors[MOST_HEADS][WARP];
    float totals[MOST_HEADS][WARP], tops[MOST_HEADS], results[RESULTS];
};

// The largest logits of a head up to the last lane: of all partial results, of the lane's split, and of the
// splits before that.
struct Tops {
    float all, split, others;
};

// Compute the factors of a head for the partial result of each lane. `top`: -infinity if there is none.
// `place`: number of the partial result in its split. `tops`: of the lanes of previous calls.
__device__ __forceinline__ Factors factors_of(float top, int place, Tops& tops) {
    const int lane = threadIdx.x % WARP, start = lane - place;  // where the split begins
    float split = top, all = top;  // of the lanes up to this one
#pragma unroll
    for (int o = 1; o < WARP; o <<= 1) {
        const float a = __shfl_up_sync(FULL, split, o), b = __shfl_up_sync(FULL, all, o);
        if (lane >= o && place >= o) split = fmaxf(split, a);
        if (lane >= o) all = fmaxf(all, b);
    }
    if (start < 0) split = fmaxf(split, tops.split);
    all = fmaxf(all, tops.all);
    float previous = __shfl_up_sync(FULL, split, 1), others = __shfl_sync(FULL, all, max(start - 1, 0));
    if (lane == 0) previous = tops.split;
    if (start <= 0) others = start ? tops.others : tops.all;
    tops.all = __shfl_sync(FULL, all, WARP - 1);
    tops.split = __shfl_sync(FULL, split, WARP - 1);
    tops.others = __shfl_sync(FULL, others, WARP - 1);
    const float exponent = exponent_of(split), last = exponent_of(all);
    return {rescale(place ? previous : -INFINITE, exponent), rescale(top, exponent), rescale(others, last),
            rescale(split, last)};
}

// Grid: (rows, groups of RESULTS results). N: as in quantize.cuh.
template <int N> __device__ __forceinline__ void merge(const Attention& a, const Target& target) {
    __shared__ Shared s;
    launch_next();
    const int tokens = (int)*(volatile const i64*)a.tokens, row = blockIdx.x;
    if (!a.metadata_ready) wait_for_previous();
    const int width = (int)a.heads * WIDTH, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int start = blockIdx.y * RESULTS, at = min(start + VECTOR * (int)threadIdx.x, width - VECTOR);
    const int first_head = start / WIDTH, heads = (min(start + RESULTS, width) - 1) / WIDTH - first_head + 1;
    const int head = at / WIDTH;
    Query query = {};
    const bool there = find_query(a, tokens, row, query);
    const int rows = a.queries == SINGLE ? (int)*a.sequences : tokens;
    const Partials p(a, query.keys, rows * head_groups(a));
    const bool whole = p.each == p.split;
    wait_for_previous();
    if (!there) return;
    const i64 stride = a.heads * PARTIAL;
    const float* partials = a.partials + row * a.slots * stride;
    const float* own = partials + head * PARTIAL + at % WIDTH;
    float x[BATCH][VECTOR];
    auto load = [&](int slot) {
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            if (slot + i >= p.count) break;
            const float4 next = *(const float4*)(own + (slot + i) * stride);
            x[i][0] = next.x, x[i][1] = next.y, x[i][2] = next.z, x[i][3] = next.w;
        }
    };
    load(0);
    float all[VECTOR] = {}, split[VECTOR] = {}, total = 0, split_total = 0;
    Tops tops[EACH];
#pragma unroll
    for (int k = 0; k < EACH; k++) tops[k] = {-INFINITE, -INFINITE, -INFINITE};
#pragma unroll 1
    for (int first = 0; first < p.count; first += WARP) {
        const int slot = first + lane, place = whole ? 0 : min((p.first + slot) & (p.split - 1), slot);
        if (first) __syncthreads();  // all have read the factors before
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            const int h = warp + k * WARPS;
            if (h >= heads) break;
            const float* two = partials + slot * stride + (first_head + h) * PARTIAL + WIDTH;
            const bool mine = slot < p.count;
            const float top = mine ? two[0] : -INFINITE;
            s.totals[h][lane] = mine ? two[1] : 0;
            s.factors[h][lane] = factors_of(top, place, tops[k]);
            if (lane == 0) s.tops[h] = tops[k].all;
        }
        __syncthreads();
#pragma unroll 1
        for (int group = 0; group < WARP && first + group < p.count; group += BATCH) {
            if (first + group) load(first + group);
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                const int n = first + group + i;
                if (n >= p.count) break;
                const Factors f = s.factors[head - first_head][group + i];
                const float part = s.totals[head - first_head][group + i];
#pragma unroll
                for (int e = 0; e < VECTOR; e++) add_scaled(split[e], f.keep, x[i][e], f.share);
                add_scaled(split_total, f.keep, part, f.share);
                if (!whole && ((p.first + n + 1) & (p.split - 1)) && n + 1 < p.count) continue;
#pragma unroll
                for (int e = 0; e < VECTOR; e++) add_scaled(all[e], f.split_keep, split[e], f.split_share), split[e] = 0;
                add_scaled(total, f.split_keep, split_total, f.split_share), split_total = 0;
            }
        }
    }
    const float factor = normalizer(a, head, p.count ? s.tops[head - first_head] : -INFINITE, total);
#pragma unroll
    for (int e = 0; e < VECTOR; e++) s.results[VECTOR * threadIdx.x + e] = __fmul_rn(all[e], factor);
    __syncthreads();
    constexpr int UNITS = RESULTS / (WARP * N);
#pragma unroll
    for (int k = 0; k < (UNITS + WARPS - 1) / WARPS; k++) {
        const int unit = (k * WARPS + warp) * WARP * N;
        if (unit >= RESULTS || start + unit >= width) break;
        float v[N];
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = s.results[unit + N * lane + i];
        emit_to<N>(v, target, query.token, 0, start + unit, width);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) merge_1(Attention a, Target target TIMESTAMPS) {
    RECORD_TIMESTAMPS
    merge<1>(a, target);
}
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) merge_8(Attention a, Target target TIMESTAMPS) {
    RECORD_TIMESTAMPS
    merge<8>(a, target);
}
