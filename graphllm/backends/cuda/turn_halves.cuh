#pragma once
// Heads of queries, keys and values on their way from a linear: normed, if they are, turned by halves,
// and the keys and values stored.

#include "kv.cuh"
#include "rope.cuh"

struct Heads {
    const u8* x;
    i64 stride;
    const float* norm;  // weight, or null
    int count, unused;
};

// Heads of 64 P elements whose pairs are those of two halves. A warp does one head after the other;
// its lanes have elements 32 j + lane of both halves.
template <int P> struct HalfTurn {
    static constexpr int WIDE = 64 * P;
    float inverse[P], s[P], c[P];

    __device__ __forceinline__ HalfTurn(const Turn& turn) {
        int lane = threadIdx.x % WARP;
#pragma unroll
        for (int j = 0; j < P; j++) {
            inverse[j] = turn.inverse[32 * j + lane];
            if (turn.factors) inverse[j] = __fdiv_rn(inverse[j], turn.factors[32 * j + lane]);
        }
    }

    __device__ __forceinline__ void at(int pos) {
#pragma unroll
        for (int j = 0; j < P; j++) angle_of(pos, inverse[j], s[j], c[j]);
    }

    __device__ __forceinline__ static void norm(float (&a)[P], float (&b)[P], const float* weight,
                                                float eps) {
        int lane = threadIdx.x % WARP;
        float sum = 0;
#pragma unroll
        for (int j = 0; j < P; j++) sum += a[j] * a[j] + b[j] * b[j];
        float factor = 1.f / sqrtf(warp_sum(sum) / WIDE + eps);
#pragma unroll
        for (int j = 0; j < P; j++) {
            a[j] = a[j] * factor * weight[32 * j + lane];
            b[j] = b[j] * factor * weight[WIDE / 2 + 32 * j + lane];
        }
    }

    // Heads first, first + by, .. of a token: queries, then keys, then values.
    __device__ __forceinline__ void heads(const Heads& q, const Heads& k, const Heads& v, float* out,
                                          const Pool& k_pool, const Pool& v_pool, i64 token,
                                          float eps, int first, int by) const {
        const int lane = threadIdx.x % WARP, all = q.count + k.count + v.count;
        const int k_slot = k_pool.slot[token], v_slot = v_pool.slot[token];
        for (int h = first; h < all; h += by) {
            bool query = h < q.count, key = !query && h < q.count + k.count;
            int own = query ? h : key ? h - q.count : h - q.count - k.count;
            const u8* base = query ? q.x : key ? k.x : v.x;
            i64 stride = query ? q.stride : key ? k.stride : v.stride;
            const float* x = (const float*)(base + token * stride) + own * WIDE + lane;
            const float* weight = query ? q.norm : key ? k.norm : v.norm;
            int slot = key ? k_slot : v_slot, i = own * WIDE + lane;
            if (!query && slot < 0) continue;
            float a[P], b[P];
#pragma unroll
            for (int j = 0; j < P; j++) {
                a[j] = x[32 * j];
                b[j] = x[WIDE / 2 + 32 * j];
            }
            if (weight) norm(a, b, weight, eps);
#pragma unroll
            for (int j = 0; j < P; j++, i += 32) {
                float y = a[j], z = b[j];
                if (query || key) {
                    y = a[j] * c[j] - b[j] * s[j];
                    z = a[j] * s[j] + b[j] * c[j];
                }
                if (query) {
                    float* to = out + token * q.count * WIDE + i;
                    to[0] = y;
                    to[WIDE / 2] = z;
                } else if (key) {
                    store_kv(k_pool, slot, i, y);
                    store_kv(k_pool, slot, i + WIDE / 2, z);
                } else {
                    store_kv(v_pool, slot, i, y);
                    store_kv(v_pool, slot, i + WIDE / 2, z);
                }
            }
        }
    }
};
