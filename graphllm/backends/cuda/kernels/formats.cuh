#pragma once
// Weight formats as kernels read them: planes of the blocks of a matrix, and items in registers.
//
// weight_packing.py splits the blocks of a matrix into planes: a plane holds the same fields of every
// block, one block after the other (the fields are those that graphllm/formats declares in `planes`).
// So a warp reads whole lines, and every thread 16 bytes at a time from an aligned address.
//
// An item is what one thread takes at a time: 16 bytes of the first plane, with their scales. It has
// PARTS parts of 16 neighbouring weights; weight e of part p is scale[p] * v + offset[p], where v is
// byte e of v[4 p ..]. In a format with blocks of 32 all parts have the same scale and offset.
//
// A format is a struct, with the name of the format in capitals:
//   BLOCK, PARTS, ITEM  elements of a block, parts of an item, elements of an item
//   OFFSET              whether some offsets are not zero
//   ZERO_POINT          the v that stands for zero, -1 in a format with minima
//   at(j, p)            first element of part p of item j of a row
//   item(w, i)          where the fields of item i of a matrix are
//   load(p)             load the item whose fields are at p
//   STEPS               bytes of the planes after the first that 32 items take
//   unpack(j, u)        unpack it; j: its number in the row
//   INTEGER_PRODUCT     whether there is product(j, a): the product with quantised activations in
//                       fewer instructions than unpack needs
// Each family has a header formats_*.cuh, included at the end.
//
// ITEMS_IN_SHARED: items are loaded from shared memory.

#ifndef ITEMS_IN_SHARED
#define ITEMS_IN_SHARED 0
#endif

struct Planes {
    const u8 *a, *b, *c, *d;
};

// Move from an item to the one n items later, a constant for which blocks are whole.
template <class W> __device__ __forceinline__ void advance(Planes& p, int n) {
    p.a += 16 * n, p.b += W::STEPS[0] * n / WARP, p.c += W::STEPS[1] * n / WARP, p.d += W::STEPS[2] * n / WARP;
}

template <int PARTS> struct Unpacked {
    int v[4 * PARTS];  // four int8 each
    float scale[PARTS], offset[PARTS];
};

// The same of formats whose elements are no int8: the weights.
template <int COUNT> struct Floats {
    float v[COUNT];
};

// Part p of an item as 16 float16.
template <int PARTS>
__device__ __forceinline__ void expand_part(const Unpacked<PARTS>& u, int p, uint4* to) {
    u32 r[8];
#pragma unroll
    for (int e = 0; e < 8; e++) {
        int v = u.v[4 * p + e / 2] >> 16 * (e % 2);
        float low = fmaf(u.scale[p], (float)(i8)v, u.offset[p]);
        r[e] = two_within_f16(low, fmaf(u.scale[p], (float)(i8)(v >> 8), u.offset[p]));
    }
    to[0] = make_uint4(r[0], r[1], r[2], r[3]);
    to[1] = make_uint4(r[4], r[5], r[6], r[7]);
}

template <int COUNT>
__device__ __forceinline__ void expand_part(const Floats<COUNT>& u, int p, uint4* to) {
    u32 r[8];
    const float* v = u.v + 16 * p;
#pragma unroll
    for (int e = 0; e < 8; e++) r[e] = two_within_f16(v[2 * e], v[2 * e + 1]);
    to[0] = make_uint4(r[0], r[1], r[2], r[3]);
    to[1] = make_uint4(r[4], r[5], r[6], r[7]);
}

__device__ __forceinline__ float low_half(u32 pair) { return from_f16((u16)pair); }
__device__ __forceinline__ float high_half(u32 pair) { return from_f16((u16)(pair >> 16)); }

// Load 16 bytes that are read once, without a place in the L1 cache.
__device__ __forceinline__ uint4 stream16(const void* address) {
#if ITEMS_IN_SHARED
    return *(const uint4*)address;
#else
    uint4 r;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(address));
    return r;
#endif
}

template <class V> __device__ __forceinline__ V constant(const void* address) {
#if ITEMS_IN_SHARED
    return *(const V*)address;
#else
    return __ldg((const V*)address);
#endif
}

__device__ __forceinline__ const u32& word(const uint4& q, int k) { return (&q.x)[k]; }

// The low nibbles of 16 bytes, then the high ones.
__device__ __forceinline__ void nibbles(const uint4& q, int* v) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
        v[k] = word(q, k) & 0x0f0f0f0f;
        v[4 + k] = word(q, k) >> 4 & 0x0f0f0f0f;
    }
}

// Bits 4 k to 4 k + 3 of `bits` as the fifth bits of four bytes.
__device__ __forceinline__ int fifth(u32 bits, int k) {
    return (bits >> 4 * k & 15) * 0x02040810 & 0x10101010;
}

// Look up the nibbles of a word in a table of sixteen int8: the low ones, then the high ones.
__device__ __forceinline__ void look_up(u32 bits, uint4 table, u32& low, u32& high) {
    const u32 low3 = bits & 0x77777777;
    const u32 which = 0x32103210 | (bits & 0x88888888) >> 1;  // selects one of each pair by the fourth bit
    const u32 first = __byte_perm(__byte_perm(table.x, table.y, low3),
                                  __byte_perm(table.z, table.w, low3), which);
    const u32 second = __byte_perm(__byte_perm(table.x, table.y, low3 >> 16),
                                   __byte_perm(table.z, table.w, low3 >> 16), which >> 16);
    low = __byte_perm(first, second, 0x6420), high = __byte_perm(first, second, 0x7531);
}

// The same for 16 bytes, in the order of nibbles().
__device__ __forceinline__ void looked_up(const uint4& q, uint4 table, int* v) {
#pragma unroll
    for (int k = 0; k < 4; k++) look_up(word(q, k), table, (u32&)v[k], (u32&)v[4 + k]);
}

// ------------------------------------------------------------------------------- pairs of f16

__device__ __forceinline__ u32 add_halves(u32 a, u32 b) {
    u32 r;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ __forceinline__ u32 multiply_halves(u32 a, u32 b) {
    u32 r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ __forceinline__ u32 fma_halves(u32 a, u32 b, u32 c) {
    u32 r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

// ------------------------------------------------------------------------- integer dot products

// The sum of four products of bytes, those of `b` signed. The compiler may reorder these, unlike
// __dp4a.
__device__ __forceinline__ int dot4(u32 a, int b, int sum) {
    int r;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(sum));
    return r;
}
__device__ __forceinline__ int dot4(int a, int b, int sum) {
    int r;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(sum));
    return r;
}
// The sum of two products: the halves of `a`, signed, times the low bytes of `b`, unsigned.
__device__ __forceinline__ int dot2(u32 a, u32 b, int sum) {
    int r;
    asm("dp2a.lo.s32.u32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(sum));
    return r;
}

// The low halves of two integers, as dot2 takes them.
__device__ __forceinline__ u32 pair_of(int low, int high) {
    return __byte_perm((u32)low, (u32)high, 0x5410);
}

__device__ __forceinline__ int dot16(const int* v, const int4& x) {
    return dot4(v[3], x.w, dot4(v[2], x.z, dot4(v[1], x.y, dot4(v[0], x.x, 0))));
}

// Dot products of the low and of the high nibbles of 16 bytes with activations. The high nibbles are
// not shifted, so that their sum counts 16 times.
__device__ __forceinline__ void dot_nibbles(const uint4& q, const int4* x, int& low, int& high) {
    const int* first = &x[0].x;
    const int* second = &x[1].x;
    low = high = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        low = dot4(word(q, k) & 0x0f0f0f0f, first[k], low);
        high = dot4(word(q, k) & 0xf0f0f0f0, second[k], high);
    }
    high >>= 4;
}

// -------------------------------------------------------------------------------- bases of items

struct By32 {
    static constexpr int BLOCK = 32, PARTS = 2, ITEM = 32;
    typedef Unpacked<2> Values;
    static constexpr bool INTEGER_PRODUCT = false;
    static constexpr int ZERO_POINT = -1;
    static constexpr bool OFFSET = true;  // offsets are not all zero
    // The first element of part p of item j of a row.
    __device__ static __forceinline__ int at(int j, int p) { return 32 * j + 16 * p; }
};

// Four bits of each element and a float16 of the block, in a plane each.
struct NibblesBy32 : By32 {
    uint4 q;
    u16 d;
    static constexpr int STEPS[3] = {64, 0, 0};
    __device__ static __forceinline__ Planes item(const Planes& w, size_t i) {
        return {w.a + 16 * i, w.b + 2 * i};
    }
    __device__ __forceinline__ void load(const Planes& p) {
        q = stream16(p.a);
        d = constant<u16>(p.b);
    }
};

struct By256 {
    static constexpr int BLOCK = 256, PARTS = 2, ITEM = 32;
    typedef Unpacked<2> Values;
    static constexpr bool INTEGER_PRODUCT = false;
    static constexpr int ZERO_POINT = -1;
    static constexpr bool OFFSET = true;
};

#ifndef BLOCK_HALVES
#define BLOCK_HALVES 0
#endif
#if BLOCK_HALVES
#include "block_halves.cuh"
#endif
#include "formats_legacy.cuh"
#include "formats_k_quants.cuh"
#include "formats_iq4.cuh"
#include "formats_microscaling.cuh"
#include "formats_rows.cuh"
