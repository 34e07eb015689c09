#pragma once
// A row held in the registers of a block of threads: warp w has the units w, w + warps, .. of 256
// elements, lane l of it the elements 32 i + l. So a norm reads its row once, and a warp has what
// quantize.cuh wants. U units a warp: rows of 8192 U elements at most.

#define UNIT 256

template <int U> struct Held {
    float v[8 * U];

    // Element i of unit u is at this column.
    static __device__ __forceinline__ int column(int u, int i) {
        int warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
        return (warp + u * warps) * UNIT + 32 * i + threadIdx.x % WARP;
    }

    // f(element, column) for the elements that there are of unit u, and of all units.
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

    // What a root-mean-square norm multiplies the row with.
    __device__ __forceinline__ float factor(int width, float eps) const {
        float sum = 0;
#pragma unroll
        for (int k = 0; k < 8 * U; k++) sum += v[k] * v[k];
        return 1.f / sqrtf(block_sum(sum) / width + eps);
    }
};

// A norm's weight: on its way before the row is there, if there are registers for it.
template <int U> struct Weight {
    const float* w;
    float held[U == 1 ? 8 : 1];

    __device__ __forceinline__ Weight(const float* from, int width) : w(from) {
        if (U > 1) return;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int c = Held<1>::column(0, i);
            held[U == 1 ? i : 0] = c < width ? w[c] : 0.f;
        }
    }

    // row[c] *= factor * w[c]
    __device__ __forceinline__ void scale(Held<U>& row, float factor, int width) const {
        if (U == 1) {
#pragma unroll
            for (int i = 0; i < 8; i++) row.v[i] = row.v[i] * factor * held[U == 1 ? i : 0];
        } else {
            const float* from = w;
            row.each(width, [=](float& x, int c) { x = x * factor * from[c]; });
        }
    }
};
