// Rows of a table in a quantised format, by token id. FORMAT: a struct of formats.cuh.
//
// Values have the bits that the decoders in graphllm/formats compute: in a format with minima the product of
// scale and integer is exact in float32, so one rounding gives the result of two. The table lies in planes
// (weight_packing.py), so that a linear may share it as its weight. A thread block does one token (x)
// and some items of its row (y), a thread one item.

#include "formats.cuh"

// Weight e of part p of an item.
template <int PARTS> __device__ __forceinline__ float value(const Unpacked<PARTS>& u, int p, int e) {
    const int v = (i8)(u.v[4 * p + e / 4] >> 8 * (e % 4));
    if (FORMAT::ZERO_POINT < 0) return fmaf(u.scale[p], (float)v, u.offset[p]);
    return __fmul_rn(u.scale[p], (float)(v - FORMAT::ZERO_POINT));  // keeps the sign of a zero
}
template <int COUNT> __device__ __forceinline__ float value(const Floats<COUNT>& u, int p, int e) {
    return u.v[16 * p + e];
}

extern "C" __global__ void embedding(const int* ids, Planes w, i64 count, float* out,
                                     const i64* live, int width TIMESTAMPS) {
    RECORD_TIMESTAMPS
    const i64 rows = begin(live);
    const i64 row = blockIdx.x;
    const int items = width / FORMAT::ITEM, j = blockIdx.y * blockDim.x + threadIdx.x;
    if (row >= rows || j >= items) return;
    const int id = ids[row];
    const bool known = 0 <= id && id < count;
    FORMAT item;
    FORMAT::Values u;
    item.load(FORMAT::item(w, (size_t)(known ? id : 0) * items + j));
    item.unpack(j, u);
#pragma unroll
    for (int p = 0; p < FORMAT::PARTS; p++) {
        float4* to = (float4*)(out + row * width + FORMAT::at(j, p));
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float x[4];
#pragma unroll
            for (int e = 0; e < 4; e++) x[e] = known ? value(u, p, 4 * k + e) : NOT_A_NUMBER;
            to[k] = make_float4(x[0], x[1], x[2], x[3]);
        }
    }
}
