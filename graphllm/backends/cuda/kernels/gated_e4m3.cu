// Gated units of fp8 with many tokens, from products of cuBLASLt; see gated_e4m3.py.

#include "row_results.cuh"

// A product of e4m3 as cuBLASLt stores it: f16 [T, width] without the scales of weights and activations.
struct UnscaledProduct {
    const u16* y;
    const float* scales;  // of the matrix's rows
};

// act(gate) * up of unscaled products. x_scales: that of the first token's activation; others follow after
// `x_stride` bytes each. All are multiplied by `factor`. A block computes TOGETHER rows, for which it reads the
// scales of the matrices once.
constexpr int TOGETHER = 2;

template <int U>
__device__ __forceinline__ void gated_e4m3(const UnscaledProduct& gate, const UnscaledProduct& up,
                                           const u8* x_scales, i64 x_stride, float factor,
                                           const Targets& targets, const i64* live, int width, int act) {
    const i64 rows = begin(live), first = (i64)TOGETHER * blockIdx.x;
    if (first >= rows) return;
    RowRegisters<U> found[TOGETHER];
#pragma unroll
    for (int u = 0; u < U; u++) {
        const int at = found[0].column(u);
        float scales[2][8];
        load_floats(scales[0], gate.scales, at, width);
        load_floats(scales[1], up.scales, at, width);
#pragma unroll
        for (int r = 0; r < TOGETHER; r++) {
            const i64 row = min(first + r, rows - 1);
            const float scale = factor * *(const float*)(x_scales + row * x_stride);
            float *v = found[r].v + 8 * u, other[8];
            load_row(v, gate.y + row * width, true, at, width);
            load_row(other, up.y + row * width, true, at, width);
#pragma unroll
            for (int i = 0; i < 8; i++)
                v[i] = activate(act, v[i] * (scales[0][i] * scale)) * (other[i] * (scales[1][i] * scale));
        }
    }
#pragma unroll
    for (int r = 0; r < TOGETHER; r++)
        if (first + r < rows) emit_row(found[r], targets, width, first + r);
}

#define GATED_E4M3(U)                                                                           \
    extern "C" __global__ void __launch_bounds__(512)                                           \
        gated_e4m3_##U(UnscaledProduct gate, UnscaledProduct up, const u8* x_scales,            \
                       i64 x_stride, float factor, Targets targets, const i64* live,            \
                       int width, int act TIMESTAMPS) {                                         \
        RECORD_TIMESTAMPS                                                                       \
        gated_e4m3<U>(gate, up, x_scales, x_stride, factor, targets, live, width, act);         \
    }
GATED_E4M3(2)
GATED_E4M3(4)
