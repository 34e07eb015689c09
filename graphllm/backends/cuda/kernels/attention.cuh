#pragma once
// Shared by all attention kernels: their argument, and the keys that a token sees.

struct Attention {
    const u8* q;
    i64 q_stride;
    const u8* k;
    i64 k_stride;
    const u8* v;
    i64 v_stride;  // bytes between slots
    i64 k_scales, v_scales;  // of quantised pools: bytes from a slot to its scales
    const int *q_start, *kv_len, *table;
    i64 table_width;
    const float *sinks, *slopes;
    const float* position_bias;  // [heads, 2 reach + 1]
    const int* prefix_len;       // these four may be null
    const i64 *tokens, *sequences;
    float *out, *partials;
    i64 heads, kv_heads, block, shift, causal, window;  // block == 1 << shift if it is a power of two
    i64 reach;           // of position_bias
    i64 skip_prefix;     // whether the keys of the prefix are left out
    i64 metadata_ready;  // q_start, kv_len, table and prefix_len may be read before the wait
    i64 split_keys;  // least length of a split, see `split_of`
    i64 slots;  // partial results that a token has room for; 0: there are none, as no token is split
    i64 fine_tiles;  // up to this number of tiles in a step, partial results are those of tiles
    i64 queries;  // which ones a kernel computes, as in enum Queries
    i64 most_sequences, most_rows;  // of a step, and rows of partial results; at least one
    float scale, softcap;
    int shared, groups;  // query heads of a KV head, and groups of at most GROUP of them
};

enum Queries { ALL, SINGLE, SEVERAL };  // sequences of any number of queries, of one, of more

#define TILE_KEYS 64

// The query at `position` sees the keys low .. high - 1 of its sequence; those before `old` were written
// by earlier runs.
struct VisibleKeys {
    int sequence, position, low, high, old;
};

// The sequence of a token: the last one that begins at or before it.
__device__ __forceinline__ int sequence_of(const Attention& a, int token) {
    int low = 0, high = (int)*a.sequences;
#pragma unroll 1
    while (low + 1 < high) {
        int middle = (low + high) / 2;
        if (a.q_start[middle] <= token) low = middle;
        else high = middle;
    }
    return low;
}

__device__ __forceinline__ VisibleKeys visible_keys(const Attention& a, int sequence, int length, int first,
                                       int end, int token) {
    int position = length - (end - token);
    VisibleKeys visible = {sequence, position, 0, length, length - (end - first)};
    const int prefix = a.prefix_len ? a.prefix_len[sequence] : 0;
    if (a.causal) visible.high = min(length, position < prefix ? prefix : position + 1);
    if (a.window) visible.low = max(0, position - (int)a.window + 1);
    if (a.skip_prefix) visible.low = max(visible.low, prefix);
    return visible;
}

__device__ __forceinline__ VisibleKeys visible_keys(const Attention& a, int sequence, int token) {
    const int *first = a.q_start + sequence;
    return visible_keys(a, sequence, a.kv_len[sequence], first[0], first[1], token);
}

// The same for a token of any sequence. In steps of one token per sequence all values are loaded together.
__device__ __forceinline__ VisibleKeys visible_keys(const Attention& a, int token) {
    const int count = (int)*a.sequences, likely = min(token, (int)a.most_sequences - 1);
    const int first = a.q_start[likely], end = a.q_start[likely + 1], length = a.kv_len[likely];
    if (likely < count && first <= token && token < end) return visible_keys(a, likely, length, first, end, token);
    return visible_keys(a, sequence_of(a, token), token);
}

// The slot of key j of a sequence, in pools with blocks of 1 << shift slots.
__device__ __forceinline__ i64 slot_of(const Attention& a, int sequence, int j) {
    int shift = (int)a.shift, page = j >> shift;
    return ((i64)a.table[sequence * a.table_width + page] << shift) + (j - (page << shift));
}

// What is added to the logits of a head: the ALiBi slope times the distance of the key, and a bias by
// distance.
struct HeadBias {
    float slope = 0;
    const float* of_distance = nullptr;  // of distance 0

    __device__ __forceinline__ HeadBias() {}
    __device__ __forceinline__ HeadBias(const Attention& a, int head) {
        if (a.slopes) slope = a.slopes[head];
        if (a.position_bias) of_distance = a.position_bias + head * (2 * a.reach + 1) + a.reach;
    }
};

__device__ __forceinline__ float position_bias(const float* of_distance, int reach, int distance) {
    return of_distance[min(max(distance, -reach), reach)];
}

// Apply the softcap and the biases to q.k * scale.
__device__ __forceinline__ float logit(const Attention& a, float x, int distance, const HeadBias& bias) {
    if (a.softcap > 0) x = __fmul_rn(a.softcap, tanhf(__fdiv_rn(x, a.softcap)));
    if (a.slopes) x = fmaf(bias.slope, (float)distance, x);
    return bias.of_distance ? x + position_bias(bias.of_distance, (int)a.reach, distance) : x;
}

// ------------------------------------------------------------------------------------- splits
//
// The keys of a query are divided into splits, whose results are merged in ascending order. Where a split
// begins and ends depends on the query's own keys only, so a token's result is the same in every step.

// The query of a row of partial results: of token `row`, or if `a.queries` is SINGLE the one of sequence
// `row`. False if there is no such query.
struct Query {
    int token;
    VisibleKeys keys;
};

__device__ __forceinline__ bool find_query(const Attention& a, int tokens, int row, Query& query) {
    query.token = row;
    if (a.queries == SINGLE) {
        if (row >= (int)*a.sequences) return false;
        query.token = a.q_start[row];
        if (a.q_start[row + 1] != query.token + 1) return false;
        query.keys = visible_keys(a, row, query.token);
        return true;
    }
    if (row >= (int)a.most_rows) return false;
    query.keys = visible_keys(a, row);  // does not wait for the number of tokens
    return row < tokens;
}

#define GROUP 8  // query heads of a KV head that tensor cores compute together

// Groups of query heads of a token.
__device__ __forceinline__ int head_groups(const Attention& a) {
    return (int)a.kv_heads * a.groups;
}

// Keys of a split of a query that sees keys below `high`: `least`, or more so that there are at most 32.
__device__ __forceinline__ int split_of(int high, int least) {
    int doubled = 32 - __clz(high - 1) - (31 - __clz(least) + 5);
    return high > 1 && doubled > 0 ? least << doubled : least;
}

__device__ __forceinline__ int log2_of(int power) { return 31 - __clz(power); }

// The partial results of a query: `count` of `each` tiles, from tile first * each on. `split`: tiles of a
// split. Tiles begin at multiples of TILE_KEYS. Both numbers of tiles are powers of two, so that nothing is divided, as
// loads wait for this.
struct Partials {
    int first, count, each, split;
    int shift;  // of `each`

    // `steps`: queries of the step times the groups of heads that are computed apart.
    __device__ __forceinline__ Partials(const Attention& a, const VisibleKeys& keys, int steps) {
        int begin = keys.low / TILE_KEYS, end = (keys.high - 1) / TILE_KEYS + 1, tiles = end - begin;
        split = split_of(keys.high, (int)a.split_keys) / TILE_KEYS;
        bool fine = tiles <= a.slots && (i64)tiles * steps <= a.fine_tiles;
        shift = fine ? 0 : log2_of(split), each = 1 << shift;
        first = begin >> shift;
        count = keys.low < keys.high ? (end - 1 >> shift) - first + 1 : 0;
    }
};

constexpr float LOG2E = 1.4426950409f;

__device__ __forceinline__ float power_of_2(float x) {  // denormals are flushed to zero
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// What is subtracted from exponents where the largest logit is `top`; -infinity: there is no key.
__device__ __forceinline__ float exponent_of(float top) {
    return top == -INFINITE ? 0.f : __fmul_rn(top, LOG2E);
}

__device__ __forceinline__ float weight_of(float logit, float exponent) {
    return power_of_2(fmaf(logit, LOG2E, -exponent));
}

// The factor of sums of weights that are relative to the logit `top`, where they are to be relative to
// `exponent`. Not fused, so that it is one if the two are equal.
__device__ __forceinline__ float rescale(float top, float exponent) {
    return power_of_2(__fsub_rn(__fmul_rn(top, LOG2E), exponent));
}

// The largest value in a row of a tensor core tile; `most` is that of the thread's columns.
__device__ __forceinline__ float largest_of_row(float most) {
    most = fmaxf(most, __shfl_xor_sync(FULL, most, 1));
    return fmaxf(most, __shfl_xor_sync(FULL, most, 2));
}

__device__ __forceinline__ void add_scaled(float& sum, float keep, float other, float share) {
    sum = fmaf(other, share, __fmul_rn(sum, keep));
}

// The factors with which two partial results are added, the first one in place.
struct Merge {
    float keep, share;

    // `top` becomes the larger of both.
    __device__ __forceinline__ Merge(float& top, float other) {
        float most = fmaxf(top, other), exponent = exponent_of(most);
        keep = rescale(top, exponent), share = rescale(other, exponent);
        top = most;
    }
    __device__ __forceinline__ void add(float& sum, float other) const { add_scaled(sum, keep, other, share); }
};

// The factor that normalizes accumulated values, given the sum `total` of exp(logit - top).
__device__ __forceinline__ float normalizer(const Attention& a, int head, float top, float total) {
    if (!a.sinks) return total > 0 ? 1 / total : 0;
    float sink = a.sinks[head], most = fmaxf(top, sink);
    float own = total > 0 ? __expf(top - most) : 0;
    return own / (own * total + __expf(sink - most));
}
