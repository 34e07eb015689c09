// Rows of a table, by token id, exactly as graphllm.quant_formats has the formulas: every operation
// rounds once, none is fused. A block does one token (x) and some columns (y), a thread one element.

__device__ __forceinline__ float times(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float less(float a, float b) { return __fsub_rn(a, b); }

// Element k of 32: all low halves of the bytes, then all high halves.
__device__ __forceinline__ int nibble(const u8* q, int k, int half) {
    return k < half ? q[k] & 15 : q[k - half] >> 4;
}

__device__ const i8 IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                      1,    13,   25,  38,  53,  69,  89,  113};
__device__ const i8 MXFP4_VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

struct F32 {
    static const int BLOCK = 1, BYTES = 4;
    static __device__ float at(const u8* b, int) { return *(const float*)b; }
};
struct F16 {
    static const int BLOCK = 1, BYTES = 2;
    static __device__ float at(const u8* b, int) { return from_f16(*(const u16*)b); }
};
struct BF16 {
    static const int BLOCK = 1, BYTES = 2;
    static __device__ float at(const u8* b, int) { return from_bf16(*(const u16*)b); }
};

struct Q4_0 {
    static const int BLOCK = 32, BYTES = 18;
    static __device__ float at(const u8* b, int k) {
        return times(load_f16(b), (float)(nibble(b + 2, k, 16) - 8));
    }
};
struct Q4_1 {
    static const int BLOCK = 32, BYTES = 20;
    static __device__ float at(const u8* b, int k) {
        return __fadd_rn(times(load_f16(b), (float)nibble(b + 4, k, 16)), load_f16(b + 2));
    }
};

__device__ __forceinline__ int fifth_bit(const u8* bits, int k) {
    return (bits[k / 8] >> k % 8 & 1) << 4;
}

struct Q5_0 {
    static const int BLOCK = 32, BYTES = 22;
    static __device__ float at(const u8* b, int k) {
        int q = nibble(b + 6, k, 16) | fifth_bit(b + 2, k);
        return times(load_f16(b), (float)(q - 16));
    }
};
struct Q5_1 {
    static const int BLOCK = 32, BYTES = 24;
    static __device__ float at(const u8* b, int k) {
        int q = nibble(b + 8, k, 16) | fifth_bit(b + 4, k);
        return __fadd_rn(times(load_f16(b), (float)q), load_f16(b + 2));
    }
};
struct Q8_0 {
    static const int BLOCK = 32, BYTES = 34;
    static __device__ float at(const u8* b, int k) {
        return times(load_f16(b), (float)(i8)b[2 + k]);
    }
};

struct Q2_K {
    static const int BLOCK = 256, BYTES = 84;
    static __device__ float at(const u8* b, int k) {
        u8 both = b[k / 16];
        int q = b[16 + k / 128 * 32 + k % 32] >> k % 128 / 32 * 2 & 3;
        float scale = times(load_f16(b + 80), (float)(both & 15));
        return less(times(scale, (float)q), times(load_f16(b + 82), (float)(both >> 4)));
    }
};
struct Q3_K {
    static const int BLOCK = 256, BYTES = 110;
    static __device__ float at(const u8* b, int k) {
        int s = k / 16;
        int scale = (nibble(b + 96, s, 8) | (b[104 + s % 4] >> s / 4 * 2 & 3) << 4) - 32;
        int low = b[32 + k / 128 * 32 + k % 32] >> k % 128 / 32 * 2 & 3;
        int q = (low | (b[k % 32] >> k / 32 & 1) << 2) - 4;
        return times(times(load_f16(b + 108), (float)scale), (float)q);
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

struct Q4_K {
    static const int BLOCK = 256, BYTES = 144;
    static __device__ float at(const u8* b, int k) {
        float scale, least;
        k_scales(b, k / 32, scale, least);
        int q = nibble(b + 16 + k / 64 * 32, k % 64, 32);
        return less(times(scale, (float)q), least);
    }
};
struct Q5_K {
    static const int BLOCK = 256, BYTES = 176;
    static __device__ float at(const u8* b, int k) {
        float scale, least;
        k_scales(b, k / 32, scale, least);
        int q = nibble(b + 48 + k / 64 * 32, k % 64, 32) | (b[16 + k % 32] >> k / 32 & 1) << 4;
        return less(times(scale, (float)q), least);
    }
};
struct Q6_K {
    static const int BLOCK = 256, BYTES = 210;
    static __device__ float at(const u8* b, int k) {
        int half = k / 128, r = k % 128;
        int low = nibble(b + half * 64, r, 64);
        int high = b[128 + half * 32 + r % 32] >> r / 32 * 2 & 3;
        float scale = times(load_f16(b + 208), (float)(i8)b[192 + k / 16]);
        return times(scale, (float)((low | high << 4) - 32));
    }
};

struct IQ4_NL {
    static const int BLOCK = 32, BYTES = 18;
    static __device__ float at(const u8* b, int k) {
        return times(load_f16(b), (float)IQ4_VALUES[nibble(b + 2, k, 16)]);
    }
};
struct IQ4_XS {
    static const int BLOCK = 256, BYTES = 136;
    static __device__ float at(const u8* b, int k) {
        int s = k / 32;
        int low = s & 1 ? b[4 + s / 2] >> 4 : b[4 + s / 2] & 15;
        int scale = (low | (load_u16(b + 2) >> 2 * s & 3) << 4) - 32;
        int q = nibble(b + 8 + s * 16, k % 32, 16);
        return times(times(load_f16(b), (float)scale), (float)IQ4_VALUES[q]);
    }
};
struct MXFP4 {
    static const int BLOCK = 32, BYTES = 17;
    static __device__ float at(const u8* b, int k) {
        u32 e = b[0];
        float scale = __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
        return times(scale, (float)MXFP4_VALUES[nibble(b + 1, k, 16)]);
    }
};

template <class Format>
__device__ __forceinline__ void embed(const int* ids, const u8* w, i64 stride, i64 count,
                                      float* out, const i64* live, int width) {
    begin();
    i64 row = blockIdx.x;
    int column = blockIdx.y * blockDim.x + threadIdx.x;
    if (row >= *live || column >= width) return;
    int id = ids[row];
    const u8* block = w + id * stride + column / Format::BLOCK * Format::BYTES;
    bool known = 0 <= id && id < count;
    out[row * width + column] = known ? Format::at(block, column % Format::BLOCK) : NOT_A_NUMBER;
}

#define EMBED(NAME, FORMAT)                                                                     \
    extern "C" __global__ void embedding_##NAME(const int* ids, const u8* w, i64 stride,       \
                                                i64 count, float* out, const i64* live,        \
                                                int width) {                                   \
        embed<FORMAT>(ids, w, stride, count, out, live, width);                                 \
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
