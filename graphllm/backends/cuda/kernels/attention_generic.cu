// Attention of any shape, not optimized: a block takes one head of a token, a thread one key at a time.
//
// K_POOL, V_POOL: 0 float32, 1 float16, 2 q8_0, 3 q4_0, 4 fp8.

#include "attention.cuh"

#define THREADS 128

// Element `at` of a head of `width` elements. Quantised slots have the elements of all heads, and from `scales` on
// their scales.
template <int POOL>
__device__ __forceinline__ float element(const u8* slot, i64 scales, int head, int at, int width) {
    const int number = head * width + at, i = number % 32;
    if (POOL == 0) return ((const float*)slot)[number];
    if (POOL == 1) return from_f16(((const u16*)slot)[number]);
    if (POOL == 4) return ((const float*)(slot + scales))[head] * from_e4m3(slot[number]);
    const float d = from_f16(((const u16*)(slot + scales))[number / 32]);
    return POOL == 2 ? d * as_i8(slot[number]) : d * ((slot[number / 32 * 16 + i % 16] >> i / 16 * 4 & 15) - 8);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) attend(Attention a, int depth,
                                                                int width TIMESTAMPS) {
    RECORD_TIMESTAMPS
    DYNAMIC_SHARED(float, acc);  // weighted sum of values
    __shared__ float weights[THREADS];
    __shared__ i64 slots[THREADS];
    begin();
    const int head = blockIdx.x, token = blockIdx.y, thread = threadIdx.x;
    if (token >= *a.tokens) return;
    const int kv = head / ((int)a.heads / (int)a.kv_heads);
    const VisibleKeys visible = visible_keys(a, sequence_of(a, token), token);
    const float* q = (const float*)(a.q + token * a.q_stride) + head * depth;
    const HeadBias bias(a, head);
    float top = -INFINITE, total = 0;
    for (int e = thread; e < width; e += THREADS) acc[e] = 0;
    for (int at = visible.low; at < visible.high; at += THREADS) {
        int j = at + thread, count = min(THREADS, visible.high - at);
        float x = -INFINITE;
        if (j < visible.high) {
            int block = (int)a.block, page = j / block;
            slots[thread] = (i64)a.table[visible.sequence * a.table_width + page] * block + j % block;
            const u8* key = a.k + slots[thread] * a.k_stride;
            float sum = 0;
            for (int e = 0; e < depth; e++) sum = fmaf(q[e], element<K_POOL>(key, a.k_scales, kv, e, depth), sum);
            x = logit(a, sum * a.scale, j - visible.position, bias);
        }
        float most = fmaxf(top, block_max(x)), shrink = top == -INFINITE ? 0 : __expf(top - most);
        weights[thread] = x == -INFINITE ? 0 : __expf(x - most);
        total = total * shrink + block_sum(weights[thread]);
        top = most;
        __syncthreads();
        for (int e = thread; e < width; e += THREADS) {
            float sum = acc[e] * shrink;
            for (int i = 0; i < count; i++)
                sum = fmaf(weights[i],
                           element<V_POOL>(a.v + slots[i] * a.v_stride, a.v_scales, kv, e, width),
                           sum);
            acc[e] = sum;
        }
        __syncthreads();
    }
    float share = normalizer(a, head, top, total);
    for (int e = thread; e < width; e += THREADS)
        a.out[((i64)token * a.heads + head) * width + e] = acc[e] * share;
}
