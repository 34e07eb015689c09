#pragma once
// Shared by all attention kernels: their argument, and the keys that a token sees.

struct Attention {
    const u8* q;
    i64 q_stride;
    const u8* k;
    i64 k_stride;
    const u8* v;
    i64 v_stride;  // bytes between slots
    const int *q_start, *kv_len, *table;
    i64 table_width;
    const float *sinks, *slopes;
    const int* prefix_len;  // these three may be null
    const i64 *tokens, *sequences;
    float *out, *partials;
    i64 heads, kv_heads, block, shift, causal, window, splits;  // block == 1 << shift if it is a power of two
    i64 metadata_ready;  // q_start, kv_len, table and prefix_len may be read before the wait
    float scale, softcap;
};

// The query at `position` sees the keys low .. high - 1 of its sequence; those before `old` were written
// by earlier runs.
struct VisibleKeys {
    int sequence, position, low, high, old;
};

__device__ __forceinline__ int sequence_of(const Attention& a, int token) {
    int s = 0, count = (int)*a.sequences;
#pragma unroll 1
    while (s + 1 < count && a.q_start[s + 1] <= token) s++;
    return s;
}

__device__ __forceinline__ VisibleKeys visible_keys(const Attention& a, int sequence, int length, int first,
                                       int end, int token) {
    int position = length - (end - token);
    VisibleKeys visible = {sequence, position, 0, length, length - (end - first)};
    if (a.causal) {
        int prefix = a.prefix_len ? a.prefix_len[sequence] : 0;
        visible.high = min(length, position < prefix ? prefix : position + 1);
    }
    if (a.window) visible.low = max(0, position - (int)a.window + 1);
    return visible;
}

__device__ __forceinline__ VisibleKeys visible_keys(const Attention& a, int sequence, int token) {
    const int *first = a.q_start + sequence;
    return visible_keys(a, sequence, a.kv_len[sequence], first[0], first[1], token);
}

// The same for a token of any sequence. The values for a single sequence are loaded together.
__device__ __forceinline__ VisibleKeys visible_keys(const Attention& a, int token) {
    int count = (int)*a.sequences, length = a.kv_len[0], end = a.q_start[1];
    if (count > 1) return visible_keys(a, sequence_of(a, token), token);
    return visible_keys(a, 0, length, 0, end, token);
}

// The slot of key j of a sequence, in pools with blocks of 1 << shift slots.
__device__ __forceinline__ i64 slot_of(const Attention& a, int sequence, int j) {
    int shift = (int)a.shift, page = j >> shift;
    return ((i64)a.table[sequence * a.table_width + page] << shift) + (j - (page << shift));
}

// Apply the softcap and the ALiBi slope to q.k * scale.
__device__ __forceinline__ float logit(const Attention& a, float x, int distance, float slope) {
    if (a.softcap > 0) x = a.softcap * tanhf(x / a.softcap);
    return a.slopes ? x + slope * distance : x;
}

// The factor that normalizes accumulated values, given the sum `total` of exp(logit - top).
__device__ __forceinline__ float normalizer(const Attention& a, int head, float top, float total) {
    if (!a.sinks) return total > 0 ? 1 / total : 0;
    float sink = a.sinks[head], most = fmaxf(top, sink);
    float own = total > 0 ? __expf(top - most) : 0;
    return own / (own * total + __expf(sink - most));
}
