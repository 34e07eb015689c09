#pragma once
// Stores activations as float32, f16, bf16, int8 blocks of 32 or 256, e4m3 blocks of 128, or rows of int8 or
// e4m3 with one scale, bit for bit as the op quantise_act declares. A warp stores a unit of 32 * N
// consecutive elements (N is 1 or 8), of which lane l holds the elements N l to N l + N - 1. Every operation
// rounds once; none is fused. Rows with one scale are the work of a block: quantize_rows.cuh.

#include "rows.cuh"

struct Target {
    u8* at;      // of the first row
    i64 stride;  // bytes between rows
    int block;   // 0: float32, 1: f16, 2: bf16, a RowKind, else elements of an int8 block
    int line;    // bytes between the lines of a row that has several
};

struct Targets {
    Target t[2];
    int count, padding;
};

// Int8 or e4m3 with a scale per row, and e4m3 with one per 128 elements.
enum RowKind { A8_ROW = 3, F8_ROW = 4, F8_128 = 5 };

// Clamps to the finite range of f16; NaN stays NaN.
__device__ __forceinline__ u16 to_half(int kind, float x) {
    if (kind == 2) return to_bf16(x);
    return to_f16(within_f16(x));
}

__device__ __forceinline__ u32 abs_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// Steps from zero to the largest absolute value of a block. In A8_ROW, half a step is clipped.
#define BLOCK_STEPS 127.f
#define ROW_STEPS 127.5f
#define E4M3_STEPS 448.f

// Scale of a block, from the bits of its largest absolute value, which has `steps`.
struct BlockScale {
    float d, inverse;  // inverse is 0 if the block is stored as zeros

    __device__ __forceinline__ BlockScale(u32 most, float steps = BLOCK_STEPS) {
        bool finite = most < 0x7f800000u, held = finite && most >= 0x0d800000u;  // 2^-100
        float amax = __uint_as_float(most);
        inverse = held ? __fdiv_rn(steps, amax) : 0.f;
        d = held ? __fdiv_rn(amax, steps) : finite ? 0.f : NOT_A_NUMBER;
    }
};

__device__ __forceinline__ int quantised(float x, float inverse) {
    float scaled = inverse != 0.f ? rintf(__fmul_rn(x, inverse)) : 0.f;
    return (int)fminf(fmaxf(scaled, -127.f), 127.f);
}

__device__ __forceinline__ u32 larger(u32 a, u32 b) { return a > b ? a : b; }

// Eight elements of a block as int8, in two words. The sum of 1.5 * 2^23 and a small number has that
// number, rounded to nearest even, in its low bits. CLIP: products may be beyond 127.
template <bool CLIP = false>
__device__ __forceinline__ uint2 quantised8(const float* v, float inverse) {
    u32 q[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float scaled = __fmul_rn(v[i], inverse);
        if (CLIP) scaled = fminf(fmaxf(scaled, -127.f), 127.f);
        q[i] = __float_as_uint(__fadd_rn(scaled, 12582912.f));
    }
    uint2 packed;
    packed.x = __byte_perm(__byte_perm(q[0], q[1], 0x40), __byte_perm(q[2], q[3], 0x40), 0x5410);
    packed.y = __byte_perm(__byte_perm(q[4], q[5], 0x40), __byte_perm(q[6], q[7], 0x40), 0x5410);
    if (inverse == 0.f) packed.x = packed.y = 0;  // elements may be NaN
    return packed;
}

// Two numbers of at most 448 as e4m3, to nearest even, the first one in the low byte.
__device__ __forceinline__ u32 two_e4m3(float low, float high) {
#if __CUDA_ARCH__ >= 890
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#else
    u32 bytes[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 bits = __float_as_uint(i ? high : low), size = bits & 0x7fffffffu;
        // Below 2^-6 e4m3 has steps of 2^-9; above, round off 20 bits of the mantissa.
        const u32 small = (u32)rintf(__uint_as_float(size) * 512.f);
        const u32 normal = (size + 0x7ffffu + (size >> 20 & 1) >> 20) - (120 << 3);
        const u32 byte = size < 0x3c800000u ? small : normal;
        bytes[i] = (byte < 0x7e ? byte : 0x7e) | bits >> 31 << 7;
    }
    return bytes[0] | bytes[1] << 8;
#endif
}

// Eight elements of a block as e4m3.
__device__ __forceinline__ uint2 e4m3_of8(const float* v, float inverse) {
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        pairs[i] = two_e4m3(__fmul_rn(v[2 * i], inverse), __fmul_rn(v[2 * i + 1], inverse));
    if (inverse == 0.f) return make_uint2(0, 0);  // elements may be NaN
    return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

__device__ __forceinline__ u32 largest8(const float* v) {
    u32 most = abs_bits(v[0]);
#pragma unroll
    for (int i = 1; i < 8; i++) most = larger(most, abs_bits(v[i]));
    return most;
}

__device__ __forceinline__ int sum8(uint2 q) {
    return __dp4a((int)q.x, 0x01010101, __dp4a((int)q.y, 0x01010101, 0));
}

// Rows of int8 blocks are aligned to 4 bytes only.
__device__ __forceinline__ void store8(u8* to, uint2 q) {
    ((u32*)to)[0] = q.x, ((u32*)to)[1] = q.y;
}

// Store a block of 32: q, d and sum go to the planes of a row of `width` elements, from element `first`
// on. The same holds for the functions below. Without `store`, for warm-up passes, nothing is stored.
__device__ __forceinline__ void emit_32(float v, u8* row, int first, int width, bool store = true) {
    int lane = threadIdx.x % WARP;
    BlockScale scale(warp_max(abs_bits(v)));
    int q = quantised(v, scale.inverse), sum = warp_sum(q);
    if (!store) return;
    ((i8*)row)[first + lane] = (i8)q;
    if (lane) return;
    ((float*)(row + width))[first / 32] = scale.d;
    ((int*)(row + width + width / 8))[first / 32] = sum;
}

// Store up to eight blocks of 32, each held by four lanes.
__device__ __forceinline__ void emit_32(const float* v, u8* row, int first, int width, bool store = true) {
    const int lane = threadIdx.x % WARP, at = first + 8 * lane;
    u32 most = largest8(v);
    most = larger(most, __shfl_xor_sync(FULL, most, 1));
    BlockScale scale(larger(most, __shfl_xor_sync(FULL, most, 2)));
    const uint2 q = quantised8(v, scale.inverse);
    int sum = sum8(q);
    sum += __shfl_xor_sync(FULL, sum, 1);
    sum += __shfl_xor_sync(FULL, sum, 2);
    if (at >= width || !store) return;
    store8(row + at, q);
    if (lane % 4) return;
    ((float*)(row + width))[at / 32] = scale.d;
    ((int*)(row + width + width / 8))[at / 32] = sum;
}

// Store a block of 256.
__device__ __forceinline__ void emit_256(const float* v, u8* row, int first, int width, bool store = true) {
    const int lane = threadIdx.x % WARP;
    BlockScale scale(warp_max(largest8(v)));
    const uint2 q = quantised8(v, scale.inverse);
    int sum = sum8(q);
    sum += __shfl_xor_sync(FULL, sum, 1);
    if (!store) return;
    store8(row + first + 8 * lane, q);
    if (lane == 0) ((float*)(row + width))[first / 256] = scale.d;
    i16* sums = (i16*)(row + width + width / 64);
    if (lane % 2 == 0) sums[first / 16 + lane / 2] = (i16)sum;
}

// Store up to two blocks of 128, each held by half of the lanes.
__device__ __forceinline__ void emit_128(const float* v, u8* row, int first, int width, bool store = true) {
    const int at = first + 8 * (threadIdx.x % WARP);
    u32 most = largest8(v);
#pragma unroll
    for (int o = 8; o; o >>= 1) most = larger(most, __shfl_xor_sync(FULL, most, o));
    BlockScale scale(most, E4M3_STEPS);
    if (at >= width || !store) return;
    store8(row + at, e4m3_of8(v, scale.inverse));
    if (at % 128 == 0) ((float*)(row + width))[at / 128] = scale.d;
    if (at == 0)  // rows are padded with zeros to multiples of 32 bytes
        for (int i = width / 128; i % 8; i++) ((float*)(row + width))[i] = 0;
}

// Store a unit as f16 or bf16.
__device__ __forceinline__ void emit_halves(const float* v, int kind, u16* row, int first, int width,
                                            bool store = true) {
    const int at = first + 8 * (threadIdx.x % WARP);
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        pairs[i] = to_half(kind, v[2 * i]) | (u32)to_half(kind, v[2 * i + 1]) << 16;
    if (!store) return;
    if (at + 8 <= width && (u64)(row + at) % 16 == 0) {
        *(uint4*)(row + at) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (at + i < width) row[at + i] = (u16)(pairs[i / 2] >> 16 * (i % 2));
}

// Store a unit to one target. Elements beyond the row's `width` are ignored (blocks are whole).
template <int N>
__device__ __forceinline__ void emit_to(const float* v, const Target& t, i64 row, int line, int first,
                                        int width, bool store = true) {
    u8* to = t.at + row * t.stride + line * (i64)t.line;
    if constexpr (N == 1) {
        const int column = first + threadIdx.x % WARP;
        if (t.block > 2)
            emit_32(v[0], to, first, width, store);
        else if (column < width && store && t.block)
            ((u16*)to)[column] = to_half(t.block, v[0]);
        else if (column < width && store)
            ((float*)to)[column] = v[0];
    } else if (t.block == 32) {
        emit_32(v, to, first, width, store);
    } else if (t.block == 256) {
        emit_256(v, to, first, width, store);
    } else if (t.block == F8_128) {
        emit_128(v, to, first, width, store);
    } else if (t.block) {
        emit_halves(v, t.block, (u16*)to, first, width, store);
    } else {
        store_floats(v, (float*)to, first + 8 * (threadIdx.x % WARP), store ? width : 0);
    }
}

// Store a unit to all targets. N is 8 if one of them has blocks of 128 or 256, f16 or bf16, else 1.
template <int N>
__device__ __forceinline__ void emit(const float* v, const Targets& targets, i64 row, int line,
                                     int first, int width, bool store = true) {
#pragma unroll 1
    for (int i = 0; i < targets.count; i++)
        emit_to<N>(v, i ? targets.t[1] : targets.t[0], row, line, first, width, store);
}

#define MOST_FLOATS 1024  // depth up to which a GEMV quantizes float32 activations itself

// Store a row of at most MOST_FLOATS float32 as int8 in blocks of BLOCK, 32 or 256, by SHARERS warps of a
// block: each of four has one unit, a single one has all.
template <int BLOCK, int SHARERS>
__device__ __forceinline__ void quantise_row(const float* row, u8* to, int width) {
    constexpr int UNIT = 256, EACH = MOST_FLOATS / UNIT / SHARERS;
    const int first = threadIdx.x / WARP % SHARERS * UNIT;
    float v[EACH][8];  // all in flight at once
#pragma unroll
    for (int i = 0; i < EACH; i++)
        load_floats(v[i], row, first + i * SHARERS * UNIT + 8 * (threadIdx.x % WARP), width);
    // A loop, since a launch has to fetch its code; the unit to store is always the first one.
#pragma unroll 1
    for (int unit = first; unit < min(width, MOST_FLOATS); unit += SHARERS * UNIT) {
        if (BLOCK == 32)
            emit_32(v[0], to, unit, width);
        else
            emit_256(v[0], to, unit, width);
#pragma unroll
        for (int i = 0; i + 1 < EACH; i++)
#pragma unroll
            for (int e = 0; e < 8; e++) v[i][e] = v[i + 1][e];
    }
}
