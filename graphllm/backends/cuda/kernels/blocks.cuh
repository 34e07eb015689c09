#pragma once
// Weight formats as kernels read them: planes of a matrix's blocks, and items of them in registers.
//
// layouts.py lays the blocks of a matrix out in planes: plane p holds bytes first..last of every
// block, one block after the other (`graphllm.quant_formats` names the bytes). So a warp reads
// whole lines, and every thread 16 bytes at a time from an aligned address.
//
// An item is what one thread takes: a 16-byte piece of the small integers with its scales. It has
// PARTS parts of 16 neighbouring weights; weight e of part p is scale[p] * v + offset[p], where v is
// byte e of v[4 p ..]. In a format with blocks of 32 all parts have the same scale and offset.

struct Planes {
    const u8 *a, *b, *c, *d;
};

template <int PARTS> struct Unpacked {
    int v[4 * PARTS];  // four int8 each
    float scale[PARTS], offset[PARTS];
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

__device__ __forceinline__ float low_half(u32 pair) { return from_f16((u16)pair); }
__device__ __forceinline__ float high_half(u32 pair) { return from_f16((u16)(pair >> 16)); }

// 16 bytes that are read once: they do not take a place in the first-level cache.
__device__ __forceinline__ uint4 stream16(const void* address) {
    uint4 r;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(address));
    return r;
}

template <class V> __device__ __forceinline__ V constant(const void* address) {
    return __ldg((const V*)address);
}

__device__ __forceinline__ u16 half_at(const u8* plane, size_t index) {
    return constant<u16>(plane + 2 * index);
}

__device__ __forceinline__ const u32& word(const uint4& q, int k) { return (&q.x)[k]; }

// The low and the high nibbles of 16 bytes.
__device__ __forceinline__ void nibbles(const uint4& q, int* v) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
        v[k] = word(q, k) & 0x0f0f0f0f;
        v[4 + k] = word(q, k) >> 4 & 0x0f0f0f0f;
    }
}

// Bits 4k..4k+3 of `bits` as the fifth bits of four bytes.
__device__ __forceinline__ int fifth(u32 bits, int k) {
    return (bits >> 4 * k & 15) * 0x02040810 & 0x10101010;
}

// What the nibbles of 16 bytes stand for, by a table of sixteen int8 in four words.
__device__ __forceinline__ void looked_up(const uint4& q, uint4 table, int* v) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 bits = word(q, k), low3 = bits & 0x77777777;
        u32 which = 0x32103210 | (bits & 0x88888888) >> 1;  // of a pair: by the fourth bit
        u32 first = __byte_perm(__byte_perm(table.x, table.y, low3),
                                     __byte_perm(table.z, table.w, low3), which);
        u32 second = __byte_perm(__byte_perm(table.x, table.y, low3 >> 16),
                                      __byte_perm(table.z, table.w, low3 >> 16), which >> 16);
        v[k] = __byte_perm(first, second, 0x6420);
        v[4 + k] = __byte_perm(first, second, 0x7531);
    }
}

// quant_formats.IQ4_VALUES and MXFP4_VALUES.
__device__ __forceinline__ uint4 iq4_values() {
    return make_uint4(0xbfad9881, 0xf6eaddcf, 0x26190d01, 0x71594535);
}
__device__ __forceinline__ uint4 mxfp4_values() {
    return make_uint4(0x03020100, 0x0c080604, 0xfdfeff00, 0xf4f8fafc);
}

// Half of what an e8m0 byte stands for: 2 ** (e - 128).
__device__ __forceinline__ float half_e8m0(u32 e) {
    return __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
}

// ----------------------------------------------------------------------------- blocks of 32

struct By32 {
    static constexpr int BLOCK = 32, PARTS = 2, ITEM = 32;
    typedef Unpacked<2> Values;
    static constexpr bool OFFSET = true;  // offsets are not all zero
    // Where part p of item j of a row begins, in elements.
    __device__ static __forceinline__ int at(int j, int p) { return 32 * j + 16 * p; }
};

struct Q8_0 {
    static constexpr int BLOCK = 32, PARTS = 1, ITEM = 16;
    typedef Unpacked<1> Values;
    static constexpr bool OFFSET = false;
    uint4 q;
    u16 d;
    __device__ static __forceinline__ int at(int j, int p) { return 16 * j; }
    __device__ __forceinline__ void load(const Planes& w, size_t i) {
        q = stream16(w.a + 16 * i);
        d = half_at(w.b, i >> 1);
    }
    __device__ __forceinline__ void unpack(int j, Unpacked<1>& u) const {
#pragma unroll
        for (int k = 0; k < 4; k++) u.v[k] = word(q, k);
        u.scale[0] = from_f16(d);
        u.offset[0] = 0;
    }
};

template <int ZERO> struct Nibbles : By32 {  // scale * (nibble - ZERO)
    uint4 q;
    u16 d;
    __device__ __forceinline__ void load(const Planes& w, size_t i) {
        q = stream16(w.a + 16 * i);
        d = half_at(w.b, i);
    }
    __device__ __forceinline__ void unpack(int j, Unpacked<2>& u) const {
        nibbles(q, u.v);
        u.scale[0] = u.scale[1] = from_f16(d);
        u.offset[0] = u.offset[1] = -ZERO * u.scale[0];
    }
};

using Q4_0 = Nibbles<8>;

struct Q4_1 : By32 {
    uint4 q;
    u32 dm;
    __device__ __forceinline__ void load(const Planes& w, size_t i) {
        q = stream16(w.a + 16 * i);
        dm = constant<u32>(w.b + 4 * i);
    }
    __device__ __forceinline__ void unpack(int j, Unpacked<2>& u) const {
        nibbles(q, u.v);
        u.scale[0] = u.scale[1] = low_half(dm);
        u.offset[0] = u.offset[1] = high_half(dm);
    }
};

struct Fifths : By32 {
    uint4 q;
    u32 high;
    __device__ __forceinline__ void load(const Planes& w, size_t i) {
        q = stream16(w.a + 16 * i);
        high = constant<u32>(w.b + 4 * i);
    }
    __device__ __forceinline__ void integers(int* v) const {
        nibbles(q, v);
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] |= fifth(high, k);
    }
};

struct Q5_0 : Fifths {
    u16 d;
    __device__ __forceinline__ void load(const Planes& w, size_t i) {
        Fifths::load(w, i);
        d = half_at(w.c, i);
    }
    __device__ __forceinline__ void unpack(int j, Unpacked<2>& u) const {
        integers(u.v);
        u.scale[0] = u.scale[1] = from_f16(d);
        u.offset[0] = u.offset[1] = -16 * u.scale[0];
    }
};

struct Q5_1 : Fifths {
    u32 dm;
    __device__ __forceinline__ void load(const Planes& w, size_t i) {
        Fifths::load(w, i);
        dm = constant<u32>(w.c + 4 * i);
    }
    __device__ __forceinline__ void unpack(int j, Unpacked<2>& u) const {
        integers(u.v);
        u.scale[0] = u.scale[1] = low_half(dm);
        u.offset[0] = u.offset[1] = high_half(dm);
    }
};

struct IQ4_NL : By32 {
    static constexpr bool OFFSET = false;
    uint4 q;
    u16 d;
    __device__ __forceinline__ void load(const Planes& w, size_t i) {
        q = stream16(w.a + 16 * i);
        d = half_at(w.b, i);
    }
    __device__ __forceinline__ void unpack(int j, Unpacked<2>& u) const {
        looked_up(q, iq4_values(), u.v);
        u.scale[0] = u.scale[1] = from_f16(d);
        u.offset[0] = u.offset[1] = 0;
    }
};

struct MXFP4 : By32 {
    static constexpr bool OFFSET = false;
    uint4 q;
    u32 e;
    __device__ __forceinline__ void load(const Planes& w, size_t i) {
        q = stream16(w.a + 16 * i);
        e = constant<u8>(w.b + i);
    }
    __device__ __forceinline__ void unpack(int j, Unpacked<2>& u) const {
        looked_up(q, mxfp4_values(), u.v);
        u.scale[0] = u.scale[1] = half_e8m0(e);
        u.offset[0] = u.offset[1] = 0;
    }
};

// ---------------------------------------------------------------------------- blocks of 256

struct By256 {
    static constexpr int BLOCK = 256, PARTS = 2, ITEM = 32;
    typedef Unpacked<2> Values;
    static constexpr bool OFFSET = true;
};

// 128 bytes of nibbles: of 64 neighbours the first half low, the second high.
struct Scales : By256 {
    uint4 q, head;  // head: d, dmin: f16, then 6-bit scales and mins in 12 bytes
    __device__ static __forceinline__ int at(int j, int p) {
        return 256 * (j >> 3) + 64 * (j >> 1 & 3) + 16 * (j & 1) + 32 * p;
    }
    // Scales and mins of sub-blocks 2 pair and 2 pair + 1: a byte each.
    __device__ __forceinline__ void coefficients(int j, u32& s, u32& m) const {
        int pair = j >> 1 & 3, shift = 16 * (pair & 1);
        u32 low = head.y >> shift, high = head.z >> shift, mixed = head.w >> shift;
        s = low & 0x3f3f, m = high & 0x3f3f;
        if (pair >= 2) {
            s = (mixed & 0x0f0f) | (low & 0xc0c0) >> 2;
            m = (mixed >> 4 & 0x0f0f) | (high & 0xc0c0) >> 2;
        }
    }
    __device__ __forceinline__ void coefficients(int j, Unpacked<2>& u) const {
        u32 s, m;
        coefficients(j, s, m);
        float d = low_half(head.x), least = -high_half(head.x);
        u.scale[0] = d * (s & 255), u.scale[1] = d * (s >> 8 & 255);
        u.offset[0] = least * (m & 255), u.offset[1] = least * (m >> 8 & 255);
    }
};

struct Q4_K : Scales {
    __device__ __forceinline__ void load(const Planes& w, size_t i) {
        q = stream16(w.a + 16 * i);
        head = constant<uint4>(w.b + 16 * (i >> 3));
    }
    __device__ __forceinline__ void unpack(int j, Unpacked<2>& u) const {
        nibbles(q, u.v);
        coefficients(j, u);
    }
};

struct Q5_K : Scales {
    uint4 high;  // bit s for sub-block s
    __device__ __forceinline__ void load(const Planes& w, size_t i) {
        q = stream16(w.a + 16 * i);
        high = constant<uint4>(w.b + 32 * (i >> 3) + 16 * (i & 1));
        head = constant<uint4>(w.c + 16 * (i >> 3));
    }
    __device__ __forceinline__ void integers(int j, int* v) const {
        int pair = j >> 1 & 3;
        nibbles(q, v);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            u32 bits = word(high, k) >> 2 * pair;
            v[k] |= (bits & 0x01010101) << 4;
            v[4 + k] |= (bits & 0x02020202) << 3;
        }
    }
    __device__ __forceinline__ void unpack(int j, Unpacked<2>& u) const {
        integers(j, u.v);
        coefficients(j, u);
    }
};

struct Q6_K : By256 {
    uint4 q, high;  // high: of the half's run r bits 2 r and 2 r + 1
    u16 d;
    int low_scale, high_scale;
    __device__ static __forceinline__ int at(int j, int p) {
        return 256 * (j >> 3) + 128 * (j >> 2 & 1) + 16 * (j & 3) + 64 * p;
    }
    __device__ __forceinline__ void load(const Planes& w, size_t i) {
        size_t block = i >> 3;
        int half = i >> 2 & 1, place = i & 3;
        q = stream16(w.a + 16 * i);
        high = constant<uint4>(w.b + 64 * block + 32 * half + 16 * (place & 1));
        const u8* scales = w.c + 16 * block + 8 * half + place;
        low_scale = constant<i8>(scales), high_scale = constant<i8>(scales + 4);
        d = half_at(w.d, block);
    }
    __device__ __forceinline__ void integers(int j, int* v) const {
        int shift = j & 2;
        nibbles(q, v);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            u32 bits = word(high, k) >> shift;
            v[k] |= (bits & 0x03030303) << 4;
            v[4 + k] |= bits & 0x30303030;
        }
    }
    __device__ __forceinline__ void unpack(int j, Unpacked<2>& u) const {
        integers(j, u.v);
        float unit = from_f16(d);
        u.scale[0] = unit * low_scale, u.scale[1] = unit * high_scale;
        u.offset[0] = -32 * u.scale[0], u.offset[1] = -32 * u.scale[1];
    }
};

// 64 bytes of bit pairs: of each half (32 bytes) all lowest pairs, then the next.
struct Pairs {
    static constexpr int BLOCK = 256, PARTS = 4, ITEM = 64;
    typedef Unpacked<4> Values;
    static constexpr bool OFFSET = true;
    uint4 q;
    __device__ static __forceinline__ int at(int j, int p) {
        return 256 * (j >> 2) + 128 * (j >> 1 & 1) + 16 * (j & 1) + 32 * p;
    }
    __device__ __forceinline__ void integers(int* v) const {
#pragma unroll
        for (int k = 0; k < 16; k++) v[k] = word(q, k & 3) >> 2 * (k >> 2) & 0x03030303;
    }
};

struct Q2_K : Pairs {
    uint2 scales;  // of the half: a scale below a min each
    u32 dm;
    __device__ __forceinline__ void load(const Planes& w, size_t i) {
        q = stream16(w.a + 16 * i);
        scales = constant<uint2>(w.b + 8 * (i >> 1));
        dm = constant<u32>(w.c + 4 * (i >> 2));
    }
    __device__ __forceinline__ void unpack(int j, Unpacked<4>& u) const {
        integers(u.v);
        float d = low_half(dm), least = -high_half(dm);
#pragma unroll
        for (int p = 0; p < 4; p++) {
            u32 s = (p < 2 ? scales.x : scales.y) >> (16 * (p & 1) + 8 * (j & 1));
            u.scale[p] = d * (s & 15);
            u.offset[p] = least * (s >> 4 & 15);
        }
    }
};

struct Q3_K : Pairs {
    uint4 third;  // bit 4 half + r for run r
    u32 low0, low1, top;  // sixteen 6-bit scales: nibbles, and their top bit pairs
    u16 d;
    __device__ __forceinline__ void load(const Planes& w, size_t i) {
        size_t block = i >> 2;
        q = stream16(w.a + 16 * i);
        third = constant<uint4>(w.b + 32 * block + 16 * (i & 1));
        const u8* scales = w.c + 12 * block;
        low0 = constant<u32>(scales), low1 = constant<u32>(scales + 4);
        top = constant<u32>(scales + 8);
        d = half_at(w.d, block);
    }
    __device__ __forceinline__ void unpack(int j, Unpacked<4>& u) const {
        int half = j >> 1 & 1, odd = j & 1;
        integers(u.v);
#pragma unroll
        for (int k = 0; k < 16; k++)
            u.v[k] |= (word(third, k & 3) >> (4 * half + (k >> 2)) & 0x01010101) << 2;
        float unit = from_f16(d);
#pragma unroll
        for (int p = 0; p < 4; p++) {  // scale number 8 half + 2 p + odd
            u32 low = (p < 2 ? low0 : low1) >> (16 * (p & 1) + 8 * odd + 4 * half);
            u32 high = top >> (8 * (2 * (p & 1) + odd) + 4 * half + 2 * (p >> 1));
            u.scale[p] = unit * (int)((low & 15 | (high & 3) << 4) - 32);
            u.offset[p] = -4 * u.scale[p];
        }
    }
};

struct IQ4_XS : By256 {
    static constexpr bool OFFSET = false;
    uint4 q;
    uint2 head;  // d: f16, the top bit pairs of eight scales, their nibbles
    __device__ static __forceinline__ int at(int j, int p) { return 32 * j + 16 * p; }
    __device__ __forceinline__ void load(const Planes& w, size_t i) {
        q = stream16(w.a + 16 * i);
        head = constant<uint2>(w.b + 8 * (i >> 3));
    }
    __device__ __forceinline__ void unpack(int j, Unpacked<2>& u) const {
        int s = j & 7;
        int scale = (head.y >> 4 * s & 15 | (head.x >> (16 + 2 * s) & 3) << 4) - 32;
        looked_up(q, iq4_values(), u.v);
        u.scale[0] = u.scale[1] = low_half(head.x) * scale;
        u.offset[0] = u.offset[1] = 0;
    }
};
