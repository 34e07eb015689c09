// Linears of many tokens with weights and activations of bytes; see gemm_tiles.cuh. GATED: the result is
// act(first) * second. PROMOTED: tiles of the depth whose products tensor cores add before the result is added
// to float32 sums; 0: all. They add products of e4m3 with few bits.

#define ADJACENT 0
#include "gemm_tiles.cuh"
#include "quantize.cuh"

#define TOGETHER 8  // pairs of results whose scales and residuals are requested together

#if PROMOTED
// Add the products of a stage to the sums, scaled if GROUPED. token_scales: of the thread's two tokens.
__device__ __forceinline__ void promote(float (&sums)[SUMS], const float (&c)[SUMS], const Stage& from,
                                        const float (&token_scales)[2]) {
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j++) {
#if GROUPED
        const float2 w = *(const float2*)&from.w_scales[8 * j + threadIdx.x % 4 * 2];
#endif
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float &sum = sums[4 * j + i], product = c[4 * j + i];
#if GROUPED
            sum = fmaf(product, __fmul_rn(token_scales[i / 2], i % 2 ? w.y : w.x), sum);
#else
            sum += product;
#endif
        }
    }
}
#endif

// Multiply a tile of results.
__device__ __forceinline__ void multiply_tile(Shared& s, Place& place, int group, int k,
                                              const float* const (&scales_of)[2], Sum (&sums)[SUMS]) {
#if PROMOTED
    float c[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; i++) sums[i] = 0;
#else
    Sum(&c)[SUMS] = sums;
#endif
#pragma unroll 1
    for (int at = 0; at < k;) {
        const int end = PROMOTED ? min(k, at + PROMOTED * DEPTH) : k;
#if PROMOTED
        const int scale = at / DEPTH;
        const float scales[2] = {GROUPED ? scales_of[0][scale] : 1, GROUPED ? scales_of[1][scale] : 1};
#endif
        const int last = multiply_depth(s, place, group, end - at, c);
#if PROMOTED
        promote(sums, c, s.stages[last], scales);
#endif
        release(&s.empty[last]);
        at = end;
    }
}

// Two adjacent floats of a row, of which the second may be beyond it.
__device__ __forceinline__ float2 load_two(const float* from, bool both) {
    if (both && (u64)from % 8 == 0) return *(const float2*)from;
    return make_float2(from[0], both ? from[1] : 0);
}
__device__ __forceinline__ void store_two(float* to, float2 v, bool both) {
    if (both && (u64)to % 8 == 0) {
        *(float2*)to = v;
    } else {
        to[0] = v.x;
        if (both) to[1] = v.y;
    }
}

// What two adjacent rows of a matrix contribute to their results.
struct RowPair {
    float2 scale, bias;

    __device__ __forceinline__ void load(const Matrix& m, int row, bool both) {
#if !GROUPED
        scale = load_two((const float*)m.w.b + row, both);
#endif
        if (m.bias) bias = load_two(m.bias + row, both);
    }
    // A pair of sums with the scales of the token and of the rows, see small_batch_results.cuh, and with bias.
    __device__ __forceinline__ float2 scaled(const Matrix& m, Sum a, Sum b, float token) const {
        float2 v = make_float2((float)a, (float)b);
#if !GROUPED
        v.x = __fmul_rn(v.x, __fmul_rn(scale.x, token)), v.y = __fmul_rn(v.y, __fmul_rn(scale.y, token));
#endif
        if (m.bias) v.x += bias.x, v.y += bias.y;
        return v;
    }
};

// Store the thread's sums of token `token` and the eighth one after it, which have `scales`. Of the sums of a token,
// four apart, the first pair is of row `row` and the next one, the second of the eighth row after these, and so on.
// What results need is loaded before any is stored: the compiler cannot tell that stores do not change it.
__device__ __forceinline__ void store(const Matrix& m, const Matrix& up, int row, int token, int tokens,
                                      const float (&scales)[2], const Sum (&sums)[SUMS], int act) {
#pragma unroll
    for (int first = 0; first < ROWS / 8; first += TOGETHER) {
        RowPair rows[TOGETHER];
#if GATED
        RowPair others[TOGETHER];
#else
        float2 before[2][TOGETHER];
#endif
#pragma unroll
        for (int j = 0; j < TOGETHER; j++) {
            const int r = row + 8 * (first + j);
            if (r >= m.rows) continue;
            const bool both = r + 1 < m.rows;
            rows[j].load(m, r, both);
#if GATED
            others[j].load(up, r, both);
#else
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (m.residual && token + 8 * i < tokens)
                    before[i][j] = load_two((const float*)(m.residual + (token + 8 * i) * m.residual_stride) + r, both);
#endif
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (token + 8 * i >= tokens) continue;
            float* y = (float*)(m.y + (token + 8 * i) * m.y_stride);
#pragma unroll
            for (int j = 0; j < TOGETHER; j++) {
                const int r = row + 8 * (first + j), at = 4 * (first + j) + 2 * i;
                if (r >= m.rows) continue;
                float2 v = rows[j].scaled(m, sums[at], sums[at + 1], scales[i]);
#if GATED
                const float2 other = others[j].scaled(up, sums[at + SUMS / 2], sums[at + SUMS / 2 + 1], scales[i]);
                v.x = activate(act, v.x) * other.x, v.y = activate(act, v.y) * other.y;
#else
                if (m.residual) v.x += before[i][j].x, v.y += before[i][j].y;
#endif
                store_two(y + r, v, r + 1 < m.rows);
            }
        }
    }
}

// Multiply and store all tiles of a block; run by warpgroup `group`, which has 64 tokens of each.
__device__ __forceinline__ void compute(Shared& s, int group, const u8* x, i64 x_stride, const Matrices& all,
                                        const Counts& counts, int tokens, int k, int act) {
    const int lane = threadIdx.x % WARP;
    const int own_token = threadIdx.x / WARP * 16 + lane / 4, own_row = lane % 4 * 2;
    Place place;
#pragma unroll 1
    for (int n = blockIdx.x; n < counts.tiles(); n += gridDim.x) {
        const Tile tile(all, counts, n);
        const int token = tile.token + own_token;  // and the eighth one after it
        const float* scales_of[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
            scales_of[i] = (const float*)(x + min(token + 8 * i, tokens - 1) * x_stride + k);
        const float token_scales[2] = {*scales_of[0], *scales_of[1]};
        Sum sums[SUMS];
        multiply_tile(s, place, group, k, scales_of, sums);
        Matrix m = all.m[0];
        if (!GATED && tile.matrix == 1) m = all.m[1];
        if (!GATED && tile.matrix == 2) m = all.m[2];
        store(m, all.m[1], tile.row + own_row, token, tokens, token_scales, sums, act);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gemm_bytes(const __grid_constant__ Maps maps, const u8* x, i64 x_stride, const i64* live, int k,
               const __grid_constant__ Matrices all, int act TIMESTAMPS) {
    RECORD_TIMESTAMPS
    DYNAMIC_SHARED(uint4, memory);
    Shared& s = aligned_memory(memory);
    const int tokens = (int)begin(live);
    const Counts counts(all, tokens);
    run_warpgroups(s, maps, all, counts, k,
                   [&](int group) { compute(s, group, x, x_stride, all, counts, tokens, k, act); });
}
