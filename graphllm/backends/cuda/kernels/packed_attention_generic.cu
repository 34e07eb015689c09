// Bidirectional attention of any shape, not optimized: a block takes one head of a token, a thread one key at
// a time.
//
// HALVES: queries, keys and values are f16, else float32.

#include "packed_attention.cuh"
#include "quantize.cuh"

#define THREADS 128

__device__ __forceinline__ float element(const u8* row, int at) {
#if HALVES
    return from_f16(((const u16*)row)[at]);
#else
    return ((const float*)row)[at];
#endif
}

// Grid: (heads, tokens). depth, width: elements of a key, of a value.
extern "C" __global__ void __launch_bounds__(THREADS)
    attend(PackedAttention a, int depth, int width TIMESTAMPS) {
    RECORD_TIMESTAMPS
    DYNAMIC_SHARED(float, acc);  // weighted sum of values
    __shared__ float weights[THREADS];
    const int tokens = (int)begin(a.tokens), head = blockIdx.x, token = blockIdx.y, thread = threadIdx.x;
    if (token >= tokens) return;
    const int kv = head / ((int)a.heads / (int)a.kv_heads);
    const int sequence = find_sequence(a.q_start, (int)*a.starts - 1, token);
    const int first = a.q_start[sequence], position = token - first;
    const KeyRange keys(a, a.q_start[sequence + 1] - first, position, position);
    const u8* q = a.q + token * a.q_stride;
    const float* biases = biases_of(a, head);
    float top = -INFINITE, total = 0;
    for (int e = thread; e < width; e += THREADS) acc[e] = 0;
#pragma unroll 1
    for (int at = keys.low; at < keys.high; at += THREADS) {
        const int j = at + thread, count = min(THREADS, keys.high - at);
        float x = -INFINITE;
        if (j < keys.high) {
            const u8* key = a.k + (first + j) * a.k_stride;
            float sum = 0;
            for (int e = 0; e < depth; e++) sum = fmaf(element(q, head * depth + e), element(key, kv * depth + e), sum);
            x = sum * a.scale;
            if (biases) x += position_bias(biases, (int)a.reach, j - position);
        }
        const float most = fmaxf(top, block_max(x)), shrink = top == -INFINITE ? 0 : __expf(top - most);
        weights[thread] = x == -INFINITE ? 0 : __expf(x - most);
        total = total * shrink + block_sum(weights[thread]);
        top = most;
        __syncthreads();
        for (int e = thread; e < width; e += THREADS) {
            float sum = acc[e] * shrink;
            for (int i = 0; i < count; i++)
                sum = fmaf(weights[i], element(a.v + (first + at + i) * a.v_stride, kv * width + e), sum);
            acc[e] = sum;
        }
        __syncthreads();
    }
    u8* out = a.out + token * a.out_stride;
    for (int e = thread; e < width; e += THREADS) {
        const float x = acc[e] / total;
        const int at = head * width + e;
        if (a.kind) ((u16*)out)[at] = to_half(a.kind, x);
        else ((float*)out)[at] = x;
    }
}
