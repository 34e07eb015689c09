#pragma once
// An RMS norm of one token, shared by the linears around it, so that it needs no launch of its own:
//
//     norm(h) = factor * (h * weight), where factor = 1 / sqrt(mean of the squares of h + eps)
//
// The linear that makes h stores h * weight as int8 in blocks of 32, whose steps do not depend on the factor, and sums of
// squares of h (NORM_AFTER). The linears after it multiply these int8, and their results by the factor (NORM_BEFORE).

#include "norm.cuh"
#include "quantize.cuh"

#ifndef NORM_AFTER
#define NORM_AFTER 0
#endif
#ifndef NORM_BEFORE
#define NORM_BEFORE 0
#endif
#if NORM_AFTER || NORM_BEFORE
#define SPLIT_NORM , SplitNorm split_norm
#else
#define SPLIT_NORM
#endif

struct SplitNorm {
    const float* weight;
    u8* row;         // the int8
    float* squares;  // sums of squares of each block
    int width;       // of the row
    float eps;
};

// Store the block whose first element is `first`, by a warp, of which each lane has an element and its weight.
__device__ __forceinline__ void store_norm_block(const SplitNorm& norm, float h, float weight, int first) {
    const float squares = warp_sum(h * h);
    if (threadIdx.x % WARP == 0) norm.squares[first / WARP] = squares;
    emit_32(h * weight, norm.row, first, norm.width);
}

// The factor of the norm, by a warp, which requests the first sums when it makes this object.
struct SplitNormFactor {
    static constexpr int EACH = 4;
    float sums[EACH];

    __device__ __forceinline__ explicit SplitNormFactor(const SplitNorm& norm) { load(norm, threadIdx.x % WARP); }

    // Every lane gets it.
    __device__ __forceinline__ float get(const SplitNorm& norm) {
        float all = total();
#pragma unroll 1
        for (int at = threadIdx.x % WARP + EACH * WARP; at < norm.width / WARP; at += EACH * WARP) {
            load(norm, at);
            all += total();
        }
        return rms_factor(warp_sum(all), norm.width, norm.eps);
    }

  private:
    __device__ __forceinline__ void load(const SplitNorm& norm, int at) {
#pragma unroll
        for (int i = 0; i < EACH; i++) sums[i] = at + i * WARP < norm.width / WARP ? load_l2(norm.squares + at + i * WARP) : 0;
    }
    __device__ __forceinline__ float total() const { return sums[0] + sums[1] + (sums[2] + sums[3]); }
};
