#pragma once
// Items of plain weights, like those of formats.cuh, and products of items with activations.
//
// FORMAT: format of the weights. INTEGER: int8 activations, else float32, or HALVES: 1: f16, 2: bf16.
// LONE: one token at a time.

#include "formats.cuh"

struct F16 {
    static constexpr int ITEM = 8;
    typedef Floats<8> Values;
    uint4 q;
    static constexpr int STEPS[3] = {0, 0, 0};
    __device__ static __forceinline__ Planes item(const Planes& w, size_t i) { return {w.a + 16 * i}; }
    __device__ __forceinline__ void load(const Planes& p) { q = stream16(p.a); }
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
    static constexpr int STEPS[3] = {0, 0, 0};
    __device__ static __forceinline__ Planes item(const Planes& w, size_t i) { return {w.a + 16 * i}; }
    __device__ __forceinline__ void load(const Planes& p) { q = stream16(p.a); }
    __device__ __forceinline__ void unpack(int j, Values& u) const {
#pragma unroll
        for (int k = 0; k < 4; k++) u.v[k] = __uint_as_float(word(q, k));
    }
};

// ---------------------------------------------------------------------------------- products

// Four activations from element `at` on.
__device__ __forceinline__ float4 floats4(const u8* row, int at) {
#if HALVES
    ushort4 h = *(const ushort4*)(row + 2 * at);
    return HALVES == 2
               ? make_float4(from_bf16(h.x), from_bf16(h.y), from_bf16(h.z), from_bf16(h.w))
               : make_float4(from_f16(h.x), from_f16(h.y), from_f16(h.z), from_f16(h.w));
#else
    return *(const float4*)(row + 4 * at);
#endif
}

// Sums of products with w8a8 stay integers up to the last one, if activations are integers.
template <class W> struct IntegerSum {
    static constexpr bool value = false;
    typedef float Type;
};
#if INTEGER
template <> struct IntegerSum<W8A8> {
    static constexpr bool value = true;
    typedef int Type;
};
#endif
template <class W> using SumOf = typename IntegerSum<W>::Type;

// A sum as the result that `finish` stores, for a row of activations at `x`.
__device__ __forceinline__ float scaled(float sum, const Planes& w, int row, const u8* x, int k) { return sum; }
__device__ __forceinline__ float scaled(int sum, const Planes& w, int row, const u8* x, int k) {
    return __fmul_rn((float)sum, __fmul_rn(((const float*)w.b)[row], *(const float*)(x + k)));
}

#if INTEGER
__device__ __forceinline__ int4 bytes16(const u8* address, bool aligned) {
    if (aligned) return *(const int4*)address;
    const int* q = (const int*)address;
    return make_int4(q[0], q[1], q[2], q[3]);
}
#else
// Product of item j of a weight and a row of float32 activations.
template <class W, int PARTS>
__device__ __forceinline__ float dot_floats(const Unpacked<PARTS>& u, const u8* row, int j) {
    float sum = 0;
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        float products = 0, plain = 0;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float4 x = floats4(row, W::at(j, p) + 4 * e);
            int v = u.v[4 * p + e];
            products = fmaf((float)(i8)v, x.x, products);
            products = fmaf((float)(i8)(v >> 8), x.y, products);
            products = fmaf((float)(i8)(v >> 16), x.z, products);
            products = fmaf((float)(v >> 24), x.w, products);
            if (W::OFFSET) plain += x.x + x.y + x.z + x.w;
        }
        sum = fmaf(u.scale[p], products, sum);
        if (W::OFFSET) sum = fmaf(u.offset[p], plain, sum);
    }
    return sum;
}
#endif

#if !LONE
// Several tokens: activations are loaded again for each row, since keeping them would take too many
// registers.

// The product of an item with float activations of a token.
template <class W, int COUNT>
__device__ __forceinline__ float dot(const Floats<COUNT>& u, const u8* row, int k, int j,
                                     bool aligned) {
    float sum = 0;
#pragma unroll
    for (int e = 0; e < COUNT; e += 4) {
        float4 x = floats4(row, COUNT * j + e);
        sum = fmaf(u.v[e], x.x, sum), sum = fmaf(u.v[e + 1], x.y, sum);
        sum = fmaf(u.v[e + 2], x.z, sum), sum = fmaf(u.v[e + 3], x.w, sum);
    }
    return sum;
}

#if !INTEGER
template <class W, int PARTS>
__device__ __forceinline__ float dot(const Unpacked<PARTS>& u, const u8* row, int k, int j,
                                     bool aligned) {
    return dot_floats<W>(u, row, j);
}
#else
// Quantized activations: K int8, then a float32 scale per block, then sums of 32 (int32) or of 16 (int16)
// of the int8.
template <class W, int PARTS>
__device__ __forceinline__ SumOf<W> dot(const Unpacked<PARTS>& u, const u8* row, int k, int j,
                                        bool aligned) {
    int products[PARTS];
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        int4 x = bytes16(row + W::at(j, p), aligned);
        int sum = __dp4a(u.v[4 * p], x.x, 0);
        sum = __dp4a(u.v[4 * p + 1], x.y, sum);
        sum = __dp4a(u.v[4 * p + 2], x.z, sum);
        products[p] = __dp4a(u.v[4 * p + 3], x.w, sum);
    }
    if constexpr (IntegerSum<W>::value) return products[0];
    int block = W::at(j, 0) / W::BLOCK;
    const u8 *scales = row + k, *sums = scales + k / W::BLOCK * 4;
    float d = *(const float*)(scales + 4 * block), sum = 0;
    if (W::BLOCK == 32) {
        int all = 0;
#pragma unroll
        for (int p = 0; p < PARTS; p++) all += products[p];
        sum = u.scale[0] * all;
        if (W::OFFSET) sum = fmaf(u.offset[0], *(const int*)(sums + 4 * block), sum);
    } else {
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            sum = fmaf(u.scale[p], products[p], sum);
            if (W::OFFSET) sum = fmaf(u.offset[p], *(const i16*)(sums + W::at(j, p) / 8), sum);
        }
    }
    return d * sum;
}
#endif
#else
// Where the activations for item j of a row are: values, scale, sums.
struct RowPlace {
    const u8 *x, *d, *sums;
    int j;
};

// The activations for an item. `place(row, k, j)` is where those of item j of a row of depth k are, and
// `advance(p, n)` moves to the item n items later, as `advance` of formats.cuh does.
#if !INTEGER
template <class W, class VALUES = typename W::Values> struct Activations {
    const u8* row;
    int j;
    __device__ static __forceinline__ RowPlace place(const u8* row, int k, int j) {
        return {row, row, row, j};
    }
    __device__ static __forceinline__ void advance(RowPlace& p, int n) { p.j += n; }
    __device__ __forceinline__ void load(const RowPlace& p, bool aligned) { row = p.x, j = p.j; }
};

template <class W, int COUNT> struct Activations<W, Floats<COUNT>> {
#if HALVES
    static constexpr int SIZE = 2;
#else
    static constexpr int SIZE = 4;
#endif
    float4 x[COUNT / 4];
    __device__ static __forceinline__ RowPlace place(const u8* row, int k, int j) {
        return {row + SIZE * COUNT * j, row, row, j};
    }
    __device__ static __forceinline__ void advance(RowPlace& p, int n) { p.x += SIZE * COUNT * n; }
    __device__ __forceinline__ void load(const RowPlace& p, bool aligned) {
#pragma unroll
        for (int e = 0; e < COUNT; e += 4) x[e / 4] = floats4(p.x, e);
    }
};

template <int COUNT, class W>
__device__ __forceinline__ float dot(const Floats<COUNT>& u, const Activations<W>& a) {
    float sum = 0;
#pragma unroll
    for (int e = 0; e < COUNT; e += 4) {
        const float4& x = a.x[e / 4];
        sum = fmaf(u.v[e], x.x, sum), sum = fmaf(u.v[e + 1], x.y, sum);
        sum = fmaf(u.v[e + 2], x.z, sum), sum = fmaf(u.v[e + 3], x.w, sum);
    }
    return sum;
}

template <int PARTS, class W>
__device__ __forceinline__ float dot(const Unpacked<PARTS>& u, const Activations<W>& a) {
    return dot_floats<W>(u, a.row, a.j);
}
#else
// Quantized activations: K int8, then a float32 scale per block, then sums of 32 (int32) or of 16 (int16)
// of the int8.
template <class W> struct Activations {
    int4 x[W::PARTS];
    float d;
    int sums[W::PARTS];

    __device__ static __forceinline__ RowPlace place(const u8* row, int k, int j) {
        const int first = W::at(j, 0);
        const u8 *scales = row + k, *all = scales + k / W::BLOCK * 4;
        return {row + first, scales + first / W::BLOCK * 4, all + first / 8, j};
    }
    __device__ static __forceinline__ void advance(RowPlace& p, int n) {
        const int elements = W::ITEM * n;
        p.x += elements, p.d += elements / W::BLOCK * 4, p.sums += elements / 8;
    }
    // Parts have the same distance in all items.
    __device__ __forceinline__ void load(const RowPlace& p, bool aligned) {
#pragma unroll
        for (int i = 0; i < W::PARTS; i++) x[i] = bytes16(p.x + W::at(0, i), aligned);
        d = *(const float*)p.d;
        if (!W::OFFSET) return;
        if (W::BLOCK == 32) {
            sums[0] = *(const int*)p.sums;
        } else {
#pragma unroll
            for (int i = 0; i < W::PARTS; i++) sums[i] = *(const i16*)(p.sums + W::at(0, i) / 8);
        }
    }
};

template <> struct Activations<W8A8> {
    int4 x;

    __device__ static __forceinline__ RowPlace place(const u8* row, int k, int j) {
        return {row + 16 * j, row, row, j};
    }
    __device__ static __forceinline__ void advance(RowPlace& p, int n) { p.x += 16 * n; }
    __device__ __forceinline__ void load(const RowPlace& p, bool aligned) { x = bytes16(p.x, aligned); }
};

__device__ __forceinline__ int product(const W8A8& w, int lane, const Activations<W8A8>& a) {
    return dot16((const int*)&w.q, a.x);
}

template <int PARTS, class W>
__device__ __forceinline__ float dot(const Unpacked<PARTS>& u, const Activations<W>& a) {
    int products[PARTS];
#pragma unroll
    for (int p = 0; p < PARTS; p++) products[p] = dot16(u.v + 4 * p, a.x[p]);
    float sum = 0;
    if (W::BLOCK == 32) {
        int all = 0;
#pragma unroll
        for (int p = 0; p < PARTS; p++) all += products[p];
        sum = u.scale[0] * all;
        if (W::OFFSET) sum = fmaf(u.offset[0], a.sums[0], sum);
    } else {
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            sum = fmaf(u.scale[p], products[p], sum);
            if (W::OFFSET) sum = fmaf(u.offset[p], a.sums[p], sum);
        }
    }
    return a.d * sum;
}

#endif

template <class W>
__device__ __forceinline__ float product(const W& w, int lane, const Activations<W>& a) {
#if INTEGER
    if constexpr (W::INTEGER_PRODUCT) return w.product(lane, a);
#endif
    typename W::Values u;
    w.unpack(lane, u);
    return dot(u, a);
}
#endif
