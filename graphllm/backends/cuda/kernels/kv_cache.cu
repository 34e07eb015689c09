// Writes to the pools of keys and values: rows, rotated or not, and copies of blocks. POOL: see kv_cache.cuh.

#include "head_rotation.cuh"
#include "kv_cache.cuh"

// A block stores one head (y) of one row (x).
extern "C" __global__ void kv_write(Pool pool, const u8* x, i64 stride, const i64* live,
                                    int width TIMESTAMPS) {
    RECORD_TIMESTAMPS
    const i64 rows = begin(live);
    const i64 row = blockIdx.x;
    const int head = blockIdx.y;
    if (row >= rows) return;
    const int slot = pool.slot[row];
    if (slot < 0) return;
    const float* from = (const float*)(x + row * stride) + head * width;
    u32 most = 0;
    if (HEAD_SCALE) {
        for (int i = threadIdx.x; i < width; i += blockDim.x) most = larger(most, abs_bits(from[i]));
        most = block_max(most);
    }
    const BlockScale scale = head_scale(most);
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        const float x[1] = {from[i]};
        store_kv(pool, slot, head, i, x, scale);
    }
}

// Copy blocks of a pool, in words of type T; a thread block (x, y) copies a part (y) of copy x. No
// target is a source.
template <class T>
__device__ __forceinline__ void copy_words(u8* pool, const int* sources, const int* targets,
                                           const i64* live, i64 words) {
    const i64 count = begin(live), at = blockIdx.x;
    if (at >= count) return;
    const i64 source = sources[at], target = targets[at];
    if (source < 0 || target < 0) return;
    const T* old = (const T*)pool + source * words;
    T* copied = (T*)pool + target * words;
    for (i64 i = (i64)blockIdx.y * blockDim.x + threadIdx.x; i < words;
         i += (i64)gridDim.y * blockDim.x)
        copied[i] = old[i];
}

#define COPY_BLOCKS(NAME, T)                                                                    \
    extern "C" __global__ void NAME(u8* pool, const int* sources, const int* targets,           \
                                    const i64* live, i64 words TIMESTAMPS) {                    \
        RECORD_TIMESTAMPS                                                                       \
        copy_words<T>(pool, sources, targets, live, words);                                     \
    }
COPY_BLOCKS(copy_blocks_2, u16)
COPY_BLOCKS(copy_blocks_4, u32)
COPY_BLOCKS(copy_blocks_16, uint4)

// Norm (if there is a weight) and rotate heads of any width. A block computes one head (y) of one token
// (x): first queries, then keys, then values, which are only stored.
extern "C" __global__ void rope_write(Heads q, Heads k, Heads v, float* out, Pool k_pool,
                                      Pool v_pool, const i64* live, int width, float eps,
                                      Rotation rotation TIMESTAMPS) {
    RECORD_TIMESTAMPS
    DYNAMIC_SHARED(float, head);
    const i64 rows = begin(live);
    i64 token = blockIdx.x;
    if (token >= rows) return;
    int h = blockIdx.y;
    bool query = h < q.count, key = !query && h < q.count + k.count;
    int own = query ? h : key ? h - q.count : h - q.count - k.count;
    int slot = query ? 0 : key ? k_pool.slot[token] : v_pool.slot[token];
    if (slot < 0) return;
    const Heads& of = query ? q : key ? k : v;
    const float *x = head_of(of, token, own, width), *norm = of.norm;
    float factor = 1;
    if (norm) {
        float sum = 0;
        for (int i = threadIdx.x; i < width; i += blockDim.x) sum += x[i] * x[i];
        factor = rms_factor(block_sum(sum), width, eps);
    }
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        head[i] = norm ? x[i] * factor * norm[i] : x[i];
    __syncthreads();
    if (query) {
        for (int i = threadIdx.x; i < width; i += blockDim.x)
            out[(token * q.count + own) * width + i] = rotated(rotation, token, head, i);
        return;
    }
    auto element = [&](int i) { return key ? rotated(rotation, token, head, i) : head[i]; };
    const Pool pool = key ? k_pool : v_pool;
    u32 most = 0;
    if (HEAD_SCALE) {
        for (int i = threadIdx.x; i < width; i += blockDim.x) most = larger(most, abs_bits(element(i)));
        most = block_max(most);
    }
    const BlockScale scale = head_scale(most);
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        const float x[1] = {element(i)};
        store_kv(pool, slot, own, i, x, scale);
    }
}

// Heads of 64 P elements: queries, then keys, then values.
template <int P> struct HeadWriter : WarpRotation<P> {
    static constexpr int WIDE = 64 * P;
    using WarpRotation<P>::WarpRotation;

    // The norm's weight for head h, or null.
    static __device__ __forceinline__ const float* weight_of(const Heads& q, const Heads& k,
                                                             const Heads& v, int h) {
        return h < q.count ? q.norm : h < q.count + k.count ? k.norm : v.norm;
    }

    // Compute heads first, first + by, ... of a token. `u` and `w`: the norm's weight for the first of them.
    __device__ __forceinline__ void heads(const Heads& q, const Heads& k, const Heads& v, float* out,
                                          const Pool& k_pool, const Pool& v_pool, int k_slot,
                                          int v_slot, i64 token, float eps, int first, int by,
                                          const SinCos<P>& sin_cos, float (&u)[P], float (&w)[P]) const {
        const int lane = threadIdx.x % WARP, all = q.count + k.count + v.count;
        for (int h = first; h < all; h += by) {
            bool query = h < q.count, key = !query && h < q.count + k.count;
            int own = query ? h : key ? h - q.count : h - q.count - k.count;
            const float* weight = weight_of(q, k, v, h);
            int slot = key ? k_slot : v_slot;
            if (!query && slot < 0) continue;
            float a[P], b[P], x[2 * P];
            this->load(head_of(query ? q : key ? k : v, token, own, WIDE), a, b);
            if (weight && h != first) this->load(weight, u, w);
            if (weight) this->norm(a, b, u, w, eps);
            if (query || key) this->rotate(sin_cos, a, b);
            this->elements(a, b, x);
            if (query) {
                float* to = out + (token * q.count + own) * WIDE;
#pragma unroll
                for (int j = 0; j < 2 * P; j++) to[32 * j + lane] = x[j];
                continue;
            }
            u32 most = 0;
#pragma unroll
            for (int j = 0; j < 2 * P; j++) most = larger(most, abs_bits(x[j]));
            const Pool pool = key ? k_pool : v_pool;
            store_kv(pool, slot, own, lane, x, head_scale(HEAD_SCALE ? warp_max(most) : 0));
        }
    }
};

// Norm and rotate heads of 64 P elements that are rotated as a whole. The warps of gridDim.y blocks
// share the heads of a token.
template <int P>
__device__ __forceinline__ void rotate_heads(const Heads& q, const Heads& k, const Heads& v,
                                            float* out, const Pool& k_pool, const Pool& v_pool,
                                            const i64* live, float eps, bool positions_ready,
                                            const Rotation& rotation) {
    int warps = blockDim.x / WARP, first = blockIdx.y * warps + threadIdx.x / WARP;
    HeadWriter<P> angles(rotation);
    float u[P], w[P];
    if (const float* weight = angles.weight_of(q, k, v, first)) angles.load(weight, u, w);
    const i64 rows = begin(live, positions_ready), token = blockIdx.x;
    const int k_slot = k_pool.slot[token], v_slot = v_pool.slot[token];
    const SinCos<P> sin_cos = angles.at(rotation.pos[token]);
    wait_for_previous();
    if (token >= rows) return;
    angles.heads(q, k, v, out, k_pool, v_pool, k_slot, v_slot, token, eps, first,
                 gridDim.y * warps, sin_cos, u, w);
}

#define ROPE_WRITE(P)                                                                           \
    extern "C" __global__ void rope_write_##P(Heads q, Heads k, Heads v, float* out,            \
                                              Pool k_pool, Pool v_pool, const i64* live,        \
                                              float eps, int positions_ready, Rotation rotation TIMESTAMPS) {\
        RECORD_TIMESTAMPS                                                                       \
        rotate_heads<P>(q, k, v, out, k_pool, v_pool, live, eps, positions_ready, rotation);    \
    }
ROPE_WRITE(1)
ROPE_WRITE(2)
ROPE_WRITE(4)
