// From logits to token ids. Every row may have other settings, which are read here, not by the host.
//
// `slice_maxima` finds the largest of every slice of a row. `pick`, a block a row, looks where the top_k
// largest can be: in slices whose peak is among the top_k peaks. It draws in float64 and in the
// order of the op's declaration. A wide row, one with top_k off, is drawn from by several blocks
// that do a piece of it each, with weights as integers, whose sums do not depend on their order:
// `pick` sums them by bins of the logits' distance from the largest, so that the bin is found in
// which top_p is reached; `finish` lists that bin and adds up what lies above it, and the block that
// is the last to be done there draws. A row that asks for a large top_k, or has too many equal
// values, is drawn from by one block, which goes over it again and again.

#include "sampling.cuh"

#define KEPT 256          // top_k, at most, that is drawn from as a few
#define PIECE 2048        // logits of a wide row that a block does, at least
#define FINENESS 64       // bins of a logit
#define LISTED (1 << 14)  // of a bin, at most

// What the blocks of a wide row share; what stands before `sums` is zero at first.
struct Wide {
    u64 mass[BINS];  // weights by bins
    int weighed, finished, listed, unused;
    u64 sums[THREADS];  // of each piece's weights above the bin
    u64 above, need;    // top_p: what lies above the bin, and what is to be reached
    u64 bin;
    u64 list[LISTED];  // candidates in the bin
};

#define ZEROED (BINS + 2)  // words

// The largest key of each slice, to out [rows, THREADS]. A warp does a slice.
extern "C" __global__ void slice_maxima(const u8* x, i64 stride, int width, Settings settings,
                                 const i64* live, u32* out, Wide* wide TIMESTAMPS) {
    RECORD_TIMESTAMPS
    const i64 rows = begin(live);
    i64 n = blockIdx.x;
    int slice = blockIdx.y * (blockDim.x / WARP) + threadIdx.x / WARP, size = slice_of(width);
    if (n >= rows) return;
    if (wide) {
        int first = blockIdx.y * blockDim.x + threadIdx.x, step = gridDim.y * blockDim.x;
        for (int i = first; i < ZEROED; i += step) ((u64*)(wide + n))[i] = 0;
    }
    Row row(x + n * stride, width, settings);
    int first = slice * size, last = min(first + size, width);
    if (first >= width) return;
    u32 most = 0;
#pragma unroll 8
    for (int i = first + threadIdx.x % WARP; i < last; i += WARP) most = max(most, row.key(i));
    most = warp_max(most);
    if (threadIdx.x % WARP == 0) out[n * THREADS + slice] = most;
}

// The block's peak of slice threadIdx.x, zero for none.
__device__ __forceinline__ u32 own_maximum(const u32* maxima, int width) {
    int size = slice_of(width), slices = (width + size - 1) / size;
    return threadIdx.x < slices ? maxima[(i64)blockIdx.x * THREADS + threadIdx.x] : 0;
}

// ---------------------------------------------------------------------------- the few largest

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

// Sums of values[0..i] to sums[i], one after the other: the order is the declaration's.
__device__ __forceinline__ void add_up(const double* values, int count, double* sums) {
    double sum = 0;
#pragma unroll 8
    for (int i = 0; i < count; i++) sums[i] = sum += values[i];
}

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

// From a whole row, by one block. Kept are the keys above `least`, and those equal to it that lie
// before `end`.
__device__ int draw_many(const Row& row, u32 top, int top_k, const Draw& draw, u32* room) {
    Weights weights(top, row.width);
    auto key = [&](int i) { return row.key(i); };
    u32 least = 0;
    int width = row.width, end = 0;
    auto kept = [&](int i, u32 k) { return k > least || (k == least && i < end); };
    auto plain = [&](int i, u32 k) { return kept(i, k) ? weights.plain(k) : 0ull; };
    auto warm = [&](int i, u32 k) { return kept(i, k) ? weights.warm(k, draw) : 0ull; };
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
        u64 need = weights.need(draw, total_of(width, key, plain));
        Level level = reach(room, width, key, plain, need);
        u64 each = weights.plain(level.key);
        cut(level, (need - level.above + each - 1) / each);
    }
    return locate(width, key, warm, target_of(draw, total_of(width, key, warm)));
}

// --------------------------------------------------------------------------------- wide rows

// Logits of a block's piece: so many that there are no more pieces than THREADS.
__device__ __forceinline__ int piece_of(int width) {
    return (width - 1) / (PIECE * THREADS) * PIECE + PIECE;
}

// Whether all other blocks of the row have come here, and what they wrote can be read.
__device__ __forceinline__ bool is_last(int* count) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(count, 1) == gridDim.y - 1;
    __syncthreads();
    __threadfence();
    return last;
}

// The bin of a key, the higher the larger: by the distance from the largest.
__device__ __forceinline__ int bin_of(u32 key, u32 top) {
    if (key == top) return BINS - 1;
    float distance = value_of(top) - value_of(key);
    return BINS - 1 - (int)fminf(distance * FINENESS, BINS - 1);
}

// The weights of the block's piece by bins; and by the last block, in which bin top_p is reached.
__device__ void weigh(const Row& row, u32 top, const Draw& draw, u32* room, Wide* wide) {
    Weights weights(top, row.width);
    Bins bins(room);
    int size = piece_of(row.width), first = blockIdx.y * size, last = min(first + size, row.width);
    auto key = [&](int i) { return row.key(i); };
    over(first + threadIdx.x, last, THREADS, key, [&](int, u32 k) {
        u64 w = weights.plain(k);
        if (w) bins.add(bin_of(k, top), w);
    });
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += THREADS)
        if (bins[i]) atomicAdd(&wide->mass[i], bins[i]);
    if (!is_last(&wide->weighed)) return;
    u64 own = __ldcg(&wide->mass[own_bin()]), next = __ldcg(&wide->mass[own_bin() - 1]);
    u64 need = weights.need(draw, block_total(own + next));
    Crossing at = crossing(own, next, 0, need);
    if (threadIdx.x == 0) wide->bin = at.bin, wide->above = at.above, wide->need = need;
}

// Of `count` listed candidates those that top_p leaves: the keys above `least`, and those equal to
// it that lie before `end`.
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
    auto place = [&](int i) {  // larger for a lower index
        u64 c = __ldcg(&wide->list[i]);
        return key_of(c) == level.key ? (u32)c : 0u;
    };
    Level first = reach(room, count, place, [](int, u32 k) { return k ? 1ull : 0ull; }, ties);
    end = (int)~first.key + 1;
}

// By the last block, from what all have added up: `count` of the bin are listed.
__device__ int draw_wide(const Row& row, u32 top, const Draw& draw, u32* room, const Wide* wide,
                         int count) {
    __shared__ u64 sums[THREADS], rest;
    __shared__ int found;
    Weights weights(top, row.width);
    int t = threadIdx.x, size = piece_of(row.width), end = 0;
    u32 least = 0;
    if (count) cut_list(wide, count, weights, room, least, end);
    auto kept = [&](int i, u32 k) { return k > least || (k == least && i < end); };
    sums[t] = t < gridDim.y ? __ldcg(&wide->sums[t]) : 0;
    __syncthreads();
    for (int i = t; i < count; i += THREADS) {
        u64 c = __ldcg(&wide->list[i]);
        if (kept(index_of(c), key_of(c)))
            atomicAdd(&sums[index_of(c) / size], weights.warm(key_of(c), draw));
    }
    __syncthreads();
    u64 own = sums[t], through = block_scan(own), target = target_of(draw, block_total(own));
    if (through - own <= target && target < through) found = t, rest = target - (through - own);
    __syncthreads();
    int first = found * size, last = min(first + size, row.width);
    auto key = [&](int i) { return row.key(first + i); };
    auto warm = [&](int i, u32 k) { return kept(first + i, k) ? weights.warm(k, draw) : 0ull; };
    return first + locate(last - first, key, warm, rest);
}

// ------------------------------------------------------------------------------------ kernels

struct Asked {
    Draw draw;
    int top_k;
    bool greedy;
    bool wide;  // drawn from by several blocks
};

__device__ __forceinline__ Asked asked(const Settings& s, i64 n, int width) {
    Asked a = {{}, 1, true, false};
    if (!s.temperature) return a;
    float top_p = s.top_p[n];
    a.draw = {s.temperature[n], top_p, s.min_p[n], top_p < 1, random_24(s.seed[n], s.count[n])};
    a.greedy = !(a.draw.temperature > 0);
    if (a.greedy) return a;
    a.top_k = s.top_k[n];
    a.wide = !(0 < a.top_k && a.top_k < width);
    return a;
}

// Whether no id can be sampled from a row whose largest key is `most`: it has NaN or +infinity, or
// nothing but -infinity.
__device__ __forceinline__ bool hopeless(const Settings& s, u32 most) {
    return s.temperature && (most >= KEY_OF_INFINITY || most == KEY_OF_MINUS_INFINITY);
}

// The first of the largest; `peak`: of the thread's slice, `most`: of all.
__device__ __forceinline__ int largest(const Row& row, u32 peak, u32 most) {
    __shared__ u64 chosen;
    int size = slice_of(row.width);
    if (threadIdx.x == 0) chosen = 0;
    __syncthreads();
    if (peak == most) atomicMax(&chosen, candidate(most, threadIdx.x));
    __syncthreads();
    int first = index_of(chosen) * size, last = min(first + size, row.width);
    auto key = [&](int i) { return row.key(first + i); };
    auto equal = [&](int, u32 k) { return k == most ? 1ull : 0ull; };
    return first + locate(last - first, key, equal, 0);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    pick(const u8* x, i64 stride, int width, Settings s, const i64* live, const u32* maxima,
         Wide* wide, int* out TIMESTAMPS) {
    RECORD_TIMESTAMPS
    __shared__ u64 room[BINS];  // of candidates, or of bins
    const i64 rows = begin(live);
    i64 n = blockIdx.x;
    if (n >= rows) return;
    Row row(x + n * stride, width, s);
    Asked a = asked(s, n, width);
    if (a.wide ? !a.draw.some : blockIdx.y) return;
    u32 peak = own_maximum(maxima, width), most = block_most(peak);
    int drawn;
    if (hopeless(s, most)) {  // of a wide row `finish` says so
        drawn = -1;
        if (a.wide) return;
    } else if (a.wide) {
        weigh(row, most, a.draw, (u32*)room, wide + n);
        return;
    } else if (a.greedy) {
        drawn = largest(row, peak, most);
    } else {
        bool few = a.top_k <= KEPT;
        u32 least = few ? kth_largest(peak, a.top_k) : 0;
        int count = few ? gather(row, peak, least, room) : THREADS + 1;
        drawn = count <= THREADS ? draw_few(room, count, a.top_k, a.draw)
                                 : draw_many(row, most, a.top_k, a.draw, (u32*)room);
    }
    if (threadIdx.x == 0) out[n] = drawn;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    finish(const u8* x, i64 stride, int width, Settings s, const i64* live, const u32* maxima,
           Wide* wide, int* out TIMESTAMPS) {
    RECORD_TIMESTAMPS
    __shared__ u64 room[BINS];
    const i64 rows = begin(live);
    i64 n = blockIdx.x;
    if (n >= rows) return;
    Row row(x + n * stride, width, s);
    Asked a = asked(s, n, width);
    if (!a.wide) return;
    wide += n;
    u32 top = block_most(own_maximum(maxima, width));
    if (hopeless(s, top)) {
        if (blockIdx.y == 0 && threadIdx.x == 0) out[n] = -1;
        return;
    }
    Weights weights(top, width);
    int cut = a.draw.some ? (int)wide->bin : -1;
    int size = piece_of(width), first = blockIdx.y * size, last = min(first + size, width);
    u64 sum = 0;
    auto key = [&](int i) { return row.key(i); };
    over(first + threadIdx.x, last, THREADS, key, [&](int i, u32 k) {
        int bin = bin_of(k, top);
        if (bin > cut) sum += weights.warm(k, a.draw);
        if (bin != cut || !weights.plain(k)) return;
        int at = atomicAdd(&wide->listed, 1);
        if (at < LISTED) wide->list[at] = candidate(k, i);
    });
    sum = block_total(sum);
    if (threadIdx.x == 0) wide->sums[blockIdx.y] = sum;
    if (!is_last(&wide->finished)) return;
    int count = __ldcg(&wide->listed);
    int drawn = count <= LISTED ? draw_wide(row, top, a.draw, (u32*)room, wide, count)
                                : draw_many(row, top, 0, a.draw, (u32*)room);
    if (threadIdx.x == 0) out[n] = drawn;
}
