// Quantization of activations. A warp stores one block of a line (a row has one or several), or 256
// columns of a row.

#include "quantize_rows.cuh"

template <int N>
__device__ __forceinline__ void quantise(const u8* x, i64 stride, u8* out, i64 out_stride,
                                         const i64* live, int lines, int width, int out_line) {
    i64 row = blockIdx.x / lines;
    int line = blockIdx.x % lines;
    int first = (blockIdx.y * (blockDim.x / WARP) + threadIdx.x / WARP) * 32 * N;
    const float* from = (const float*)(x + row * stride) + (i64)line * width;
    launch_next();
    const i64 rows = *(volatile const i64*)live;
#pragma unroll 1
    for (int pass = first_pass(); pass < 2; pass++) {
        if (pass) wait_for_previous();
        if (row >= rows || first >= width) continue;
        float v[N];
        if constexpr (N == 8)
            load_floats<true>(v, from, first + 8 * (threadIdx.x % WARP), width);
        else
            v[0] = load_l2(from + first + threadIdx.x % WARP);
        emit_to<N>(v, {out, out_stride, 32 * N, out_line}, row, line, first, width, pass);
    }
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

extern "C" __global__ void quantise_128(const u8* x, i64 stride, u8* out, i64 out_stride,
                                        const i64* live, int lines, int width,
                                        int out_line TIMESTAMPS) {
    RECORD_TIMESTAMPS
    const i64 rows = begin(live), row = blockIdx.x / lines;
    const int line = blockIdx.x % lines;
    const int first = (blockIdx.y * (blockDim.x / WARP) + threadIdx.x / WARP) * 256;
    if (row >= rows || first >= width) return;
    float v[8];
    load_floats(v, (const float*)(x + row * stride) + (i64)line * width, first + 8 * (threadIdx.x % WARP), width);
    emit_to<8>(v, {out, out_stride, F8_128, out_line}, row, line, first, width);
}

// A block stores one line, as A8_ROW or F8_ROW.
extern "C" __global__ void __launch_bounds__(1024)
    quantise_row(const u8* x, i64 stride, u8* out, i64 out_stride, const i64* live, int lines, int width,
                 int out_line, int kind TIMESTAMPS) {
    RECORD_TIMESTAMPS
    const i64 rows = begin(live), row = blockIdx.x / lines;
    const int line = blockIdx.x % lines;
    if (row >= rows) return;
    const float* from = (const float*)(x + row * stride) + (i64)line * width;
    u8* to = out + row * out_stride + line * (i64)out_line;
    const int first = 8 * threadIdx.x, step = 8 * blockDim.x;
    float v[8], held[8];  // the first elements stay in registers, others are read again
    load_floats(held, from, first, width);
    u32 most = largest8(held);
    for (int at = first + step; at < width; at += step) {
        load_floats(v, from, at, width);
        most = larger(most, largest8(v));
    }
    const BlockScale scale = row_scale(kind, most);
    int sum = first < width ? store_elements(kind, held, scale, to + first) : 0;
    for (int at = first + step; at < width; at += step) {
        load_floats(v, from, at, width);
        sum += store_elements(kind, v, scale, to + at);
    }
    store_tail(kind, scale, sum, to, width);
}

// Activations with scales as floats again: f16 with values clamped to its range, or float32. A thread has
// eight elements of a line.
extern "C" __global__ void dequantise(const u8* x, i64 stride, i64 x_line, u8* out, const i64* live, int lines,
                                      int width, int kind, int halves TIMESTAMPS) {
    RECORD_TIMESTAMPS
    const i64 rows = begin(live), row = blockIdx.x / lines;
    const int line = blockIdx.x % lines, at = 8 * (blockIdx.y * blockDim.x + threadIdx.x);
    if (row >= rows || at >= width) return;
    const u8* from = x + row * stride + line * x_line;
    const uint2 q = *(const uint2*)(from + at);
    const float d = ((const float*)(from + width))[kind == F8_128 ? at / 128 : 0];
    float v[8];
#pragma unroll
    for (int e = 0; e < 8; e++) {
        const u32 byte = (e < 4 ? q.x : q.y) >> 8 * (e % 4) & 0xff;
        v[e] = __fmul_rn(d, kind == A8_ROW ? (float)as_i8(byte) : from_e4m3(byte));
    }
    const i64 to = (row * lines + line) * width + at;
    if (!halves) {
        store_floats(v, (float*)out + to, 0, 8);
        return;
    }
#pragma unroll
    for (int e = 0; e < 8; e += 2) ((u32*)((u16*)out + to))[e / 2] = two_within_f16(v[e], v[e + 1]);
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
