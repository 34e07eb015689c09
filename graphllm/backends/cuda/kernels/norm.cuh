#pragma once
// A row in the registers of a block: warp w holds the units w, w + warps, ... of 256 elements, and its
// lane l their elements 32 i + l. So a norm reads its row once, and the values are laid out as
// quantize.cuh needs them. U: units per warp, for rows of at most 8192 U elements.

#define UNIT 256

template <int U> struct RowRegisters {
    float v[8 * U];

    // Column of element i of unit u.
    static __device__ __forceinline__ int column(int u, int i) {
        int warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
        return (warp + u * warps) * UNIT + 32 * i + threadIdx.x % WARP;
    }

    // Call f(element, column) for the elements of unit u, or of all units, that are within the row.
    template <class F> __device__ __forceinline__ void each_of(int u, int width, F f) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int c = column(u, i);
            if (c < width) f(v[8 * u + i], c);
        }
    }

    template <class F> __device__ __forceinline__ void each(int width, F f) {
#pragma unroll
        for (int u = 0; u < U; u++) each_of(u, width, f);
    }

    __device__ __forceinline__ void load_unit(int u, const float* row, int width) {
#pragma unroll
        for (int i = 0; i < 8; i++) v[8 * u + i] = 0;
        each_of(u, width, [=](float& x, int c) { x = row[c]; });
    }

    __device__ __forceinline__ void load(const float* row, int width) {
#pragma unroll
        for (int u = 0; u < U; u++) load_unit(u, row, width);
    }

    // The factor of an RMS norm.
    __device__ __forceinline__ float factor(int width, float eps) const {
        float sum = 0;
#pragma unroll
        for (int k = 0; k < 8 * U; k++) sum += v[k] * v[k];
        return 1.f / sqrtf(block_sum(sum) / width + eps);
    }
};

// The weight of a norm, loaded before the wait if registers suffice (U == 1).
template <int U> struct Weight {
    const float* w;
    float held[U == 1 ? 8 : 1];

    __device__ __forceinline__ Weight(const float* from, int width) : w(from) {
        if (U > 1) return;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int c = RowRegisters<1>::column(0, i);
            held[U == 1 ? i : 0] = c < width ? w[c] : 0.f;
        }
    }

    // row[c] *= factor * w[c]
    __device__ __forceinline__ void scale(RowRegisters<U>& row, float factor, int width) const {
        if (U == 1) {
#pragma unroll
            for (int i = 0; i < 8; i++) row.v[i] = row.v[i] * factor * held[U == 1 ? i : 0];
        } else {
            const float* from = w;
            row.each(width, [=](float& x, int c) { x = x * factor * from[c]; });
        }
    }
};
