// Linears of 2 to 8 tokens with f16 or bf16 (BFLOAT) weights and float32 activations, on tensor cores.
//
// A warp multiplies 16 rows of the matrix with 8 tokens; the warps of a block share the depth. An
// activation is split into two values of the weights' dtype, high + low, which keeps almost all of its
// precision; the tensor cores would otherwise idle while weights are loaded. The depth is taken 32 at
// a time, and thread q of four takes elements 8 q .. 8 q + 7 of it instead of those that the
// instruction's layout assigns to it. The sum is the same as long as weights and activations agree.

#include "matrices.cuh"
#include "tensor_cores.cuh"

#define STEP 32
#define SIDE 16  // rows of a block
#define MANY 8   // tokens
#define WARPS 8

#if BFLOAT
__device__ __forceinline__ float first(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float second(u32 pair) { return __uint_as_float(pair & 0xffff0000); }
__device__ __forceinline__ float limited(float x) { return x; }
#else
__device__ __forceinline__ float first(u32 pair) { return low_half(pair); }
__device__ __forceinline__ float second(u32 pair) { return high_half(pair); }
__device__ __forceinline__ float limited(float x) { return within_f16(x); }
#endif

// Two floats as a pair of halves, and their remainders as another pair.
__device__ __forceinline__ void split(float x, float y, u32& high, u32& low) {
    x = limited(x), y = limited(y);
    high = pair(x, y);
    low = pair(x - first(high), y - second(high));
}

extern "C" __global__ void __launch_bounds__(WARP* WARPS)
    small_batch(const u8* x, i64 x_stride, const i64* live, int k, Matrices all TIMESTAMPS) {
    RECORD_TIMESTAMPS
    __shared__ float sums[WARPS][MANY][SIDE + 1];
    launch_next();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, group = lane / 4, part = lane % 4;
    int row = blockIdx.x * SIDE;
    Matrix m = all.m[0];
    find_matrix<SIDE>(all, row, m);
    const int first = blockIdx.y * MANY;
    const u8* rows[2];
#pragma unroll
    for (int i = 0; i < 2; i++)
        rows[i] = m.w.a + ((i64)min(row + 8 * i + group, (int)m.rows - 1) * k + 8 * part) * 2;
    uint4 w[2], next[2];
    int at = STEP * warp;
    auto load = [&](uint4* to, int from) {
        if (from < k) to[0] = stream16(rows[0] + 2 * from), to[1] = stream16(rows[1] + 2 * from);
    };
    load(w, at);
    const int tokens = (int)*live;
    wait_for_previous();
    const u8* token = x + min(first + group, max(tokens - 1, 0)) * x_stride + 32 * part;
    float c[4] = {};
    for (; at < k && first < tokens; at += STEP * WARPS) {
        load(next, at + STEP * WARPS);
        float4 v = ((const float4*)(token + 4 * at))[0], v2 = ((const float4*)(token + 4 * at))[1];
        u32 high[4], low[4];
        split(v.x, v.y, high[0], low[0]), split(v.z, v.w, high[1], low[1]);
        split(v2.x, v2.y, high[2], low[2]), split(v2.z, v2.w, high[3], low[3]);
#pragma unroll
        for (int h = 0; h < 4; h += 2) {
            u32 a[4] = {word(w[0], h), word(w[1], h), word(w[0], h + 1), word(w[1], h + 1)};
            multiply(c, a, high[h], high[h + 1]);
            multiply(c, a, low[h], low[h + 1]);
        }
        w[0] = next[0], w[1] = next[1];
    }
#pragma unroll
    for (int e = 0; e < 4; e++) sums[warp][2 * part + e % 2][8 * (e / 2) + group] = c[e];
    __syncthreads();
    if (threadIdx.x >= MANY * SIDE) return;
    const int t = threadIdx.x / SIDE, r = threadIdx.x % SIDE;
    float value = 0;
#pragma unroll
    for (int s = 0; s < WARPS; s++) value += sums[s][t][r];
    if (first + t < tokens && row + r < m.rows) finish(m, first + t, row + r, value);
}
