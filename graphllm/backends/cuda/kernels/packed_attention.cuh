#pragma once
// Shared by the kernels of bidirectional attention over packed sequences.

#include "attention.cuh"
#include "sequences.cuh"

struct PackedAttention {
    const u8* q;
    i64 q_stride;
    const u8* k;
    i64 k_stride;
    const u8* v;
    i64 v_stride;  // bytes between tokens
    const int* q_start;
    const float* position_bias;  // [heads, 2 reach + 1], or null
    const i64 *tokens, *starts;  // live numbers of tokens, and of elements of q_start
    u8* out;
    i64 out_stride;
    i64 heads, kv_heads;
    i64 window;  // largest distance of a key; 0: any
    i64 reach;   // of position_bias
    i64 starts_ready;  // q_start may be read before the wait
    float scale;
    int kind;  // of the results: 0: float32, else as in to_half of quantize.cuh
};

// The keys of a sequence of `length` tokens that the queries at `first` to `last` see: low .. high - 1.
struct KeyRange {
    int low, high;

    __device__ __forceinline__ KeyRange(const PackedAttention& a, int length, int first, int last)
        : low(a.window ? max(0, first - (int)a.window) : 0),
          high(a.window ? min(length, last + (int)a.window + 1) : length) {}
};

// The biases of a head by distance, from that of distance 0 on; null if there are none.
__device__ __forceinline__ const float* biases_of(const PackedAttention& a, int head) {
    return a.position_bias ? a.position_bias + head * (2 * a.reach + 1) + a.reach : nullptr;
}

// Replaces the logits of row `r` of a tensor core tile by weights relative to the largest logit of the query so far,
// `top`, which it updates. `most` is the largest logit of the thread. Returns the factor of the sums of the keys before.
template <int N>
__device__ __forceinline__ float to_weights(float (&scores)[N][4], int r, float most, float& top) {
    most = fmaxf(largest_of_row(most), top);
    const float exponent = exponent_of(most), keep = rescale(top, exponent);
    top = most;
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int e = 0; e < 2; e++) scores[i][2 * r + e] = weight_of(scores[i][2 * r + e], exponent);
    return keep;
}
