// What tensor cores give at best to the instruction that kernels here multiply halves with.
#define BFLOAT 0
#include "tensor_cores.cuh"

#define SUMS 8  // tiles of 16 x 8 that a warp adds to in turns

// SUMS products of 16 x 16 by 16 x 8 in each of `turns`, by every warp.
extern "C" __global__ void multiply_f16(i64 turns, u32 a, u32 b, u32* sink) {
    float sums[SUMS][4];
#pragma unroll
    for (int i = 0; i < SUMS * 4; i++) sums[i / 4][i % 4] = (float)i;  // else one would do for all
    const u32 left[4] = {a, a, a, a};
    for (i64 n = 0; n < turns; n++)
#pragma unroll
        for (int i = 0; i < SUMS; i++) multiply(sums[i], left, b, b);
    u32 all = 0;
#pragma unroll
    for (int i = 0; i < SUMS; i++) all ^= __float_as_uint(sums[i][0]) ^ __float_as_uint(sums[i][3]);
    if (all == 0x12345678) *sink = all;
}
