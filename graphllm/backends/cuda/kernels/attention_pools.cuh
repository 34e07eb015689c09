#pragma once
// Elements of pools of keys and values as f16, for tensor cores. POOL: 1 float16, 2 q8_0, 3 q4_0, 4 fp8, as in
// graphllm.graph.dtype.CACHED. Slots are aligned to four bytes.

#if POOL == 1
constexpr int HEAD_BYTES = 2 * DEPTH;
#elif POOL == 2
constexpr int HEAD_BYTES = DEPTH / 32 * 34;
#elif POOL == 3
constexpr int HEAD_BYTES = DEPTH / 32 * 18;
#else
constexpr int HEAD_BYTES = DEPTH + 4;
#endif

// Four unsigned bytes less `zero`, times an f16 scale in both halves of `scale`, as two pairs of f16: the products
// of a float32 multiplication, rounded. `zero`: twice 1024 more than what is subtracted, as f16.
__device__ __forceinline__ void four_halves(u32 q, u32 zero, u32 scale, u32* to) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 x = __byte_perm(q, 0x64646464u, i ? 0x4342 : 0x4140);  // 1024 + q
        asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(x) : "r"(x), "r"(zero));
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(to[i]) : "r"(x), "r"(scale));
    }
}

// Four e4m3 times a scale, as two pairs of f16. Their bits, moved, are those of f16 that are smaller by 2^8, which
// `scale` makes up for.
__device__ __forceinline__ void four_e4m3_halves(u32 q, u32 scale, u32* to) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 two = __byte_perm(q, 0, i ? 0x3424 : 0x1404);
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(to[i]) : "r"((two & 0x7f007f00) >> 1 | two & 0x80008000), "r"(scale));
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

#if POOL != 1
// A head of a slot, in global or shared memory: `offset` bytes, an even number, after an address aligned to four.
struct StoredHead {
    const u8* row;
    int offset;
    u32 scale;  // of fp8: of the head, times 2^8, twice as f16

    __device__ __forceinline__ StoredHead(const u8* row, int offset) : row(row), offset(offset), scale(0) {
#if POOL == 4
        scale = to_f16(*(const float*)(row + offset + DEPTH) * 256.f) * 0x10001u;
#endif
    }

    // N (8, 4 or 2) bytes at an even number of bytes after the head's first.
    template <int N> __device__ __forceinline__ void bytes(int at, u32* to) const {
        at += offset;
        if (N == 2) {
            to[0] = *(const u16*)(row + at);
        } else if (N == 4) {
            const u16* halves = (const u16*)(row + at);
            to[0] = halves[0] | (u32)halves[1] << 16;
        } else {
            const u32* words = (const u32*)(row + (at & ~3));
            const bool odd = at & 2;
            const u32 end = odd ? words[2] : 0;
            to[0] = __funnelshift_r(words[0], words[1], odd ? 16 : 0);
            to[1] = __funnelshift_r(words[1], end, odd ? 16 : 0);
        }
    }

    // N adjacent elements, from number `first` on, a multiple of N, as pairs.
    template <int N> __device__ __forceinline__ void elements(int first, u32* to) const {
        constexpr int WORDS = (N + 3) / 4;
        u32 q[WORDS], pairs[2 * WORDS];
#if POOL == 4
#pragma unroll
        for (int i = 0; i < WORDS; i++)
            q[i] = N == 2 ? *(const u16*)(row + offset + first) : ((const u32*)(row + offset + first))[i];
#else
        constexpr int STORED = POOL == 2 ? 32 : 16;  // bytes of a block after its scale
        const int block = first / 32 * (2 + STORED);
        const u32 d = *(const u16*)(row + offset + block) * 0x10001u;
        bytes<N>(block + 2 + first % STORED, q);
#endif
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
#if POOL == 2
            four_halves(q[i] ^ 0x80808080u, 0x64806480u, d, pairs + 2 * i);  // q + 128, unsigned
#elif POOL == 3
            four_halves(q[i] >> (first % 32 / 16 * 4) & 0x0f0f0f0fu, 0x64086408u, d, pairs + 2 * i);
#else
            four_e4m3_halves(q[i], scale, pairs + 2 * i);
#endif
        }
#pragma unroll
        for (int i = 0; i < N / 2; i++) to[i] = pairs[i];
    }
};
#endif
