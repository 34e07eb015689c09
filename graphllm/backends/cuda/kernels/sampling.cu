// Sampling of token ids from logits. Every row may have other settings, which are read on the device.
//
// `slice_maxima` finds the largest key of every slice of a row, and its first index. `pick`, one block per row, looks for the
// top_k largest keys only in slices whose maximum is among the top_k maxima. Of the ids left, the one
// with the largest sum of logit and Gumbel noise is sampled, in float64. A wide row, one without top_k,
// is sampled by several blocks with a share of it each. For top_p they use weights as integers, whose
// sums do not depend on their order: `pick` sums them by bins of the logits' distance from the largest,
// and so finds the bin in which top_p is reached; `finish` finds the best id above that bin, and lists
// the bin, of which the last block to finish considers the part within top_p. A row with a large top_k,
// or with too many equal values, is sampled by one block, which reads it several times.

#include "sampling.cuh"

#define KEPT 256          // largest top_k that is sampled from a list of candidates
#define FINENESS 64       // bins per unit of a logit
#define LISTED (1 << 14)  // most candidates of a bin

// Shared by the blocks of a wide row; the fields before `sums` are zeroed first.
struct Wide {
    u64 mass[BINS];  // sum of weights by bin
    int weighed, finished, listed, unused;
    double sums[THREADS];  // of each block: the best sum above the bin, and its id
    u64 ids[THREADS];
    u64 above, need;  // top_p: sum of weights above the bin, and the sum to be reached
    u64 bin;
    u64 list[LISTED];  // candidates in the bin
};

#define ZEROED (BINS + 2)  // words

#define PIECES 8  // warp-wide loads in flight

// Store the largest key of each slice, and its first index, to out [rows, 2, THREADS]. A warp computes
// `each` slices.
extern "C" __global__ void slice_maxima(const u8* x, i64 stride, int width, Settings settings,
                                 const i64* live, u32* out, Wide* wide, int each TIMESTAMPS) {
    RECORD_TIMESTAMPS
    const i64 rows = begin(live);
    const i64 n = blockIdx.x;
    const int size = slice_of(width), lane = threadIdx.x % WARP;
    if (n >= rows) return;
    if (wide) {
        int first = blockIdx.y * blockDim.x + threadIdx.x, step = gridDim.y * blockDim.x;
        for (int i = first; i < ZEROED; i += step) ((u64*)(wide + n))[i] = 0;
    }
    Row row(x, stride, n, width, settings);
    int slice = (blockIdx.y * (blockDim.x / WARP) + threadIdx.x / WARP) * each;
    const int begin_at = slice * size, end = min(begin_at + each * size, width);
    u32 most = 0, at = 0;
    int left = size;  // logits of the present slice
#pragma unroll 1
    for (int first = begin_at; first < end; first += PIECES * WARP) {
        float logits[PIECES];
#pragma unroll
        for (int j = 0; j < PIECES; j++) {
            const int i = first + j * WARP + lane;
            logits[j] = i < end ? row.x[i] : 0;
        }
#pragma unroll
        for (int j = 0; j < PIECES; j++) {
            const int i = first + j * WARP + lane;
            if (i - lane >= end) break;
            const u32 key = i < end ? row.key_of(i, logits[j]) : 0;
            if (key > most) most = key, at = i;
            left -= WARP;
            if (left && i - lane + WARP < end) continue;
            const u32 top = warp_max(most), index = ~warp_max(most == top ? ~at : 0);
            if (lane == 0) out[2 * n * THREADS + slice] = top, out[(2 * n + 1) * THREADS + slice] = index;
            most = at = 0, left = size, slice++;
        }
    }
}

// The maximum of slice threadIdx.x of the block's row; 0 if there is no such slice.
__device__ __forceinline__ u32 own_maximum(const u32* maxima, int width) {
    int size = slice_of(width), slices = (width + size - 1) / size;
    return threadIdx.x < slices ? maxima[2 * (i64)blockIdx.x * THREADS + threadIdx.x] : 0;
}

// ---------------------------------------------------------------------------- candidates

// The k-th largest of the block's keys, one per thread (0: none); 0 if there are fewer than k.
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

// Store all candidates with keys of at least `least`, in any order, to found [THREADS], and return their
// number; if it exceeds THREADS, some are missing.
__device__ __forceinline__ int gather(const Row& row, u32 maximum, u32 least, u64* found) {
    __shared__ int slices[THREADS], count, used;
    int size = slice_of(row.width), lane = threadIdx.x % WARP;
    if (threadIdx.x == 0) count = used = 0;
    __syncthreads();
    if (maximum && maximum >= least) slices[atomicAdd(&count, 1)] = threadIdx.x;
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

// Store prefix sums of values to sums, added in the order of the op's declaration.
__device__ __forceinline__ void add_up(const double* values, int count, double* sums) {
    double sum = 0;
#pragma unroll 8
    for (int i = 0; i < count; i++) sums[i] = sum += values[i];
}

// The ids left by top_k and top_p: the listed candidates, or without a list the ids of a row whose keys
// are above `least`, or equal to it before index `end`.
struct Kept {
    const u64* list;
    int count;
    u32 least;
    int end;
};

// Sample one of the ids left, of which min_p excludes some.
__device__ __forceinline__ int draw(const Row& row, const Kept& kept, u32 top, const SamplingParams& params) {
    Best best;
#pragma unroll 1
    for (int i = threadIdx.x; i < kept.count; i += THREADS) {
        u64 c = kept.list ? kept.list[i] : candidate(row.key(i), i);
        u32 k = key_of(c);
        if (!kept.list && (k < kept.least || (k == kept.least && i >= kept.end))) continue;
        if (params.reaches_min_p(k, top)) best.consider(index_of(c), k, top, params);
    }
    best.join_block();
    return best.id;
}

// Apply top_k and top_p to `count` candidates that contain the `keep` largest.
__device__ Kept keep_candidates(const u64* found, int count, int keep, const SamplingParams& params) {
    __shared__ u64 sorted[KEPT];
    __shared__ double weights[KEPT], sums[KEPT];
    int t = threadIdx.x;
    if (t < count) {
        u64 own = found[t];
        int rank = 0;
#pragma unroll 4
        for (int i = 0; i < count; i++) rank += found[i] > own;
        if (rank < keep) sorted[rank] = own;
    }
    __syncthreads();
    int left = keep = min(keep, count);
    if (params.some) {
        if (t < keep) weights[t] = weight_of(key_of(sorted[t]), key_of(sorted[0]));
        __syncthreads();
        if (t == 0) add_up(weights, keep, sums);
        __syncthreads();
        double need = (double)params.top_p * sums[keep - 1];
        left = min(keep, 1 + __syncthreads_count(t < keep && sums[t] < need));
    }
    return {sorted, left, 0, 0};
}

// Apply top_k and top_p to a whole row by one block.
__device__ Kept keep_of_row(const Row& row, u32 top, int top_k, const SamplingParams& params, u32* room) {
    Weights weights(top, row.width);
    auto key = [&](int i) { return row.key(i); };
    u32 least = 0;
    int width = row.width, end = 0;
    auto kept = [&](int i, u32 k) { return k > least || (k == least && i < end); };
    auto plain = [&](int i, u32 k) { return kept(i, k) ? weights.plain(k) : 0ull; };
    auto cut = [&](Level level, u64 ties) {
        auto equal = [&](int, u32 k) { return k == level.key ? 1ull : 0ull; };
        end = 1 + locate(width, key, equal, ties - 1);
        least = level.key;
    };
    if (0 < top_k && top_k < width) {
        Level level = reach(room, width, key, [](int, u32) { return 1ull; }, top_k);
        cut(level, top_k - level.above);
    }
    if (params.some) {
        u64 need = weights.need(params, total_of(width, key, plain));
        Level level = reach(room, width, key, plain, need);
        u64 each = weights.plain(level.key);
        cut(level, (need - level.above + each - 1) / each);
    }
    return {nullptr, width, least, end};
}

// --------------------------------------------------------------------------------- wide rows

// Whether this is the last block of the row to get here; the writes of all others are visible then.
__device__ __forceinline__ bool is_last(int* count) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(count, 1) == gridDim.y - 1;
    __syncthreads();
    __threadfence();
    return last;
}

// The bin of a key by its distance from the largest; larger keys have higher bins.
__device__ __forceinline__ int bin_of(u32 key, u32 top) {
    if (key == top) return BINS - 1;
    float distance = value_of(top) - value_of(key);
    return BINS - 1 - (int)fminf(distance * FINENESS, BINS - 1);
}

// Sum the weights of the block's share by bin; the last block finds the bin in which top_p is reached.
__device__ void bin_weights(const Row& row, u32 top, const SamplingParams& params, u32* room, Wide* wide) {
    Weights weights(top, row.width);
    Bins bins(room);
    auto key = [&](int i) { return row.key(i); };
    over(blockIdx.y * THREADS + threadIdx.x, row.width, gridDim.y * THREADS, key, [&](int, u32 k) {
        u64 w = weights.plain(k);
        if (w) bins.add(bin_of(k, top), w);
    });
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += THREADS)
        if (bins[i]) atomicAdd(&wide->mass[i], bins[i]);
    if (!is_last(&wide->weighed)) return;
    u64 own = __ldcg(&wide->mass[own_bin()]), next = __ldcg(&wide->mass[own_bin() - 1]);
    u64 need = weights.need(params, block_total(own + next));
    Crossing at = crossing(own, next, 0, need);
    if (threadIdx.x == 0) wide->bin = at.bin, wide->above = at.above, wide->need = need;
}

// Apply top_p to `count` listed candidates: keys above `least` are kept, and those equal to it before
// index `end`.
__device__ __forceinline__ void cut_list(const Wide* wide, int count, const Weights& weights,
                                         u32* room, u32& least, int& end) {
    auto key = [&](int i) { return key_of(__ldcg(&wide->list[i])); };
    auto plain = [&](int, u32 k) { return weights.plain(k); };
    u64 need = wide->need - wide->above;
    Level level = reach(room, count, key, plain, need);
    auto equal = [&](int, u32 k) { return k == level.key ? 1ull : 0ull; };
    u64 each = weights.plain(level.key), ties = (need - level.above + each - 1) / each;
    least = level.key;
    end = 0x7fffffff;  // all
    if (ties >= total_of(count, key, equal)) return;
    auto place = [&](int i) {  // larger for lower indices
        u64 c = __ldcg(&wide->list[i]);
        return key_of(c) == level.key ? (u32)c : 0u;
    };
    Level first = reach(room, count, place, [](int, u32 k) { return k ? 1ull : 0ull; }, ties);
    end = (int)~first.key + 1;
}

// Sample from the best ids of all blocks; called by the last one. `count` candidates of the bin are
// listed.
__device__ int sample_wide(const Row& row, u32 top, const SamplingParams& params, u32* room, const Wide* wide,
                         int count) {
    int t = threadIdx.x, end = 0;
    u32 least = 0;
    Best best;
    if (t < gridDim.y) best.join(__ldcg(&wide->sums[t]), (int)__ldcg(&wide->ids[t]));
    if (count) cut_list(wide, count, Weights(top, row.width), room, least, end);
    for (int i = t; i < count; i += THREADS) {
        u64 c = __ldcg(&wide->list[i]);
        u32 k = key_of(c);
        if ((k > least || (k == least && index_of(c) < end)) && params.reaches_min_p(k, top))
            best.consider(index_of(c), k, top, params);
    }
    best.join_block();
    return best.id;
}

// ------------------------------------------------------------------------------------ kernels

struct Request {
    SamplingParams params;
    int top_k;
    bool greedy;
    bool wide;  // sampled by several blocks
};

// Whether top-k leaves all ids of a row.
__device__ __forceinline__ bool keeps_all(int top_k, int width) { return !(0 < top_k && top_k < width); }

__device__ __forceinline__ Request request_of(const Settings& s, i64 n, int width) {
    Request a = {{}, 1, true, false};
    if (!s.temperature) return a;
    float top_p = s.top_p[n];
    a.params = {s.temperature[n], top_p, s.min_p[n], top_p < 1, {}};
    a.greedy = !(a.params.temperature > 0);
    if (a.greedy) return a;
    u64 seed = (u64)s.seed[n];
    a.params.noise = {(u32)seed, (u32)(seed >> 32), (u32)s.count[n], (u32)s.sample_index[n]};
    a.top_k = s.top_k[n];
    a.wide = keeps_all(a.top_k, width);
    return a;
}

// Whether several blocks sample from row n.
__device__ __forceinline__ bool is_wide(const Settings& s, i64 n, int width) {
    return s.temperature && s.temperature[n] > 0 && keeps_all(s.top_k[n], width);
}

// `begin` for kernels of several blocks per row; `settled`: settings may be read before the wait. Returns false in blocks that
// have no work and need not wait, since the first block of the row does.
__device__ __forceinline__ bool begin_row(const Settings& s, int width, bool settled, const i64* live, i64& rows) {
    if (settled && blockIdx.y && !is_wide(s, blockIdx.x, width)) return false;
    rows = begin(live);
    return true;
}

// Whether no id can be sampled from a row with largest key `most`: it contains NaN or +infinity, or only
// -infinity.
__device__ __forceinline__ bool no_valid_logit(const Settings& s, u32 most) {
    return s.temperature && (most >= KEY_OF_INFINITY || most == KEY_OF_MINUS_INFINITY);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    pick(const u8* x, i64 stride, int width, Settings s, const i64* live, const u32* maxima,
         Wide* wide, int settled, int* out TIMESTAMPS) {
    RECORD_TIMESTAMPS
    __shared__ u64 room[BINS];  // for candidates or bins
    i64 rows, n = blockIdx.x;
    if (!begin_row(s, width, settled, live, rows) || n >= rows) return;
    Row row(x, stride, n, width, s);
    // In flight with the settings.
    const u32 maximum = own_maximum(maxima, width), own_index = maxima[(2 * n + 1) * THREADS + threadIdx.x];
    Request a = request_of(s, n, width);
    if (a.wide ? !a.params.some : blockIdx.y) return;
    const u32 most = block_most(maximum);
    int id;
    if (no_valid_logit(s, most)) {  // `finish` reports it for wide rows
        id = -1;
        if (a.wide) return;
    } else if (a.wide) {
        bin_weights(row, most, a.params, (u32*)room, wide + n);
        return;
    } else if (a.greedy) {
        const u32 index = maximum == most ? own_index : ~0u;
        id = (int)~block_most(~index);  // the first of equal keys
    } else {
        bool few = a.top_k <= KEPT;
        u32 least = few ? kth_largest(maximum, a.top_k) : 0;
        int count = few ? gather(row, maximum, least, room) : THREADS + 1;
        Kept kept = count <= THREADS ? keep_candidates(room, count, a.top_k, a.params)
                                     : keep_of_row(row, most, a.top_k, a.params, (u32*)room);
        id = draw(row, kept, most, a.params);
    }
    if (threadIdx.x == 0) out[n] = id;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    finish(const u8* x, i64 stride, int width, Settings s, const i64* live, const u32* maxima,
           Wide* wide, int settled, int* out TIMESTAMPS) {
    RECORD_TIMESTAMPS
    __shared__ u64 room[BINS];
    i64 rows, n = blockIdx.x;
    if (!begin_row(s, width, settled, live, rows) || n >= rows) return;
    Row row(x, stride, n, width, s);
    Request a = request_of(s, n, width);
    if (!a.wide) return;
    row.nan = 0xffffffffu;  // wide rows have a temperature
    wide += n;
    u32 top = block_most(own_maximum(maxima, width));
    if (no_valid_logit(s, top)) {
        if (blockIdx.y == 0 && threadIdx.x == 0) out[n] = -1;
        return;
    }
    int cut = a.params.some ? (int)wide->bin : -1;
    Best best;
#pragma unroll 1
    for (int i = blockIdx.y * THREADS + threadIdx.x; i < width; i += gridDim.y * THREADS) {
        u32 k = row.key(i);
        int bin = bin_of(k, top);
        if (bin > cut && a.params.reaches_min_p(k, top)) best.consider(i, k, top, a.params);
        if (bin != cut || !Weights(top, width).plain(k)) continue;
        int at = atomicAdd(&wide->listed, 1);
        if (at < LISTED) wide->list[at] = candidate(k, i);
    }
    best.join_block();
    if (threadIdx.x == 0) wide->sums[blockIdx.y] = best.sum, wide->ids[blockIdx.y] = best.id;
    if (!is_last(&wide->finished)) return;
    int count = __ldcg(&wide->listed);
    int id = count <= LISTED
                 ? sample_wide(row, top, a.params, (u32*)room, wide, count)
                 : draw(row, keep_of_row(row, top, 0, a.params, (u32*)room), top, a.params);
    if (threadIdx.x == 0) out[n] = id;
}
