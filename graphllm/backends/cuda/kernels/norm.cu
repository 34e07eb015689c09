// Norms over the last axis. A block computes one line: a row of [T, D], or one of the `lines` lines of
// a row of [T, lines, D].

#include "norm.cuh"

struct Line {
    const float* x;
    float* out;
    bool live;
};

__device__ __forceinline__ Line line_of(const u8* x, i64 stride, float* out, const i64* live,
                                        int lines, int width) {
    const i64 rows = begin(live);
    i64 line = blockIdx.x, row = line / lines;
    const float* from = (const float*)(x + row * stride) + line % lines * width;
    return {from, out + line * width, row < rows};
}

template <int U>
__device__ __forceinline__ void rms_norm(const u8* x, i64 stride, const float* w, float* out,
                                         const i64* live, int lines, int width, float eps) {
    Weight<U> weight(w, width);
    Line line = line_of(x, stride, out, live, lines, width);
    if (!line.live) return;
    RowRegisters<U> row;
    row.load(line.x, width);
    weight.scale(row, row.factor(width, eps), width);
#pragma unroll
    for (int u = 0; u < U; u++) row.store_unit(u, line.out, width);
}

#define RMS_NORM(U)                                                                             \
    extern "C" __global__ void __launch_bounds__(1024)                                          \
        rms_norm_##U(const u8* x, i64 stride, const float* w, float* out, const i64* live,      \
                     int lines, int width, float eps TIMESTAMPS) {                              \
        RECORD_TIMESTAMPS                                                                       \
        rms_norm<U>(x, stride, w, out, live, lines, width, eps);                                \
    }
RMS_NORM(1)
RMS_NORM(2)

// Rows of any width.
extern "C" __global__ void rms_norm_0(const u8* x, i64 stride, const float* w, float* out,
                                      const i64* live, int lines, int width, float eps TIMESTAMPS) {
    RECORD_TIMESTAMPS
    Line line = line_of(x, stride, out, live, lines, width);
    if (!line.live) return;
    float sum = 0;
    for (int i = threadIdx.x; i < width; i += blockDim.x) sum += line.x[i] * line.x[i];
    float factor = rms_factor(block_sum(sum), width, eps);
    for (int i = threadIdx.x; i < width; i += blockDim.x) line.out[i] = line.x[i] * factor * w[i];
}

// b may be null. T: float, or u16 for f16.
template <class T>
__device__ __forceinline__ void layer_norm(const u8* x, i64 stride, const float* w, const float* b, float* out,
                                           const i64* live, int lines, int width, float eps) {
    const i64 rows = begin(live), line = blockIdx.x, row = line / lines;
    if (row >= rows) return;
    const T* from = (const T*)(x + row * stride) + line % lines * width;
    auto at = [&](int i) { return sizeof(T) == 2 ? from_f16((u16)from[i]) : (float)from[i]; };
    float sum = 0;
    for (int i = threadIdx.x; i < width; i += blockDim.x) sum += at(i);
    float mean = block_sum(sum) / width, squares = 0;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float v = at(i) - mean;
        squares += v * v;
    }
    float factor = 1.f / sqrtf(block_sum(squares) / width + eps);
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        out[line * width + i] = (at(i) - mean) * factor * w[i] + (b ? b[i] : 0.f);
}

#define LAYER_NORM(NAME, T)                                                                     \
    extern "C" __global__ void NAME(const u8* x, i64 stride, const float* w, const float* b,    \
                                    float* out, const i64* live, int lines, int width,          \
                                    float eps TIMESTAMPS) {                                     \
        RECORD_TIMESTAMPS                                                                       \
        layer_norm<T>(x, stride, w, b, out, live, lines, width, eps);                           \
    }
LAYER_NORM(layer_norm_f32, float)
LAYER_NORM(layer_norm_f16, u16)

extern "C" __global__ void softmax(const u8* x, i64 stride, float* out, const i64* live, int lines,
                                   int width TIMESTAMPS) {
    RECORD_TIMESTAMPS
    Line line = line_of(x, stride, out, live, lines, width);
    if (!line.live) return;
    float most = -INFINITE;
    for (int i = threadIdx.x; i < width; i += blockDim.x) most = fmaxf(most, line.x[i]);
    most = block_max(most);
    float sum = 0;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float e = expf(line.x[i] - most);
        line.out[i] = e;
        sum += e;
    }
    float factor = 1.f / block_sum(sum);
    for (int i = threadIdx.x; i < width; i += blockDim.x) line.out[i] *= factor;
}
