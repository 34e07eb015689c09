#pragma once
// Matrices of which each row of activations meets one, as an argument of a kernel. A row of results
// is called a pair: one of a token and one of its matrices, number token * each + choice.

#include "formats.cuh"
#include "quantize.cuh"

struct Experts {
    const u8* x;
    i64 x_stride, line;          // bytes from token to token, and from pair to pair (0: all have one row)
    Planes w, up;                // [matrices, rows, depth]; `up` in gated kernels
    const float *bias, *up_bias;  // [matrices, rows], or null
    u8* y;                       // [tokens, each, rows]
    const u8* ids;   // [tokens, each] below `matrices`; null: pair j of a token meets matrix j
    i64 ids_stride;  // bytes from token to token
    const i64* live;  // tokens
    int each, matrices, rows, depth;
    int kind, form;  // of x, and of y in gated kernels: 0: float32, or as quantize.cuh has it
    int act;          // of gated kernels: as common.cuh counts them, or CLAMPED, with:
    float alpha, limit;
    int ids_ready;  // the ids may be read before the wait
};

// At the beginning of every kernel here: the next one may begin when this one has waited, not sooner. So
// one after it, whose rows are its results, finds the same ids there before it waits: `early`.
__device__ __forceinline__ void wait_and_launch_next(bool soon = true) {
    wait_for_previous();
    if (soon) launch_next();
}

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

__device__ __forceinline__ int id_of(const u8* ids, i64 stride, int each, int pair) {
    return ((const int*)(ids + pair / each * stride))[pair % each];
}

// A result: with the matrix's bias, or NaN where there is no such matrix.
__device__ __forceinline__ void finish(const Experts& e, int pair, int matrix, int row, float value) {
    const i64 at = (i64)matrix * e.rows + row;
    if (!exists(e, matrix))
        value = NOT_A_NUMBER;
    else if (e.bias)
        value += e.bias[at];
    ((float*)e.y)[(i64)pair * e.rows + row] = value;
}

#define CLAMPED -1

// act(gate) * up, with the biases.
__device__ __forceinline__ void finish_gated(const Experts& e, int pair, int matrix, int row, float gate,
                                             float up) {
    const i64 at = (i64)matrix * e.rows + row, to = (i64)pair * e.rows + row;
    float value = NOT_A_NUMBER;
    if (exists(e, matrix)) {
        if (e.bias) gate += e.bias[at];
        if (e.up_bias) up += e.up_bias[at];
        value = e.act == CLAMPED ? act_clamped(gate, up, e.alpha, e.limit)
                                 : activate(e.act, gate) * up;
    }
    if (e.form)
        ((u16*)e.y)[to] = to_half(e.form, value);
    else
        ((float*)e.y)[to] = value;
}
