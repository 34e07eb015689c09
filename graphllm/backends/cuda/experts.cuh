#pragma once
// Matrices of which each row of activations meets one, as an argument of a kernel. A row of results
// is called a pair: one of a token and one of its matrices, number token * each + choice.

#include "blocks.cuh"

struct Experts {
    const u8* x;
    i64 x_stride, line;  // bytes from token to token, and from pair to pair (0: all have one row)
    Planes w;            // [matrices, rows, depth]
    const float* bias;   // [matrices, rows], or null
    float* y;            // [tokens, each, rows]
    const int* ids;      // [tokens, each] below `matrices`; null: pair j of a token meets matrix j
    const i64* live;     // tokens
    int each, matrices, rows, depth, kind, unused;  // kind: of x: 0: float32, or as quantise.cuh has it
};

// Some pairs of one matrix; one that is not there (an id is too large) gives NaN.
struct Group {
    int matrix, first, count, unused;  // `first`: in the order of pairs by matrix
};

__device__ __forceinline__ bool exists(const Experts& e, int matrix) {
    return (u32)matrix < (u32)e.matrices;
}

__device__ __forceinline__ const u8* row_of(const Experts& e, int pair) {
    return e.x + pair / e.each * e.x_stride + pair % e.each * e.line;
}

__device__ __forceinline__ void finish(const Experts& e, int pair, int matrix, int row, float value) {
    if (e.bias) value += e.bias[(i64)matrix * e.rows + row];
    e.y[(i64)pair * e.rows + row] = value;
}
