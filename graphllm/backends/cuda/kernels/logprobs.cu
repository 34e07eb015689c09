// The most likely ids of a row, and log-probabilities of ids. A block computes a row.
// `biased` are the logits that the ids have, `x` those that are summed; without biases the same.

#include "sampling.cuh"

#define LISTED 256  // largest n of top_ids

extern "C" __global__ void __launch_bounds__(THREADS)
    top_ids(const u8* x, i64 stride, int width, int n, const i64* live, int* out TIMESTAMPS) {
    RECORD_TIMESTAMPS
    __shared__ u64 room[BINS], found[LISTED];
    __shared__ int used;
    const i64 rows = begin(live);
    if (blockIdx.x >= rows) return;
    Row row(x + blockIdx.x * stride, width);
    auto key = [&](int i) { return row.key(i); };
    Level level = reach((u32*)room, width, key, [](int, u32) { return 1ull; }, (u64)n);
    auto equal = [&](int, u32 k) { return k == level.key ? 1ull : 0ull; };
    int end = 1 + locate(width, key, equal, n - level.above - 1);
    if (threadIdx.x == 0) used = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < width; i += THREADS) {
        u32 k = row.key(i);
        if (k > level.key || (k == level.key && i < end)) found[atomicAdd(&used, 1)] = candidate(k, i);
    }
    __syncthreads();
    if (threadIdx.x >= n) return;
    int rank = 0;
    for (int i = 0; i < n; i++) rank += found[i] > found[threadIdx.x];
    out[blockIdx.x * n + rank] = index_of(found[threadIdx.x]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    logprobs(const u8* x, i64 stride, int width, const u8* biased, i64 biased_stride,
             const int* ids, int listed, const i64* live, float* out TIMESTAMPS) {
    RECORD_TIMESTAMPS
    const i64 rows = begin(live);
    if (blockIdx.x >= rows) return;
    Row row(x + blockIdx.x * stride, width);
    const float* own = (const float*)(biased + blockIdx.x * biased_stride);
    ids += (i64)blockIdx.x * listed;
    out += (i64)blockIdx.x * listed;
    u32 most = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < width; i += THREADS) most = max(most, row.key(i));
    most = block_most(most);
    bool valid = KEY_OF_MINUS_INFINITY < most && most < KEY_OF_INFINITY;
    float top = value_of(most);
    double sum = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < width; i += THREADS) sum += expf(row.x[i] - top);
    sum = block_sum(sum);
    for (int j = threadIdx.x; j < listed; j += THREADS) {
        int id = ids[j];
        bool known = valid && 0 <= id && id < width;
        out[j] = known ? (float)((double)own[id] - (double)top - log(sum)) : NOT_A_NUMBER;
    }
}
