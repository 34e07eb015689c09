#pragma once
// Eight adjacent elements of a head of a pool, as float32. `head`: where the head begins; `at`: number of the first
// element, a multiple of 8; `width`: elements of a head.

struct F32 {
    float4 a, b;
    __device__ static __forceinline__ int head_bytes(int width) { return 4 * width; }
    __device__ __forceinline__ void load(const u8* head, int at, int width) {
        a = *(const float4*)(head + 4 * at), b = *(const float4*)(head + 4 * at + 16);
    }
    __device__ __forceinline__ void read(float* x) const {
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
        x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    }
};

struct F16 {
    uint4 q;
    __device__ static __forceinline__ int head_bytes(int width) { return 2 * width; }
    __device__ __forceinline__ void load(const u8* head, int at, int width) { q = *(const uint4*)(head + 2 * at); }
    __device__ __forceinline__ void read(float* x) const {
        const u32* words = &q.x;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[2 * i] = from_f16((u16)words[i]), x[2 * i + 1] = from_f16((u16)(words[i] >> 16));
        }
    }
};

struct Q8_0 {  // blocks of 34 bytes: a scale, 32 int8
    u16 d;
    u16 q[4];
    __device__ static __forceinline__ int head_bytes(int width) { return width / 32 * 34; }
    __device__ __forceinline__ void load(const u8* head, int at, int width) {
        const u16* block = (const u16*)(head + at / 32 * 34);
        d = block[0];
#pragma unroll
        for (int i = 0; i < 4; i++) q[i] = block[1 + at % 32 / 2 + i];
    }
    __device__ __forceinline__ void read(float* x) const {
        float scale = from_f16(d);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[2 * i] = scale * (i8)(q[i] & 255), x[2 * i + 1] = scale * (i8)(q[i] >> 8);
        }
    }
};

struct Q4_0 {  // blocks of 18 bytes: a scale, 16 bytes with elements 0 to 15 in their low halves
    u16 d;
    u16 q[4];
    int shift;
    __device__ static __forceinline__ int head_bytes(int width) { return width / 32 * 18; }
    __device__ __forceinline__ void load(const u8* head, int at, int width) {
        const u16* block = (const u16*)(head + at / 32 * 18);
        d = block[0], shift = at % 32 / 16 * 4;
#pragma unroll
        for (int i = 0; i < 4; i++) q[i] = block[1 + at % 16 / 2 + i];
    }
    __device__ __forceinline__ void read(float* x) const {
        float scale = from_f16(d);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int two = q[i] >> shift;
            x[2 * i] = scale * ((two & 15) - 8), x[2 * i + 1] = scale * ((two >> 8 & 15) - 8);
        }
    }
};

struct FP8 {  // e4m3, then a float32 scale
    u32 q[2];
    float d;
    __device__ static __forceinline__ int head_bytes(int width) { return width + 4; }
    __device__ __forceinline__ void load(const u8* head, int at, int width) {
        q[0] = ((const u32*)(head + at))[0], q[1] = ((const u32*)(head + at))[1];
        d = *(const float*)(head + width);
    }
    __device__ __forceinline__ void read(float* x) const {
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = d * from_e4m3(q[i / 4] >> 8 * (i % 4) & 255);
    }
};
