#pragma once
// The token of a step of one, whose heads attention_decode.cu norms and rotates itself, as rope_write of kv_cache.cu does,
// bit by bit. Each block does so for the query heads of its KV head, and for the new key, which it does not read from
// the pool: one of the blocks writes it there. Pools are f16.

#include "attention_units.cuh"
#include "new_token.cuh"

static_assert(POOL == 1, "quantised keys would be read with the bits that are written");

// The units of the token's query. Block (x, y) has partial results x, x + gridDim.x, ... of group y of the query heads, so
// that finding them takes few instructions: what precedes the first loads of keys is a chain that nothing hides.
struct TokenUnits {
    const Query query;
    const Partials partials;

    __device__ __forceinline__ TokenUnits(const Attention& a, int length)
        : query{0, keys_of_lone(a, length)}, partials(a, query.keys, gridDim.y) {}

    // Unit `number` of this block.
    __device__ __forceinline__ void get(const NewToken& token, int number, Unit& unit) const {
        const int slot = blockIdx.x + number * gridDim.x, group = blockIdx.y;
        unit.there = slot < partials.count;
        unit.row = 0, unit.slot = slot, unit.query = query;
        unit.kv = token.groups == 1 ? group : group / token.groups;
        unit.head = unit.kv * token.shared + (group - unit.kv * token.groups) * GROUP;
        unit.heads = min(GROUP, (unit.kv + 1) * token.shared - unit.head);
        const int tile = partials.first + slot << partials.shift;
        unit.tile = max(tile, query.keys.low / TILE_KEYS);
        unit.end = min(tile + partials.each, (query.keys.high - 1) / TILE_KEYS + 1);
    }
};

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

    // Store the unit's queries as f16 times `scale`, and the new key and value, which go to the pools as well if this is
    // the first unit of its KV head.
    __device__ __forceinline__ void compute(const Unit& unit, float scale, u16 (*queries)[QUERY], u16 (*fresh)[DEPTH]) {
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        const bool first = unit.slot == 0 && unit.head == unit.kv * token.shared;
        float a[SHARE][PAIRS], b[SHARE][PAIRS];
#pragma unroll
        for (int i = 0; i < SHARE; i++) {  // all loads are in flight together
            const int n = warp + i * WARPS - unit.heads;
            const Heads& all = n < 0 ? token.q : n == 0 ? token.k : token.v;
            if (n < 2) angles.load(head_of(all, 0, n < 0 ? unit.head + unit.heads + n : unit.kv, DEPTH), a[i], b[i]);
        }
#pragma unroll
        for (int i = 0; i < SHARE; i++) {
            const int n = warp + i * WARPS - unit.heads;
            if (n >= 2) continue;
            if (n < 0 && token.q.norm) angles.norm(a[i], b[i], q_norm[0], q_norm[1], token.eps);
            if (n == 0 && token.k.norm) angles.norm(a[i], b[i], k_norm[0], k_norm[1], token.eps);
            if (n < 1) angles.rotate(a[i], b[i]);
            float x[2 * PAIRS];
            angles.elements(a[i], b[i], x);
            u16* const to = (n < 0 ? queries[unit.heads + n] : fresh[n]) + lane;
#pragma unroll
            for (int j = 0; j < 2 * PAIRS; j++) to[32 * j] = to_f16(n < 0 ? x[j] * scale : x[j]);
            if (n >= 0 && first && slot >= 0)
                store_kv(n ? token.v_pool : token.k_pool, slot, unit.kv, lane, x, head_scale(0));
        }
    }
};
