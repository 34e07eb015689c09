#pragma once
// Norm and rotation of heads of 64 P elements that are rotated as a whole, by one warp for each.

#include "norm.cuh"
#include "rope.cuh"

// Queries, keys or values of a step.
struct Heads {
    const u8* x;
    i64 stride;
    const float* norm;  // weight, or null
    int count, padding;
};

__device__ __forceinline__ const float* head_of(const Heads& all, i64 token, int own, int width) {
    return (const float*)(all.x + token * all.stride) + own * width;
}

// Sines and cosines of a position.
template <int P> struct SinCos {
    float s[P], c[P];
};

// Lane l rotates the pairs 32 j + l. Products are rounded as stated, so that all kernels get the same bits.
template <int P> struct WarpRotation {
    static constexpr int WIDE = 64 * P;
    float inverse[P], divisor[P], attention_factor;
    int interleaved;

    __device__ __forceinline__ WarpRotation(const Rotation& rotation)
        : attention_factor(rotation.attention_factor), interleaved(rotation.interleaved) {
        int lane = threadIdx.x % WARP;
#pragma unroll
        for (int j = 0; j < P; j++) {
            inverse[j] = rotation.inverse[32 * j + lane];
            divisor[j] = rotation.factors ? rotation.factors[32 * j + lane] : 1;
        }
    }

    // Those of a position, which waits for what the constructor loads.
    __device__ __forceinline__ SinCos<P> at(int pos) const {
        SinCos<P> sin_cos;
#pragma unroll
        for (int j = 0; j < P; j++) {
            const float each = divisor[j] == 1 ? inverse[j] : __fdiv_rn(inverse[j], divisor[j]);
            angle_of(pos, each, sin_cos.s[j], sin_cos.c[j]);
            sin_cos.s[j] *= attention_factor, sin_cos.c[j] *= attention_factor;
        }
        return sin_cos;
    }

    // Load the pairs of a row of floats.
    __device__ __forceinline__ void load(const float* x, float (&a)[P], float (&b)[P]) const {
        int lane = threadIdx.x % WARP;
#pragma unroll
        for (int j = 0; j < P; j++) {
            const float* from = x + (interleaved ? 64 * j + 2 * lane : 32 * j + lane);
            a[j] = from[0], b[j] = from[interleaved ? 1 : WIDE / 2];
        }
    }

    // `u` and `v`: the weight.
    __device__ __forceinline__ void norm(float (&a)[P], float (&b)[P], const float (&u)[P],
                                         const float (&v)[P], float eps) const {
        float sum = 0;
#pragma unroll
        for (int j = 0; j < P; j++) sum = fmaf(a[j], a[j], fmaf(b[j], b[j], sum));
        float factor = rms_factor(warp_sum(sum), WIDE, eps);
#pragma unroll
        for (int j = 0; j < P; j++) a[j] = a[j] * factor * u[j], b[j] = b[j] * factor * v[j];
    }

    static __device__ __forceinline__ void rotate(const SinCos<P>& t, float (&a)[P], float (&b)[P]) {
#pragma unroll
        for (int j = 0; j < P; j++) {
            const float y = a[j], z = b[j];
            a[j] = fmaf(y, t.c[j], -__fmul_rn(z, t.s[j])), b[j] = fmaf(y, t.s[j], __fmul_rn(z, t.c[j]));
        }
    }

    // From elements 2 l and 2 l + 1 in lane l to elements l and 32 + l.
    static __device__ __forceinline__ void straighten(float& y, float& z) {
        int lane = threadIdx.x % WARP, from = lane / 2;
        float y1 = __shfl_sync(FULL, y, from), z1 = __shfl_sync(FULL, z, from);
        float y2 = __shfl_sync(FULL, y, from + 16), z2 = __shfl_sync(FULL, z, from + 16);
        y = lane & 1 ? z1 : y1;
        z = lane & 1 ? z2 : y2;
    }

    // Elements lane + 32 j of a head, of its pairs.
    __device__ __forceinline__ void elements(float (&a)[P], float (&b)[P], float (&x)[2 * P]) const {
        if (interleaved)
#pragma unroll
            for (int j = 0; j < P; j++) straighten(a[j], b[j]);
#pragma unroll
        for (int j = 0; j < 2 * P; j++)
            x[j] = interleaved ? (j % 2 ? b[j / 2] : a[j / 2]) : j < P ? a[j % P] : b[j % P];
    }
};
