// Merges the partial results of each query in ascending order of keys, and stores them as `target` requests.
//
// WIDTH: elements of a value.

#include "attention.cuh"
#include "quantize.cuh"

#define THREADS 256
#define RESULTS (4 * THREADS)  // of a block, four adjacent ones per thread
constexpr int PARTIAL = WIDTH + 4;  // floats of a partial result: sums, top, total
constexpr int BATCH = 8;  // partial results that are loaded together

// Four results of a row, and the total of their weights, which are relative to the logit `top`.
struct Sums {
    float x[4], total, top;

    __device__ __forceinline__ void clear() { x[0] = x[1] = x[2] = x[3] = total = 0, top = -INFINITE; }
    __device__ __forceinline__ void add(const Sums& other) {
        const Merge merge(top, other.top);
#pragma unroll
        for (int e = 0; e < 4; e++) merge.add(x[e], other.x[e]);
        merge.add(total, other.total);
    }
};

// Grid: (rows, groups of 1024 results). N: as in quantize.cuh.
template <int N> __device__ __forceinline__ void merge(const Attention& a, const Target& target) {
    __shared__ float results[RESULTS];
    const int tokens = (int)begin(a.tokens, a.metadata_ready), row = blockIdx.x;
    const int width = (int)a.heads * WIDTH, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int start = blockIdx.y * RESULTS, at = min(start + 4 * (int)threadIdx.x, width - 4), head = at / WIDTH;
    Query query = {};
    const bool there = find_query(a, tokens, row, query);
    const int rows = a.queries == SINGLE ? (int)*a.sequences : tokens;
    const Partials p(a, query.keys, rows * head_groups(a));
    wait_for_previous();
    if (!there) return;
    const float* partials = a.partials + (row * a.slots * a.heads + head) * PARTIAL;
    const i64 stride = a.heads * PARTIAL;
    float4 sums[BATCH];
    float2 tops[BATCH];  // top and total
    auto load = [&](int slot) {
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const float* from = partials + min(slot + i, p.count - 1) * stride;
            sums[i] = *(const float4*)(from + at % WIDTH), tops[i] = *(const float2*)(from + WIDTH);
        }
    };
    Sums all, split;
    all.clear(), split.clear();
    if (p.count) load(0);
#pragma unroll 1
    for (int first = 0; first < p.count; first += BATCH) {
        if (first) load(first);
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int slot = first + i;
            if (slot >= p.count) break;
            const Sums one = {{sums[i].x, sums[i].y, sums[i].z, sums[i].w}, tops[i].y, tops[i].x};
            if (p.each == p.split) {
                all.add(one);
                continue;
            }
            split.add(one);
            if ((p.first + slot + 1) % p.split && slot + 1 < p.count) continue;
            all.add(split);
            split.clear();
        }
    }
    const float factor = normalizer(a, head, all.top, all.total);
#pragma unroll
    for (int e = 0; e < 4; e++) results[4 * threadIdx.x + e] = __fmul_rn(all.x[e], factor);
    __syncthreads();
    constexpr int UNITS = RESULTS / (WARP * N), WARPS = THREADS / WARP;
#pragma unroll
    for (int k = 0; k < (UNITS + WARPS - 1) / WARPS; k++) {
        const int unit = (k * WARPS + warp) * WARP * N;
        if (unit >= RESULTS || start + unit >= width) break;
        float v[N];
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = results[unit + N * lane + i];
        emit_to<N>(v, target, query.token, 0, start + unit, width);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) merge_1(Attention a, Target target TIMESTAMPS) {
    RECORD_TIMESTAMPS
    merge<1>(a, target);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) merge_8(Attention a, Target target TIMESTAMPS) {
    RECORD_TIMESTAMPS
    merge<8>(a, target);
}
