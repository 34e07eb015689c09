// Quantization of activations. A warp stores one block of a line (a row has one or several), or 256
// columns of a row.

#include "quantize.cuh"

template <int N>
__device__ __forceinline__ void quantise(const u8* x, i64 stride, u8* out, i64 out_stride,
                                         const i64* live, int lines, int width, int out_line) {
    const i64 rows = begin(live);
    i64 row = blockIdx.x / lines;
    int line = blockIdx.x % lines;
    int first = (blockIdx.y * (blockDim.x / WARP) + threadIdx.x / WARP) * 32 * N;
    if (row >= rows || first >= width) return;
    const float* from = (const float*)(x + row * stride) + (i64)line * width + first;
    from += threadIdx.x % WARP;
    float v[N];
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = from[32 * i];
    emit_to<N>(v, {out + (i64)line * out_line, out_stride, 32 * N, 0}, row, first, width);
}

extern "C" __global__ void quantise_32(const u8* x, i64 stride, u8* out, i64 out_stride,
                                       const i64* live, int lines, int width,
                                       int out_line TIMESTAMPS) {
    RECORD_TIMESTAMPS
    quantise<1>(x, stride, out, out_stride, live, lines, width, out_line);
}

extern "C" __global__ void quantise_256(const u8* x, i64 stride, u8* out, i64 out_stride,
                                        const i64* live, int lines, int width,
                                        int out_line TIMESTAMPS) {
    RECORD_TIMESTAMPS
    quantise<8>(x, stride, out, out_stride, live, lines, width, out_line);
}

extern "C" __global__ void narrow(const u8* x, i64 stride, u8* out, i64 out_stride,
                                  const i64* live, int width, int kind TIMESTAMPS) {
    RECORD_TIMESTAMPS
    const i64 rows = begin(live);
    i64 row = blockIdx.x;
    int first = (blockIdx.y * (blockDim.x / WARP) + threadIdx.x / WARP) * 256;
    if (row >= rows || first >= width) return;
    const float* from = (const float*)(x + row * stride);
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int column = first + 32 * i + threadIdx.x % WARP;
        v[i] = column < width ? from[column] : 0.f;
    }
    emit_to<8>(v, {out, out_stride, kind, 0}, row, first, width);
}
