// Norms with a residual before or after them, and gated units, with optional quantization.

#include "row_results.cuh"

__device__ __forceinline__ const float* row_of(const u8* x, i64 stride) {
    return (const float*)(x + (i64)blockIdx.x * stride);
}

// norm(h), quantized. A block computes one row, here and below.
template <int U>
__device__ __forceinline__ void norm_quantise(const u8* h, i64 h_stride, const float* w,
                                              const Targets& targets, const i64* live, int width,
                                              float eps) {
    launch_next();
    const i64 rows = *(volatile const i64*)live;
#pragma unroll 1
    for (int pass = first_pass(); pass < 2; pass++) {
        Weight<U> weight(w, width);
        if (pass) wait_for_previous();
        if (blockIdx.x >= rows) continue;
        RowRegisters<U> row;
        row.template load<true>(row_of(h, h_stride), width);
        weight.scale(row, row.factor(width, eps), width);
        emit_row(row, targets, width, pass);
    }
}

// The weights of a layer norm; b may be null. half: x is f16.
struct LayerNorm {
    const u8* x;
    i64 x_stride;
    const float *w, *b;
    const i64* live;
    i64 half;
    int width;
    float eps;
};

// Weight and bias of eight elements from `at` on.
struct LayerWeights {
    float w[8], b[8] = {};

    __device__ __forceinline__ LayerWeights(const LayerNorm& a, int at) {
        load_floats(w, a.w, at, a.width);
        if (a.b) load_floats(b, a.b, at, a.width);
    }
    __device__ __forceinline__ void scale(float* v, float mean, float factor) const {
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = (v[k] - mean) * factor * w[k] + b[k];
    }
};

__device__ __forceinline__ float sum8(const float* v) {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) sum += v[k];
    return sum;
}

// Sum of the squares of the distances from the mean, of eight elements from `at` on.
__device__ __forceinline__ float squares8(const float* v, const LayerNorm& a, float mean, int at) {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const float distance = at + k < a.width ? v[k] - mean : 0.f;
        sum += distance * distance;
    }
    return sum;
}

// layer_norm(x), quantized, for rows of one unit per warp of a block.
extern "C" __global__ void __launch_bounds__(1024, 1) layer_norm_quantise_1(LayerNorm a, Targets targets TIMESTAMPS) {
    RECORD_TIMESTAMPS
    RowRegisters<1> row;
    const int at = row.column(0);
    const LayerWeights weights(a, at);
    const i64 rows = begin(a.live);
    if (blockIdx.x >= rows) return;
    load_row(row.v, a.x + blockIdx.x * a.x_stride, a.half, at, a.width);
    const float mean = block_sum(sum8(row.v)) / a.width;
    const float factor = 1.f / sqrtf(block_sum(squares8(row.v, a, mean, at)) / a.width + a.eps);
    weights.scale(row.v, mean, factor);
    emit_row(row, targets, a.width);
}

// The same for many rows of U units, each computed by a warp. No target has a scale per row.
template <int U> __device__ __forceinline__ void layer_norm_rows(const LayerNorm& a, const Targets& targets) {
    const i64 rows = begin(a.live), row = (i64)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    const int first = 8 * (threadIdx.x % WARP);
    if (row >= rows) return;
    float v[U][8], sum = 0, squares = 0;
#pragma unroll
    for (int u = 0; u < U; u++) load_row(v[u], a.x + row * a.x_stride, a.half, first + UNIT * u, a.width);
#pragma unroll
    for (int u = 0; u < U; u++) sum += sum8(v[u]);
    const float mean = warp_sum(sum) / a.width;
#pragma unroll
    for (int u = 0; u < U; u++) squares += squares8(v[u], a, mean, first + UNIT * u);
    const float factor = 1.f / sqrtf(warp_sum(squares) / a.width + a.eps);
#pragma unroll
    for (int u = 0; u < U; u++) LayerWeights(a, first + UNIT * u).scale(v[u], mean, factor);
#pragma unroll 1
    for (int i = 0; i < targets.count; i++) {
        const Target t = i ? targets.t[1] : targets.t[0];
#pragma unroll
        for (int u = 0; u < U; u++) emit_to<8>(v[u], t, row, 0, UNIT * u, a.width);
    }
}

#define LAYER_NORM_ROWS(U)                                                                      \
    extern "C" __global__ void __launch_bounds__(256)                                           \
        layer_norm_rows_##U(LayerNorm a, Targets targets TIMESTAMPS) {                          \
        RECORD_TIMESTAMPS                                                                       \
        layer_norm_rows<U>(a, targets);                                                         \
    }
LAYER_NORM_ROWS(1)
LAYER_NORM_ROWS(2)
LAYER_NORM_ROWS(3)
LAYER_NORM_ROWS(4)

// Store x + norm(h) to `sum` and, if AGAIN, the norm of that with w2 to the targets. A warp with two
// units holds one unit of x at a time, for lack of registers.
template <int U, bool AGAIN>
__device__ __forceinline__ void norm_add(const u8* h, i64 h_stride, const float* w, const u8* x,
                                         i64 x_stride, const float* w2, u8* sum, i64 sum_stride,
                                         const Targets& targets, const i64* live, int width,
                                         float eps, float eps2) {
    float* out = (float*)(sum + (i64)blockIdx.x * sum_stride);
    launch_next();
    const i64 rows = *(volatile const i64*)live;
#pragma unroll 1
    for (int pass = U == 1 ? first_pass() : 1; pass < 2; pass++) {  // else registers would be spilled
        Weight<U> weight(w, width), weight2(AGAIN ? w2 : w, width);
        if (pass) wait_for_previous();
        if (blockIdx.x >= rows) continue;
        RowRegisters<U> row, base;
        row.template load<true>(row_of(h, h_stride), width);
        if (U == 1) base.template load<true>(row_of(x, x_stride), width);
        weight.scale(row, row.factor(width, eps), width);
#pragma unroll
        for (int u = 0; u < U; u++) {
            if (U > 1) base.template load_unit<true>(u, row_of(x, x_stride), width);
#pragma unroll
            for (int k = 8 * u; k < 8 * u + 8; k++) row.v[k] += base.v[k];
            row.store_unit(u, out, pass ? width : 0);
        }
        if (!AGAIN) continue;
        weight2.scale(row, row.factor(width, eps2), width);
        emit_row(row, targets, width, pass);
    }
}

// act(gate) * up. A warp computes one unit of a line; a row has one or several lines.
template <int N>
__device__ __forceinline__ void glu(const u8* gate, i64 gate_stride, const u8* up, i64 up_stride,
                                    const Targets& targets, const i64* live, int lines,
                                    int width, int act) {
    const i64 rows = begin(live), row = blockIdx.x / lines, line = blockIdx.x % lines;
    int first = (blockIdx.y * (blockDim.x / WARP) + threadIdx.x / WARP) * 32 * N;
    if (row >= rows || first >= width) return;
    const float* a = (const float*)(gate + row * gate_stride) + line * width;
    const float* b = (const float*)(up + row * up_stride) + line * width;
    float v[N], other[N];
    const int lane = threadIdx.x % WARP;
    if constexpr (N == 8) {
        load_floats(v, a, first + 8 * lane, width);
        load_floats(other, b, first + 8 * lane, width);
    } else {
        v[0] = first + lane < width ? a[first + lane] : 0.f;
        other[0] = first + lane < width ? b[first + lane] : 0.f;
    }
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = activate(act, v[i]) * other[i];
    emit<N>(v, targets, row, (int)line, first, width);
}

__device__ __forceinline__ float from_half(int kind, u32 pair, int i) {
    u16 half = (u16)(pair >> 16 * i);
    if (kind == 2) return from_bf16(half);
    return within_f16(from_f16(half));  // an infinity of the product counts as the largest value
}

// act(gate) * up of dense rows of f16 or bf16, stored as the same type. A thread computes eight columns.
template <int KIND>
__device__ __forceinline__ void glu_halves(const u16* gate, const u16* up, u8* out, i64 out_stride,
                                           const i64* live, int width, int act) {
    const i64 rows = begin(live);
    i64 row = blockIdx.x;
    int column = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (row >= rows || column >= width) return;
    uint4 a = *(const uint4*)(gate + row * width + column);
    uint4 b = *(const uint4*)(up + row * width + column);
    u32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w}, z[4];
#pragma unroll
    for (int p = 0; p < 4; p++) {
        u32 halves[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float v = activate_half(act, from_half(KIND, x[p], i));
            halves[i] = to_half(KIND, v * from_half(KIND, y[p], i));
        }
        z[p] = halves[0] | halves[1] << 16;
    }
    *(uint4*)(out + row * out_stride + 2 * column) = make_uint4(z[0], z[1], z[2], z[3]);
}

// act(x + bias) in place for dense rows of f16 or bf16. A thread computes eight columns. bias may be null.
template <int KIND>
__device__ __forceinline__ void unit_halves(u16* x, const float* bias, const i64* live, int width, int act) {
    const i64 rows = begin(live);
    const i64 row = blockIdx.x;
    const int column = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (row >= rows || column >= width) return;
    uint4* at = (uint4*)(x + row * width + column);
    const uint4 own = *at;
    float more[8] = {};
    if (bias) load_floats(more, bias, column, width);
    u32 two[4] = {own.x, own.y, own.z, own.w};
#pragma unroll
    for (int p = 0; p < 4; p++) {
        const u32 low = to_half(KIND, activate_half(act, from_half(KIND, two[p], 0) + more[2 * p]));
        const u32 high = to_half(KIND, activate_half(act, from_half(KIND, two[p], 1) + more[2 * p + 1]));
        two[p] = low | high << 16;
    }
    *at = make_uint4(two[0], two[1], two[2], two[3]);
}

#define NORMS(U)                                                                                \
    extern "C" __global__ void __launch_bounds__(1024, 1)                                       \
        norm_quantise_##U(const u8* h, i64 h_stride, const float* w, Targets targets,           \
                          const i64* live, int width, float eps TIMESTAMPS) {                   \
        RECORD_TIMESTAMPS                                                                       \
        norm_quantise<U>(h, h_stride, w, targets, live, width, eps);                            \
    }                                                                                           \
    extern "C" __global__ void __launch_bounds__(1024)                                          \
        norm_add_##U(const u8* h, i64 h_stride, const float* w, const u8* x, i64 x_stride,      \
                     u8* sum, i64 sum_stride, const i64* live, int width, float eps TIMESTAMPS) {\
        RECORD_TIMESTAMPS                                                                       \
        norm_add<U, false>(h, h_stride, w, x, x_stride, 0, sum, sum_stride, Targets(), live,    \
                           width, eps, 0);                                                      \
    }                                                                                           \
    extern "C" __global__ void __launch_bounds__(1024) norm_add_norm_##U(                       \
        const u8* h, i64 h_stride, const float* w, const u8* x, i64 x_stride, const float* w2,  \
        u8* sum, i64 sum_stride, Targets targets, const i64* live, int width, float eps,        \
        float eps2 TIMESTAMPS) {                                                                \
        RECORD_TIMESTAMPS                                                                       \
        norm_add<U, true>(h, h_stride, w, x, x_stride, w2, sum, sum_stride, targets, live,      \
                          width, eps, eps2);                                                    \
    }
NORMS(1)
NORMS(2)

#define GLU(N)                                                                                  \
    extern "C" __global__ void glu_##N(const u8* gate, i64 gate_stride, const u8* up,           \
                                       i64 up_stride, Targets targets, const i64* live,         \
                                       int lines, int width, int act TIMESTAMPS) {              \
        RECORD_TIMESTAMPS                                                                       \
        glu<N>(gate, gate_stride, up, up_stride, targets, live, lines, width, act);             \
    }
GLU(1)
GLU(8)

#define GLU_HALVES(NAME, KIND)                                                                  \
    extern "C" __global__ void glu_##NAME(const u16* gate, const u16* up, u8* out,              \
                                          i64 out_stride, const i64* live, int width,           \
                                          int act TIMESTAMPS) {                                 \
        RECORD_TIMESTAMPS                                                                       \
        glu_halves<KIND>(gate, up, out, out_stride, live, width, act);                          \
    }
GLU_HALVES(f16, 1)
GLU_HALVES(bf16, 2)

#define UNIT_HALVES(NAME, KIND)                                                                 \
    extern "C" __global__ void unit_##NAME(u16* x, const float* bias, const i64* live,          \
                                           int width, int act TIMESTAMPS) {                     \
        RECORD_TIMESTAMPS                                                                       \
        unit_halves<KIND>(x, bias, live, width, act);                                           \
    }
UNIT_HALVES(f16, 1)
UNIT_HALVES(bf16, 2)
