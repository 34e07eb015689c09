#pragma once
// A row in the registers of a block: warp w holds the units w, w + warps, ... of 256 elements, and its
// lane l their elements 8 l to 8 l + 7. So a norm reads its row once, and the values are laid out as
// quantize.cuh needs them. U: units per warp, for rows of at most 8192 U elements.

#include "rows.cuh"

#define UNIT 256

// The factor of an RMS norm of `width` elements, from the sum of their squares.
__device__ __forceinline__ float rms_factor(float squares, int width, float eps) {
    return rsqrtf(__fdividef(squares, width) + eps);
}

template <int U> struct RowRegisters {
    float v[8 * U];

    // Column of the first element of unit u that this warp, or this thread, holds.
    static __device__ __forceinline__ int unit(int u) {
        return ((int)threadIdx.x / WARP + u * ((int)blockDim.x / WARP)) * UNIT;
    }
    static __device__ __forceinline__ int column(int u) {
        return unit(u) + 8 * ((int)threadIdx.x % WARP);
    }

    // L2: by `load_l2`.
    template <bool L2 = false> __device__ __forceinline__ void load_unit(int u, const float* row, int width) {
        load_floats<L2>(v + 8 * u, row, column(u), width);
    }

    template <bool L2 = false> __device__ __forceinline__ void load(const float* row, int width) {
#pragma unroll
        for (int u = 0; u < U; u++) load_unit<L2>(u, row, width);
    }

    __device__ __forceinline__ void store_unit(int u, float* row, int width) const {
        store_floats(v + 8 * u, row, column(u), width);
    }

    // The factor of an RMS norm.
    __device__ __forceinline__ float factor(int width, float eps) const {
        float sum = 0;
#pragma unroll
        for (int k = 0; k < 8 * U; k++) sum += v[k] * v[k];
        return rms_factor(block_sum(sum), width, eps);
    }
};

// The weight of a norm, loaded before the wait if registers suffice (U == 1).
template <int U> struct Weight {
    const float* w;
    RowRegisters<1> held;

    __device__ __forceinline__ Weight(const float* from, int width) : w(from) {
        if (U == 1) held.load(w, width);
    }

    // Multiply the elements by `factor`, then by the weight.
    __device__ __forceinline__ void scale(RowRegisters<U>& row, float factor, int width) const {
#pragma unroll
        for (int u = 0; u < U; u++) {
            float own[8];
            if (U > 1) load_floats(own, w, row.column(u), width);
#pragma unroll
            for (int i = 0; i < 8; i++)
                row.v[8 * u + i] = row.v[8 * u + i] * factor * (U > 1 ? own[i] : held.v[i]);
        }
    }
};
