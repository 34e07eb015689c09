// Linears of many tokens with weights, activations and results of f16, or of bf16 if BFLOAT; see gemm_tiles.cuh.
// The result is act(x w^T + bias) + residual, rounded once. ACT: an Activation, or -1. The rows of a matrix are a
// multiple of 32.

#define ADJACENT 1
#include "gemm_tiles.cuh"
#include "quantize.cuh"

#define TOGETHER 4  // groups of 32 columns whose biases and residuals are requested together

// A pair of results, and one as floats.
__device__ __forceinline__ u32 two_halves(float low, float high) {
#if BFLOAT
    return to_bf16(low) | (u32)to_bf16(high) << 16;
#else
    return two_within_f16(low, high);
#endif
}
__device__ __forceinline__ float2 two_floats(u32 pair) {
#if BFLOAT
    return make_float2(from_bf16((u16)pair), from_bf16((u16)(pair >> 16)));
#else
    return make_float2(from_f16((u16)pair), from_f16((u16)(pair >> 16)));
#endif
}

// What eight adjacent results of two tokens need besides their sums.
struct Extra {
    float4 bias[2];
    uint4 residual[2];

    __device__ __forceinline__ void load(const Matrix& m, int row, int token, int tokens) {
        const float4* from = (const float4*)(m.bias + row);
        const bool there = m.bias && row < m.rows;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const bool live = m.residual && row < m.rows && token + 8 * i < tokens;
            const uint4* before = (const uint4*)(m.residual + (token + 8 * i) * m.residual_stride + 2 * row);
            bias[i] = there ? from[i] : make_float4(0, 0, 0, 0);
            residual[i] = live ? *before : make_uint4(0, 0, 0, 0);
        }
    }
    // The results of the i-th token, whose sums are the first two of every four from `sums` on.
    __device__ __forceinline__ uint4 finish(int i, const Sum* sums) const {
        const float of_row[8] = {bias[0].x, bias[0].y, bias[0].z, bias[0].w, bias[1].x, bias[1].y, bias[1].z, bias[1].w};
        const u32 before[4] = {residual[i].x, residual[i].y, residual[i].z, residual[i].w};
        u32 made[4];
#pragma unroll
        for (int p = 0; p < 4; p++) {
            float x = sums[4 * p] + of_row[2 * p], y = sums[4 * p + 1] + of_row[2 * p + 1];
            if (ACT >= 0) x = activate_half(ACT, x), y = activate_half(ACT, y);
            const float2 other = two_floats(before[p]);
            made[p] = two_halves(x + other.x, y + other.y);
        }
        return make_uint4(made[0], made[1], made[2], made[3]);
    }
};

// Store the thread's sums of token `token` and the eighth one after it: of every 32 rows of the matrix, eight from
// `row` on. What they need is loaded before any is stored: the compiler cannot tell that stores do not change it.
__device__ __forceinline__ void store(const Matrix& m, int row, int token, int tokens, const Sum (&sums)[SUMS]) {
#pragma unroll
    for (int first = 0; first < COLUMNS / 32; first += TOGETHER) {
        Extra extra[TOGETHER];
#pragma unroll
        for (int j = 0; j < TOGETHER; j++) extra[j].load(m, row + 32 * (first + j), token, tokens);
#pragma unroll
        for (int n = 0; n < 2 * TOGETHER; n++) {
            const int i = n % 2, j = n / 2, r = row + 32 * (first + j);
            const uint4 made = extra[j].finish(i, &sums[16 * (first + j) + 2 * i]);
            if (r < m.rows && token + 8 * i < tokens)
                *(uint4*)(m.y + (token + 8 * i) * m.y_stride + 2 * r) = made;
        }
    }
}

// `depth`: bytes of a row of the factors.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gemm_halves(const __grid_constant__ Maps maps, const i64* live, int depth,
                const __grid_constant__ Matrices all TIMESTAMPS) {
    RECORD_TIMESTAMPS
    DYNAMIC_SHARED(uint4, memory);
    Shared& s = aligned_memory(memory);
    const int tokens = (int)begin(live);
    const Counts counts(all, tokens);
    run_warpgroups(s, maps, all, counts, depth, [&](int group) {
        const int own_token = threadIdx.x / WARP * 16 + threadIdx.x % WARP / 4, own_row = threadIdx.x % 4 * 8;
        Place place;
#pragma unroll 1
        for (int n = blockIdx.x; n < counts.tiles(); n += gridDim.x) {
            const Tile tile(all, counts, n);
            Sum sums[SUMS];
            release(&s.empty[multiply_depth(s, place, group, depth, sums)]);
            Matrix m = all.m[0];
            if (tile.matrix == 1) m = all.m[1];
            if (tile.matrix == 2) m = all.m[2];
            store(m, tile.row + own_row, tile.token + own_token, tokens, sums);
        }
    });
}
