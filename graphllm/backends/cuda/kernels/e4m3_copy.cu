// Copies of weights in e4m3 with a scale per row, for steps of many tokens; see e4m3_copy.py.
// FORMAT: format of the weights.

#include "dot.cuh"
#include "quantize_rows.cuh"

// Elements 8 p to 8 p + 7 of an unpacked item, in the order of its parts.
template <int PARTS>
__device__ __forceinline__ void eight_of(const Unpacked<PARTS>& u, int p, float* v) {
#pragma unroll
    for (int e = 0; e < 8; e++) {
        const i8 q = (i8)(u.v[2 * p + e / 4] >> 8 * (e % 4));
        v[e] = fmaf(u.scale[p / 2], (float)q, u.offset[p / 2]);
    }
}

template <int COUNT>
__device__ __forceinline__ void eight_of(const Floats<COUNT>& u, int p, float* v) {
#pragma unroll
    for (int e = 0; e < 8; e++) v[e] = u.v[8 * p + e];
}

// Where these elements are in their row, whose item j it is.
template <class W> __device__ __forceinline__ int place_of(int j, int p) {
    if constexpr (W::ITEM == 8)
        return 8 * j;
    else
        return W::at(j, p / 2) + 8 * (p % 2);
}

// Store a row of a matrix as e4m3, and its scale. A block takes a row, and unpacks it twice.
extern "C" __global__ void __launch_bounds__(256)
    copy_e4m3(Planes w, int items, int depth, u8* to, float* scales) {
    begin();
    const i64 row = blockIdx.x;
    float v[8];
    u32 most = 0;
    for (int j = threadIdx.x; j < items; j += blockDim.x) {
        FORMAT item;
        FORMAT::Values u;
        item.load(FORMAT::item(w, row * items + j));
        item.unpack(j, u);
#pragma unroll
        for (int p = 0; p < FORMAT::ITEM / 8; p++) {
            eight_of(u, p, v);
            most = larger(most, largest8(v));
        }
    }
    const BlockScale scale = row_scale(F8_ROW, most);
    for (int j = threadIdx.x; j < items; j += blockDim.x) {
        FORMAT item;
        FORMAT::Values u;
        item.load(FORMAT::item(w, row * items + j));
        item.unpack(j, u);
#pragma unroll
        for (int p = 0; p < FORMAT::ITEM / 8; p++) {
            eight_of(u, p, v);
            *(uint2*)(to + row * depth + place_of<FORMAT>(j, p)) = e4m3_of8(v, scale.inverse);
        }
    }
    if (threadIdx.x == 0) scales[row] = scale.d;
}
