#pragma once
// Stores activations as float32, f16, bf16, or int8 blocks of 32 or 256, bit for bit as the op
// quantise_act declares. A warp stores a unit of 32 * N consecutive elements (N is 1 or 8), of which
// lane l holds the elements 32 i + l. Every operation rounds once; none is fused.

struct Target {
    u8* at;      // of the first row
    i64 stride;  // bytes between rows
    int block;   // 0: float32, 1: f16, 2: bf16, else elements of an int8 block
    int line;    // bytes between the lines of a row that has several
};

struct Targets {
    Target t[2];
    int count, padding;
};

// Clamps to the finite range of f16; NaN stays NaN.
__device__ __forceinline__ u16 to_half(int kind, float x) {
    if (kind == 2) return to_bf16(x);
    return to_f16(within_f16(x));
}

__device__ __forceinline__ u32 abs_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// Scale of a block, from the bits of its largest absolute value.
struct BlockScale {
    float d, inverse;  // inverse is 0 if the block is stored as zeros

    __device__ __forceinline__ BlockScale(u32 most) {
        bool finite = most < 0x7f800000u, held = finite && most >= 0x0d800000u;  // 2^-100
        float amax = __uint_as_float(most);
        inverse = held ? __fdiv_rn(127.f, amax) : 0.f;
        d = held ? __fdiv_rn(amax, 127.f) : finite ? 0.f : NOT_A_NUMBER;
    }
};

__device__ __forceinline__ int quantised(float x, float inverse) {
    float scaled = inverse != 0.f ? rintf(__fmul_rn(x, inverse)) : 0.f;
    return (int)fminf(fmaxf(scaled, -127.f), 127.f);
}

// Eight reductions at once, each over the 2 * OFFSET lanes of a group: lane l gets the result of
// v[l / (OFFSET / 4) % 8]. The first three steps each halve the number of values of a lane.
template <int OFFSET, class T, class F>
__device__ __forceinline__ T reduce8(const T (&v)[8], F f) {
    int lane = threadIdx.x % WARP;
    T a[4], b[2];
    bool upper = lane & OFFSET;
#pragma unroll
    for (int i = 0; i < 4; i++)
        a[i] = f(upper ? v[4 + i] : v[i],
                 __shfl_xor_sync(FULL, upper ? v[i] : v[4 + i], OFFSET));
    upper = lane & OFFSET / 2;
#pragma unroll
    for (int i = 0; i < 2; i++)
        b[i] = f(upper ? a[2 + i] : a[i],
                 __shfl_xor_sync(FULL, upper ? a[i] : a[2 + i], OFFSET / 2));
    upper = lane & OFFSET / 4;
    T c = f(upper ? b[1] : b[0], __shfl_xor_sync(FULL, upper ? b[0] : b[1], OFFSET / 4));
#pragma unroll
    for (int o = OFFSET / 8; o; o >>= 1) c = f(c, __shfl_xor_sync(FULL, c, o));
    return c;
}

__device__ __forceinline__ int plus(int a, int b) { return a + b; }
__device__ __forceinline__ u32 larger(u32 a, u32 b) { return a > b ? a : b; }

// Store a block of 32, of which lane l holds element l: q, d and sum go to the planes of a row of `width`
// elements, from element `first` on. The same holds for the functions below.
__device__ __forceinline__ void emit_32(float v, u8* row, int first, int width) {
    int lane = threadIdx.x % WARP;
    BlockScale scale(warp_max(abs_bits(v)));
    int q = quantised(v, scale.inverse), sum = warp_sum(q);
    ((i8*)row)[first + lane] = (i8)q;
    if (lane) return;
    ((float*)(row + width))[first / 32] = scale.d;
    ((int*)(row + width + width / 8))[first / 32] = sum;
}

// Store up to eight blocks of 32.
__device__ __forceinline__ void emit_32(const float* v, u8* row, int first, int width) {
    int lane = threadIdx.x % WARP, at = first / 32 + lane / 4, q[8];
    u32 sizes[8];
#pragma unroll
    for (int i = 0; i < 8; i++) sizes[i] = abs_bits(v[i]);
    BlockScale scale(reduce8<16>(sizes, larger));  // of block lane / 4
#pragma unroll
    for (int i = 0; i < 8; i++) {
        q[i] = quantised(v[i], __shfl_sync(FULL, scale.inverse, 4 * i));
        if (first + 32 * i < width) ((i8*)row)[first + 32 * i + lane] = (i8)q[i];
    }
    int sum = reduce8<16>(q, plus);
    if (lane % 4 || 32 * at >= width) return;
    ((float*)(row + width))[at] = scale.d;
    ((int*)(row + width + width / 8))[at] = sum;
}

// Store a block of 256.
__device__ __forceinline__ void emit_256(const float* v, u8* row, int first, int width) {
    int lane = threadIdx.x % WARP, q[8];
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) most = larger(most, abs_bits(v[i]));
    BlockScale scale(warp_max(most));
#pragma unroll
    for (int i = 0; i < 8; i++) {
        q[i] = quantised(v[i], scale.inverse);
        ((i8*)row)[first + 32 * i + lane] = (i8)q[i];
    }
    int sum = reduce8<8>(q, plus);  // over half a warp's elements of v[lane / 2 % 8]
    if (lane == 0) ((float*)(row + width))[first / 256] = scale.d;
    i16* sums = (i16*)(row + width + width / 64);
    if (lane % 2 == 0) sums[first / 16 + 2 * (lane / 2 % 8) + lane / 16] = (i16)sum;
}

// Store a unit to one target. Elements beyond the row's `width` are ignored (blocks are whole).
template <int N>
__device__ __forceinline__ void emit_to(const float* v, const Target& t, i64 row, int first,
                                        int width) {
    u8* to = t.at + row * t.stride;
    if (N == 1 && t.block > 2) {
        emit_32(v[0], to, first, width);
    } else if (t.block == 32) {
        emit_32(v, to, first, width);
    } else if (t.block == 256) {
        emit_256(v, to, first, width);
    } else {
        int column = first + threadIdx.x % WARP;
#pragma unroll
        for (int i = 0; i < N; i++, column += 32)
            if (column < width && t.block)
                ((u16*)to)[column] = to_half(t.block, v[i]);
            else if (column < width)
                ((float*)to)[column] = v[i];
    }
}

// Store a unit to all targets. N is 8 if one of them has blocks of 256, f16 or bf16, else 1.
template <int N>
__device__ __forceinline__ void emit(const float* v, const Targets& targets, i64 row, int first,
                                     int width) {
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (i < targets.count) emit_to<N>(v, targets.t[i], row, first, width);
}
