// Matrix products with weights, for few tokens: a warp goes along a few rows of the matrix.
//
// FORMAT: a struct of blocks.cuh or one of those below. INTEGER: activations are quantised, else
// float32. TOKENS: taken at a time; ROWS: of a matrix, to a warp; DEPTH: items of each row that are
// on their way at a time. GATED: two matrices of one shape give act(first) * second. NEXT: when the
// kernel after this one may begin: 0: at once, 1: when the first weights are asked for, 2: at the end.
// SHARED_BY: warps that share the depth of a row; more than one for a lone token only.

#include "matrices.cuh"

#define WARPS 4
#define STREAMS (GATED ? 2 : 1)  // matrices that a warp reads at a time

// ------------------------------------------------------------------------------ plain weights

template <int COUNT> struct Floats {
    float v[COUNT];
};

struct F16 {
    static constexpr int ITEM = 8;
    typedef Floats<8> Values;
    uint4 q;
    __device__ __forceinline__ void load(const Planes& w, size_t i) { q = stream16(w.a + 16 * i); }
    __device__ __forceinline__ void unpack(int j, Values& u) const {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            u.v[2 * k] = low_half(word(q, k));
            u.v[2 * k + 1] = high_half(word(q, k));
        }
    }
};

struct BF16 : F16 {
    __device__ __forceinline__ void unpack(int j, Values& u) const {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            u.v[2 * k] = __uint_as_float(word(q, k) << 16);
            u.v[2 * k + 1] = __uint_as_float(word(q, k) & 0xffff0000);
        }
    }
};

struct F32 {
    static constexpr int ITEM = 4;
    typedef Floats<4> Values;
    uint4 q;
    __device__ __forceinline__ void load(const Planes& w, size_t i) { q = stream16(w.a + 16 * i); }
    __device__ __forceinline__ void unpack(int j, Values& u) const {
#pragma unroll
        for (int k = 0; k < 4; k++) u.v[k] = __uint_as_float(word(q, k));
    }
};

// ---------------------------------------------------------------------------------- products

__device__ __forceinline__ float4 floats4(const u8* row, int at) {
    return *(const float4*)(row + 4 * at);
}

// An item's part of a token's sum: float32 activations.
template <class W, int COUNT>
__device__ __forceinline__ float dot(const Floats<COUNT>& u, const u8* row, int k, int j,
                                     bool wide) {
    float sum = 0;
#pragma unroll
    for (int e = 0; e < COUNT; e += 4) {
        float4 x = floats4(row, COUNT * j + e);
        sum = fmaf(u.v[e], x.x, sum), sum = fmaf(u.v[e + 1], x.y, sum);
        sum = fmaf(u.v[e + 2], x.z, sum), sum = fmaf(u.v[e + 3], x.w, sum);
    }
    return sum;
}

#if !INTEGER
template <class W, int PARTS>
__device__ __forceinline__ float dot(const Unpacked<PARTS>& u, const u8* row, int k, int j,
                                     bool wide) {
    float sum = 0;
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        float products = 0, plain = 0;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float4 x = floats4(row, W::at(j, p) + 4 * e);
            int v = u.v[4 * p + e];
            products = fmaf((float)(i8)v, x.x, products);
            products = fmaf((float)(i8)(v >> 8), x.y, products);
            products = fmaf((float)(i8)(v >> 16), x.z, products);
            products = fmaf((float)(v >> 24), x.w, products);
            if (W::OFFSET) plain += x.x + x.y + x.z + x.w;
        }
        sum = fmaf(u.scale[p], products, sum);
        if (W::OFFSET) sum = fmaf(u.offset[p], plain, sum);
    }
    return sum;
}
#else
// `wide`: rows begin at multiples of 16 bytes; a lone one always does.
__device__ __forceinline__ int4 bytes16(const u8* address, bool wide) {
    if (TOKENS == 1 || wide) return *(const int4*)address;
    const int* q = (const int*)address;
    return make_int4(q[0], q[1], q[2], q[3]);
}

// Quantised activations: K int8, then a float32 scale a block, then sums of 32 (int32) or of 16
// (int16) of the int8.
template <class W, int PARTS>
__device__ __forceinline__ float dot(const Unpacked<PARTS>& u, const u8* row, int k, int j,
                                     bool wide) {
    int products[PARTS];
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        int4 x = bytes16(row + W::at(j, p), wide);
        int sum = __dp4a(u.v[4 * p], x.x, 0);
        sum = __dp4a(u.v[4 * p + 1], x.y, sum);
        sum = __dp4a(u.v[4 * p + 2], x.z, sum);
        products[p] = __dp4a(u.v[4 * p + 3], x.w, sum);
    }
    int block = W::at(j, 0) / W::BLOCK;
    const u8 *scales = row + k, *sums = scales + k / W::BLOCK * 4;
    float d = *(const float*)(scales + 4 * block), sum = 0;
    if (W::BLOCK == 32) {
        int all = 0;
#pragma unroll
        for (int p = 0; p < PARTS; p++) all += products[p];
        sum = u.scale[0] * all;
        if (W::OFFSET) sum = fmaf(u.offset[0], *(const int*)(sums + 4 * block), sum);
    } else {
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            sum = fmaf(u.scale[p], products[p], sum);
            if (W::OFFSET) sum = fmaf(u.offset[p], *(const i16*)(sums + W::at(j, p) / 8), sum);
        }
    }
    return d * sum;
}
#endif

// ----------------------------------------------------------------------------------- kernel

// y = x w^T for up to three matrices of one format and depth k: their rows, one after another.
extern "C" __global__ void linear(const u8* x, i64 x_stride, const i64* live, int k, Matrices all,
                                  int act STAMPS) {
    STAMPED
    if (NEXT == 0) launch_next();
    const int items = k / FORMAT::ITEM, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int start = lane + WARP * DEPTH * (warp % SHARED_BY);
    int row = (int)(blockIdx.x * (WARPS / SHARED_BY) + warp / SHARED_BY) * ROWS;
    Matrix m = all.m[0];
    if (!GATED) find_matrix<ROWS>(all, row, m);
    if (row >= m.rows) return;
    FORMAT w[STREAMS][DEPTH][ROWS];
    auto load = [&](int at) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++)
            if (at + WARP * d < items)
#pragma unroll
                for (int s = 0; s < STREAMS; s++)
#pragma unroll
                    for (int r = 0; r < ROWS; r++) {
                        size_t i = (size_t)min(row + r, (int)m.rows - 1) * items + at + WARP * d;
                        w[s][d][r].load(s ? all.m[1].w : m.w, i);
                    }
    };
    load(start);  // weights are constants: there is no need to wait for the kernel before
    if (NEXT == 1) launch_next();
    const int first = blockIdx.y * TOKENS, tokens = (int)*live;
    wait_for_previous();
    const bool wide = (u64)x % 16 == 0 && x_stride % 16 == 0;
    if (first >= tokens) return;
    float sums[STREAMS][ROWS][TOKENS] = {};
    for (int at = start; at < items; at += WARP * DEPTH * SHARED_BY) {
        if (at != start) load(at);
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            int j = at + WARP * d;
            if (j >= items) break;
#pragma unroll
            for (int s = 0; s < STREAMS; s++)
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    typename FORMAT::Values u;
                    w[s][d][r].unpack(j, u);
#pragma unroll
                    for (int t = 0; t < TOKENS; t++) {
                        const u8* token = x + min(first + t, tokens - 1) * x_stride;
                        sums[s][r][t] += dot<FORMAT>(u, token, k, j, wide);
                    }
                }
        }
    }
#pragma unroll
    for (int s = 0; s < STREAMS; s++)
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int t = 0; t < TOKENS; t++) sums[s][r][t] = warp_sum(sums[s][r][t]);
#if SHARED_BY > 1
    __shared__ float parts[WARPS][STREAMS][ROWS];
#pragma unroll
    for (int s = 0; s < STREAMS; s++)
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (lane == 0) parts[warp][s][r] = sums[s][r][0];
    __syncthreads();
    if (warp % SHARED_BY) return;
#pragma unroll
    for (int s = 0; s < STREAMS; s++)
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int other = 1; other < SHARED_BY; other++)
                sums[s][r][0] += parts[warp + other][s][r];
#endif
    if (lane) return;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            if (row + r >= m.rows || first + t >= tokens) continue;
#if GATED
            const Matrix& up = all.m[1];
            float gate = sums[0][r][t], other = sums[1][r][t];
            if (m.bias) gate += m.bias[row + r];
            if (up.bias) other += up.bias[row + r];
            ((float*)(m.y + (first + t) * m.y_stride))[row + r] = activate(act, gate) * other;
#else
            finish(m, first + t, row + r, sums[0][r][t]);
#endif
        }
}
