// Linears of up to 16 tokens with f16 or bf16 (BFLOAT) weights and activations of the same dtype, in one
// pass over the weights.
//
// A block computes SIDE rows of a matrix, which has at least as many, and reads all activations for
// them; more rows amortize these reads. GATED: half of the rows are of one matrix and the other half
// the same rows of a second one; the result is act(first) * second, in float32 or a kind of
// quantize.cuh. The warps of a block share the depth, 32 at a time; thread q of four takes elements
// 8 q .. 8 q + 7 of these, as in small_batch_f32.cu. A warp has 8 KB of weights in flight, the first of
// them before the activations are available.

#include "matrices.cuh"
#include "quantize.cuh"
#include "tensor_cores.cuh"

#define STEP 32
#define MANY 16  // tokens
#define WARPS 8
#define TILES (SIDE / 16)  // of 16 rows
#define STAGES (8 / TILES)
#define ROWS (SIDE / (1 + GATED))  // of a matrix
#define SOON (STAGES < 4 ? STAGES : 4)  // activations in registers: the current and the next ones

extern "C" __global__ void __launch_bounds__(WARP* WARPS, 2)
    small_batch(const u8* x, i64 x_stride, const i64* live, int k, Matrices all, int act,
           int kind TIMESTAMPS) {
    RECORD_TIMESTAMPS
    __shared__ float sums[WARPS][MANY][SIDE + 1];
    launch_next();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, group = lane / 4, part = lane % 4;
    int row = blockIdx.x * ROWS;
    Matrix m = all.m[0];
    if (!GATED) find_matrix<ROWS>(all, row, m);
    const int first = blockIdx.y * MANY;
    row = min(row, (int)m.rows - ROWS);  // blocks that overlap compute the same results
    const i64 start = (i64)(row + group) * (k / 8) + part;
    const uint4* rows = (const uint4*)m.w.a + start;
    const uint4* others = (const uint4*)all.m[GATED].w.a + start - (i64)(ROWS / 8) * k;
    uint4 w[STAGES][TILES][2], v[SOON][2];
    auto load = [&](int stage, int from) {
        if (from >= k) return;
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                w[stage][t][i] = stream16((GATED && 2 * t + i >= TILES ? others : rows) +
                                          (i64)(2 * t + i) * k + from / 8);
    };
    const int begin_at = STEP * warp, next = STEP * WARPS;
#pragma unroll
    for (int s = 0; s < STAGES; s++) load(s, begin_at + s * next);
    const int tokens = (int)*live;
    wait_for_previous();
    if (first >= tokens) return;
    const uint4* mine[2];
#pragma unroll
    for (int i = 0; i < 2; i++)
        mine[i] = (const uint4*)(x + min(first + 8 * i + group, tokens - 1) * x_stride) + part;
    auto load_activations = [&](int stage, int from) {
        if (from >= k) return;
#pragma unroll
        for (int i = 0; i < 2; i++) v[stage][i] = mine[i][from / 8];
    };
#pragma unroll
    for (int s = 0; s + 1 < SOON; s++) load_activations(s, begin_at + s * next);
    float c[TILES][2][4] = {};
    for (int at = begin_at; at < k; at += STAGES * next) {
#pragma unroll
        for (int s = 0; s < STAGES; s++) {
            int here = at + s * next;
            if (here >= k) break;
            load_activations((s + SOON - 1) % SOON, here + (SOON - 1) * next);
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
                for (int h = 0; h < 4; h += 2) {
                    const uint4* q = w[s][t];
                    u32 a[4] = {word(q[0], h), word(q[1], h), word(q[0], h + 1), word(q[1], h + 1)};
#pragma unroll
                    for (int n = 0; n < 2; n++)
                        multiply(c[t][n], a, word(v[s % SOON][n], h), word(v[s % SOON][n], h + 1));
                }
            load(s, here + STAGES * next);
        }
    }
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                sums[warp][8 * n + 2 * part + e % 2][16 * t + 8 * (e / 2) + group] = c[t][n][e];
    __syncthreads();
    auto sum = [&](int token, int r) {
        float value = 0;
#pragma unroll
        for (int s = 0; s < WARPS; s++) value += sums[s][token][r];
        return value;
    };
    for (int i = threadIdx.x; i < MANY * ROWS; i += WARP * WARPS) {
        const int t = i / ROWS, r = i % ROWS, token = first + t;
        if (token >= tokens) break;
#if GATED
        const Matrix& up = all.m[1];
        float value = sum(t, r), other = sum(t, ROWS + r);
        if (m.bias) value += m.bias[row + r];
        if (up.bias) other += up.bias[row + r];
        value = activate(act, value) * other;
        u8* y = m.y + token * m.y_stride;
        if (kind)
            ((u16*)y)[row + r] = to_half(kind, value);
        else
            ((float*)y)[row + r] = value;
#else
        finish(m, token, row + r, sum(t, r));
#endif
    }
}
