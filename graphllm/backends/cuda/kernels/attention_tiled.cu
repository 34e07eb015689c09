// Attention of many tokens on tensor cores: 64 queries of a head against tiles of keys, with an online
// softmax (FlashAttention-2, Dao 2023). Scores stay in registers.
//
// POOL: 1 float16, 2 q8_0. DEPTH: elements of queries, keys and values, a multiple of 16. BIASED:
// logits are capped, or have ALiBi slopes.

#include "attention.cuh"
#include "quantize.cuh"
#include "tensor_cores.cuh"

#define THREADS 128
#define QUERIES 64
#define KEYS 64
constexpr int STRIDE = DEPTH + 8;  // halves between rows: eight rows cover all banks
constexpr int STEPS = DEPTH / 16, VECTORS = DEPTH / 8;
constexpr float LOG2E = 1.4426950409f;

struct Tile {
    u16 q[QUERIES][STRIDE], k[KEYS][STRIDE], v[KEYS][STRIDE];
};

__device__ __forceinline__ float power_of_2(float x) {  // denormals are flushed to zero
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Copy eight elements of a slot to shared memory.
__device__ __forceinline__ void load_elements(u16* to, const u8* slot, int at) {
#if POOL == 1
    copy16(to, slot + 2 * at);
#else
    const u16* block = (const u16*)(slot + at / 32 * 34);
    float d = from_f16(block[0]);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 q = block[1 + at % 32 / 2 + i];
        ((u32*)to)[i] = pair(d * (i8)(q & 255), d * (i8)(q >> 8));
    }
#endif
}

// The sequence and the first query of tile `tile`; false if there is no such tile.
__device__ __forceinline__ bool find(const Attention& a, int tile, int& sequence, int& first) {
    int count = (int)*a.sequences;
    for (sequence = 0; sequence < count; sequence++) {
        int queries = a.q_start[sequence + 1] - a.q_start[sequence];
        int tiles = (queries + QUERIES - 1) / QUERIES;
        if (tile < tiles) {
            first = a.q_start[sequence] + (tiles - 1 - tile) * QUERIES;  // tiles with the most keys first
            return true;
        }
        tile -= tiles;
    }
    return false;
}

// Grid: (tiles of queries, heads). kind: of the results, as in quantize.cuh.
extern "C" __global__ void __launch_bounds__(THREADS, 2) attend(Attention a, int kind TIMESTAMPS) {
    RECORD_TIMESTAMPS
    DYNAMIC_SHARED(Tile, memory);
    Tile& s = *memory;
    begin();
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    const int head = blockIdx.y, kv = head / ((int)a.heads / (int)a.kv_heads);
    int sequence, first;
    if (!find(a, blockIdx.x, sequence, first)) return;
    const int queries = min(QUERIES, a.q_start[sequence + 1] - first);

    for (int i = thread; i < QUERIES * VECTORS; i += THREADS) {
        int row = i / VECTORS, at = i % VECTORS * 8;
        const float* q = (const float*)(a.q + (first + min(row, queries - 1)) * a.q_stride);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float* two = q + head * DEPTH + at + 2 * e;
            ((u32*)&s.q[row][at])[e] = pair(two[0] * a.scale, two[1] * a.scale);
        }
    }
    // A thread has results of two queries: number lane / 4 of its warp's 16, and the eighth after it.
    VisibleKeys mine[2];
    int low = 0x7fffffff, high = 0, clear_low = 0, clear_high = 0x7fffffff;
#pragma unroll
    for (int r = 0; r < 2; r++)
        mine[r] = visible_keys(a, sequence, first + min(warp * 16 + lane / 4 + 8 * r, queries - 1));
    {
        VisibleKeys start = visible_keys(a, sequence, first), end = visible_keys(a, sequence, first + queries - 1);
        // Both ends of the visible range never decrease from one query to the next, except for a prefix.
        low = start.low, high = max(start.high, end.high);
        clear_low = end.low, clear_high = min(start.high, end.high);
        if (a.causal && a.prefix_len) clear_high = min(clear_high, start.position + 1);
    }
    const float slope = a.slopes ? a.slopes[head] : 0;
    float scores[KEYS / 8][4], acc[VECTORS][4] = {}, tops[2] = {-INFINITE, -INFINITE}, totals[2] = {};
    u32 mine_q[DEPTH <= 128 ? STEPS : 1][4];

    const bool whole = (1 << a.shift) % KEYS == 0;  // then a tile is within one block of the table
    if (whole) low -= low % KEYS;
    auto load_tile = [&](u16 (*to)[STRIDE], const u8* pool, i64 stride, int at) {
        const u8* block = pool + (whole ? slot_of(a, sequence, at) * stride : 0);
#pragma unroll 4
        for (int i = thread; i < KEYS * VECTORS; i += THREADS) {
            int j = min(i / VECTORS, high - 1 - at);
            i64 slot = whole ? j : slot_of(a, sequence, at + j);
            load_elements(&to[i / VECTORS][i % VECTORS * 8], block + slot * stride,
                  kv * DEPTH + i % VECTORS * 8);
        }
        close_copies();
    };
    if (low < high) load_tile(s.k, a.k, a.k_stride, low);
    __syncthreads();
    const u16* q_row = &s.q[warp * 16 + lane % 16][lane / 16 * 8];
    if (DEPTH <= 128)
#pragma unroll
        for (int t = 0; t < STEPS; t++) load_matrices(mine_q[t], q_row + 16 * t);

    for (int at = low; at < high; at += KEYS) {
        wait_copies<0>();
        __syncthreads();  // keys are loaded, and the previous values have been used
        load_tile(s.v, a.v, a.v_stride, at);
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) scores[n][e] = 0;
#pragma unroll
        for (int t = 0; t < STEPS; t++) {
            u32 other[4];
            if (DEPTH > 128) load_matrices(other, q_row + 16 * t);
            const u32* q = DEPTH > 128 ? other : mine_q[DEPTH > 128 ? 0 : t];
#pragma unroll
            for (int n = 0; n < KEYS / 16; n++) {
                u32 keys[4];
                load_matrices(keys, &s.k[16 * n + lane % 8 + lane / 16 * 8][16 * t + lane / 8 % 2 * 8]);
                multiply(scores[2 * n], q, keys[0], keys[1]);
                multiply(scores[2 * n + 1], q, keys[2], keys[3]);
            }
        }
        if (BIASED || at < clear_low || at + KEYS > clear_high)
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const VisibleKeys& m = mine[e / 2];
                    int j = at + 8 * n + lane % 4 * 2 + e % 2;
                    float x = scores[n][e];
                    if (BIASED) x = logit(a, x, j - m.position, slope);
                    scores[n][e] = j >= m.low && j < m.high ? x : -INFINITE;
                }
        float shrink[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float most = tops[r];
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
                most = fmaxf(most, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
            most = fmaxf(most, __shfl_xor_sync(FULL, most, 1));
            most = fmaxf(most, __shfl_xor_sync(FULL, most, 2));
            float base = most == -INFINITE ? 0 : most * LOG2E;
            shrink[r] = power_of_2(tops[r] * LOG2E - base);
            tops[r] = most;
            totals[r] *= shrink[r];
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; e++) {
                    scores[n][e] = power_of_2(fmaf(scores[n][e], LOG2E, -base));
                    totals[r] += scores[n][e];
                }
        }
        if (__any_sync(FULL, shrink[0] != 1.f || shrink[1] != 1.f))
#pragma unroll
            for (int n = 0; n < VECTORS; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) acc[n][e] *= shrink[e / 2];
        wait_copies<0>();
        __syncthreads();  // values are loaded, and the keys have been used
        if (at + KEYS < high) load_tile(s.k, a.k, a.k_stride, at + KEYS);
#pragma unroll
        for (int t = 0; t < KEYS / 16; t++) {
            u32 weights[4] = {pair(scores[2 * t][0], scores[2 * t][1]),
                              pair(scores[2 * t][2], scores[2 * t][3]),
                              pair(scores[2 * t + 1][0], scores[2 * t + 1][1]),
                              pair(scores[2 * t + 1][2], scores[2 * t + 1][3])};
#pragma unroll
            for (int n = 0; n < VECTORS / 2; n++) {
                u32 values[4];
                load_matrices_transposed(values, &s.v[16 * t + lane % 16][16 * n + lane / 16 * 8]);
                multiply(acc[2 * n], weights, values[0], values[1]);
                multiply(acc[2 * n + 1], weights, values[2], values[3]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float total = totals[r];
        total += __shfl_xor_sync(FULL, total, 1);
        total += __shfl_xor_sync(FULL, total, 2);
        float share = normalizer(a, head, tops[r], total);
        int row = warp * 16 + lane / 4 + 8 * r;
        if (row >= queries) continue;
        i64 to = ((i64)(first + row) * a.heads + head) * DEPTH + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < VECTORS; n++) {
            float x = acc[n][2 * r] * share, y = acc[n][2 * r + 1] * share;
            if (kind)
                *(u32*)((u16*)a.out + to + 8 * n) = to_half(kind, x) | (u32)to_half(kind, y) << 16;
            else
                *(float2*)(a.out + to + 8 * n) = make_float2(x, y);
        }
    }
}
