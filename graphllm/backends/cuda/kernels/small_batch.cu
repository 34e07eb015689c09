// Linears of several tokens with f16 or bf16 (BFLOAT) weights and activations of the same dtype, or with
// bytes (EIGHT_BITS, see element_types.cuh) that have a scale per row of each, or, if GROUPED, per 128
// elements of a row.
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

// Tensor cores add products of e4m3 with few bits, so that those of a tile are added to sums in float32.
#define PROMOTED (EIGHT_BITS == E4M3)
// Products of the previous tile that may be in flight while copies for the next ones are requested. Without
// any, one more tile is requested ahead.
#define BEHIND (TOKENS > 32 || PROMOTED ? 0 : 1)
#define DEPTH (128 / ELEMENT_BYTES)  // of a tile
#define UNIT (16 / ELEMENT_BYTES)    // elements that are copied together
#define CHUNK 256                    // of which a split has whole ones
#define THREADS (4 * WARP * WARPGROUPS)
#define SIDE (64 * WARPGROUPS)      // rows of a block
#define ROWS (SIDE / (1 + GATED))   // of a matrix
#define TILES (TOKENS / 8)
#define STRIDE (SIDE + 4)  // floats between the sums of two tokens: stores use all banks
#include "small_batch_results.cuh"
#define UNITS (TOKENS * 8)
#define OWN_UNITS ((UNITS + THREADS - 1) / THREADS)

struct Shared {
    u16 w[STAGES][SIDE][64], x[STAGES][TOKENS][64];  // 128 bytes of a row, see wgmma.cuh
#if GROUPED
    float w_scales[STAGES][SIDE], x_scales[STAGES][TOKENS];
#endif
};
static_assert(sizeof(Shared) + 1024 == SHARED && sizeof(Shared) >= 4 * TOKENS * STRIDE,
              "see small_batch.py");

#if PROMOTED
// Add the products of a tile to the sums, scaled if GROUPED, and clear them.
__device__ __forceinline__ void promote(float (&sums)[TILES][4], float (&c)[TILES][4], const Shared& s,
                                        int stage) {
#if GROUPED
    const int lane = threadIdx.x % WARP, row = threadIdx.x / WARP * 16 + lane / 4;
    const float w[2] = {s.w_scales[stage][row], s.w_scales[stage][row + 8]};
#endif
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#if GROUPED
        const float2 x = *(const float2*)&s.x_scales[stage][8 * tile + lane % 4 * 2];
#endif
#pragma unroll
        for (int i = 0; i < 4; i++) {
#if GROUPED
            sums[tile][i] = fmaf(c[tile][i], __fmul_rn(i % 2 ? x.y : x.x, w[i / 2]), sums[tile][i]);
#else
            sums[tile][i] += c[tile][i];
#endif
            c[tile][i] = 0;
        }
    }
}
#endif

// Wait for all products; nothing reads the sums earlier.
__device__ __forceinline__ void finish_products(Sum (&c)[TILES][4]) {
#if WGMMA
    wait_products<0>();
#pragma unroll
    for (int i = 0; i < TILES; i++)
        asm volatile("" : SUMS_OF(c[i], 0));
#endif
}

// Add the products of a tile.
__device__ __forceinline__ void add_tile(Sum (&c)[TILES][4], const u16 (&w)[SIDE][64],
                                         const u16 (&x)[TOKENS][64]) {
    const int warp = threadIdx.x / WARP;
#if WGMMA
    begin_products();
#pragma unroll
    for (int i = 0; i < 4; i++)
        multiply_shared64<TOKENS>(&c[0][0], factor(w[warp / 4 * 64], i), factor(x[0], i));
    commit_products();
    if (BEHIND) wait_products<1>();
#else
    const int lane = threadIdx.x % WARP, r = 16 * warp + lane % 16;
#pragma unroll
    for (int i = 0; i < 4; i++) {
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
        w_at[i] = (up ? all.m[GATED].w.a : m.w.a) + (i64)own * k * ELEMENT_BYTES + 16 * unit;
    }
#if GROUPED
    const float *w_scale = 0, *x_scale = 0;  // of the row and the token that this thread copies
    const u32 next_group = number(m.w.d);    // the matrices of a gated unit have one shape
    if (threadIdx.x < SIDE) {
        const int r = threadIdx.x, up = GATED && r >= ROWS;
        w_scale = (const float*)(up ? all.m[GATED].w.b : m.w.b) + min(row + r - up * ROWS, (int)m.rows - 1);
    }
#endif
    auto copy_weights = [&](int stage, int tile) {
#pragma unroll
        for (int i = 0; i < SIDE * 8 / THREADS; i++) {
            const int r = threadIdx.x / 8 + THREADS / 8 * i;
            copy16(&s.w[stage][r][8 * swizzled(r, unit)], w_at[i] + (i64)tile * 128,
                   tile * DEPTH + UNIT * unit < k);
        }
#if GROUPED
        if (threadIdx.x < SIDE) copy4(&s.w_scales[stage][threadIdx.x], w_scale + (u64)tile * next_group);
#endif
    };
    u32 x_at[OWN_UNITS];
    auto copy_activations = [&](int stage, int tile) {
#pragma unroll
        for (int i = 0; i < OWN_UNITS; i++) {
            const int n = threadIdx.x / 8 + THREADS / 8 * i;
            if (UNITS % THREADS && n >= TOKENS) break;
            copy16(&s.x[stage][n][8 * swizzled(n, unit)], x + x_at[i] + tile * 128,
                   tile * DEPTH + UNIT * unit < k);
        }
#if GROUPED
        if (threadIdx.x < TOKENS) copy4(&s.x_scales[stage][threadIdx.x], x_scale + tile);
#endif
        close_copies();
    };
    Sum c[TILES][4] = {};
#if PROMOTED
    float sums[TILES][4] = {};
#else
    Sum(&sums)[TILES][4] = c;
#endif
    bool waited = false;
#if CLUSTERS
    const int split = blockIdx.z;
#else
    Sum total[TILES][4], half[TILES][4];
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
#if GROUPED
        if (threadIdx.x < TOKENS)
            x_scale = (const float*)(x + min(first + (int)threadIdx.x, last) * x_stride + k);
#endif
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
#if PROMOTED
            finish_products(c);
            promote(sums, c, s, stage);
#endif
            stage = stage + 1 < STAGES ? stage + 1 : 0, later = later + 1 < STAGES ? later + 1 : 0;
        }
        if (!PROMOTED) finish_products(c);
        __syncthreads();
#if !CLUSTERS
        add_split(sums, half, total, split, splits);
    }
#endif
    Sum* out = (Sum*)&s;
#pragma unroll
    for (int i = 0; i < TILES * 4; i++)
        out[(i / 4 * 8 + 2 * part + i % 2) * STRIDE + 16 * warp + i % 4 / 2 * 8 + group] = sums[i / 4][i % 4];
    store_results(out, all, blockIdx.y * ROWS, first, last, splits, act, kind, {x, x_stride, k});
}
