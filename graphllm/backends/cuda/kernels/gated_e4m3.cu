// Gated units of fp8 with many tokens, from products of cuBLASLt; see gated_e4m3.py.

#include "row_results.cuh"

// A product of e4m3 as cuBLASLt stores it: f16 [T, width] without the scales of weights and activations.
struct UnscaledProduct {
    const u16* y;
    const float* scales;  // of the matrix's rows
};

// Eight scaled elements of the block's row; `scale` is that of its activation.
__device__ __forceinline__ void load_scaled(float* v, const UnscaledProduct& p, float scale, int at, int width) {
    float own[8];
    load_row(v, p.y + blockIdx.x * (i64)width, true, at, width);
    load_floats(own, p.scales, at, width);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] *= own[i] * scale;
}

// act(gate) * up of unscaled products. x_scales: that of the first token's activation; others follow after
// `x_stride` bytes each. All are multiplied by `factor`. A block computes one row.
template <int U>
__device__ __forceinline__ void gated_e4m3(const UnscaledProduct& gate, const UnscaledProduct& up,
                                           const u8* x_scales, i64 x_stride, float factor,
                                           const Targets& targets, const i64* live, int width, int act) {
    const i64 rows = begin(live);
    if (blockIdx.x >= rows) return;
    const float scale = factor * *(const float*)(x_scales + blockIdx.x * x_stride);
    RowRegisters<U> row;
#pragma unroll
    for (int u = 0; u < U; u++) {
        float *v = row.v + 8 * u, other[8];
        load_scaled(v, gate, scale, row.column(u), width);
        load_scaled(other, up, scale, row.column(u), width);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = activate(act, v[i]) * other[i];
    }
    emit_row(row, targets, width);
}

#define GATED_E4M3(U)                                                                           \
    extern "C" __global__ void __launch_bounds__(1024)                                          \
        gated_e4m3_##U(UnscaledProduct gate, UnscaledProduct up, const u8* x_scales,            \
                       i64 x_stride, float factor, Targets targets, const i64* live,            \
                       int width, int act TIMESTAMPS) {                                         \
        RECORD_TIMESTAMPS                                                                       \
        gated_e4m3<U>(gate, up, x_scales, x_stride, factor, targets, live, width, act);         \
    }
GATED_E4M3(1)
GATED_E4M3(2)
