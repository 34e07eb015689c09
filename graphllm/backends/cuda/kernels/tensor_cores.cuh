#pragma once
// Tensor cores: 16 x 16 times 16 x 8, f16 or bf16 (BFLOAT) with float32 sums; or 16 x 32 times 32 x 8 of
// bytes. Before capability 8.9, e4m3 is converted to f16 for them.

#include "element_types.cuh"

#if BFLOAT
#define HALF "bf16"
#else
#define HALF "f16"
#endif
#if EIGHT_BITS == INT8
#define MMA_TYPES "m16n8k32.row.col.s32.s8.s8.s32"
#elif EIGHT_BITS && __CUDA_ARCH__ >= 890
#define MMA_TYPES "m16n8k32.row.col.f32.e4m3.e4m3.f32"
#else
#define MMA_TYPES "m16n8k16.row.col.f32." HALF "." HALF ".f32"
#endif
#define UPCAST (EIGHT_BITS == E4M3 && __CUDA_ARCH__ < 890)

__device__ __forceinline__ void multiply_once(Sum* c, const u32* a, u32 b0, u32 b1) {
    asm("mma.sync.aligned." MMA_TYPES " "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+" SUM_REGISTER(c[0]), "+" SUM_REGISTER(c[1]), "+" SUM_REGISTER(c[2]), "+" SUM_REGISTER(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The low or the high two of four e4m3 as f16: their exponents have 8 less, which the product adds.
__device__ __forceinline__ u32 halves_of_e4m3(u32 four, bool high) {
    const u32 two = __byte_perm(four, 0, high ? 0x3424 : 0x1404);
    u32 r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"((two & 0x7f007f00) >> 1 | two & 0x80008000), "r"(0x5c005c00));
    return r;
}

__device__ __forceinline__ void multiply(Sum* c, const u32* a, u32 b0, u32 b1) {
#if UPCAST  // both factors have the elements of the depth in the same other order
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 four = i ? b1 : b0;
        u32 halves[4];
#pragma unroll
        for (int j = 0; j < 4; j++) halves[j] = halves_of_e4m3(a[2 * i + j % 2], j / 2);
        multiply_once(c, halves, halves_of_e4m3(four, false), halves_of_e4m3(four, true));
    }
#else
    multiply_once(c, a, b0, b1);
#endif
}

__device__ __forceinline__ u32 pair(float low, float high) {
    u32 r;
    asm("cvt.rn." HALF "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

__device__ __forceinline__ u32 shared_address(const void* p) {
    return (u32)__cvta_generic_to_shared(p);
}

// Load four matrices of 8 x 8 halves; lane l has the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(u32* r, const u16* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)));
}

// Load two of them; the addresses of the lanes from 16 on are ignored.
__device__ __forceinline__ void load_two_matrices(u32* r, u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(row));
}
__device__ __forceinline__ void load_two_matrices(u32* r, const u16* row) {
    load_two_matrices(r, shared_address(row));
}

__device__ __forceinline__ void load_matrices_transposed(u32* r, const u16* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)));
}

// Copy 16 bytes to shared memory asynchronously; zeros if `there` is false.
__device__ __forceinline__ void copy16(u16* to, const u8* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from));
}

__device__ __forceinline__ void copy16(u16* to, const u8* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(there ? 16 : 0));
}

// Copy 4 bytes.
__device__ __forceinline__ void copy4(float* to, const float* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from));
}

__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;"); }

template <int LEFT> __device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT));
}
