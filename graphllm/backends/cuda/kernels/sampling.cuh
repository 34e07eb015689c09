#pragma once
// A row of logits and its settings; sums, searches and random numbers by a block of THREADS threads.

#define THREADS 1024
#define BINS 2048  // of sums by bits of the key: two per thread

struct Settings {  // null: argmax, with NaN as the smallest value
    const float* temperature;
    const int* top_k;
    const float *top_p, *min_p;
    const i64* seed;
    const int *count, *sample_index;
    const int* mask;  // bitmaps of allowed ids, (width + 31) / 32 words a row; null for none
};

#define KEY_OF_INFINITY 0xff800000u
#define KEY_OF_MINUS_INFINITY 0x007fffffu

struct Row {
    const float* x;
    int width;
    u32 nan;          // key of NaN: above or below all others
    const int* mask;  // bitmaps of allowed ids, the others count as -infinity; null: all
    u32 first;        // word of the row's bitmap

    __device__ __forceinline__ Row(const u8* x, i64 stride, i64 n, int width, const Settings& settings)
        : x((const float*)(x + n * stride)),
          width(width),
          nan(settings.temperature ? 0xffffffffu : 1u),
          mask(settings.mask), first((u32)n * (u32)((width + 31) / 32)) {}
    // NaN is above all others.
    __device__ __forceinline__ Row(const void* x, int width)
        : x((const float*)x), width(width), nan(0xffffffffu), mask(nullptr), first(0) {}

    __device__ __forceinline__ bool excludes(int i) const {
        return mask && !(mask[first + i / 32] >> (i % 32) & 1);
    }
    // A key that is larger for larger values, never zero, and equal for both zeros.
    __device__ __forceinline__ u32 key(int i) const { return key_of(i, x[i]); }
    __device__ __forceinline__ u32 key_of(int i, float v) const {
        return excludes(i) ? KEY_OF_MINUS_INFINITY : key_of(v);
    }
    __device__ __forceinline__ u32 key_of(float v) const {
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

// Sum over the block, added in the same order in every run.
__device__ __forceinline__ double block_sum(double x) {
    __shared__ double parts[WARP];
#pragma unroll
    for (int o = WARP / 2; o; o >>= 1) x += __shfl_xor_sync(FULL, x, o);
    __syncthreads();
    if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = x;
    __syncthreads();
    x = parts[threadIdx.x % WARP];
#pragma unroll
    for (int o = WARP / 2; o; o >>= 1) x += __shfl_xor_sync(FULL, x, o);
    return x;
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

// What the noise of a row depends on, besides the id.
struct NoiseKey {
    u32 low, high, count, index;  // halves of the seed, output position, index of the sample
};

enum Purpose { TOKEN, XTC };

// The random word of an id or another item: ops/random_numbers.py has the definition.
template <Purpose PURPOSE> __device__ __forceinline__ u32 random_word(const NoiseKey& key, int id) {
    u32 c0 = (u32)id / 4, c1 = key.count, c2 = key.index, c3 = PURPOSE, k0 = key.low, k1 = key.high;
#pragma unroll
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
    return id & 2 ? (id & 1 ? c3 : c2) : (id & 1 ? c1 : c0);
}

// Gumbel noise -log(-log(u)) of a word, with u = (word + 1/2) 2^-32.
__device__ __forceinline__ double gumbel(u32 word) {
    return -log(-log(((double)word + 0.5) * 0x1p-32));
}

// exp(value - top), where the top is finite.
__device__ __forceinline__ double weight_of(u32 key, u32 top) {
    return exp((double)value_of(key) - (double)value_of(top));
}

// The settings of a row.
struct SamplingParams {
    float temperature, top_p, min_p;
    bool some;  // top_p is on
    NoiseKey noise;

    __device__ __forceinline__ bool reaches_min_p(u32 key, u32 top) const {
        return !(min_p > 0) || key == top || weight_of(key, top) >= min_p;
    }
};

// Weights of a row with largest key `top` as fixed-point integers, whose sums do not depend on their
// order and stay below 2^62.
struct Weights {
    u32 top;
    double unit;

    __device__ __forceinline__ Weights(u32 top, int width)
        : top(top), unit((double)(1ull << (30 + __clz(width)))) {}
    __device__ __forceinline__ u64 plain(u32 key) const {
        return (u64)__double2ll_rn(weight_of(key, top) * unit);
    }
    // The sum of weights to be reached for top_p.
    __device__ __forceinline__ u64 need(const SamplingParams& params, u64 sum) const {
        i64 part = __double2ll_ru((double)params.top_p * (double)sum);
        return part < 1 ? 1 : part;
    }
};

// ------------------------------------------------------------------------------------- the draw

#define MAX_NOISE 22.9f  // above -log(-log(1 - 2^-33))

// The id with the largest sum of (value - top) / temperature and noise, the lowest of equal sums.
struct Best {
    double sum;
    int id;  // INT_MAX: none

    __device__ __forceinline__ Best() : sum(-INFINITE), id(0x7fffffff) {}

    __device__ __forceinline__ void join(double other_sum, int other_id) {
        if (other_sum < sum || (other_sum == sum && other_id > id)) return;
        sum = other_sum;
        id = other_id;
    }

    // Consider an id. Most cannot win with the largest noise, or with ln 2 times one more than the
    // number of leading ones of the word, an upper bound of its noise as -log(u) is at least 1 - u.
    __device__ __forceinline__ void consider(int i, u32 key, u32 top, const SamplingParams& params) {
        // In float, where an error of some 1e-5 discards no winner thanks to the margins.
        float gap = (value_of(key) - value_of(top)) * fminf(1 / params.temperature, 1e30f);
        if (gap + MAX_NOISE < (float)sum) return;
        u32 word = random_word<TOKEN>(params.noise, i);
        if (gap + 0.6932f * (__clz(~word) + 1) + 1e-3f < (float)sum) return;
        double distance = (double)value_of(key) - (double)value_of(top);
        join(distance / params.temperature + gumbel(word), i);
    }

    // The best of the block's threads, in all threads.
    __device__ __forceinline__ void join_block() {
        __shared__ double sums[WARP];
        __shared__ int ids[WARP];
        int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        join_warp();
        __syncthreads();
        if (lane == 0) sums[warp] = sum, ids[warp] = id;
        __syncthreads();
        sum = sums[lane], id = ids[lane];
        join_warp();
    }

    __device__ __forceinline__ void join_warp() {
#pragma unroll
        for (int o = WARP / 2; o; o >>= 1) {
            double other = __shfl_xor_sync(FULL, sum, o);
            join(other, __shfl_xor_sync(FULL, id, o));
        }
    }
};
