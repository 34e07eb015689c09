// Activations as int8 in blocks. A warp does one block of a row.

#include "quantise.cuh"

template <int N>
__device__ __forceinline__ void quantise(const u8* x, i64 stride, u8* out, i64 out_stride,
                                         const i64* live, int width) {
    begin();
    i64 row = blockIdx.x;
    int first = (blockIdx.y * (blockDim.x / WARP) + threadIdx.x / WARP) * 32 * N;
    if (row >= *live || first >= width) return;
    const float* from = (const float*)(x + row * stride) + first + threadIdx.x % WARP;
    float v[N];
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = from[32 * i];
    emit_to<N>(v, {out, out_stride, 32 * N, 0}, row, first, width);
}

extern "C" __global__ void quantise_32(const u8* x, i64 stride, u8* out, i64 out_stride,
                                       const i64* live, int width) {
    quantise<1>(x, stride, out, out_stride, live, width);
}

extern "C" __global__ void quantise_256(const u8* x, i64 stride, u8* out, i64 out_stride,
                                        const i64* live, int width) {
    quantise<8>(x, stride, out, out_stride, live, width);
}
