// Probe of tensor core throughput, with the mma instruction that kernels here use.
#define BFLOAT 0
#include "tensor_cores.cuh"

#define ACCUMULATORS 8  // independent tiles of 16 x 8 of a warp

// ACCUMULATORS products of 16 x 16 by 16 x 8 per iteration, by every warp.
extern "C" __global__ void multiply_f16(i64 iterations, u32 a, u32 b, u32* sink) {
    float sums[ACCUMULATORS][4];
#pragma unroll
    for (int i = 0; i < ACCUMULATORS * 4; i++) sums[i / 4][i % 4] = (float)i;  // different, or the compiler would merge them
    const u32 left[4] = {a, a, a, a};
    for (i64 n = 0; n < iterations; n++)
#pragma unroll
        for (int i = 0; i < ACCUMULATORS; i++) multiply(sums[i], left, b, b);
    u32 all = 0;
#pragma unroll
    for (int i = 0; i < ACCUMULATORS; i++) all ^= __float_as_uint(sums[i][0]) ^ __float_as_uint(sums[i][3]);
    if (all == 0x12345678) *sink = all;
}
