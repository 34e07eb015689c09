#pragma once
// Packed sequences: q_start has the first token of each, and the number of tokens.

#include "common.cuh"

// The sequence of a token: the last one that begins at or before it. All lanes of a warp take part.
__device__ __forceinline__ int find_sequence(const int* q_start, int sequences, int token) {
    int low = 0, high = sequences;
#pragma unroll 1
    while (high - low > 1) {
        const int step = (high - low + WARP - 1) / WARP, at = low + (int)threadIdx.x % WARP * step;
        const u32 before = __ballot_sync(FULL, at < high && q_start[at] <= token);
        low += (__popc(before) - 1) * step, high = min(high, low + step);
    }
    return low;
}
