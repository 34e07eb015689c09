#pragma once
// Tensor cores: 16 x 16 times 16 x 8, f16 or bf16 (BFLOAT) with float32 sums.

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

__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;"); }

template <int LEFT> __device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT));
}
