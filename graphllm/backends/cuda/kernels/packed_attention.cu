// Bidirectional attention of packed f16 sequences on tensor cores (FlashAttention-2, Dao 2023): a warp takes 16
// consecutive tokens of a head, whatever the sequences that they belong to, and multiplies them with the keys
// of each of these sequences.
//
// DEPTH: elements of queries, keys and values, a multiple of 32. BIASED: there are biases by distance.
//
// The keys of a sequence are taken KEYS at a time from its first one on, so the bits of a result depend on its
// own sequence only. A block copies the keys and values that its queries see to shared memory, ROWS tokens at
// a time; its warps take all groups of KEYS that begin among the first ROWS - KEYS + 1 of these tokens.

#include "packed_attention.cuh"
#include "quantize.cuh"
#include "tensor_cores.cuh"

#define WARPS 4
#define QUERIES 16  // of a warp
#define KEYS 32     // of a step of the loop
constexpr int THREADS = WARPS * WARP, TILES = KEYS / 16, VECTORS = DEPTH / 8;
constexpr int ROWS = DEPTH == 32 ? 256 : DEPTH == 64 ? 160 : DEPTH == 96 ? 128 : 96, STRIDE = DEPTH + 8;
constexpr u32 ONES = 0x3c003c00u;

struct __align__(16) Rows {
    u16 k[ROWS][STRIDE], v[ROWS][STRIDE];
};

// The keys that the queries first .. last of a sequence see, as tokens of the step: low .. high - 1, and where
// groups of KEYS begin.
struct Segment {
    int start, end, low, high;

    __device__ __forceinline__ Segment(const PackedAttention& a, int sequence, int sequences, int tokens, int first,
                                       int last)
        : start(a.q_start[sequence]), end(sequence + 1 < sequences ? a.q_start[sequence + 1] : tokens) {
        const KeyRange keys(a, end - start, max(first, start) - start, min(last, end - 1) - start);
        low = start + keys.low - keys.low % KEYS, high = start + keys.high;
    }
};

// Grid: (heads, groups of WARPS * QUERIES tokens).
extern "C" __global__ void __launch_bounds__(THREADS, DEPTH > 64 ? 2 : 4) attend(PackedAttention a TIMESTAMPS) {
    RECORD_TIMESTAMPS
    DYNAMIC_SHARED(Rows, memory);
    Rows& s = *memory;
    const int tokens = (int)begin(a.tokens, a.starts_ready), sequences = (int)*(volatile const i64*)a.starts - 1;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, c = lane % 4;
    const int block_first = blockIdx.y * WARPS * QUERIES, block_last = min(block_first + WARPS * QUERIES, tokens) - 1;
    const bool there = block_first < tokens;
    const int first = min(block_first + warp * QUERIES, tokens), last = min(first + QUERIES, tokens) - 1;
    int sequence = 0, from = 0, to = 0;  // tokens whose keys the block needs
    if (there) {
        const int least = find_sequence(a.q_start, sequences, block_first);
        const int most = find_sequence(a.q_start, sequences, block_last);
        sequence = first < tokens ? find_sequence(a.q_start, sequences, first) : sequences;
        from = Segment(a, least, sequences, tokens, block_first, block_last).low;
        to = Segment(a, most, sequences, tokens, block_first, block_last).high;
    }
    if (a.starts_ready) wait_for_previous();  // all blocks, else this kernel could complete before its predecessor
    if (!there) return;

    const int head = blockIdx.x, kv = head / ((int)a.heads / (int)a.kv_heads);
    const float* biases = BIASED ? biases_of(a, head) : nullptr;
    const int rows[2] = {first + g, first + g + 8};  // queries of which the thread has results
    auto load_rows = [&](int at) {
        const int count = min(ROWS, to - at);
#pragma unroll 4
        for (int i = threadIdx.x; i < count * VECTORS; i += THREADS) {
            const int row = i / VECTORS, column = i % VECTORS * 8;
            copy16(&s.k[row][column], a.k + (at + row) * a.k_stride + 2 * (kv * DEPTH + column));
            copy16(&s.v[row][column], a.v + (at + row) * a.v_stride + 2 * (kv * DEPTH + column));
        }
        close_copies();
    };
    load_rows(from);
    u32 q[DEPTH / 16][4];
#pragma unroll
    for (int n = 0; n < DEPTH / 16; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u8* row = a.q + min(rows[i % 2], tokens - 1) * a.q_stride + 2 * head * DEPTH;
            q[n][i] = ((const u32*)row)[8 * n + c + i / 2 * 4];
        }
    float acc[DEPTH / 8][4] = {}, tops[2] = {-INFINITE, -INFINITE}, totals[2] = {};

    bool more = first < tokens;  // keys are left
    Segment own(a, min(sequence, sequences - 1), sequences, tokens, first, last);
    int at = own.low;
#pragma unroll 1
    for (int base = from; base < to; base += ROWS - KEYS + 1) {
        wait_copies<0>();
        __syncthreads();
#pragma unroll 1
        while (more && at < base + ROWS - KEYS + 1) {
            const int end = own.high - 1 - base;  // the last key in shared memory
            const bool mine[2] = {rows[0] >= own.start && rows[0] < own.end, rows[1] >= own.start && rows[1] < own.end};
            const int key = at - base;
            float scores[KEYS / 8][4] = {};
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                if (at + 16 * t >= own.high) continue;
                const u16* row = &s.k[min(key + 16 * t + lane % 8 + lane / 16 * 8, end)][lane / 8 % 2 * 8];
#pragma unroll
                for (int n = 0; n < DEPTH / 16; n++) {
                    u32 keys[4];
                    load_matrices(keys, row + 16 * n);
                    multiply(scores[2 * t], q[n], keys[0], keys[1]);
                    multiply(scores[2 * t + 1], q[n], keys[2], keys[3]);
                }
            }
            float keep[2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                // Distance of the thread's first key, and the bounds of the keys that the query sees.
                const int distance = at + 2 * c - rows[r], reach = a.window ? (int)a.window : 0x3fffffff;
                const int end_distance = mine[r] ? min(own.high - rows[r], reach + 1) : -0x40000000;
                float most = -INFINITE;
#pragma unroll
                for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int d = distance + 8 * i + e;
                        float x = scores[i][2 * r + e] * a.scale;
                        if (BIASED && biases) x += position_bias(biases, (int)a.reach, d);
                        x = d < end_distance && d >= -reach ? x : -INFINITE;
                        scores[i][2 * r + e] = x, most = fmaxf(most, x);
                    }
                keep[r] = to_weights(scores, r, most, tops[r]);
            }
            u32 weights[TILES][4];
            float sums[4] = {};
#pragma unroll
            for (int t = 0; t < TILES; t++) {
#pragma unroll
                for (int i = 0; i < 4; i++) weights[t][i] = pair(scores[2 * t + i / 2][i % 2 * 2], scores[2 * t + i / 2][i % 2 * 2 + 1]);
                multiply(sums, weights[t], ONES, ONES);
            }
            // Values of other sequences, which may be infinite or NaN, must not reach a row even with weight 0.
#pragma unroll
            for (int r = 0; r < 2; r++)
                if (mine[r]) totals[r] = fmaf(totals[r], keep[r], sums[2 * r]);
#pragma unroll
            for (int n = 0; n < DEPTH / 16; n++) {
                float parts[2][4] = {};
#pragma unroll
                for (int t = 0; t < TILES; t++) {
                    if (at + 16 * t >= own.high) continue;
                    u32 values[4];
                    load_matrices_transposed(values, &s.v[min(key + 16 * t + lane % 16, end)][16 * n + lane / 16 * 8]);
                    multiply(parts[0], weights[t], values[0], values[1]);
                    multiply(parts[1], weights[t], values[2], values[3]);
                }
#pragma unroll
                for (int i = 0; i < 2; i++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        if (mine[e / 2]) acc[2 * n + i][e] = fmaf(acc[2 * n + i][e], keep[e / 2], parts[i][e]);
            }
            at += KEYS;
            while (more && at >= own.high) {  // the next sequence that has queries
                more = own.end <= last;
                if (more) own = Segment(a, ++sequence, sequences, tokens, first, last), at = own.low;
            }
        }
        __syncthreads();
        if (base + ROWS - KEYS + 1 < to) load_rows(base + ROWS - KEYS + 1);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (rows[r] > last) continue;
        const float factor = 1.f / totals[r];
        u8* out = a.out + rows[r] * a.out_stride;
#pragma unroll
        for (int n = 0; n < DEPTH / 8; n++) {
            const int column = head * DEPTH + 8 * n + 2 * c;
            const float x = acc[n][2 * r] * factor, y = acc[n][2 * r + 1] * factor;
            if (a.kind) *(u32*)(out + 2 * column) = to_half(a.kind, x) | (u32)to_half(a.kind, y) << 16;
            else *(float2*)(out + 4 * column) = make_float2(x, y);
        }
    }
}
