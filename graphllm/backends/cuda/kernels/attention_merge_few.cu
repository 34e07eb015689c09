// Merges the partial results of few queries, as attention_merge.cu does for many, with the same bits: groups of threads
// merge the tiles of a split each, and then threads the splits. So all partial results are loaded together.
//
// WIDTH: elements of a value, a multiple of 8.

#include "attention.cuh"
#include "quantize.cuh"

#define THREADS 512
#define VECTOR 4  // adjacent results of a thread
#define BATCH 4   // partial results that a thread loads together
#define MOST_SPLITS 32
constexpr int PARTIAL = WIDTH + 4;  // floats of a partial result: sums, top, total

// RESULTS: of a block, which are those of `HEADS` heads at most.
template <int RESULTS> struct __align__(16) Shared {
    static constexpr int HEADS = RESULTS / WIDTH + 2;
    float sums[MOST_SPLITS][RESULTS], tops[HEADS][MOST_SPLITS], totals[HEADS][MOST_SPLITS];
    float2 factors[HEADS][MOST_SPLITS];  // of the splits before, and of the split
    float all[HEADS], results[RESULTS];
};

// A result of a split, or of all: sums that are relative to `top`.
struct Merged {
    float sums[VECTOR] = {}, total = 0, top = -INFINITE;

    __device__ __forceinline__ void add(const float4& x, float other_total, float other_top) {
        const Merge merge(top, other_top);
        merge.add(sums[0], x.x), merge.add(sums[1], x.y), merge.add(sums[2], x.z), merge.add(sums[3], x.w);
        merge.add(total, other_total);
    }
};

// Merge the partial results `from` to `to` (not included) of a split, of which a thread has those at `own`, and the
// head's top and total at `ends`.
__device__ __forceinline__ Merged merge_split(const float* own, const float* ends, i64 stride, int from, int to) {
    Merged split;
#pragma unroll 1
    for (int first = from; first < to; first += BATCH) {
        float4 x[BATCH];
        float2 end[BATCH];  // top and total
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const i64 at = min(first + i, to - 1) * stride;
            x[i] = *(const float4*)(own + at), end[i] = *(const float2*)(ends + at);
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            if (first + i < to) split.add(x[i], end[i].y, end[i].x);
    }
    return split;
}

// Compute the factors with which the splits of a head are added, one in each lane.
template <class S> __device__ __forceinline__ void factors_of(S& s, int head, int splits) {
    const int lane = threadIdx.x % WARP;
    const float own = lane < splits ? s.tops[head][lane] : -INFINITE;
    float top = own;  // of the splits up to this one
#pragma unroll
    for (int o = 1; o < WARP; o <<= 1) {
        const float other = __shfl_up_sync(FULL, top, o);
        if (lane >= o) top = fmaxf(top, other);
    }
    const float before = __shfl_up_sync(FULL, top, 1), exponent = exponent_of(top);
    s.factors[head][lane] = make_float2(rescale(lane ? before : -INFINITE, exponent), rescale(own, exponent));
    if (lane == WARP - 1) s.all[head] = top;
}

// Grid: (rows, groups of RESULTS results). N: as in quantize.cuh.
template <int N, int RESULTS> __device__ __forceinline__ void merge(const Attention& a, const Target& target) {
    constexpr int LANES = RESULTS / VECTOR, GROUPS = THREADS / LANES;
    __shared__ Shared<RESULTS> s;
    launch_next();
    const int tokens = (int)*(volatile const i64*)a.tokens, row = blockIdx.x, thread = threadIdx.x;
    if (!a.metadata_ready) wait_for_previous();
    const int width = (int)a.heads * WIDTH, start = blockIdx.y * RESULTS;
    const int first_head = start / WIDTH, heads = (min(start + RESULTS, width) - 1) / WIDTH - first_head + 1;
    Query query = {};
    const bool there = find_query(a, tokens, row, query);
    const int rows = a.queries == SINGLE ? (int)*a.sequences : tokens;
    const Partials p(a, query.keys, rows * head_groups(a));
    const int shift = log2_of(p.split) - p.shift, each = 1 << shift, begin = p.first >> shift;  // partial results of a split
    const int splits = p.count ? (p.first + p.count - 1 >> shift) - begin + 1 : 0;
    wait_for_previous();
    if (!there) return;

    const i64 stride = a.heads * PARTIAL;
    {
        const int at = min(start + thread % LANES * VECTOR, width - VECTOR), head = at / WIDTH;
        const float* ends = a.partials + row * a.slots * stride + head * PARTIAL + WIDTH;
#pragma unroll 1
        for (int split = thread / LANES; split < splits; split += GROUPS) {
            const int from = max((begin + split) * each - p.first, 0);
            const int to = min((begin + split + 1) * each - p.first, p.count);
            const Merged made = merge_split(ends - WIDTH + at % WIDTH, ends, stride, from, to);
            *(float4*)&s.sums[split][thread % LANES * VECTOR] =
                make_float4(made.sums[0], made.sums[1], made.sums[2], made.sums[3]);
            if (thread % LANES == 0 || at % WIDTH == 0)
                s.tops[head - first_head][split] = made.top, s.totals[head - first_head][split] = made.total;
        }
    }
    __syncthreads();
    for (int head = thread / WARP; head < heads; head += THREADS / WARP) factors_of(s, head, splits);
    __syncthreads();
    float own = 0;
    if (thread < RESULTS) {
        const int head = min(start + thread, width - 1) / WIDTH - first_head;
        float sum = 0, total = 0;
#pragma unroll 4
        for (int split = 0; split < splits; split++) {
            const float2 f = s.factors[head][split];
            add_scaled(sum, f.x, s.sums[split][thread], f.y);
            add_scaled(total, f.x, s.totals[head][split], f.y);
        }
        const float top = splits ? s.all[head] : -INFINITE;
        own = __fmul_rn(sum, normalizer(a, first_head + head, top, total));
        if (N > 1) s.results[thread] = own;
    }
    if (N > 1) __syncthreads();
    const int unit = thread / WARP * WARP * N;
    if (unit >= RESULTS || start + unit >= width) return;
    float v[N];
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = N > 1 ? s.results[unit + thread % WARP * N + i] : own;
    emit_to<N>(v, target, query.token, 0, start + unit, width);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) merge_1(Attention a, Target target TIMESTAMPS) {
    RECORD_TIMESTAMPS
    merge<1, 128>(a, target);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) merge_8(Attention a, Target target TIMESTAMPS) {
    RECORD_TIMESTAMPS
    merge<8, 256>(a, target);
}
