// Writes into the pools of keys and values.

#include "kv.cuh"
#include "rope.cuh"

// A block does one row (x) and some elements of it (y).
extern "C" __global__ void kv_write(Pool pool, const u8* x, i64 stride, const i64* live,
                                    int width) {
    begin();
    i64 row = blockIdx.x;
    int column = blockIdx.y * blockDim.x + threadIdx.x;
    if (row >= *live || column >= width) return;
    int slot = pool.slot[row];
    if (slot >= 0) store_kv(pool, slot, column, ((const float*)(x + row * stride))[column]);
}

struct Heads {
    const u8* x;
    i64 stride;
    const float* norm;  // weight, or null
    int count, unused;
};

// Heads normed, if they are, and turned, of any width. A block does one head (y) of one token (x):
// first the queries, then the keys, then the values, which are only stored.
extern "C" __global__ void rope_write(Heads q, Heads k, Heads v, float* out, Pool k_pool,
                                      Pool v_pool, const i64* live, int width, float eps,
                                      Turn turn) {
    DYNAMIC_SHARED(float, head);
    begin();
    i64 token = blockIdx.x;
    if (token >= *live) return;
    int h = blockIdx.y;
    bool query = h < q.count, key = !query && h < q.count + k.count;
    int own = query ? h : key ? h - q.count : h - q.count - k.count;
    int slot = query ? 0 : key ? k_pool.slot[token] : v_pool.slot[token];
    if (slot < 0) return;
    const u8* base = query ? q.x : key ? k.x : v.x;
    i64 stride = query ? q.stride : key ? k.stride : v.stride;
    const float *x = (const float*)(base + token * stride) + own * width, *norm = q.norm;
    if (!query) norm = key ? k.norm : v.norm;
    float factor = 1;
    if (norm) {
        float sum = 0;
        for (int i = threadIdx.x; i < width; i += blockDim.x) sum += x[i] * x[i];
        factor = 1.f / sqrtf(block_sum(sum) / width + eps);
    }
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        head[i] = norm ? x[i] * factor * norm[i] : x[i];
    __syncthreads();
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        if (query) {
            out[(token * q.count + own) * width + i] = turned(turn, token, head, i);
        } else if (key) {
            store_kv(k_pool, slot, own * width + i, turned(turn, token, head, i));
        } else {
            store_kv(v_pool, slot, own * width + i, head[i]);
        }
    }
}

// The same for heads of 64 P elements whose pairs are those of two halves. A warp does one head
// after the other, every gridDim.y * warps-th; its lanes have elements 32 j + lane of both halves.
template <int P>
__device__ __forceinline__ void turn_halves(const Heads& q, const Heads& k, const Heads& v,
                                            float* out, const Pool& k_pool, const Pool& v_pool,
                                            const i64* live, float eps, const Turn& turn) {
    const int WIDTH = 64 * P;
    int lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    float inverse[P], s[P], c[P];
#pragma unroll
    for (int j = 0; j < P; j++) {
        inverse[j] = turn.inverse[32 * j + lane];
        if (turn.factors) inverse[j] = __fdiv_rn(inverse[j], turn.factors[32 * j + lane]);
    }
    begin();
    i64 token = blockIdx.x;
    if (token >= *live) return;
    int pos = turn.pos[token], k_slot = k_pool.slot[token], v_slot = v_pool.slot[token];
#pragma unroll
    for (int j = 0; j < P; j++) angle_of(pos, inverse[j], s[j], c[j]);
    int all = q.count + k.count + v.count, first = blockIdx.y * warps + threadIdx.x / WARP;
    for (int h = first; h < all; h += gridDim.y * warps) {
        bool query = h < q.count, key = !query && h < q.count + k.count;
        int own = query ? h : key ? h - q.count : h - q.count - k.count;
        const u8* base = query ? q.x : key ? k.x : v.x;
        i64 stride = query ? q.stride : key ? k.stride : v.stride;
        const float* x = (const float*)(base + token * stride) + own * WIDTH + lane;
        const float* norm = query ? q.norm : key ? k.norm : v.norm;
        float a[P], b[P];
#pragma unroll
        for (int j = 0; j < P; j++) {
            a[j] = x[32 * j];
            b[j] = x[WIDTH / 2 + 32 * j];
        }
        if (norm) {
            float sum = 0;
#pragma unroll
            for (int j = 0; j < P; j++) sum += a[j] * a[j] + b[j] * b[j];
            float factor = 1.f / sqrtf(warp_sum(sum) / WIDTH + eps);
#pragma unroll
            for (int j = 0; j < P; j++) {
                a[j] = a[j] * factor * norm[32 * j + lane];
                b[j] = b[j] * factor * norm[WIDTH / 2 + 32 * j + lane];
            }
        }
        int slot = key ? k_slot : v_slot;
        if (!query && slot < 0) continue;
#pragma unroll
        for (int j = 0; j < P; j++) {
            float y = a[j], z = b[j];
            if (query || key) {
                y = a[j] * c[j] - b[j] * s[j];
                z = a[j] * s[j] + b[j] * c[j];
            }
            int i = own * WIDTH + 32 * j + lane;
            if (query) {
                float* to = out + token * q.count * WIDTH + i;
                to[0] = y;
                to[WIDTH / 2] = z;
            } else if (key) {
                store_kv(k_pool, slot, i, y);
                store_kv(k_pool, slot, i + WIDTH / 2, z);
            } else {
                store_kv(v_pool, slot, i, y);
                store_kv(v_pool, slot, i + WIDTH / 2, z);
            }
        }
    }
}

#define HALVES(P)                                                                               \
    extern "C" __global__ void rope_write_##P(Heads q, Heads k, Heads v, float* out,           \
                                              Pool k_pool, Pool v_pool, const i64* live,       \
                                              float eps, Turn turn) {                          \
        turn_halves<P>(q, k, v, out, k_pool, v_pool, live, eps, turn);                          \
    }
HALVES(1)
HALVES(2)
HALVES(4)
