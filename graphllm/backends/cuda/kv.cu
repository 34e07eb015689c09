// Writes into the pools of keys and values.

#include "turning.cuh"

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

// The same for heads of 64 P elements that are turned as a whole: warps of gridDim.y blocks to a
// token.
template <int P>
__device__ __forceinline__ void turn_heads(const Heads& q, const Heads& k, const Heads& v,
                                            float* out, const Pool& k_pool, const Pool& v_pool,
                                            const i64* live, float eps, const Turn& turn) {
    int warps = blockDim.x / WARP;
    Turning<P> angles(turn);
    begin();
    i64 token = blockIdx.x;
    if (token >= *live) return;
    angles.at(turn.pos[token]);
    angles.heads(q, k, v, out, k_pool, v_pool, token, eps, blockIdx.y * warps + threadIdx.x / WARP,
                 gridDim.y * warps);
}

#define WHOLE(P)                                                                               \
    extern "C" __global__ void rope_write_##P(Heads q, Heads k, Heads v, float* out,           \
                                              Pool k_pool, Pool v_pool, const i64* live,       \
                                              float eps, Turn turn) {                          \
        turn_heads<P>(q, k, v, out, k_pool, v_pool, live, eps, turn);                          \
    }
WHOLE(1)
WHOLE(2)
WHOLE(4)
