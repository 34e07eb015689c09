#pragma once
// Tensor cores of capability 9.0, which read factors from shared memory: 64 x 16 times 16 x 64 by
// the four warps of a warpgroup, whose first warp's number is a multiple of four. f16 or bf16 (BFLOAT)
// with float32 sums; or 64 x 32 times 32 x 64 of bytes, see element_types.cuh.
//
// A factor consists of dense rows of 64 halves or 128 bytes, aligned to 1024 bytes. 16 bytes of row r are
// at position `swizzled(r, unit)`, so that eight rows cover all banks. PTX ISA 8.x, 9.7.15 (asynchronous
// warpgroup level matrix instructions; 128-byte swizzle).

#include "element_types.cuh"

#if EIGHT_BITS == INT8
#define WGMMA_TYPES "k32.s32.s8.s8"
#define WGMMA_FACTORS ""  // no factor is negated or transposed
#elif EIGHT_BITS
#define WGMMA_TYPES "k32.f32.e4m3.e4m3"
#define WGMMA_FACTORS ", 1, 1"
#elif BFLOAT
#define WGMMA_TYPES "k16.f32.bf16.bf16"
#define WGMMA_FACTORS ", 1, 1, 0, 0"
#else
#define WGMMA_TYPES "k16.f32.f16.f16"
#define WGMMA_FACTORS ", 1, 1, 0, 0"
#endif

__device__ __forceinline__ int swizzled(int row, int unit) { return unit ^ row % 8; }

// Descriptor of the first 32 bytes of the rows at `at` in shared memory: address, 1024 bytes between
// groups of eight rows, swizzle.
__device__ __forceinline__ u64 factor(u32 at) {
    return (u64)(at >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// The same for bytes 32 k .. 32 k + 31.
__device__ __forceinline__ u64 factor(const u16* first, int k) {
    return factor((u32)__cvta_generic_to_shared(first) + 32 * k);
}

// Make shared memory written by threads visible to the tensor cores; call before a barrier.
__device__ __forceinline__ void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void begin_products() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void commit_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Wait for all groups of products but the last LEFT.
template <int LEFT> __device__ __forceinline__ void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ void end_products() {
    commit_products();
    wait_products<0>();
}

// Sum 4 * j + i of a lane is for row lane / 4 + 8 * (i / 2) of its warp's sixteen and column
// 8 * j + lane % 4 * 2 + i % 2. ADD: the products are added to the sums, which they replace otherwise.
template <int WIDTH, bool ADD = true> __device__ __forceinline__ void multiply_shared64(Sum* c, u64 a, u64 b);

#define MULTIPLY_SHARED(WIDTH, ...) \
    MULTIPLY_SHARED_AS(WIDTH, true, "eq", __VA_ARGS__) \
    MULTIPLY_SHARED_AS(WIDTH, false, "ne", __VA_ARGS__)
#define MULTIPLY_SHARED_AS(WIDTH, ADD, RELATION, SUMS, FACTORS, ...) \
    template <> __device__ __forceinline__ void multiply_shared64<WIDTH, ADD>(Sum* c, u64 a, u64 b) { \
        asm volatile("{.reg .pred p; setp." RELATION ".b32 p, 0, 0;" \
                     "wgmma.mma_async.sync.aligned.m64n" #WIDTH WGMMA_TYPES \
                     " {" SUMS "}, " FACTORS ", p" WGMMA_FACTORS ";}" \
                     : __VA_ARGS__ : "l"(a), "l"(b)); \
    }
#define SUMS_OF(c, i) "+" SUM_REGISTER((c)[i]), "+" SUM_REGISTER((c)[i + 1]), \
                      "+" SUM_REGISTER((c)[i + 2]), "+" SUM_REGISTER((c)[i + 3])
#define SUM4(I) SUMS_OF(c, I)
MULTIPLY_SHARED(8, "%0, %1, %2, %3",
                "%4, %5",
                SUM4(0))
MULTIPLY_SHARED(16, "%0, %1, %2, %3, %4, %5, %6, %7",
                "%8, %9",
                SUM4(0), SUM4(4))
MULTIPLY_SHARED(32, "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15",
                "%16, %17",
                SUM4(0), SUM4(4), SUM4(8), SUM4(12))
MULTIPLY_SHARED(64, "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31",
                "%32, %33",
                SUM4(0), SUM4(4), SUM4(8), SUM4(12), SUM4(16), SUM4(20), SUM4(24), SUM4(28))
MULTIPLY_SHARED(128, "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63",
                "%64, %65",
                SUM4(0), SUM4(4), SUM4(8), SUM4(12), SUM4(16), SUM4(20), SUM4(24), SUM4(28),
                SUM4(32), SUM4(36), SUM4(40), SUM4(44), SUM4(48), SUM4(52), SUM4(56), SUM4(60))
MULTIPLY_SHARED(256, "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
                "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
                "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
                "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
                "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127",
                "%128, %129",
                SUM4(0), SUM4(4), SUM4(8), SUM4(12), SUM4(16), SUM4(20), SUM4(24), SUM4(28),
                SUM4(32), SUM4(36), SUM4(40), SUM4(44), SUM4(48), SUM4(52), SUM4(56), SUM4(60),
                SUM4(64), SUM4(68), SUM4(72), SUM4(76), SUM4(80), SUM4(84), SUM4(88), SUM4(92),
                SUM4(96), SUM4(100), SUM4(104), SUM4(108), SUM4(112), SUM4(116), SUM4(120), SUM4(124))

__device__ __forceinline__ void multiply64(Sum* c, u64 a, u64 b) { multiply_shared64<64>(c, a, b); }

#if !EIGHT_BITS
// The same with the first factor in registers, 16 x 16 in each warp as for `multiply`. They must not
// change until the products have been waited for.
template <int WIDTH> __device__ __forceinline__ void multiply_registers64(Sum* c, const u32 (&a)[4], u64 b);

#define MULTIPLY_REGISTERS(WIDTH, SUMS, FACTORS, ...) \
    template <> \
    __device__ __forceinline__ void multiply_registers64<WIDTH>(Sum* c, const u32 (&a)[4], u64 b) { \
        asm volatile("{.reg .pred p; setp.eq.b32 p, 0, 0;" \
                     "wgmma.mma_async.sync.aligned.m64n" #WIDTH WGMMA_TYPES \
                     " {" SUMS "}, " FACTORS ", p, 1, 1, 0;}" \
                     : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); \
    }
MULTIPLY_REGISTERS(8, "%0, %1, %2, %3",
                   "{%4, %5, %6, %7}, %8",
                   SUM4(0))
MULTIPLY_REGISTERS(16, "%0, %1, %2, %3, %4, %5, %6, %7",
                   "{%8, %9, %10, %11}, %12",
                   SUM4(0), SUM4(4))
MULTIPLY_REGISTERS(32, "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15",
                   "{%16, %17, %18, %19}, %20",
                   SUM4(0), SUM4(4), SUM4(8), SUM4(12))
MULTIPLY_REGISTERS(64, "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                   "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31",
                   "{%32, %33, %34, %35}, %36",
                   SUM4(0), SUM4(4), SUM4(8), SUM4(12), SUM4(16), SUM4(20), SUM4(24), SUM4(28))
MULTIPLY_REGISTERS(128, "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                   "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                   "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                   "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63",
                   "{%64, %65, %66, %67}, %68",
                   SUM4(0), SUM4(4), SUM4(8), SUM4(12), SUM4(16), SUM4(20), SUM4(24), SUM4(28),
                   SUM4(32), SUM4(36), SUM4(40), SUM4(44), SUM4(48), SUM4(52), SUM4(56), SUM4(60))
#endif
