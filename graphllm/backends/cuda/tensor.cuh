#pragma once
// Tensor cores: 16 x 16 times 16 x 8, halves with float32 sums. BFLOAT: the halves are bfloat16.

#if BFLOAT
#define HALF "bf16"
#else
#define HALF "f16"
#endif

__device__ __forceinline__ void multiply(float* c, const u32* a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." HALF "." HALF ".f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 pair(float low, float high) {
    u32 r;
    asm("cvt.rn." HALF "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
