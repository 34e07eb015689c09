#pragma once
// The argument of attention_rotation.cuh: the token, and where its key and value go.

#include "head_rotation.cuh"
#include "kv_cache.cuh"

struct NewToken {
    Heads q, k, v;
    Pool k_pool, v_pool;
    Rotation rotation;
    float eps;
    int position_ready;  // position and slot may be read before the wait
    int few_heads;       // the next linear has few weights, so it starts when the queries are there
    int padding;
};
