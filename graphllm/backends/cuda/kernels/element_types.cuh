#pragma once
// Types of the factors and sums of tensor cores. EIGHT_BITS: 0: f16, or bf16 if BFLOAT; INT8; E4M3, an 8-bit
// float with 4 bits of exponent.
//
// A tensor core instruction takes 32 bytes of the depth of each factor, whatever the type, and the layout of
// factors in bytes is the same for all. So kernels for halves and for bytes differ in the instruction only.

#define INT8 1
#define E4M3 2
#ifndef EIGHT_BITS
#define EIGHT_BITS 0
#endif

#ifndef GROUPED
#define GROUPED 0  // bytes have a scale per 128 elements, not per row
#endif

#if EIGHT_BITS == INT8
typedef int Sum;  // exact for depths of less than 2^17
#define SUM_REGISTER "r"
#else
typedef float Sum;
#define SUM_REGISTER "f"
#endif

#define ELEMENT_BYTES (EIGHT_BITS ? 1 : 2)

__device__ __forceinline__ u32 bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ u32 bits_of(int x) { return (u32)x; }
template <class T> __device__ __forceinline__ T from_bits(u32 bits);
template <> __device__ __forceinline__ float from_bits<float>(u32 bits) { return __uint_as_float(bits); }
template <> __device__ __forceinline__ int from_bits<int>(u32 bits) { return (int)bits; }
