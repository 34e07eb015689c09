#pragma once
// Elements of pools of keys and values as f16, for tensor cores. POOL: 1 float16, 2 q8_0 in rows that are
// aligned to four bytes.

// Four int8 times an f16 scale, in two words of f16: the product of a float32 multiplication, rounded.
__device__ __forceinline__ void four_halves(u32 q, u32 d, u32* to) {
    q ^= 0x80808080u;  // q + 128, unsigned; with 0x64 as the upper byte q + 128 + 1024
    const u32 scale = d | d << 16;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 x = __byte_perm(q, 0x64646464u, i ? 0x4342 : 0x4140);
        asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(x) : "r"(x), "r"(0x64806480u));
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(to[i]) : "r"(x), "r"(scale));
    }
}

// Load 16 or 8 bytes that no other thread reads: the L1 cache does not keep them.
__device__ __forceinline__ uint4 load_once16(const u8* from) {
    uint4 r;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(from));
    return r;
}
__device__ __forceinline__ uint2 load_once8(const u8* from) {
    uint2 r;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];" : "=r"(r.x), "=r"(r.y) : "l"(from));
    return r;
}

// Eight adjacent elements of a key.
struct KeyVector {
#if POOL == 1
    uint4 q;
    __device__ __forceinline__ void load(const u8* row, int at) { q = load_once16(row + 2 * at); }
    __device__ __forceinline__ void read(u32* to) const { to[0] = q.x, to[1] = q.y, to[2] = q.z, to[3] = q.w; }
#else
    u32 q[2], d;
    __device__ __forceinline__ void load(const u8* row, int at) {
        const u8 *block = row + at / 32 * 34, *from = block + 2 + at % 32;
        d = *(const u16*)block;
        if (at / 32 % 2) {  // aligned to four bytes, as rows are
            q[0] = ((const u32*)from)[0], q[1] = ((const u32*)from)[1];
        } else {
            u32 middle = *(const u32*)(from + 2);
            q[0] = *(const u16*)from | middle << 16, q[1] = middle >> 16 | (u32)*(const u16*)(from + 6) << 16;
        }
    }
    __device__ __forceinline__ void read(u32* to) const {
        four_halves(q[0], d, to);
        four_halves(q[1], d, to + 2);
    }
#endif
};
