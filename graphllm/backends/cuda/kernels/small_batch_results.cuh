#pragma once
// The end of a block of small_batch.cu or small_batch_blocks.cu: sums in shared memory become results.
//
// The including file defines TOKENS, THREADS and GATED, ROWS (of a matrix) and STRIDE (floats between the
// sums of two tokens), and includes element_types.cuh. Bytes are scaled here unless GROUPED.

#include "clusters.cuh"
#include "matrices.cuh"
#include "quantize.cuh"

// A thread has VECTOR adjacent rows of a token, and the same rows of TOGETHER tokens at a time.
#define VECTOR (TOKENS > 16 ? 4 : 1)
#define TOGETHER (TOKENS > 16 ? 4 : 2)
#define LANES (ROWS / VECTOR)     // threads of a token
#define SAME (THREADS / LANES)    // tokens at the same time

// Load the first `count` of VECTOR rows.
__device__ __forceinline__ void load_rows(const float* from, int count, float (&to)[VECTOR]) {
    if (VECTOR == 4 && count == 4 && (u64)from % 16 == 0) {
        const float4 x = *(const float4*)from;
        to[0] = x.x, to[VECTOR / 4] = x.y, to[VECTOR / 2] = x.z, to[VECTOR - 1] = x.w;
        return;
    }
#pragma unroll
    for (int e = 0; e < VECTOR; e++) to[e] = e < count ? from[e] : 0;
}

__device__ __forceinline__ void store_rows(const float (&x)[VECTOR], float* to, int count) {
    if (VECTOR == 4 && count == 4 && (u64)to % 16 == 0) {
        *(float4*)to = make_float4(x[0], x[VECTOR / 4], x[VECTOR / 2], x[VECTOR - 1]);
        return;
    }
#pragma unroll
    for (int e = 0; e < VECTOR; e++)
        if (e < count) to[e] = x[e];
}

__device__ __forceinline__ void store_halves(int kind, const float (&x)[VECTOR], u16* to, int count) {
    u16 halves[VECTOR];
#pragma unroll
    for (int e = 0; e < VECTOR; e++) halves[e] = to_half(kind, x[e]);
    if (VECTOR == 4 && count == 4 && (u64)to % 8 == 0) {
        *(uint2*)to = make_uint2(halves[0] | (u32)halves[VECTOR / 4] << 16,
                                 halves[VECTOR / 2] | (u32)halves[VECTOR - 1] << 16);
        return;
    }
#pragma unroll
    for (int e = 0; e < VECTOR; e++)
        if (e < count) to[e] = halves[e];
}

// The activations of the step. Those of bytes end with the scale of the row, unless the sums are scaled.
struct ScaledRows {
    const u8* x;
    i64 stride;
    int k;
    // The scale of a token, and of a row of a matrix.
    __device__ __forceinline__ float of_token(int token) const {
        return *(const float*)(x + token * stride + k);
    }
    __device__ __forceinline__ static float of_row(const Planes& w, int row) {
        return ((const float*)w.b)[row];
    }
};
#define SCALED (EIGHT_BITS && !GROUPED)

// A sum with the scales of its token and of its row.
__device__ __forceinline__ float scaled(Sum sum, float token, float row) {
    return SCALED ? __fmul_rn((float)sum, __fmul_rn(row, token)) : (float)sum;
}

// Add the sums of the blocks that share a depth, and store the results of this block's part of the tokens.
//
// out: the block's sums [TOKENS, STRIDE]; those of the second matrix of a gated unit come ROWS after those
// of the first. place: first row of the block. first: its first token. last: last token of the step.
__device__ __forceinline__ void store_results(const Sum* out, const Matrices& all, int place, int first,
                                              int last, int splits, int act, int kind, const ScaledRows& rows) {
    const int blocks = gridDim.z;
    meet(blocks);
    asm volatile("" : "+r"(place));  // find the matrix again: keeping its fields would take 20 registers
    Matrix m = all.m[0];
    if (!GATED) find_matrix<ROWS>(all, place, m);
    const int r = place + threadIdx.x % LANES * VECTOR, count = min(TOKENS, last + 1 - first);
    const int own = min(VECTOR, (int)m.rows - r);  // rows of this thread
    if (own > 0 && count > 0) {  // count is positive; without that the compiler spills registers
#if GATED
        const Matrix& up = all.m[1];
        float bias[VECTOR], up_bias[VECTOR];
#pragma unroll
        for (int e = 0; e < VECTOR; e++) {
            bias[e] = m.bias && e < own ? m.bias[r + e] : 0;
            up_bias[e] = up.bias && e < own ? up.bias[r + e] : 0;
        }
#else
        float bias[VECTOR];
#pragma unroll
        for (int e = 0; e < VECTOR; e++) bias[e] = m.bias && e < own ? m.bias[r + e] : 0;
#endif
#if SCALED
        float scales[1 + GATED][VECTOR];
#pragma unroll
        for (int e = 0; e < VECTOR; e++)
#pragma unroll
            for (int i = 0; i <= GATED; i++)
                scales[i][e] = ScaledRows::of_row(i ? all.m[1].w : m.w, r + min(e, own - 1));
#else
        constexpr float scales[1 + GATED][VECTOR] = {};
#endif
        const Sum* sums = out + threadIdx.x % LANES * VECTOR;
#pragma unroll 1
        for (int t = threadIdx.x / LANES + SAME * blockIdx.z; t < count; t += TOGETHER * SAME * blocks) {
#if !GATED
            float residual[TOGETHER][VECTOR];  // requested together, before the sums
#pragma unroll
            for (int u = 0; u < TOGETHER; u++) {
                const int token = t + u * SAME * blocks;
                if (m.residual && token < count)
                    load_rows((const float*)(m.residual + (first + token) * m.residual_stride) + r, own, residual[u]);
            }
#endif
#pragma unroll
            for (int u = 0; u < TOGETHER; u++) {
                const int token = t + u * SAME * blocks;
                if (token >= count) break;
                Sum added[VECTOR];
                float values[VECTOR];
                const float scale = SCALED ? rows.of_token(first + token) : 1;
                sums_of_blocks(sums + token * STRIDE, blocks, splits, added);
#pragma unroll
                for (int e = 0; e < VECTOR; e++) values[e] = scaled(added[e], scale, scales[0][e]);
                u8* y = m.y + (first + token) * m.y_stride;
#if GATED
                sums_of_blocks(sums + token * STRIDE + ROWS, blocks, splits, added);
#pragma unroll
                for (int e = 0; e < VECTOR; e++) {
                    const float other = scaled(added[e], scale, scales[GATED][e]);
                    values[e] = activate(act, values[e] + bias[e]) * (other + up_bias[e]);
                }
                if (kind) {
                    store_halves(kind, values, (u16*)y + r, own);
                    continue;
                }
#else
#pragma unroll
                for (int e = 0; e < VECTOR; e++) {
                    if (m.bias) values[e] += bias[e];
                    if (m.residual) values[e] += residual[u][e];
                }
#endif
                store_rows(values, (float*)y + r, own);
            }
        }
    }
    if (blocks > 1) meet(blocks);  // the others have read this block's sums
}
