#pragma once
// The argument of kernels in which each row of activations multiplies a matrix of its own. A pair is
// one token and one of its matrices, with number token * each + choice; it has a row of results.

#include "formats.cuh"
#include "quantize.cuh"

struct Experts {
    const u8* x;
    i64 x_stride, line;          // bytes between tokens, and between pairs (0: pairs share a row)
    Planes w, up;                // [matrices, rows, depth]; `up` in gated kernels
    const float *bias, *up_bias;  // [matrices, rows], or null
    u8* y;                       // [tokens, each, rows]
    const u8* ids;   // [tokens, each], less than `matrices`; null: pair j of a token has matrix j
    i64 ids_stride;  // bytes between tokens
    const i64* live;  // tokens
    int each, matrices, rows, depth;
    int kind, form;  // of x, and of y in gated kernels; 0: float32, else a kind of quantize.cuh
    int act;          // of gated kernels: an Activation, or CLAMPED with these parameters:
    float alpha, limit;
    int ids_ready;  // the ids may be read before the wait, by kernels that add up results also speculatively
    // of kernels that add up the results of one token, of at most MOST_SUMMED pairs:
    const float *weights, *residual;  // [each], [rows]
    int quantised_nbytes;             // bytes of a quantised row in shared memory
    // of kernels that choose the experts of one token themselves, see expert_choice.cuh:
    const float *logits, *correction;  // [matrices], the latter or null
    int* chosen;                       // [each], ids of the chosen experts, for the next launch
    float* chosen_weights;             // [each]
    int score, normalised;             // an enum Score; divide the weights by their sum plus `eps`
    float eps, factor;                 // `factor` multiplies the weights
};

#define MOST_SUMMED 8

// The start of every kernel of products with ids. The next kernel may start only after this one has
// waited, so everything before this one, such as the router, has completed by then, and the next kernel
// may read the same ids before its own wait (`ids_ready`).
__device__ __forceinline__ void wait_and_launch_next(bool soon = true) {
    wait_for_previous();
    if (soon) launch_next();
}

// Pairs of one matrix. A matrix that does not exist (an id is out of range) gives NaN.
struct Group {
    int matrix, first, count, unused;  // `first`: index into the pairs sorted by matrix
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

// One row of a matrix's bias, 0 if there is none. `biases`: those of all matrices.
__device__ __forceinline__ float bias_of(const Experts& e, const float* biases, int matrix, int row) {
    return biases && exists(e, matrix) ? biases[(i64)matrix * e.rows + row] : 0.f;
}

// Store one result, to which the bias has been added; NaN if the matrix does not exist.
__device__ __forceinline__ void store(const Experts& e, int pair, int matrix, int row, float value) {
    ((float*)e.y)[(i64)pair * e.rows + row] = exists(e, matrix) ? value : NOT_A_NUMBER;
}

// Store one result with the matrix's bias.
__device__ __forceinline__ void finish(const Experts& e, int pair, int matrix, int row, float value) {
    store(e, pair, matrix, row, value + bias_of(e, e.bias, matrix, row));
}

#define CLAMPED -1

// Store act(gate) * up, to which the biases have been added.
__device__ __forceinline__ void store_gated(const Experts& e, int pair, int matrix, int row, float gate,
                                            float up) {
    const i64 to = (i64)pair * e.rows + row;
    float value = NOT_A_NUMBER;
    if (exists(e, matrix))
        value = e.act == CLAMPED ? act_clamped(gate, up, e.alpha, e.limit) : activate(e.act, gate) * up;
    if (e.form)
        ((u16*)e.y)[to] = to_half(e.form, value);
    else
        ((float*)e.y)[to] = value;
}

// Store act(gate) * up with the biases.
__device__ __forceinline__ void finish_gated(const Experts& e, int pair, int matrix, int row, float gate,
                                             float up) {
    gate += bias_of(e, e.bias, matrix, row), up += bias_of(e, e.up_bias, matrix, row);
    store_gated(e, pair, matrix, row, gate, up);
}
