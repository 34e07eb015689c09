#pragma once
// Tensor cores of capability 9.0, which read both factors from shared memory: 64 x 16 times 16 x 64 by
// the four warps of a warpgroup, whose first warp's number is a multiple of four. f16 or bf16 (BFLOAT)
// with float32 sums.
//
// A factor consists of dense rows of 64 halves, aligned to 1024 bytes. Eight halves of row r are at
// position `swizzled(r, eight)`, so that eight rows cover all banks. PTX ISA 8.x, 9.7.15 (asynchronous
// warpgroup level matrix instructions; 128-byte swizzle).

#if BFLOAT
#define WGMMA_HALVES "bf16.bf16"
#else
#define WGMMA_HALVES "f16.f16"
#endif

__device__ __forceinline__ int swizzled(int row, int eight) { return eight ^ row % 8; }

// Descriptor of elements 16 k .. 16 k + 15 of the rows from `first` on: address, 1024 bytes between
// groups of eight rows, swizzle.
__device__ __forceinline__ u64 factor(const u16* first, int k) {
    const u32 at = (u32)__cvta_generic_to_shared(first) + 32 * k;
    return (u64)(at >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// Make shared memory written by threads visible to the tensor cores; call before a barrier.
__device__ __forceinline__ void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void begin_products() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void end_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

#define SUM4(C, I) "+f"(C[I]), "+f"(C[I + 1]), "+f"(C[I + 2]), "+f"(C[I + 3])

// Sum 4 * j + i of a lane is for row lane / 4 + 8 * (i / 2) of its warp's sixteen and column
// 8 * j + lane % 4 * 2 + i % 2.
__device__ __forceinline__ void multiply64(float* c, u64 a, u64 b) {
    asm volatile(
        "{.reg .pred p; setp.eq.b32 p, 0, 0;"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." WGMMA_HALVES
        " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19,"
        " %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, 0, 0;}"
        : SUM4(c, 0), SUM4(c, 4), SUM4(c, 8), SUM4(c, 12), SUM4(c, 16), SUM4(c, 20), SUM4(c, 24),
          SUM4(c, 28)
        : "l"(a), "l"(b));
}
