#pragma once
// The argument of attention_rotation.cuh: tokens, and where their keys and values go.

#include "head_rotation.cuh"
#include "kv_cache.cuh"

struct NewTokens {
    Heads q, k, v;
    Pool k_pool, v_pool;
    Rotation rotation;
    float eps;
    int position_ready;  // positions and slots may be read before the wait
    int few_heads;       // the next linear has few weights, so it starts when the queries are there
    int padding;
};
