#pragma once
// A row of logits and its settings; sums, searches and random numbers by a block of THREADS threads.

#define THREADS 1024
#define BINS 2048  // of sums by bits of the key: two per thread

struct Settings {  // null: argmax, with NaN as the smallest value
    const float* temperature;
    const int* top_k;
    const float *top_p, *min_p;
    const i64* seed;
    const int* count;
};

#define KEY_OF_INFINITY 0xff800000u
#define KEY_OF_MINUS_INFINITY 0x007fffffu

struct Row {
    const float* x;
    int width;
    u32 nan;  // key of NaN: above or below all others

    __device__ __forceinline__ Row(const u8* x, int width, const Settings& settings)
        : x((const float*)x), width(width), nan(settings.temperature ? 0xffffffffu : 1u) {}

    // A key that is larger for larger values, never zero, and equal for both zeros.
    __device__ __forceinline__ u32 key(int i) const {
        float v = x[i];
        if (v != v) return nan;
        u32 bits = __float_as_uint(v + 0.f);
        return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    }
};

__device__ __forceinline__ float value_of(u32 key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Logits of a slice, a multiple of 32.
__device__ __forceinline__ int slice_of(int width) {
    return (width + WARP * THREADS - 1) / (WARP * THREADS) * WARP;
}

// ------------------------------------------------------------------------------- in a block

__device__ __forceinline__ u64 warp_scan(u64 x) {  // inclusive
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int o = 1; o < WARP; o <<= 1) {
        u64 y = __shfl_up_sync(FULL, x, o);
        if (lane >= o) x += y;
    }
    return x;
}

__device__ __forceinline__ u64 block_scan(u64 x) {  // inclusive
    __shared__ u64 parts[WARP];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    x = warp_scan(x);
    __syncthreads();
    if (lane == WARP - 1) parts[warp] = x;
    __syncthreads();
    u64 before = warp_scan(parts[lane]) - parts[lane];
    return x + __shfl_sync(FULL, before, warp);
}

__device__ __forceinline__ u64 block_total(u64 x) {
    __shared__ u64 total;
    x = block_scan(x);
    if (threadIdx.x == THREADS - 1) total = x;
    __syncthreads();
    return total;
}

__device__ __forceinline__ u32 block_most(u32 x) {
    __shared__ u32 parts[WARP];
    x = warp_max(x);
    __syncthreads();
    if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = x;
    __syncthreads();
    return warp_max(parts[threadIdx.x % WARP]);
}

// Call f(i, key(i)) for every step-th i, with four keys in flight.
template <class K, class F>
__device__ __forceinline__ void over(int first, int last, int step, K key, F f) {
    for (int i = first; i < last; i += 4 * step) {
        u32 keys[4];
#pragma unroll
        for (int j = 0; j < 4; j++) keys[j] = i + j * step < last ? key(i + j * step) : 0;
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (i + j * step < last) f(i + j * step, keys[j]);
    }
}

template <class K, class W> __device__ __forceinline__ u64 total_of(int width, K key, W weight) {
    u64 sum = 0;
    over(threadIdx.x, width, THREADS, key, [&](int i, u32 k) { sum += weight(i, k); });
    return block_total(sum);
}

// The bin at which the sum from the highest bin down, plus `above`, reaches `need`, and the sum above it.
// A thread has two bins; the last thread has the lowest ones.
struct Crossing {
    u32 bin;
    u64 above;
};

__device__ __forceinline__ int own_bin() { return BINS - 1 - 2 * threadIdx.x; }  // and the one below

__device__ __forceinline__ Crossing crossing(u64 own, u64 next, u64 above, u64 need) {
    __shared__ Crossing found;
    u64 through = above + block_scan(own + next), before = through - own - next;
    if (before < need && need <= before + own)
        found = {(u32)own_bin(), before};
    else if (before + own < need && need <= through)
        found = {(u32)own_bin() - 1, before + own};
    __syncthreads();
    return found;
}

// Sums by bin in shared memory; `room`: 2 * BINS words, for the low and high halves.
struct Bins {
    u32 *low, *high;

    __device__ __forceinline__ Bins(u32* room) : low(room), high(room + BINS) {
        __syncthreads();
        for (int i = threadIdx.x; i < BINS; i += THREADS) low[i] = high[i] = 0;
        __syncthreads();
    }
    __device__ __forceinline__ void add(u32 bin, u64 weight) const {
        u32 lower = (u32)weight, old = atomicAdd(&low[bin], lower);
        u32 upper = (u32)(weight >> 32) + (old + lower < old);
        if (upper) atomicAdd(&high[bin], upper);
    }
    __device__ __forceinline__ u64 operator[](int bin) const {
        return (u64)high[bin] << 32 | low[bin];
    }
};

// The key at which the sum of the weights of the largest keys reaches `need`, and the sum above it.
struct Level {
    u32 key;
    u64 above;
};

template <class K, class W>
__device__ Level reach(u32* room, int width, K key, W weight, u64 need) {
    Crossing at = {0, 0};
    u32 prefix = 0;
    for (int pass = 0; pass < 3; pass++) {
        int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0, bits = pass < 2 ? 11 : 10;
        Bins bins(room);
        over(threadIdx.x, width, THREADS, key, [&](int i, u32 k) {
            if (pass && k >> (shift + bits) != prefix) return;
            u64 w = weight(i, k);
            if (w) bins.add(k >> shift & ((1u << bits) - 1), w);
        });
        __syncthreads();
        at = crossing(bins[own_bin()], bins[own_bin() - 1], at.above, need);
        prefix = prefix << bits | at.bin;
    }
    return {prefix, at.above};
}

// The first index at which the prefix sum of the weights exceeds `target`; -1: none.
template <class K, class W> __device__ int locate(int width, K key, W weight, u64 target) {
    __shared__ u64 parts[WARP];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, first = 0, last = width;
    while (last - first > WARP) {
        int chunk = (last - first + WARP - 1) / WARP;
        int from = first + warp * chunk, to = from + chunk < last ? from + chunk : last;
        u64 sum = 0;
        over(from + lane, to, WARP, key, [&](int i, u32 k) { sum += weight(i, k); });
        sum = __shfl_sync(FULL, warp_scan(sum), WARP - 1);
        __syncthreads();
        if (lane == 0) parts[warp] = sum;
        __syncthreads();
        u64 own = parts[lane], through = warp_scan(own);
        u32 beyond = __ballot_sync(FULL, through > target);
        if (!beyond) return -1;
        int which = __ffs(beyond) - 1;
        target -= __shfl_sync(FULL, through - own, which);
        first += which * chunk;
        last = first + chunk < last ? first + chunk : last;
    }
    u64 own = first + lane < last ? weight(first + lane, key(first + lane)) : 0;
    u32 beyond = __ballot_sync(FULL, warp_scan(own) > target);
    return beyond ? first + __ffs(beyond) - 1 : -1;
}

// ------------------------------------------------------------------------------- candidates

// A candidate: the key in the high half and the complement of the index in the low half, so that of
// equal keys the first index is the largest candidate.
__device__ __forceinline__ u64 candidate(u32 key, int i) { return (u64)key << 32 | ~(u32)i; }
__device__ __forceinline__ u32 key_of(u64 c) { return (u32)(c >> 32); }
__device__ __forceinline__ int index_of(u64 c) { return (int)~(u32)c; }
// ------------------------------------------------------------------------------------- sampling

// Philox4x32-10's first word for a request's seed and output position, its upper 24 bits.
__device__ __forceinline__ u32 random_24(i64 seed, int count) {
    u32 c0 = (u32)count, c1 = 0, c2 = 0, c3 = 0, k0 = (u32)seed, k1 = (u32)((u64)seed >> 32);
    for (int round = 0; round < 10; round++) {
        u64 even = (u64)c0 * 0xD2511F53u, odd = (u64)c2 * 0xCD9E8D57u;
        u32 next = (u32)(odd >> 32) ^ c1 ^ k0;
        c2 = (u32)(even >> 32) ^ c3 ^ k1;
        c1 = (u32)odd;
        c3 = (u32)even;
        c0 = next;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c0 >> 8;
}

// exp((value - top) / temperature), where the top is finite.
__device__ __forceinline__ double weight_of(u32 key, u32 top, double temperature) {
    return exp(((double)value_of(key) - (double)value_of(top)) / temperature);
}

// The settings of a row.
struct SamplingParams {
    double temperature, top_p, min_p;
    bool some;  // top_p is on
    u32 number;
};

// Weights of a row with largest key `top` as fixed-point integers, whose sums do not depend on their
// order and stay below 2^62.
struct Weights {
    u32 top;
    double unit;

    __device__ __forceinline__ Weights(u32 top, int width)
        : top(top), unit((double)(1ull << (30 + __clz(width)))) {}
    __device__ __forceinline__ u64 plain(u32 key) const {
        return (u64)__double2ll_rn(weight_of(key, top, 1) * unit);
    }
    // Weight at the temperature; 0 if min_p excludes the key.
    __device__ __forceinline__ u64 heated(u32 key, const SamplingParams& params) const {
        bool in = key == top || !(params.min_p > 0) || weight_of(key, top, 1) >= params.min_p;
        return in ? (u64)__double2ll_rn(weight_of(key, top, params.temperature) * unit) : 0ull;
    }
    // The sum of weights to be reached for top_p.
    __device__ __forceinline__ u64 need(const SamplingParams& params, u64 sum) const {
        i64 part = __double2ll_ru(params.top_p * (double)sum);
        return part < 1 ? 1 : part;
    }
};

// The sampled point of [0, sum).
__device__ __forceinline__ u64 target_of(const SamplingParams& params, u64 sum) {
    u64 number = params.number;
    return __umul64hi(number, sum) << 40 | (number * sum) >> 24;
}
