// Bidirectional attention of packed float32 sequences on tensor cores: as packed_attention.cu, but that keys and
// values go from memory to the fragments, without shared memory, so warps do not wait for each other.
//
// An element is the sum of three bf16, so that six products have the precision of float32. DEPTH: elements of
// queries, keys and values, a multiple of 32. BIASED: there are biases by distance.
//
// The keys of a sequence are taken KEYS at a time from its first one on, so the bits of a result depend on its
// own sequence only. Elements of keys and queries are permuted as in attention_tiled.cu.

#define BFLOAT 1
#include "packed_attention.cuh"
#include "quantize.cuh"
#include "tensor_cores.cuh"

#define WARPS 4
#define QUERIES 16  // of a warp
#define KEYS 16     // of a step of the loop
constexpr int THREADS = WARPS * WARP, STEPS = DEPTH / 32;
constexpr int PARTS = 3;  // of an element
constexpr int RESIDENT = DEPTH <= 64 ? 3 : 2;  // blocks of a multiprocessor
constexpr u32 ONES = 0x3f803f80u;
// A thread loads OWN adjacent elements of a value at a time; eight threads have SPREAD dimensions.
constexpr int OWN = 4, SPREAD = 8 * OWN, SPREADS = DEPTH / SPREAD;

// A pair of float32 as PARTS pairs of halves.
__device__ __forceinline__ void split_pair(u32* to, float low, float high) {
    to[0] = pair(low, high);
#pragma unroll
    for (int p = 1; p < PARTS; p++) {
        low -= __uint_as_float(to[p - 1] << 16), high -= __uint_as_float(to[p - 1] & 0xffff0000u);
        to[p] = pair(low, high);
    }
}

// Eight adjacent elements of a row, and their four pairs as factors.
struct Eight {
    float4 low, high;
    __device__ __forceinline__ void load(const u8* row, int at) {
        low = *(const float4*)(row + 4 * at), high = *(const float4*)(row + 4 * at + 16);
    }
    __device__ __forceinline__ void factors(u32 (*to)[4]) const {
        const float two[4][2] = {{low.x, low.y}, {low.z, low.w}, {high.x, high.y}, {high.z, high.w}};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 parts[PARTS];
            split_pair(parts, two[i][0], two[i][1]);
#pragma unroll
            for (int p = 0; p < PARTS; p++) to[p][i] = parts[p];
        }
    }
};

__device__ __forceinline__ float element(const float4& four, int j) {
    return j == 0 ? four.x : j == 1 ? four.y : j == 2 ? four.z : four.w;
}

// The product of factors in parts, without the products that are below the precision of float32, the smallest
// ones first.
__device__ __forceinline__ void multiply_parts(float* c, const u32 (*a)[4], const u32* b0, const u32* b1) {
#pragma unroll
    for (int sum = PARTS - 1; sum >= 0; sum--)
#pragma unroll
        for (int p = 0; p <= sum; p++) multiply(c, a[p], b0[sum - p], b1[sum - p]);
}

// Grid: (heads, groups of WARPS * QUERIES tokens).
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) attend(PackedAttention a TIMESTAMPS) {
    RECORD_TIMESTAMPS
    const int tokens = (int)begin(a.tokens, a.starts_ready), sequences = (int)*(volatile const i64*)a.starts - 1;
    const int lane = threadIdx.x % WARP, g = lane / 4, c = lane % 4;
    const int first = (blockIdx.y * WARPS + threadIdx.x / WARP) * QUERIES, last = min(first + QUERIES, tokens) - 1;
    const bool there = first < tokens;
    int sequence = there ? find_sequence(a.q_start, sequences, first) : 0;
    if (a.starts_ready) wait_for_previous();  // all blocks, else this kernel could complete before its predecessor
    if (!there) return;

    const int head = blockIdx.x, kv = head / ((int)a.heads / (int)a.kv_heads);
    const float* biases = BIASED ? biases_of(a, head) : nullptr;
    const int rows[2] = {first + g, first + g + 8};  // queries of which the thread has results
    float acc[SPREADS][OWN][4] = {}, tops[2] = {-INFINITE, -INFINITE}, totals[2] = {};

#pragma unroll 1
    for (int start = a.q_start[sequence], end; start <= last; start = end, sequence++) {
        end = sequence + 1 < sequences ? a.q_start[sequence + 1] : tokens;
        const KeyRange keys(a, end - start, max(first, start) - start, min(last, end - 1) - start);
        const bool mine[2] = {rows[0] >= start && rows[0] < end, rows[1] >= start && rows[1] < end};
        const u8 *k = a.k + start * a.k_stride, *v = a.v + start * a.v_stride;
#pragma unroll 1
        for (int at = keys.low - keys.low % KEYS; at < keys.high && start < end; at += KEYS) {
            float scores[KEYS / 8][4] = {};
#pragma unroll 1
            for (int n = 0; n < STEPS; n++) {
                Eight own[KEYS / 8], q[2];  // queries are loaded again, for lack of registers
#pragma unroll
                for (int r = 0; r < 2; r++)
                    q[r].load(a.q + min(rows[r], last) * a.q_stride, head * DEPTH + 32 * n + 8 * c);
#pragma unroll
                for (int i = 0; i < KEYS / 8; i++)
                    if (at + 8 * i < keys.high)
                        own[i].load(k + min(at + 8 * i + g, keys.high - 1) * a.k_stride, kv * DEPTH + 32 * n + 8 * c);
                u32 one[PARTS][4], two[PARTS][4], factors[2][PARTS][4];
                q[0].factors(one), q[1].factors(two);
#pragma unroll
                for (int h = 0; h < 2; h++)
#pragma unroll
                    for (int p = 0; p < PARTS; p++) {
                        factors[h][p][0] = one[p][2 * h], factors[h][p][1] = two[p][2 * h];
                        factors[h][p][2] = one[p][2 * h + 1], factors[h][p][3] = two[p][2 * h + 1];
                    }
#pragma unroll
                for (int i = 0; i < KEYS / 8; i++) {
                    if (at + 8 * i >= keys.high) continue;
                    u32 key[PARTS][4], b0[PARTS], b1[PARTS];
                    own[i].factors(key);
#pragma unroll
                    for (int h = 0; h < 2; h++) {
#pragma unroll
                        for (int p = 0; p < PARTS; p++) b0[p] = key[p][2 * h], b1[p] = key[p][2 * h + 1];
                        multiply_parts(scores[i], factors[h], b0, b1);
                    }
                }
            }
            float keep[2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int position = rows[r] - start;
                float most = -INFINITE;
#pragma unroll
                for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int j = at + 8 * i + 2 * c + e, distance = j - position;
                        float x = scores[i][2 * r + e] * a.scale;
                        if (BIASED && biases) x += position_bias(biases, (int)a.reach, distance);
                        const bool far = a.window && abs(distance) > a.window;
                        x = mine[r] && j < keys.high && !far ? x : -INFINITE;
                        scores[i][2 * r + e] = x, most = fmaxf(most, x);
                    }
                keep[r] = to_weights(scores, r, most, tops[r]);
            }
            u32 weights[PARTS][4];
            float sums[4] = {};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 parts[PARTS];
                split_pair(parts, scores[i / 2][i % 2 * 2], scores[i / 2][i % 2 * 2 + 1]);
#pragma unroll
                for (int p = 0; p < PARTS; p++) weights[p][i] = parts[p];
            }
#pragma unroll
            for (int p = PARTS - 1; p >= 0; p--) multiply(sums, weights[p], ONES, ONES);
            // Values of other sequences, which may be infinite or NaN, must not reach a row even with weight 0.
#pragma unroll
            for (int r = 0; r < 2; r++)
                if (mine[r]) totals[r] = fmaf(totals[r], keep[r], sums[2 * r]);
#pragma unroll
            for (int b = 0; b < SPREADS; b++) {
                float4 own[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int j = min(at + 2 * c + i % 2 + i / 2 * 8, keys.high - 1);
                    own[i] = *(const float4*)(v + j * a.v_stride + 4 * (kv * DEPTH + b * SPREAD + g * OWN));
                }
#pragma unroll
                for (int j = 0; j < OWN; j++) {
                    float parts[4] = {};
                    u32 b0[PARTS], b1[PARTS];
                    split_pair(b0, element(own[0], j), element(own[1], j));
                    split_pair(b1, element(own[2], j), element(own[3], j));
                    multiply_parts(parts, weights, b0, b1);
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        if (mine[e / 2]) acc[b][j][e] = fmaf(acc[b][j][e], keep[e / 2], parts[e]);
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (rows[r] > last) continue;
        const float factor = 1.f / totals[r];
        u8* out = a.out + rows[r] * a.out_stride;
#pragma unroll
        for (int b = 0; b < SPREADS; b++) {
            const int at = head * DEPTH + b * SPREAD + 2 * c * OWN;
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float x[OWN];
#pragma unroll
                for (int j = 0; j < OWN; j++) x[j] = acc[b][j][2 * r + e] * factor;
                const int to = at + e * OWN;
                if (a.kind)
                    *(uint2*)(out + 2 * to) = make_uint2(to_half(a.kind, x[0]) | to_half(a.kind, x[1]) << 16,
                                                         to_half(a.kind, x[2]) | to_half(a.kind, x[3]) << 16);
                else
                    *(float4*)(out + 4 * to) = make_float4(x[0], x[1], x[2], x[3]);
            }
        }
    }
}
