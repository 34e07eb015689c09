// Filters of logits before sampling. Rows are copied, and in those that have filters a block replaces logits
// by -infinity, one filter after another. Weights are integers, whose sums do not depend on their order, where a filter keeps ids up
// to a share of them.

#include "copy_row.cuh"
#include "sampling.cuh"

struct Filters {
    const float* settings;  // top_n_sigma, typical_p, top_p, min_p, xtc_probability, xtc_threshold
    const int* top_k;
    const i64* seed;
    const int *count, *sample_index;
};

#define COLUMNS 6

// Replace the logits of the ids that are not kept(i, key).
template <class F> __device__ __forceinline__ void keep(float* y, const Row& row, F kept) {
    __syncthreads();
    for (int i = threadIdx.x; i < row.width; i += THREADS)
        if (!kept(i, row.key(i))) y[i] = -INFINITE;
    __syncthreads();
}

// Keep the ids with the largest scores whose weights reach `need`; the first of equal scores.
template <class S, class W>
__device__ __forceinline__ void keep_mass(float* y, const Row& row, u32* room, S score, W weight, u64 need) {
    Level level = reach(room, row.width, score, weight, need);
    auto equal = [&](int i, u32 s) { return s == level.key ? weight(i, s) : 0ull; };
    int end = 1 + locate(row.width, score, equal, need - level.above - 1);
    keep(y, row, [&](int i, u32) {
        u32 s = score(i);
        return s > level.key || (s == level.key && i < end);
    });
}

// The weights to be reached for a share of their sum.
__device__ __forceinline__ u64 need_of(float share, u64 sum) {
    i64 part = __double2ll_ru((double)share * (double)sum);
    return part < 1 ? 1 : part;
}

__device__ void keep_top_n_sigma(float* y, const Row& row, u32 top, float sigmas) {
    double count = 0, total = 0, squares = 0;
    for (int i = threadIdx.x; i < row.width; i += THREADS)
        if (y[i] > -INFINITE) count++, total += y[i];
    count = block_sum(count);
    double mean = block_sum(total) / count;
    for (int i = threadIdx.x; i < row.width; i += THREADS)
        if (y[i] > -INFINITE) squares += (y[i] - mean) * (y[i] - mean);
    double floor = value_of(top) - sigmas * sqrt(block_sum(squares) / count);
    keep(y, row, [&](int, u32 k) { return value_of(k) >= floor; });
}

__device__ void keep_top_k(float* y, const Row& row, u32* room, int top_k) {
    auto key = [&](int i) { return row.key(i); };
    auto finite = [](int, u32 k) { return k > KEY_OF_MINUS_INFINITY ? 1ull : 0ull; };
    if (top_k > 0 && top_k < total_of(row.width, key, finite))
        keep_mass(y, row, room, key, finite, (u64)top_k);
}

__device__ void keep_typical(float* y, const Row& row, u32 top, u32* room, float share) {
    Weights weights(top, row.width);
    double total = 0, mean = 0;
    for (int i = threadIdx.x; i < row.width; i += THREADS) {
        u32 k = row.key(i);
        double w = weight_of(k, top);
        if (w > 0) total += w, mean += w * ((double)value_of(k) - (double)value_of(top));
    }
    total = block_sum(total);
    mean = block_sum(mean) / total;
    auto score = [&](int i) {  // larger for ids closer to the mean
        u32 k = row.key(i);
        if (k == KEY_OF_MINUS_INFINITY) return 0u;
        return ~__float_as_uint(fabsf((float)((double)value_of(k) - (double)value_of(top) - mean)));
    };
    auto weight = [&](int i, u32 s) { return s ? weights.plain(row.key(i)) : 0ull; };
    keep_mass(y, row, room, score, weight, need_of(share, total_of(row.width, score, weight)));
}

__device__ void keep_top_p(float* y, const Row& row, u32 top, u32* room, float share) {
    Weights weights(top, row.width);
    auto key = [&](int i) { return row.key(i); };
    auto weight = [&](int, u32 k) { return weights.plain(k); };
    keep_mass(y, row, room, key, weight, need_of(share, total_of(row.width, key, weight)));
}

// Exclude all but the last of the ids with a probability of at least `threshold`.
__device__ void exclude_top(float* y, const Row& row, u32 top, float threshold) {
    double total = 0;
    for (int i = threadIdx.x; i < row.width; i += THREADS) total += weight_of(row.key(i), top);
    double floor = threshold * block_sum(total);
    u32 least = 0, last = 0;  // the complement of the least key, and its last id plus one
    for (int i = threadIdx.x; i < row.width; i += THREADS) {
        u32 k = row.key(i);
        if (k > KEY_OF_MINUS_INFINITY && weight_of(k, top) >= floor) least = max(least, ~k);
    }
    least = block_most(least);
    for (int i = threadIdx.x; i < row.width; i += THREADS)
        if (row.key(i) == ~least) last = max(last, (u32)i + 1);
    last = block_most(last);
    if (least) keep(y, row, [&](int i, u32 k) { return weight_of(k, top) < floor || i + 1 == last; });
}

__device__ __forceinline__ u32 largest_key(const Row& row) {
    u32 most = 0;
    for (int i = threadIdx.x; i < row.width; i += THREADS) most = max(most, row.key(i));
    return block_most(most);
}

// Grid: (rows, blocks of a row).
extern "C" __global__ void copy_rows(const u8* x, i64 stride, int width, const i64* live, float* out TIMESTAMPS) {
    RECORD_TIMESTAMPS
    const i64 rows = begin(live), n = blockIdx.x;
    if (n >= rows) return;
    const int each = columns_of(width), first = blockIdx.y * each;
    copy_columns((const float*)(x + n * stride), out + n * width, first, min(width, first + each));
}

// Whether a row has filters.
__device__ __forceinline__ bool filters(const float* s, int top_k) {
    return s[0] > 0 || top_k > 0 || s[1] < 1 || s[2] < 1 || s[3] > 0 || (s[4] > 0 && s[5] <= 0.5f);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    filter_logits(float* out, int width, Filters f, const i64* live TIMESTAMPS) {
    RECORD_TIMESTAMPS
    __shared__ u64 room[BINS];
    const i64 rows = begin(live);
    i64 n = blockIdx.x;
    if (n >= rows) return;
    const float* s = f.settings + n * COLUMNS;
    if (!filters(s, f.top_k[n])) return;
    float* y = out + n * width;
    Row row(y, width);
    u32 top = largest_key(row);
    if (top >= KEY_OF_INFINITY || top == KEY_OF_MINUS_INFINITY) return;  // `sample` reports it
    if (s[0] > 0) keep_top_n_sigma(y, row, top, s[0]);
    keep_top_k(y, row, (u32*)room, f.top_k[n]);
    if (s[1] < 1) {
        keep_typical(y, row, top, (u32*)room, s[1]);
        top = largest_key(row);
    }
    if (s[2] < 1) keep_top_p(y, row, top, (u32*)room, s[2]);
    if (s[3] > 0) keep(y, row, [&](int, u32 k) { return weight_of(k, top) >= s[3]; });
    u64 seed = (u64)f.seed[n];
    NoiseKey noise = {(u32)seed, (u32)(seed >> 32), (u32)f.count[n], (u32)f.sample_index[n]};
    double number = ((double)random_word<XTC>(noise, 0) + 0.5) * 0x1p-32;
    if (s[5] <= 0.5f && number < s[4]) exclude_top(y, row, top, s[5]);
}
