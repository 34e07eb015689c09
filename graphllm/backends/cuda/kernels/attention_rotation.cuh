#pragma once
// The token of a step of one, whose heads attention_decode.cu norms and rotates itself, as rope_write of kv_cache.cu does,
// bit by bit. Each block does so for the query heads of its KV head, and for the new key, which it does not read from
// the pool: one of the blocks writes it there. Pools are f16.

#include "attention_units.cuh"
#include "new_token.cuh"

static_assert(POOL == 1, "quantised keys would be read with the bits that are written");

// Works on heads in the warps of a block: query heads first, then the key and the value.
struct TokenRotation {
    static constexpr int PAIRS = DEPTH / 64, SHARE = (GROUP + 2 + WARPS - 1) / WARPS;  // heads of a warp
    const NewToken& token;
    WarpRotation<PAIRS> angles;
    float q_norm[2][PAIRS], k_norm[2][PAIRS];
    const int slot, position;

    // Loads what the angles need.
    __device__ __forceinline__ TokenRotation(const NewToken& t)
        : token(t), angles(t.rotation), slot(t.k_pool.slot[0]), position(t.rotation.pos[0]) {}

    // Loads the weights of norms, and computes the angles.
    __device__ __forceinline__ void prepare() {
        if (token.q.norm) angles.load(token.q.norm, q_norm[0], q_norm[1]);
        if (token.k.norm) angles.load(token.k.norm, k_norm[0], k_norm[1]);
        angles.at(position);
    }

    // Store the unit's queries as f16 times `a.scale`, and the new key and value, which go to the pools as well if this is
    // the first unit of its KV head.
    __device__ __forceinline__ void compute(const Attention& a, const Unit& unit, u16 (*queries)[QUERY], u16 (*new_rows)[DEPTH]) {
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        const bool first = unit.slot == 0 && unit.head == unit.kv * a.shared;
        float y[SHARE][PAIRS], z[SHARE][PAIRS];
#pragma unroll
        for (int i = 0; i < SHARE; i++) {  // all loads are in flight together
            const int n = warp + i * WARPS - unit.heads;
            const Heads& all = n < 0 ? token.q : n == 0 ? token.k : token.v;
            if (n < 2) angles.load(head_of(all, 0, n < 0 ? unit.head + unit.heads + n : unit.kv, DEPTH), y[i], z[i]);
        }
#pragma unroll
        for (int i = 0; i < SHARE; i++) {
            const int n = warp + i * WARPS - unit.heads;
            if (n >= 2) continue;
            if (n < 0 && token.q.norm) angles.norm(y[i], z[i], q_norm[0], q_norm[1], token.eps);
            if (n == 0 && token.k.norm) angles.norm(y[i], z[i], k_norm[0], k_norm[1], token.eps);
            if (n < 1) angles.rotate(y[i], z[i]);
            float x[2 * PAIRS];
            angles.elements(y[i], z[i], x);
            u16* const to = (n < 0 ? queries[unit.heads + n] : new_rows[n]) + lane;
#pragma unroll
            for (int j = 0; j < 2 * PAIRS; j++) to[32 * j] = to_f16(n < 0 ? x[j] * a.scale : x[j]);
            if (n >= 0 && first && slot >= 0)
                store_kv(n ? token.v_pool : token.k_pool, slot, unit.kv, lane, x, head_scale(0));
        }
    }
};
