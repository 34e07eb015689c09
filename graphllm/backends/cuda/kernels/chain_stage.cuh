#pragma once
// The arguments of a stage of linear_chain.cu.

#include "matrices.cuh"

struct ChainStage {
    const u8* x;
    const float* norm;  // weight of the norm
    u8* row;            // where the first block stores the activations if it is not AS_IS
    Matrices all;
    float eps;
    int act;  // of a gated unit
};
