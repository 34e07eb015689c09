#pragma once
// Stores elements of a head to a pool of keys or values. POOL: 0 float32, 1 float16, 2 q8_0, 3 q4_0, 4 fp8. A
// quantised slot has the elements of all heads, and then the scales of all heads (runtime/pool_layout.py).

#include "quantize.cuh"

#ifndef POOL
#define POOL 1
#endif
#define HEAD_SCALE (POOL == 4)  // a head has one scale

struct Pool {
    u8* at;
    i64 stride;  // bytes between slots
    const int* slot;  // slot of each token; negative: do not store
    i64 scales;  // of quantised pools: bytes from a slot to its scales
    int width, padding;
};

// The scale of a head, if it has one, from the bits of its largest magnitude.
__device__ __forceinline__ BlockScale head_scale(u32 most) { return BlockScale(HEAD_SCALE ? most : 0, E4M3_STEPS); }

// The bits of a q8_0 or q4_0 block's largest magnitude, and whether its elements are divided by a scale. The
// declaration of kv_write says what becomes of values that are not finite or almost zero.
struct BlockMost {
    u32 bits;
    __device__ __forceinline__ bool finite() const { return bits < 0x7f800000u; }
    __device__ __forceinline__ bool held() const { return finite() && bits >= 0x0d800000u; }  // 2^-100
};

// Store N adjacent blocks of q8_0 or q4_0 of a head, of which a warp has the elements in order. Rounding is that of
// graphllm.formats.quantization.quantise. Lane n divides for block n, since divisions are code with branches, which the
// compiler does not overlap.
template <int N>
__device__ __forceinline__ void store_blocks(const Pool& pool, u8* slot, int head, int first,
                                             const float (&x)[N]) {
    constexpr bool EIGHT = POOL == 2;
    const int lane = threadIdx.x % WARP, blocks = pool.width / 32;
    BlockMost most[N], own;
    float extreme = 0;  // what the scale of the lane's block is computed from
#pragma unroll
    for (int n = 0; n < N; n++) {
        most[n].bits = warp_max(abs_bits(x[n]));
        float largest = __uint_as_float(most[n].bits);
        // The first element of the largest magnitude becomes -8.
        if (!EIGHT) largest = __shfl_sync(FULL, x[n], __ffs(__ballot_sync(FULL, abs_bits(x[n]) == most[n].bits)) - 1);
        if (n == 0 || lane == n) own = most[n], extreme = largest;
    }
    float d = EIGHT ? 0.f : -0.f;
    if (own.held()) d = EIGHT ? __fdiv_rn(extreme, 127.f) : __fmul_rn(extreme, -0.125f);
    const float inverse = own.held() ? __frcp_rn(d) : 0.f;
    u8* elements = slot + (head * blocks + first) * (EIGHT ? 32 : 16);
    u16* scales = (u16*)(slot + pool.scales) + head * blocks + first;
    if (lane < N) scales[lane] = own.finite() ? to_f16(d) : 0x7e00;
#pragma unroll
    for (int n = 0; n < N; n++) {
        const float scaled = most[n].held() ? __fmul_rn(x[n], __shfl_sync(FULL, inverse, n)) : 0.f;
        u8* to = elements + n * (EIGHT ? 32 : 16);
        if (EIGHT) {
            to[lane] = (u8)(int)truncf(__fadd_rn(scaled, copysignf(0.5f, scaled)));
        } else {
            int q = (int)fminf(__fadd_rn(scaled, 8.5f), 15.f), upper = __shfl_down_sync(FULL, q, 16);
            if (lane < 16) to[lane] = (u8)(q | upper << 4);
        }
    }
}

// Store elements i, i + 32, ... of a head, N of them. Lane l of a warp holds those of which the number % 32 is l, and
// all lanes those of the same blocks of 32. `scale`: of the head.
template <int N>
__device__ __forceinline__ void store_kv(const Pool& pool, i64 slot, int head, int i, const float (&x)[N],
                                         const BlockScale& scale) {
    u8* to = pool.at + slot * pool.stride;
#if POOL == 2 || POOL == 3
    store_blocks(pool, to, head, i / 32, x);
#else
#pragma unroll
    for (int n = 0; n < N; n++) {
        const int at = head * pool.width + i + 32 * n;
#if POOL == 0
        ((float*)to)[at] = x[n];
#elif POOL == 1
        ((u16*)to)[at] = to_f16(x[n]);
#else
        to[at] = scale.inverse == 0.f ? 0 : (u8)two_e4m3(__fmul_rn(x[n], scale.inverse), 0.f);
#endif
    }
    if (HEAD_SCALE && i == 0) ((float*)(to + pool.scales))[head] = scale.d;
#endif
}
