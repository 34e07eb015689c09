#pragma once
// Block weights as pairs of f16 in registers, in the order of tensor core fragments.
//
// A chunk of a row is CHUNK elements of the depth, of which each of four threads (`part`) expands
// CHUNK / 4 consecutive ones. These are groups of four: group `gamma` of all four threads is what a
// tensor core takes at a time (16 elements), so that its element order is not that of memory:
// small_batch_blocks.cuh puts activations in the same order.
//
// Halves<FORMAT> has
//   CHUNK, BYTES        elements of a chunk, and its bytes in each plane (q6_k: d counts one of two)
//   load(from)          load a chunk of a row from shared memory, and compute its scales; `from` is a
//                       ChunkOfRow of small_batch_blocks.cuh
//   ADJACENT            whether each half of the turns takes a half of the chunk; else every second 64 elements
//   turn(t, v)          expand two groups: v[i] are elements 0, 1 and 2, 3 of group gamma(t, i)
// All loops over turns are unrolled. Products and scales are rounded to f16.

template <class W> struct Halves;

// Loads from shared memory, at addresses in 32 bits.
__device__ __forceinline__ uint4 load_shared16(u32 at) {
    uint4 r;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(at));
    return r;
}
__device__ __forceinline__ u32 load_shared4(u32 at) {
    u32 r;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(at));
    return r;
}
__device__ __forceinline__ u32 load_shared2(u32 at) {
    u16 r;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(r) : "r"(at));
    return r;
}
__device__ __forceinline__ u32 load_shared1(u32 at) {
    u32 r;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(r) : "r"(at));
    return r;
}

// The low or the high half of a pair, twice.
__device__ __forceinline__ u32 both_low(u32 pair) {
    u32 r;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l};}" : "=r"(r) : "r"(pair));
    return r;
}
__device__ __forceinline__ u32 both_high(u32 pair) {
    u32 r;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h};}" : "=r"(r) : "r"(pair));
    return r;
}
__device__ __forceinline__ u32 both(u32 pair, int i) { return i ? both_high(pair) : both_low(pair); }

// A pair of small negative integers, exact in f16: -(1024 + zero), or of another power of two.
__device__ constexpr u32 minus(int n) {
    int e = 0;
    while (n >> e + 1) e++;
    const u32 half = 0x8000u | (15 + e) << 10 | (n << 10 >> e & 0x3ff);
    return half | half << 16;
}

// As bits of f16, 0x6400 + n is 1024 + n for n from 0 to 1023.
struct Expansion {
    static constexpr bool ADJACENT = true;
    u32 magic;  // 0x6400 twice, of which the compiler must not know: see small_batch_blocks.cu

    // Bytes 0, 1 and 2, 3 of a word as f16, less ZERO.
    template <int ZERO> __device__ __forceinline__ void bytes(u32 word, u32 (&v)[2]) const {
        v[0] = add_halves(__byte_perm(word, magic, 0x5150), minus(1024 + ZERO));
        v[1] = add_halves(__byte_perm(word, magic, 0x5352), minus(1024 + ZERO));
    }
    // The same for the high nibbles of bytes.
    template <int ZERO> __device__ __forceinline__ void high_nibbles(u32 word, u32 (&v)[2]) const {
        word &= 0xf0f0f0f0;
        v[0] = fma_halves(__byte_perm(word, magic, 0x5150), 0x2c002c00, minus(64 + ZERO));  // / 16
        v[1] = fma_halves(__byte_perm(word, magic, 0x5352), 0x2c002c00, minus(64 + ZERO));
    }
    // The low nibbles of a word as f16, less ZERO, and the high ones.
    template <int ZERO> __device__ __forceinline__ void nibbles(u32 word, u32 (&v)[2][2]) const {
        bytes<ZERO>(word & 0x0f0f0f0f, v[0]);
        high_nibbles<ZERO>(word, v[1]);
    }
    // The first two bytes.
    template <int ZERO> __device__ __forceinline__ u32 two_bytes(u32 word) const {
        return add_halves(__byte_perm(word, magic, 0x5150), minus(1024 + ZERO));
    }
};

// ---------------------------------------------------------------------------- blocks of 32

// Each thread has one block.
struct Halves32 : Expansion {
    static constexpr int CHUNK = 128;
    u32 scale, offset;  // twice each

    template <class P> __device__ __forceinline__ void load_scale(const P& from, u32 d) {
        scale = from.there(32 * from.part) ? d | d << 16 : 0;
    }
    // d and m
    template <class P> __device__ __forceinline__ void load_both(const P& from, u32 dm) {
        if (!from.there(32 * from.part)) dm = 0;
        scale = both_low(dm), offset = both_high(dm);
    }
    __device__ __forceinline__ u32 scaled(u32 v) const { return multiply_halves(v, scale); }
    __device__ __forceinline__ u32 shifted(u32 v) const { return fma_halves(v, scale, offset); }
    // The bytes of a word less ZERO, scaled; and the same with the offset.
    template <int ZERO> __device__ __forceinline__ void scaled_bytes(u32 word, u32 (&v)[2]) const {
        bytes<ZERO>(word, v);
        v[0] = scaled(v[0]), v[1] = scaled(v[1]);
    }
    template <int ZERO> __device__ __forceinline__ void shifted_bytes(u32 word, u32 (&v)[2]) const {
        bytes<ZERO>(word, v);
        v[0] = shifted(v[0]), v[1] = shifted(v[1]);
    }
    // The entries of a table (see `positive`) for the nibbles of a word, scaled: low ones, then high ones.
    __device__ __forceinline__ void scaled_entries(u32 word, uint4 table, u32 (&v)[2][2]) const {
        u32 values[2];
        look_up(word, table, values[0], values[1]);
        scaled_bytes<128>(values[0], v[0]), scaled_bytes<128>(values[1], v[1]);
    }
    __device__ __forceinline__ static constexpr int gamma(int t, int i) { return t + 4 * i; }
};

__device__ __forceinline__ u32 load_half(u32 from, int i) { return load_shared2(from + 2 * i); }

// A table of int8 with 128 added to each.
__device__ __forceinline__ uint4 positive(uint4 t) {
    return make_uint4(t.x ^ 0x80808080, t.y ^ 0x80808080, t.z ^ 0x80808080, t.w ^ 0x80808080);
}

// ---------------------------------------------------------------------------- blocks of 256

// Two halves of 32 elements, each with its scale.
struct Halves64 : Expansion {
    static constexpr int CHUNK = 256;
    static constexpr bool ADJACENT = false;
    __device__ __forceinline__ static constexpr int gamma(int t, int i) { return t + 8 * i; }
};
