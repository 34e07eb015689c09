#pragma once
// The tokens of a step of one sequence, whose heads attention_decode.cu norms and rotates itself, as rope_write of
// kv_cache.cu does, bit by bit. A block does so for the query heads of its KV head and its token, and for the new keys
// that its units see, which it does not read from the pool: for each token, one block of its KV head writes them there.
// Pools are f16.
//
// ROTATED: most tokens.

#include "attention_units.cuh"
#include "new_tokens.cuh"

static_assert(POOL == 1, "quantised keys would be read with the bits that are written");

// Whether the angles of one token are computed while its heads are loaded, and not before: faster where the kernel before holds
// most registers, so that blocks start when it ends and have no time before the wait.
constexpr bool LATE_ANGLES = ROTATED == 1 && DEPTH == 128;

// Works on heads in the warps of a block: query heads first, then new keys, then their values.
struct TokenRotation {
    static constexpr int PAIRS = DEPTH / 64;
    // Heads of a warp whose loads are in flight together; for one token those are all.
    static constexpr int SHARE = ROTATED == 1 ? (GROUP + 2 + WARPS - 1) / WARPS : DEPTH == 64 ? 5 : 2;
    const NewTokens& tokens;
    const WarpRotation<PAIRS> rotation;
    const int position, slot;  // of the block's token
    float q_norm[2][PAIRS], k_norm[2][PAIRS];
    SinCos<PAIRS> sin_cos[ROTATED > 1 ? SHARE : 1];
    int first, count;  // tokens whose keys are computed

    // Loads what the angles of the block's token need, and the slot of its key.
    __device__ __forceinline__ TokenRotation(const NewTokens& t)
        : tokens(t), rotation(t.rotation), position(t.rotation.pos[blockIdx.z]), slot(t.k_pool.slot[blockIdx.z]) {}

    // Whether the block writes the key and the value of its token.
    static __device__ __forceinline__ bool writes(const Attention& a, const Unit& unit) {
        return unit.slot == 0 && unit.head == unit.kv * a.shared;
    }

    // The token of head n.
    __device__ __forceinline__ int token_of(const Unit& unit, int n) const {
        if (ROTATED == 1) return 0;
        const int key = n - unit.heads;
        return key < 0 ? unit.row : first + (key < count ? key : key - count);
    }
    __device__ __forceinline__ SinCos<PAIRS> sin_cos_of(const Unit& unit, int n) const {
        if (n < unit.heads) return rotation.at(position);
        return rotation.at(tokens.rotation.pos[token_of(unit, n)]);
    }

    // Finds the new keys of the block's units, of which there are `several` or one, loads weights of norms and, but for
    // LATE_ANGLES, computes angles.
    __device__ __forceinline__ void prepare(const Attention& a, const Unit& unit, bool several) {
        const VisibleKeys& keys = unit.query.keys;
        first = several ? 0 : max(0, unit.tile * TILE_KEYS - keys.old);
        int end = min(keys.high, several ? keys.high : unit.end * TILE_KEYS) - keys.old;
        if (writes(a, unit)) first = end > first ? min(first, unit.row) : unit.row, end = max(end, unit.row + 1);
        count = max(0, end - first);
        if (tokens.q.norm) rotation.load(tokens.q.norm, q_norm[0], q_norm[1]);
        if (tokens.k.norm) rotation.load(tokens.k.norm, k_norm[0], k_norm[1]);
        if (ROTATED == 1 && !LATE_ANGLES) sin_cos[0] = rotation.at(position);
        if (ROTATED > 1)
#pragma unroll
            for (int i = 0; i < SHARE; i++) {
                const int n = threadIdx.x / WARP + i * WARPS;
                if (n < unit.heads + count) sin_cos[i] = sin_cos_of(unit, n);
            }
    }

    // Store the unit's queries as f16 times `a.scale`, and new keys and values by token, of which the block's own ones go
    // to the pools as well.
    __device__ __forceinline__ void compute(const Attention& a, const Unit& unit, u16 (*queries)[QUERY],
                                            u16 (*new_rows)[ROTATED][DEPTH]) {
        const int warp = threadIdx.x / WARP, all = unit.heads + 2 * count;
#pragma unroll 1
        for (int from = warp;; from += WARPS * SHARE) {
            float y[SHARE][PAIRS], z[SHARE][PAIRS];
#pragma unroll
            for (int i = 0; i < SHARE; i++) {
                const int n = from + i * WARPS, key = n - unit.heads;
                const Heads& heads = key < 0 ? tokens.q : key < count ? tokens.k : tokens.v;
                const int own = key < 0 ? unit.head + n : unit.kv;
                if (n < all) rotation.load(head_of(heads, token_of(unit, n), own, DEPTH), y[i], z[i]);
            }
            if (LATE_ANGLES) sin_cos[0] = rotation.at(position);
#pragma unroll
            for (int i = 0; i < SHARE; i++) {
                const int n = from + i * WARPS;
                if (ROTATED > 1 && from != warp && n < unit.heads + count) sin_cos[i] = sin_cos_of(unit, n);
                if (n < all) store(a, unit, n, sin_cos[ROTATED > 1 ? i : 0], y[i], z[i], queries, new_rows);
            }
            if (ROTATED == 1 || from + WARPS * SHARE >= all) break;
        }
    }

    __device__ __forceinline__ void store(const Attention& a, const Unit& unit, int n, const SinCos<PAIRS>& sin_cos,
                                          float (&y)[PAIRS], float (&z)[PAIRS], u16 (*queries)[QUERY],
                                          u16 (*new_rows)[ROTATED][DEPTH]) const {
        const int lane = threadIdx.x % WARP, key = n - unit.heads, token = token_of(unit, n);
        const bool query = key < 0, value = key >= count;
        if (query && tokens.q.norm) rotation.norm(y, z, q_norm[0], q_norm[1], tokens.eps);
        if (!query && !value && tokens.k.norm) rotation.norm(y, z, k_norm[0], k_norm[1], tokens.eps);
        if (!value) rotation.rotate(sin_cos, y, z);
        float x[2 * PAIRS];
        rotation.elements(y, z, x);
        u16* const to = (query ? queries[n] : new_rows[value][token]) + lane;
#pragma unroll
        for (int j = 0; j < 2 * PAIRS; j++) to[32 * j] = to_f16(query ? x[j] * a.scale : x[j]);
        if (query || token != unit.row || !writes(a, unit)) return;
        const int to_slot = ROTATED == 1 ? slot : tokens.k_pool.slot[token];
        if (to_slot >= 0) store_kv(value ? tokens.v_pool : tokens.k_pool, to_slot, unit.kv, lane, x, head_scale(0));
    }
};
