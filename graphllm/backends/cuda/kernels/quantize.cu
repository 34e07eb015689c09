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
    const float* from = (const float*)(x + row * stride) + (i64)line * width;
    float v[N];
    if constexpr (N == 8)
        load_floats(v, from, first + 8 * (threadIdx.x % WARP), width);
    else
        v[0] = from[first + threadIdx.x % WARP];
    emit_to<N>(v, {out, out_stride, 32 * N, out_line}, row, line, first, width);
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
    float v[8];
    load_floats(v, (const float*)(x + row * stride), first + 8 * (threadIdx.x % WARP), width);
    emit_to<8>(v, {out, out_stride, kind, 0}, row, 0, first, width);
}
