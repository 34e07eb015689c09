#pragma once
// Elements of pools of keys and values as f16, for tensor cores. POOL: 1 float16, 2 q8_0, 3 q4_0, 4 fp8, as in
// graphllm.graph.dtype.CACHED.
//
// A slot has the elements of all its heads and then, but for float16, the scales of all its heads (see
// runtime/pool_layout.py), so that elements are loaded as they are multiplied: 8 bytes at a time of keys, and 4 of
// values. Slots are aligned to four bytes, those of float16 to 16.

#if POOL == 1
constexpr int HEAD_BYTES = 2 * DEPTH;
#else
constexpr int HEAD_BYTES = POOL == 3 ? DEPTH / 2 : DEPTH;  // of elements
constexpr int SCALES = POOL == 4 ? 1 : DEPTH / 32, SCALE_BYTES = POOL == 4 ? 4 : 2 * SCALES;  // of a head
#endif

// Load 16, 8, 4 or 2 bytes that no other thread reads: the L1 cache does not keep them.
#define LOAD_ONCE "ld.global.L1::no_allocate.L2::128B."
__device__ __forceinline__ uint4 load_once16(const u8* from) {
    uint4 r;
    asm volatile(LOAD_ONCE "v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(from));
    return r;
}
__device__ __forceinline__ uint2 load_once8(const u8* from) {
    uint2 r;
    asm volatile(LOAD_ONCE "v2.u32 {%0, %1}, [%2];" : "=r"(r.x), "=r"(r.y) : "l"(from));
    return r;
}
__device__ __forceinline__ u32 load_once4(const u8* from) {
    u32 r;
    asm volatile(LOAD_ONCE "u32 %0, [%1];" : "=r"(r) : "l"(from));
    return r;
}
__device__ __forceinline__ u32 load_once2(const u8* from) {
    u16 r;
    asm volatile(LOAD_ONCE "u16 %0, [%1];" : "=h"(r) : "l"(from));
    return r;
}

#if POOL != 1
// Byte of a head's elements that has number `first`, and for q4_0 where its bits begin: each byte of a block has
// elements i and 16 + i.
__device__ __forceinline__ int byte_of(int first) { return POOL == 3 ? first / 32 * 16 + first % 16 : first; }
__device__ __forceinline__ int shift_of(int first) { return POOL == 3 ? first % 32 / 16 * 4 : 0; }

// Two stored elements, in the bytes LOW and HIGH of `four`, times `scales` (of each), as f16: the products of a
// float32 multiplication, rounded.
template <int LOW, int HIGH> __device__ __forceinline__ u32 two_halves(u32 four, u32 scales) {
    u32 x;
#if POOL == 4
    // The bits of e4m3, moved, are those of f16 that are smaller by 2^8, which scales make up for.
    const u32 two = __byte_perm(four, 0, 0x0404 | LOW << 4 | HIGH << 12);
    x = (two & 0x7f007f00) >> 1 | two & 0x80008000;
#else
    // As f16, 0x64 and a byte are 1024 more than the byte, and `zero` is 1024 more than what it has too much.
    const u32 zero = POOL == 2 ? 0x64806480u : 0x64086408u;
    x = __byte_perm(four, 0x64646464u, 0x4040 | LOW | HIGH << 8);
    asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(x) : "r"(zero));
#endif
    asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(x) : "r"(scales));
    return x;
}

// Four bytes as `two_halves` reads them: unsigned integers, or e4m3.
__device__ __forceinline__ u32 unsigned_bytes(u32 four, int shift) {
    return POOL == 2 ? four ^ 0x80808080u : POOL == 3 ? four >> shift & 0x0f0f0f0fu : four;
}

// A stored scale as f16: bits of one, or of a float32 for e4m3.
__device__ __forceinline__ u16 scale_half(u32 stored) {
    return POOL == 4 ? to_f16(__uint_as_float(stored) * 256.f) : (u16)stored;
}

// Eight adjacent elements times their scale, as pairs. `first`: number of the first one.
__device__ __forceinline__ void eight_halves(uint2 eight, int first, u32 scale, u32* to) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 four = unsigned_bytes(i ? eight.y : eight.x, shift_of(first));
        to[2 * i] = two_halves<0, 1>(four, scale), to[2 * i + 1] = two_halves<2, 3>(four, scale);
    }
}
#endif
