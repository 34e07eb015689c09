// Rows of a table, by token id, exactly as graphllm.quant_formats has the formulas: every operation
// rounds once, none is fused. Tables of blocks lie in planes (layouts.py), so that a linear may share
// one with its weight. A block does one token (x) and some columns (y), a thread one element.

__device__ __forceinline__ float times(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float less(float a, float b) { return __fsub_rn(a, b); }

// Element k of 32: all low halves of the bytes, then all high halves.
__device__ __forceinline__ int nibble(const u8* q, int k, int half) {
    return k < half ? q[k] & 15 : q[k - half] >> 4;
}

__device__ const i8 IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                      1,    13,   25,  38,  53,  69,  89,  113};
__device__ const i8 MXFP4_VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Where the planes begin, or a block's bytes in each.
struct Planes {
    const u8 *a, *b, *c, *d;
};

// BLOCK: elements of a block. A .. D: its bytes in each plane.
template <int ELEMENTS, int IN_A, int IN_B = 0, int IN_C = 0, int IN_D = 0> struct Layout {
    static const int BLOCK = ELEMENTS, A = IN_A, B = IN_B, C = IN_C, D = IN_D;
};

struct F32 : Layout<1, 4> {
    static __device__ float at(const Planes& w, int) { return *(const float*)w.a; }
};
struct F16 : Layout<1, 2> {
    static __device__ float at(const Planes& w, int) { return from_f16(*(const u16*)w.a); }
};
struct BF16 : Layout<1, 2> {
    static __device__ float at(const Planes& w, int) { return from_bf16(*(const u16*)w.a); }
};

struct Q4_0 : Layout<32, 16, 2> {
    static __device__ float at(const Planes& w, int k) {
        return times(load_f16(w.b), (float)(nibble(w.a, k, 16) - 8));
    }
};
struct Q4_1 : Layout<32, 16, 4> {
    static __device__ float at(const Planes& w, int k) {
        return __fadd_rn(times(load_f16(w.b), (float)nibble(w.a, k, 16)), load_f16(w.b + 2));
    }
};

__device__ __forceinline__ int fifth_bit(const u8* bits, int k) {
    return (bits[k / 8] >> k % 8 & 1) << 4;
}

struct Q5_0 : Layout<32, 16, 4, 2> {
    static __device__ float at(const Planes& w, int k) {
        int q = nibble(w.a, k, 16) | fifth_bit(w.b, k);
        return times(load_f16(w.c), (float)(q - 16));
    }
};
struct Q5_1 : Layout<32, 16, 4, 4> {
    static __device__ float at(const Planes& w, int k) {
        int q = nibble(w.a, k, 16) | fifth_bit(w.b, k);
        return __fadd_rn(times(load_f16(w.c), (float)q), load_f16(w.c + 2));
    }
};
struct Q8_0 : Layout<32, 32, 2> {
    static __device__ float at(const Planes& w, int k) {
        return times(load_f16(w.b), (float)(i8)w.a[k]);
    }
};

struct Q2_K : Layout<256, 64, 16, 4> {
    static __device__ float at(const Planes& w, int k) {
        u8 both = w.b[k / 16];
        int q = w.a[k / 128 * 32 + k % 32] >> k % 128 / 32 * 2 & 3;
        float scale = times(load_f16(w.c), (float)(both & 15));
        return less(times(scale, (float)q), times(load_f16(w.c + 2), (float)(both >> 4)));
    }
};
struct Q3_K : Layout<256, 64, 32, 12, 2> {
    static __device__ float at(const Planes& w, int k) {
        int s = k / 16;
        int scale = (nibble(w.c, s, 8) | (w.c[8 + s % 4] >> s / 4 * 2 & 3) << 4) - 32;
        int low = w.a[k / 128 * 32 + k % 32] >> k % 128 / 32 * 2 & 3;
        int q = (low | (w.b[k % 32] >> k / 32 & 1) << 2) - 4;
        return times(times(load_f16(w.d), (float)scale), (float)q);
    }
};

// The scale and the offset of sub-block s of eight, in q4_k and q5_k.
__device__ __forceinline__ void k_scales(const u8* b, int s, float& scale, float& least) {
    int i = s % 4;
    int d = s < 4 ? b[4 + i] & 63 : (b[12 + i] & 15) | b[4 + i] >> 6 << 4;
    int m = s < 4 ? b[8 + i] & 63 : b[12 + i] >> 4 | b[8 + i] >> 6 << 4;
    scale = times(load_f16(b), (float)d);
    least = times(load_f16(b + 2), (float)m);
}

struct Q4_K : Layout<256, 128, 16> {
    static __device__ float at(const Planes& w, int k) {
        float scale, least;
        k_scales(w.b, k / 32, scale, least);
        int q = nibble(w.a + k / 64 * 32, k % 64, 32);
        return less(times(scale, (float)q), least);
    }
};
struct Q5_K : Layout<256, 128, 32, 16> {
    static __device__ float at(const Planes& w, int k) {
        float scale, least;
        k_scales(w.c, k / 32, scale, least);
        int q = nibble(w.a + k / 64 * 32, k % 64, 32) | (w.b[k % 32] >> k / 32 & 1) << 4;
        return less(times(scale, (float)q), least);
    }
};
struct Q6_K : Layout<256, 128, 64, 16, 2> {
    static __device__ float at(const Planes& w, int k) {
        int half = k / 128, r = k % 128;
        int low = nibble(w.a + half * 64, r, 64);
        int high = w.b[half * 32 + r % 32] >> r / 32 * 2 & 3;
        float scale = times(load_f16(w.d), (float)(i8)w.c[k / 16]);
        return times(scale, (float)((low | high << 4) - 32));
    }
};

struct IQ4_NL : Layout<32, 16, 2> {
    static __device__ float at(const Planes& w, int k) {
        return times(load_f16(w.b), (float)IQ4_VALUES[nibble(w.a, k, 16)]);
    }
};
struct IQ4_XS : Layout<256, 128, 8> {
    static __device__ float at(const Planes& w, int k) {
        int s = k / 32;
        int low = s & 1 ? w.b[4 + s / 2] >> 4 : w.b[4 + s / 2] & 15;
        int scale = (low | (load_u16(w.b + 2) >> 2 * s & 3) << 4) - 32;
        int q = nibble(w.a + s * 16, k % 32, 16);
        return times(times(load_f16(w.b), (float)scale), (float)IQ4_VALUES[q]);
    }
};
struct MXFP4 : Layout<32, 16, 1> {
    static __device__ float at(const Planes& w, int k) {
        u32 e = w.b[0];
        float scale = __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
        return times(scale, (float)MXFP4_VALUES[nibble(w.a, k, 16)]);
    }
};

template <class Format>
__device__ __forceinline__ void embed(const int* ids, const Planes& w, i64 count, float* out,
                                      const i64* live, int width) {
    const i64 rows = begin(live);
    i64 row = blockIdx.x;
    int column = blockIdx.y * blockDim.x + threadIdx.x;
    if (row >= rows || column >= width) return;
    int id = ids[row];
    i64 block = (i64)id * (width / Format::BLOCK) + column / Format::BLOCK;
    Planes own = {w.a + block * Format::A, w.b + block * Format::B, w.c + block * Format::C,
                  w.d + block * Format::D};
    bool known = 0 <= id && id < count;
    out[row * width + column] = known ? Format::at(own, column % Format::BLOCK) : NOT_A_NUMBER;
}

#define EMBED(NAME, FORMAT)                                                                     \
    extern "C" __global__ void embedding_##NAME(const int* ids, Planes w, i64 count,           \
                                                float* out, const i64* live,                    \
                                                int width TIMESTAMPS) {                             \
        RECORD_TIMESTAMPS                                                                                 \
        embed<FORMAT>(ids, w, count, out, live, width);                                         \
    }
EMBED(f32, F32)
EMBED(f16, F16)
EMBED(bf16, BF16)
EMBED(q4_0, Q4_0)
EMBED(q4_1, Q4_1)
EMBED(q5_0, Q5_0)
EMBED(q5_1, Q5_1)
EMBED(q8_0, Q8_0)
EMBED(q2_k, Q2_K)
EMBED(q3_k, Q3_K)
EMBED(q4_k, Q4_K)
EMBED(q5_k, Q5_K)
EMBED(q6_k, Q6_K)
EMBED(iq4_nl, IQ4_NL)
EMBED(iq4_xs, IQ4_XS)
EMBED(mxfp4, MXFP4)
