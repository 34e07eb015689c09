// Linears of several tokens with f16 or bf16 (BFLOAT) weights and activations of the same dtype.
//
// TOKENS: tokens of a block. WARPGROUPS: groups of four warps of a block, each of which computes 64 rows.
// GATED: half of the rows are of one matrix and the other half the same rows of a second one; the result
// is act(first) * second, in float32 or a kind of quantize.cuh. STAGES: tiles of the depth in shared
// memory, of which the first ones are requested before the activations are available. SHARED: bytes of
// shared memory.
//
// `splits` divide the depth, see clusters.cuh. A result does not depend on the number of tokens: the
// order of its sum depends on the depth and on `splits` only.

#include "clusters.cuh"
#include "matrices.cuh"
#include "quantize.cuh"
#include "tensor_cores.cuh"
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define WGMMA 1
#else
#define WGMMA 0
#endif
#include "wgmma.cuh"

// Products of the previous tile that may be in flight while copies for the next ones are requested. Without
// any, one more tile is requested ahead.
#define BEHIND (TOKENS > 32 ? 0 : 1)
#define DEPTH 64   // of a tile
#define CHUNK 256  // of which a split has whole ones
#define THREADS (4 * WARP * WARPGROUPS)
#define SIDE (64 * WARPGROUPS)      // rows of a block
#define ROWS (SIDE / (1 + GATED))   // of a matrix
#define TILES (TOKENS / 8)
#define STRIDE (SIDE + 4)  // floats between the sums of two tokens: stores use all banks
#include "small_batch_results.cuh"
#define UNITS (TOKENS * DEPTH / 8)
#define OWN_UNITS ((UNITS + THREADS - 1) / THREADS)

struct Shared {
    u16 w[STAGES][SIDE][DEPTH], x[STAGES][TOKENS][DEPTH];  // see wgmma.cuh
};
static_assert(sizeof(Shared) + 1024 == SHARED && sizeof(Shared) >= 4 * TOKENS * STRIDE,
              "see small_batch.py");

// Add the products of a tile.
__device__ __forceinline__ void add_tile(float (&c)[TILES][4], const u16 (&w)[SIDE][DEPTH],
                                         const u16 (&x)[TOKENS][DEPTH]) {
    const int warp = threadIdx.x / WARP;
#if WGMMA
    begin_products();
#pragma unroll
    for (int i = 0; i < DEPTH / 16; i++)
        multiply_halves64<TOKENS>(&c[0][0], factor(w[warp / 4 * 64], i), factor(x[0], i));
    commit_products();
    if (BEHIND) wait_products<1>();
#else
    const int lane = threadIdx.x % WARP, r = 16 * warp + lane % 16;
#pragma unroll
    for (int i = 0; i < DEPTH / 16; i++) {
        u32 a[4], b[2];
        load_matrices(a, &w[r][8 * swizzled(r, 2 * i + lane / 16)]);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const int n = 8 * tile + lane % 8;
            load_two_matrices(b, &x[n][8 * swizzled(n, 2 * i + lane / 8 % 2)]);
            multiply(c[tile], a, b[0], b[1]);
        }
    }
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 8 / WARPGROUPS / 2)
    small_batch(const u8* x, i64 x_stride, const i64* live, int k, Matrices all, int splits, int act,
                int kind TIMESTAMPS) {
    RECORD_TIMESTAMPS
    DYNAMIC_SHARED(uint4, memory);
    Shared& s = *(Shared*)((u8*)memory + (-shared_address(memory) & 1023));
    launch_next();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, group = lane / 4, part = lane % 4;
    int row = blockIdx.y * ROWS;
    Matrix m = all.m[0];
    if (!GATED) find_matrix<ROWS>(all, row, m);
    const int first = blockIdx.x * TOKENS, last = (int)*live - 1, unit = threadIdx.x % 8;
    const int chunks = (k + CHUNK - 1) / CHUNK, tiles = (k + DEPTH - 1) / DEPTH;
    // Two threads of a warp copy units of the same number of rows that are next to each other.
    const u8* w_at[SIDE * 8 / THREADS];
#pragma unroll
    for (int i = 0; i < SIDE * 8 / THREADS; i++) {
        const int r = threadIdx.x / 8 + THREADS / 8 * i, up = GATED && r >= ROWS;
        const int own = min(row + r - up * ROWS, (int)m.rows - 1);
        w_at[i] = (up ? all.m[GATED].w.a : m.w.a) + ((i64)own * k + 8 * unit) * 2;
    }
    auto copy_weights = [&](int stage, int tile) {
#pragma unroll
        for (int i = 0; i < SIDE * 8 / THREADS; i++) {
            const int r = threadIdx.x / 8 + THREADS / 8 * i;
            copy16(&s.w[stage][r][8 * swizzled(r, unit)], w_at[i] + (i64)tile * DEPTH * 2,
                   tile * DEPTH + 8 * unit < k);
        }
    };
    u32 x_at[OWN_UNITS];
    auto copy_activations = [&](int stage, int tile) {
#pragma unroll
        for (int i = 0; i < OWN_UNITS; i++) {
            const int n = threadIdx.x / 8 + THREADS / 8 * i;
            if (UNITS % THREADS && n >= TOKENS) break;
            copy16(&s.x[stage][n][8 * swizzled(n, unit)], x + x_at[i] + tile * DEPTH * 2,
                   tile * DEPTH + 8 * unit < k);
        }
        close_copies();
    };
    float c[TILES][4] = {};
    bool waited = false;
#if CLUSTERS
    const int split = blockIdx.z;
#else
    float total[TILES][4], half[TILES][4];
#pragma unroll 1
    for (int split = 0; split < splits; split++) {
#endif
        constexpr int AHEAD = STAGES - 1 - BEHIND;
        const int begin = split * chunks / splits * (CHUNK / DEPTH);
        const int end = min((split + 1) * chunks / splits * (CHUNK / DEPTH), tiles);
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (begin + i < end) copy_weights(i, begin + i);
        if (!waited) wait_for_previous();
        waited = true;
        if (first > last) return;
#pragma unroll
        for (int i = 0; i < OWN_UNITS; i++) {
            const int n = threadIdx.x / 8 + THREADS / 8 * i;
            x_at[i] = (u32)(min(first + n, last) * x_stride) + 16 * unit;
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (begin + i < end)
                copy_activations(i, begin + i);
            else
                close_copies();
        int stage = 0, later = AHEAD;
#pragma unroll 1
        for (int tile = begin; tile < end; tile++) {
            wait_copies<AHEAD - 1>();
#if WGMMA
            publish();
            if (!BEHIND) wait_products<0>();  // the next copies replace the factors of the previous tile
#endif
            __syncthreads();
            if (tile + AHEAD < end) {
                copy_weights(later, tile + AHEAD);
                copy_activations(later, tile + AHEAD);
            } else {
                close_copies();
            }
            add_tile(c, s.w[stage], s.x[stage]);
            stage = stage + 1 < STAGES ? stage + 1 : 0, later = later + 1 < STAGES ? later + 1 : 0;
        }
#if WGMMA
        wait_products<0>();
#pragma unroll
        for (int i = 0; i < TILES; i++)  // nothing reads them earlier
            asm volatile("" : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3]));
#endif
        __syncthreads();
#if !CLUSTERS
        add_split(c, half, total, split, splits);
    }
#endif
    float* out = (float*)&s;
#pragma unroll
    for (int i = 0; i < TILES * 4; i++)
        out[(i / 4 * 8 + 2 * part + i % 2) * STRIDE + 16 * warp + i % 4 / 2 * 8 + group] = c[i / 4][i % 4];
    store_results(out, all, blockIdx.y * ROWS, first, last, splits, act, kind);
}
