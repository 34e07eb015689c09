#pragma once
// Weights that are plain numbers, in items of 16 bytes; see blocks.cuh for those in blocks.

#include "blocks.cuh"

template <int COUNT> struct Floats {
    float v[COUNT];
};

struct F16 {
    static constexpr int ITEM = 8;
    typedef Floats<8> Values;
    uint4 q;
    __device__ __forceinline__ void load(const Planes& w, size_t i) { q = stream16(w.a + 16 * i); }
    __device__ __forceinline__ void unpack(int j, Values& u) const {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            u.v[2 * k] = low_half(word(q, k));
            u.v[2 * k + 1] = high_half(word(q, k));
        }
    }
};

struct BF16 : F16 {
    __device__ __forceinline__ void unpack(int j, Values& u) const {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            u.v[2 * k] = __uint_as_float(word(q, k) << 16);
            u.v[2 * k + 1] = __uint_as_float(word(q, k) & 0xffff0000);
        }
    }
};

struct F32 {
    static constexpr int ITEM = 4;
    typedef Floats<4> Values;
    uint4 q;
    __device__ __forceinline__ void load(const Planes& w, size_t i) { q = stream16(w.a + 16 * i); }
    __device__ __forceinline__ void unpack(int j, Values& u) const {
#pragma unroll
        for (int k = 0; k < 4; k++) u.v[k] = __uint_as_float(word(q, k));
    }
};
