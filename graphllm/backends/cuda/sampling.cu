// From logits to token ids. Every row may have other settings, which are read here, not by the host.
//
// Two kernels. `peaks` finds the largest of every slice of a row. `pick`, a block a row, looks where
// the top_k largest can be: in slices whose peak is among the top_k peaks. It draws in float64 and
// in the order of the op's declaration. A row that asks for more than KEPT (top_k off), or has too
// many equal values, is drawn from as a whole, with weights as integers of 2^-scale: sums of these
// do not depend on their order.

#define KEPT 64
#define THREADS 1024  // of a block of `pick`; slices of a row, at most; candidates, at most
#define BINS 2048

struct Settings {  // null: the largest is chosen
    const float* temperature;
    const int* top_k;
    const float *top_p, *min_p;
    const i64* seed;
    const int* count;
};

struct Row {
    const float* x;
    int width;
    bool greedy;  // NaN then is less than all else; otherwise it is -infinity

    // Larger for larger values, never zero; the two zeros are equal.
    __device__ __forceinline__ u32 key(int i) const {
        float v = x[i];
        if (v != v) return greedy ? 1u : 0x007fffffu;
        u32 bits = __float_as_uint(v + 0.f);
        return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    }
};

__device__ __forceinline__ float value_of(u32 key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Logits of a slice: a multiple of 32.
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

// f(i, key(i)) for every step-th i: four keys are on their way at a time.
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

// The key at which the weights of the largest keys reach `need`, and the weight of all above it.
// `room`: 2 * BINS words of shared memory, for the halves of the sums by a few bits of the key.
struct Level {
    u32 key;
    u64 above;
};

template <class K, class W>
__device__ Level reach(u32* room, int width, K key, W weight, u64 need) {
    __shared__ u32 found;
    __shared__ u64 found_above;
    u32 *low = room, *high = room + BINS;
    u32 prefix = 0;
    u64 above = 0;
    for (int pass = 0; pass < 3; pass++) {
        int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0, bits = pass < 2 ? 11 : 10;
        __syncthreads();
        for (int i = threadIdx.x; i < BINS; i += THREADS) low[i] = high[i] = 0;
        __syncthreads();
        over(threadIdx.x, width, THREADS, key, [&](int i, u32 k) {
            if (pass && k >> (shift + bits) != prefix) return;
            u64 w = weight(i, k);
            if (!w) return;
            u32 bin = k >> shift & ((1u << bits) - 1), lower = (u32)w;
            u32 old = atomicAdd(&low[bin], lower);
            u32 upper = (u32)(w >> 32) + (old + lower < old);
            if (upper) atomicAdd(&high[bin], upper);
        });
        __syncthreads();
        int top = BINS - 1 - 2 * threadIdx.x;  // a thread has two bins, the first the highest
        u64 a = (u64)high[top] << 32 | low[top], b = (u64)high[top - 1] << 32 | low[top - 1];
        u64 through = above + block_scan(a + b), before = through - a - b;
        if (before < need && need <= before + a) {
            found = top;
            found_above = before;
        } else if (before + a < need && need <= through) {
            found = top - 1;
            found_above = before + a;
        }
        __syncthreads();
        prefix = prefix << bits | found;
        above = found_above;
    }
    return {prefix, above};
}

// The first of `width` at which the sum of the weights so far exceeds `target`; -1: none.
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

// ---------------------------------------------------------------------------- the few largest

// The largest key of each slice, to out [rows, THREADS]. A warp does a slice.
extern "C" __global__ void peaks(const u8* x, i64 stride, int width, Settings settings,
                                 const i64* live, u32* out) {
    begin();
    i64 n = blockIdx.x;
    int slice = blockIdx.y * (blockDim.x / WARP) + threadIdx.x / WARP, size = slice_of(width);
    bool greedy = !settings.temperature || !(settings.temperature[n] > 0);
    Row row = {(const float*)(x + n * stride), width, greedy};
    int first = slice * size, last = min(first + size, width);
    if (n >= *live || first >= width) return;
    u32 most = 0;
#pragma unroll 8
    for (int i = first + threadIdx.x % WARP; i < last; i += WARP) most = max(most, row.key(i));
    most = warp_max(most);
    if (threadIdx.x % WARP == 0) out[n * THREADS + slice] = most;
}

// A candidate: the key above, the complement of the index below, so that the first is the largest.
__device__ __forceinline__ u64 candidate(u32 key, int i) { return (u64)key << 32 | ~(u32)i; }
__device__ __forceinline__ u32 key_of(u64 c) { return (u32)(c >> 32); }
__device__ __forceinline__ int index_of(u64 c) { return (int)~(u32)c; }

// The k-th largest of the block's keys, one a thread, zero for none; 0 where there are fewer.
__device__ __forceinline__ u32 kth_largest(u32 key, int k) {
    u32 least = 0;
    for (int bit = 31; bit >= 0; bit--) {
        u32 next = least | 1u << bit;
        int count = __syncthreads_count(key >= next);
        if (count >= k) least = next;
        if (count == k) break;
    }
    return least;
}

// All candidates of at least `least`, in any order, to found [THREADS]: how many there are, of which
// some are left out if that is more than THREADS.
__device__ __forceinline__ int gather(const Row& row, u32 peak, u32 least, u64* found) {
    __shared__ int slices[THREADS], count, used;
    int size = slice_of(row.width), lane = threadIdx.x % WARP;
    if (threadIdx.x == 0) count = used = 0;
    __syncthreads();
    if (peak && peak >= least) slices[atomicAdd(&count, 1)] = threadIdx.x;
    __syncthreads();
    for (int s = threadIdx.x / WARP; s < count; s += WARP) {
        int first = slices[s] * size, last = min(first + size, row.width);
#pragma unroll 4
        for (int i = first + lane; i < last; i += WARP) {
            u32 key = row.key(i);
            if (key < least) continue;
            int at = atomicAdd(&used, 1);
            if (at < THREADS) found[at] = candidate(key, i);
        }
    }
    __syncthreads();
    return used;
}

// ------------------------------------------------------------------------------------- drawing

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

// exp((value - top) / temperature), 1 at the top even where that is infinite.
__device__ __forceinline__ double weight_of(u32 key, u32 top, double temperature) {
    if (key == top) return 1;
    return exp(((double)value_of(key) - (double)value_of(top)) / temperature);
}

// Sums of values[0..i] to sums[i], one after the other: the order is the declaration's.
__device__ __forceinline__ void add_up(const double* values, int count, double* sums) {
    double sum = 0;
#pragma unroll 8
    for (int i = 0; i < count; i++) sums[i] = sum += values[i];
}

// What a draw needs of a row's settings.
struct Draw {
    double temperature, top_p, min_p;
    bool some;  // top_p is on
    u32 number;
};

// From the `keep` largest of `count` candidates.
__device__ int draw_few(const u64* found, int count, int keep, const Draw& draw) {
    __shared__ u64 sorted[KEPT];
    __shared__ double weights[KEPT], sums[KEPT], warm[KEPT];
    __shared__ int ids[KEPT];
    int t = threadIdx.x;
    if (t < count) {
        u64 own = found[t];
        int rank = 0;
#pragma unroll 4
        for (int i = 0; i < count; i++) rank += found[i] > own;
        if (rank < keep) sorted[rank] = own;
    }
    __syncthreads();
    keep = min(keep, count);
    u64 own = t < keep ? sorted[t] : 0;
    u32 top = key_of(sorted[0]);
    double plain = t < keep ? weight_of(key_of(own), top, 1) : 0;
    double heated = t < keep ? weight_of(key_of(own), top, draw.temperature) : 0;
    if (t < keep) weights[t] = plain;
    __syncthreads();
    int left = keep;
    if (draw.some) {
        if (t == 0) add_up(weights, keep, sums);
        __syncthreads();
        double need = draw.top_p * sums[keep - 1];
        left = min(keep, 1 + __syncthreads_count(t < keep && sums[t] < need));
    }
    if (draw.min_p > 0) left = max(1, __syncthreads_count(t < left && plain >= draw.min_p));
    if (t < left) {
        int rank = 0;
#pragma unroll 8
        for (int i = 0; i < left; i++) rank += index_of(sorted[i]) < index_of(own);
        ids[rank] = index_of(own);
        warm[rank] = heated;
    }
    __syncthreads();
    if (t == 0) add_up(warm, left, sums);
    __syncthreads();
    double target = draw.number * 0x1p-24 * sums[left - 1];
    int before = __syncthreads_count(t < left && !(sums[t] > target));
    return ids[min(before, left - 1)];
}

// From a whole row. Kept are the keys above `least`, and those equal to it that lie before `end`.
__device__ int draw_many(const Row& row, u32 top, int top_k, const Draw& draw, u32* room) {
    int width = row.width, scale = 62 - (32 - __clz(width));
    double unit = (double)(1ull << scale);
    auto key = [&](int i) { return row.key(i); };
    u32 least = 0;
    int end = 0;
    auto kept = [&](int i, u32 k) { return k > least || (k == least && i < end); };
    auto weight = [&](int i, u32 k) {
        return kept(i, k) ? (u64)__double2ll_rn(weight_of(k, top, 1) * unit) : 0ull;
    };
    auto cut = [&](Level level, u64 ties) {
        auto equal = [&](int, u32 k) { return k == level.key ? 1ull : 0ull; };
        end = 1 + locate(width, key, equal, ties - 1);
        least = level.key;
    };
    if (0 < top_k && top_k < width) {
        Level level = reach(room, width, key, [](int, u32) { return 1ull; }, top_k);
        cut(level, top_k - level.above);
    }
    if (draw.some) {
        i64 need = __double2ll_ru(draw.top_p * (double)total_of(width, key, weight));
        if (need < 1) need = 1;
        Level level = reach(room, width, key, weight, need);
        u64 each = (u64)__double2ll_rn(weight_of(level.key, top, 1) * unit);
        cut(level, (need - level.above + each - 1) / each);
    }
    auto warm = [&](int i, u32 k) {
        bool in = kept(i, k) && (k == top || !(draw.min_p > 0) || weight_of(k, top, 1) >= draw.min_p);
        return in ? (u64)__double2ll_rn(weight_of(k, top, draw.temperature) * unit) : 0ull;
    };
    u64 sum = total_of(width, key, warm), number = draw.number;
    u64 target = __umul64hi(number, sum) << 40 | (number * sum) >> 24;
    return locate(width, key, warm, target);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    pick(const u8* x, i64 stride, int width, Settings s, const i64* live, const u32* peaks,
         int* out) {
    __shared__ u64 room[BINS];  // of candidates, or of the bins of `reach`
    begin();
    i64 n = blockIdx.x;
    int t = threadIdx.x, size = slice_of(width), slices = (width + size - 1) / size, drawn;
    u32 peak = t < slices ? peaks[n * THREADS + t] : 0;
    Row row = {(const float*)(x + n * stride), width, !s.temperature};
    Draw draw = {};
    int top_k = 1;
    if (s.temperature) {
        float top_p = s.top_p[n];
        draw = {s.temperature[n], top_p, s.min_p[n], top_p < 1, 0};
        row.greedy = !(draw.temperature > 0);
        if (!row.greedy) top_k = s.top_k[n];
        draw.number = random_24(s.seed[n], s.count[n]);
    }
    if (n >= *live) return;
    bool few = 0 < top_k && top_k < width && top_k <= KEPT;
    u32 most = block_most(peak);
    if (row.greedy) {
        u64 first = peak == most ? candidate(most, t) : 0;  // the first of slices with the largest
        if (t == 0) room[0] = 0;
        __syncthreads();
        if (first) atomicMax(&room[0], first);
        __syncthreads();
        int from = index_of(room[0]) * size, last = min(from + size, width);
        auto key = [&](int i) { return row.key(from + i); };
        auto equal = [&](int, u32 k) { return k == most ? 1ull : 0ull; };
        drawn = from + locate(last - from, key, equal, 0);
    } else {
        u32 least = few ? kth_largest(peak, top_k) : 0;
        int count = few ? gather(row, peak, least, room) : THREADS + 1;
        drawn = count <= THREADS ? draw_few(room, count, top_k, draw)
                                 : draw_many(row, most, top_k, draw, (u32*)room);
    }
    if (t == 0) out[n] = drawn;
}

// ----------------------------------------------------------------------------------- penalties

struct Penalties {
    const int *history, *count, *stop;
    const float *repeat, *presence, *frequency;
    const int* min_tokens;
    int ring, stops;
};

// A block does some columns (y) of a row (x), and those of the ids that lie among them.
extern "C" __global__ void penalise(const u8* x, i64 stride, float* out, const i64* live,
                                    int width, Penalties p) {
    begin();
    i64 n = blockIdx.x;
    if (n >= *live) return;
    const float* from = (const float*)(x + n * stride);
    const int* past = p.history + n * p.ring;
    out += n * width;
    int first = blockIdx.y * 4 * blockDim.x, last = min(width, first + 4 * (int)blockDim.x);
    for (int i = first + threadIdx.x; i < last; i += blockDim.x) out[i] = from[i];
    __syncthreads();
    for (int j = threadIdx.x; j < p.ring; j += blockDim.x) {
        int id = past[j], times = 0;
        if (id < first || id >= last) continue;
        bool seen = false;
        for (int i = 0; i < p.ring; i++) {
            seen |= past[i] == id && i < j;
            times += past[i] == id;
        }
        if (seen) continue;  // the first of equal entries does it
        float v = from[id], repeat = p.repeat[n];
        v = v > 0 ? v / repeat : v * repeat;
        out[id] = v - (p.presence[n] + (float)times * p.frequency[n]);
    }
    if (p.count[n] >= p.min_tokens[n]) return;
    __syncthreads();
    for (int e = threadIdx.x; e < p.stops; e += blockDim.x) {
        int id = p.stop[e];
        if (first <= id && id < last) out[id] = -INFINITE;
    }
}
