#pragma once
// Heads of queries, keys and values on their way from a linear: normed, if they are, turned, and the
// keys and values stored.

#include "kv.cuh"
#include "rope.cuh"

struct Heads {
    const u8* x;
    i64 stride;
    const float* norm;  // weight, or null
    int count, unused;
};

// Heads of 64 P elements. A warp does one after the other; lane l turns the pairs 32 j + l.
template <int P> struct Turning {
    static constexpr int WIDE = 64 * P;
    float inverse[P], s[P], c[P];
    int interleaved;

    __device__ __forceinline__ Turning(const Turn& turn) : interleaved(turn.interleaved) {
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

    // The pairs of a row of floats.
    __device__ __forceinline__ void load(const float* x, float (&a)[P], float (&b)[P]) const {
        int lane = threadIdx.x % WARP;
#pragma unroll
        for (int j = 0; j < P; j++) {
            const float* from = x + (interleaved ? 64 * j + 2 * lane : 32 * j + lane);
            a[j] = from[0], b[j] = from[interleaved ? 1 : WIDE / 2];
        }
    }

    __device__ __forceinline__ void norm(float (&a)[P], float (&b)[P], const float* weight,
                                         float eps) const {
        float sum = 0, u[P], v[P];
#pragma unroll
        for (int j = 0; j < P; j++) sum += a[j] * a[j] + b[j] * b[j];
        float factor = 1.f / sqrtf(warp_sum(sum) / WIDE + eps);
        load(weight, u, v);
#pragma unroll
        for (int j = 0; j < P; j++) a[j] = a[j] * factor * u[j], b[j] = b[j] * factor * v[j];
    }

    // Of neighbours 2 l and 2 l + 1 in lane l: element l of the first 32, and of the second.
    static __device__ __forceinline__ void straighten(float& y, float& z) {
        int lane = threadIdx.x % WARP, from = lane / 2;
        float y1 = __shfl_sync(FULL, y, from), z1 = __shfl_sync(FULL, z, from);
        float y2 = __shfl_sync(FULL, y, from + 16), z2 = __shfl_sync(FULL, z, from + 16);
        y = lane & 1 ? z1 : y1;
        z = lane & 1 ? z2 : y2;
    }

    // Heads first, first + by, .. of a token: queries, then keys, then values.
    __device__ __forceinline__ void heads(const Heads& q, const Heads& k, const Heads& v, float* out,
                                          const Pool& k_pool, const Pool& v_pool, i64 token,
                                          float eps, int first, int by) const {
        const int lane = threadIdx.x % WARP, all = q.count + k.count + v.count;
        const int k_slot = k_pool.slot[token], v_slot = v_pool.slot[token];
        const int apart = interleaved ? 32 : WIDE / 2;  // of a lane's two elements
        for (int h = first; h < all; h += by) {
            bool query = h < q.count, key = !query && h < q.count + k.count;
            int own = query ? h : key ? h - q.count : h - q.count - k.count;
            const u8* base = query ? q.x : key ? k.x : v.x;
            i64 stride = query ? q.stride : key ? k.stride : v.stride;
            const float* weight = query ? q.norm : key ? k.norm : v.norm;
            int slot = key ? k_slot : v_slot;
            if (!query && slot < 0) continue;
            float a[P], b[P];
            load((const float*)(base + token * stride) + own * WIDE, a, b);
            if (weight) norm(a, b, weight, eps);
#pragma unroll
            for (int j = 0; j < P; j++) {
                float y = a[j], z = b[j];
                if (query || key) {
                    y = a[j] * c[j] - b[j] * s[j];
                    z = a[j] * s[j] + b[j] * c[j];
                }
                if (interleaved) straighten(y, z);
                int i = own * WIDE + (interleaved ? 64 : 32) * j + lane;
                if (query) {
                    float* to = out + token * q.count * WIDE + i;
                    to[0] = y;
                    to[apart] = z;
                } else if (key) {
                    store_kv(k_pool, slot, i, y);
                    store_kv(k_pool, slot, i + apart, z);
                } else {
                    store_kv(v_pool, slot, i, y);
                    store_kv(v_pool, slot, i + apart, z);
                }
            }
        }
    }
};
