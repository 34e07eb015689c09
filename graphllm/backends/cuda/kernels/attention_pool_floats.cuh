#pragma once
// Eight adjacent elements of head `kv` of a slot, as float32. `at`: number of the first element, a multiple of 8;
// `width`: elements of a head. Quantised slots have the elements of all heads, and from `scales_at` on their scales.

struct F32 {
    float4 a, b;
    __device__ __forceinline__ void load(const u8* slot, i64 scales_at, int kv, int at, int width) {
        const float4* from = (const float4*)((const float*)slot + kv * width + at);
        a = from[0], b = from[1];
    }
    __device__ __forceinline__ void read(float* x) const {
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
        x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    }
};

struct F16 {
    uint4 q;
    __device__ __forceinline__ void load(const u8* slot, i64 scales_at, int kv, int at, int width) {
        q = *(const uint4*)((const u16*)slot + kv * width + at);
    }
    __device__ __forceinline__ void read(float* x) const {
        const u32* words = &q.x;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[2 * i] = from_f16((u16)words[i]), x[2 * i + 1] = from_f16((u16)(words[i] >> 16));
        }
    }
};

struct Q8_0 {  // int8, an f16 scale of each 32
    u16 d;
    u16 q[4];
    __device__ __forceinline__ void load(const u8* slot, i64 scales_at, int kv, int at, int width) {
        d = ((const u16*)(slot + scales_at))[(kv * width + at) / 32];
#pragma unroll
        for (int i = 0; i < 4; i++) q[i] = ((const u16*)(slot + kv * width + at))[i];
    }
    __device__ __forceinline__ void read(float* x) const {
        float scale = from_f16(d);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[2 * i] = scale * (i8)(q[i] & 255), x[2 * i + 1] = scale * (i8)(q[i] >> 8);
        }
    }
};

struct Q4_0 {  // blocks of 16 bytes with elements 0 to 15 in their low halves; an f16 scale of each
    u16 d;
    u16 q[4];
    int shift;
    __device__ __forceinline__ void load(const u8* slot, i64 scales_at, int kv, int at, int width) {
        const int block = (kv * width + at) / 32;
        d = ((const u16*)(slot + scales_at))[block], shift = at % 32 / 16 * 4;
#pragma unroll
        for (int i = 0; i < 4; i++) q[i] = ((const u16*)(slot + 16 * block + at % 16))[i];
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

struct FP8 {  // e4m3, a float32 scale of each head
    u32 q[2];
    float d;
    __device__ __forceinline__ void load(const u8* slot, i64 scales_at, int kv, int at, int width) {
        const u32* from = (const u32*)(slot + kv * width + at);
        q[0] = from[0], q[1] = from[1];
        d = ((const float*)(slot + scales_at))[kv];
    }
    __device__ __forceinline__ void read(float* x) const {
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = d * from_e4m3(q[i / 4] >> 8 * (i % 4) & 255);
    }
};
