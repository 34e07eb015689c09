#pragma once
// The arguments of a stage of linear_chain.cu.

#include "matrices.cuh"

struct ChainStage {
    const u8* x;
    const float *norm, *norm2;  // weights of the norms
    const float* base;          // what is added to the first norm of two
    float* total;               // where the first block stores their sum, or null
    u8* row;                    // where it stores the activations if they are not AS_IS, or null
    Matrices all;
    float eps, eps2;
    int act;  // of a gated unit
};
