#pragma once
// Choice of a token's experts from the logits of the router.

#include "experts.cuh"

enum Score { SOFTMAX, SIGMOID, CHOSEN };  // of all experts; the last one: softmax of the chosen ones

// A key that orders floats: larger for larger values, never zero, equal for both zeros, largest for NaN.
__device__ __forceinline__ u32 key_of(float v) {
    if (v != v) return 0xfffffffeu;  // `largest` begins above all keys
    u32 bits = __float_as_uint(v + 0.f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float number_of(u32 key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);  // NaN for the key of NaN
}

// The experts of one token, chosen by a warp, of which lane l has the experts P l to P l + P - 1. Only SIGMOID has
// corrections. With SOFTMAX, logits are compared: of two that differ and have equal scores, which are roundings, the larger
// one is chosen.
template <int P> struct ExpertChoice {
    float scores[P];  // logits, or sigmoids of them
    u32 keys[P];      // zero for experts that do not exist

    __device__ __forceinline__ explicit ExpertChoice(const Experts& e) {
#pragma unroll
        for (int i = 0; i < P; i++) scores[i] = expert_of(i) < e.matrices ? load_l2(e.logits + expert_of(i)) : -INFINITE;
        if (e.score == SIGMOID)
#pragma unroll
            for (int i = 0; i < P; i++) scores[i] = 1.f / (1.f + expf(-scores[i]));
#pragma unroll
        for (int i = 0; i < P; i++) {
            const bool there = expert_of(i) < e.matrices;
            const float correction = e.correction && there ? e.correction[expert_of(i)] : 0.f;
            keys[i] = there ? key_of(e.correction ? scores[i] + correction : scores[i]) : 0;
        }
    }

    // The expert of a rank, the largest key having rank 0, returned to one lane; -1 to the others.
    __device__ __forceinline__ int with_rank(int rank) const {
        int found = -1;
        auto take = [&](int at, int expert, float) {
            if (at == rank) found = expert;
        };
        if (!choose<false>(rank + 1, take)) {
            found = -1;
            choose<true>(rank + 1, take);
        }
        return found;
    }

    // Call `f(rank, expert, score)` for the experts of the first `count` ranks, by the lane that has the expert.
    template <class F> __device__ __forceinline__ void top(int count, F f) const { choose<true>(count, f); }

    // The weight of the expert of rank `lane`, whose score is `own`.
    __device__ __forceinline__ float weight(const Experts& e, float own) const {
        const bool chosen = (int)threadIdx.x % WARP < e.each;
        float value = chosen ? own : 0.f;
        if (e.score != SIGMOID) {
            const float most = __shfl_sync(FULL, own, 0);
            value = chosen ? expf(own - most) : 0.f;
            float all = value;
            if (e.score == SOFTMAX) {
                all = 0;
#pragma unroll
                for (int i = 0; i < P; i++) all += expf(scores[i] - most);
            }
            value /= warp_sum(all);
        }
        if (e.normalised) value /= warp_sum(value) + e.eps;
        return value * e.factor;
    }

  private:
    __device__ __forceinline__ static int expert_of(int i) { return P * (int)(threadIdx.x % WARP) + i; }

    // With TIES as `top`. Without, all experts with the largest key are chosen at once, so that a rank depends on the one before
    // by fewer instructions; returns whether no two keys were equal.
    template <bool TIES, class F> __device__ __forceinline__ bool choose(int count, F f) const {
        u32 remaining[P];
#pragma unroll
        for (int i = 0; i < P; i++) remaining[i] = keys[i];
        bool unique = true;
#pragma unroll 1
        for (int rank = 0; rank < count; rank++) {
            u32 largest = remaining[0];
#pragma unroll
            for (int i = 1; i < P; i++) largest = max(largest, remaining[i]);
            const u32 best = warp_max(largest);
            bool may = true;
            if (TIES) may = __ffs(__ballot_sync(FULL, largest == best)) - 1 == threadIdx.x % WARP;
            int found = 0, mine = 0;
            float score = 0;
#pragma unroll
            for (int i = 0; i < P; i++)
                if (remaining[i] == best && may && !(TIES && found)) remaining[i] = 0, found++, mine = i, score = scores[i];
            if (found) f(rank, expert_of(mine), score);
            if (!TIES) unique &= warp_sum(found) == 1;
        }
        return unique;
    }
};
