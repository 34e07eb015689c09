// Linears of many tokens with weights and activations of bytes, on tensor cores of capability 9.0.
//
// EIGHT_BITS, GROUPED: see element_types.cuh. GATED: half of the columns are of one matrix and the other half
// the same rows of a second one; the result is act(first) * second. COLUMNS: rows of the matrices that a
// block multiplies at a time, which are columns of the result. STAGES: tiles of the depth in shared memory. PROMOTED:
// tiles of the depth whose products tensor cores add before the result is added to float32 sums; 0: all. They
// add products of e4m3 with few bits.
//
// A thread block computes one tile of the result after the other. One thread of its last warpgroup requests
// the factors by the copy engine, up to STAGES ahead, also for the next tile while the present one is stored;
// each of the other warpgroups multiplies 64 tokens. The two blocks of a cluster have the same weights and
// different tokens: each requests half of the weights for both. The sum of a result has one order for any
// number of tokens. Grid: (any number of clusters, 1, 2).

#include "clusters.cuh"
#include "matrices.cuh"
#include "quantize.cuh"
#include "tensor_copies.cuh"
#include "wgmma.cuh"

#define TOKENS 128
#define DEPTH 128  // of a tile
#define WARPGROUPS (TOKENS / 64)  // that multiply
#define THREADS (4 * WARP * (WARPGROUPS + 1))
#define ROWS (COLUMNS / (1 + GATED))  // of a matrix
#define CLUSTER 2
#define BOX (COLUMNS / CLUSTER)  // rows of a tensor map's tile
#define SUMS (COLUMNS / 2)  // of a thread
#define TOGETHER 8          // pairs of results whose scales and residuals are requested together

struct Stage {
    u8 w[COLUMNS][DEPTH], x[TOKENS][DEPTH];
#if GROUPED
    float w_scales[COLUMNS];
    u8 padding[1024 - 4 * COLUMNS];  // the copy engine's swizzle repeats after 1024 bytes
#endif
};
struct Shared {
    Stage stages[STAGES];
    u64 full[STAGES], empty[STAGES];
};
static_assert(sizeof(Shared) + 1024 <= SHARED, "see gemm_bytes.py");

// Tensor maps of the activations and of up to three matrices.
struct Maps {
    TensorMap x, w[3];
};

// A tile of the results: its matrix, its first row there, its first token.
struct Tile {
    int matrix = 0, row, token;

    // `number` of a cluster, which has CLUSTER adjacent tiles.
    __device__ __forceinline__ Tile(const Matrices& all, int number, int token_groups)
        : row(number / token_groups * ROWS),
          token((number % token_groups * CLUSTER + (int)blockIdx.z) * TOKENS) {
#pragma unroll
        for (int i = 0; i < (GATED ? 0 : 2); i++) {
            const int above = ((int)all.m[i].rows + ROWS - 1) / ROWS * ROWS;
            if (matrix == i && row >= above) row -= above, matrix = i + 1;
        }
    }
};

__device__ __forceinline__ int count_tiles(const Matrices& all, int token_groups) {
    int count = 0;
#pragma unroll
    for (int i = 0; i < (GATED ? 1 : 3); i++) count += ((int)all.m[i].rows + ROWS - 1) / ROWS;
    return count * token_groups;
}

// A stage, and the parity of its phase.
struct Place {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// Request all factors, in the order in which they are multiplied; run by one thread.
__device__ __forceinline__ void request(Shared& s, const Maps& maps, const Matrices& all, int tiles,
                                        int token_groups, int k) {
    Place place;
#pragma unroll 1
    for (int n = blockIdx.x; n < tiles; n += gridDim.x) {
        const Tile tile(all, n, token_groups);
#pragma unroll 1
        for (int at = 0; at < k; at += DEPTH, place.advance()) {
            wait_barrier(&s.empty[place.stage], place.parity ^ 1);
            Stage& to = s.stages[place.stage];
            u64* full = &s.full[place.stage];
            arrive_for_copies(full, sizeof(to.w) + sizeof(to.x) + GROUPED * 4 * COLUMNS);
            copy_tile(to.x, maps.x, at, tile.token, full);
            const int first = BOX * (int)blockIdx.z;
            copy_tile(to.w[first], maps.w[GATED ? blockIdx.z : tile.matrix], at, tile.row + (GATED ? 0 : first),
                      full, (1 << CLUSTER) - 1);
#if GROUPED
            const Planes &a = all.m[tile.matrix].w, &b = all.m[GATED ? 1 : tile.matrix].w;
            const float *from = (const float*)a.b + at / DEPTH * (u64)number(a.d) + tile.row;
            const float *rest = (const float*)b.b + at / DEPTH * (u64)number(b.d) + tile.row;
            copy_bytes(to.w_scales, from, 2 * COLUMNS, full);
            copy_bytes(to.w_scales + COLUMNS / 2, rest + (GATED ? 0 : COLUMNS / 2), 2 * COLUMNS, full);
#endif
        }
    }
}

// Let both blocks overwrite the stage; run by each warp that multiplies.
__device__ __forceinline__ void release(u64* empty) {
    if (threadIdx.x % WARP < CLUSTER) arrive(empty, threadIdx.x % WARP);
}

// Start the products of a stage; run by a warpgroup. ADD: see wgmma.cuh.
template <bool ADD> __device__ __forceinline__ void multiply(Shared& s, const Place& place, int group, Sum (&c)[SUMS]) {
    const Stage& from = s.stages[place.stage];
    wait_barrier(&s.full[place.stage], place.parity);
    begin_products();
#pragma unroll
    for (int i = 0; i < DEPTH / 32; i++) {
        const u64 x = factor((const u16*)from.x[64 * group], i), w = factor((const u16*)from.w, i);
        if (ADD || i) multiply_shared64<COLUMNS>(c, x, w);
        else multiply_shared64<COLUMNS, false>(c, x, w);
    }
    commit_products();
}

#if PROMOTED
// Add the products of a stage to the sums, scaled if GROUPED. token_scales: of the thread's two tokens.
__device__ __forceinline__ void promote(float (&sums)[SUMS], const float (&c)[SUMS], const Stage& from,
                                        const float (&token_scales)[2]) {
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j++) {
#if GROUPED
        const float2 w = *(const float2*)&from.w_scales[8 * j + threadIdx.x % 4 * 2];
#endif
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float &sum = sums[4 * j + i], product = c[4 * j + i];
#if GROUPED
            sum = fmaf(product, __fmul_rn(token_scales[i / 2], i % 2 ? w.y : w.x), sum);
#else
            sum += product;
#endif
        }
    }
}
#endif

// Multiply a tile of results.
__device__ __forceinline__ void multiply_tile(Shared& s, Place& place, int group, int k,
                                              const float* const (&scales_of)[2], Sum (&sums)[SUMS]) {
#if PROMOTED
    float c[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; i++) sums[i] = 0;
#else
    Sum(&c)[SUMS] = sums;
#endif
#pragma unroll 1
    for (int at = 0; at < k;) {
        const int end = PROMOTED ? min(k, at + PROMOTED * DEPTH) : k;
        int previous = place.stage;  // whose products may be in flight
#if PROMOTED
        const int scale = at / DEPTH;
        const float scales[2] = {GROUPED ? scales_of[0][scale] : 1, GROUPED ? scales_of[1][scale] : 1};
#endif
        multiply<false>(s, place, group, c);
        place.advance(), at += DEPTH;
#pragma unroll 1
        for (; at < end; at += DEPTH, place.advance()) {
            multiply<true>(s, place, group, c);
            wait_products<1>();
            release(&s.empty[previous]);
            previous = place.stage;
        }
        wait_products<0>();
#pragma unroll
        for (int i = 0; i < SUMS; i += 4) asm volatile("" : SUMS_OF(c, i));
#if PROMOTED
        promote(sums, c, s.stages[previous], scales);
#endif
        release(&s.empty[previous]);
    }
}

// Two adjacent floats of a row, of which the second may be beyond it.
__device__ __forceinline__ float2 load_two(const float* from, bool both) {
    if (both && (u64)from % 8 == 0) return *(const float2*)from;
    return make_float2(from[0], both ? from[1] : 0);
}
__device__ __forceinline__ void store_two(float* to, float2 v, bool both) {
    if (both && (u64)to % 8 == 0) {
        *(float2*)to = v;
    } else {
        to[0] = v.x;
        if (both) to[1] = v.y;
    }
}

// What two adjacent rows of a matrix contribute to their results.
struct RowPair {
    float2 scale, bias;

    __device__ __forceinline__ void load(const Matrix& m, int row, bool both) {
#if !GROUPED
        scale = load_two((const float*)m.w.b + row, both);
#endif
        if (m.bias) bias = load_two(m.bias + row, both);
    }
    // A pair of sums with the scales of the token and of the rows, see small_batch_results.cuh, and with bias.
    __device__ __forceinline__ float2 scaled(const Matrix& m, Sum a, Sum b, float token) const {
        float2 v = make_float2((float)a, (float)b);
#if !GROUPED
        v.x = __fmul_rn(v.x, __fmul_rn(scale.x, token)), v.y = __fmul_rn(v.y, __fmul_rn(scale.y, token));
#endif
        if (m.bias) v.x += bias.x, v.y += bias.y;
        return v;
    }
};

// Store the thread's sums of token `token` and the eighth one after it, which have `scales`. Of the sums of a token,
// four apart, the first pair is of row `row` and the next one, the second of the eighth row after these, and so on.
// What results need is loaded before any is stored: the compiler cannot tell that stores do not change it.
__device__ __forceinline__ void store(const Matrix& m, const Matrix& up, int row, int token, int tokens,
                                      const float (&scales)[2], const Sum (&sums)[SUMS], int act) {
#pragma unroll
    for (int first = 0; first < ROWS / 8; first += TOGETHER) {
        RowPair rows[TOGETHER];
#if GATED
        RowPair others[TOGETHER];
#else
        float2 before[2][TOGETHER];
#endif
#pragma unroll
        for (int j = 0; j < TOGETHER; j++) {
            const int r = row + 8 * (first + j);
            if (r >= m.rows) continue;
            const bool both = r + 1 < m.rows;
            rows[j].load(m, r, both);
#if GATED
            others[j].load(up, r, both);
#else
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (m.residual && token + 8 * i < tokens)
                    before[i][j] = load_two((const float*)(m.residual + (token + 8 * i) * m.residual_stride) + r, both);
#endif
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (token + 8 * i >= tokens) continue;
            float* y = (float*)(m.y + (token + 8 * i) * m.y_stride);
#pragma unroll
            for (int j = 0; j < TOGETHER; j++) {
                const int r = row + 8 * (first + j), at = 4 * (first + j) + 2 * i;
                if (r >= m.rows) continue;
                float2 v = rows[j].scaled(m, sums[at], sums[at + 1], scales[i]);
#if GATED
                const float2 other = others[j].scaled(up, sums[at + SUMS / 2], sums[at + SUMS / 2 + 1], scales[i]);
                v.x = activate(act, v.x) * other.x, v.y = activate(act, v.y) * other.y;
#else
                if (m.residual) v.x += before[i][j].x, v.y += before[i][j].y;
#endif
                store_two(y + r, v, r + 1 < m.rows);
            }
        }
    }
}

// Multiply and store all tiles of a block; run by a warpgroup, which has 64 tokens of each.
__device__ __forceinline__ void compute(Shared& s, const u8* x, i64 x_stride, const Matrices& all, int tiles,
                                        int token_groups, int tokens, int k, int act) {
    const int lane = threadIdx.x % WARP, group = threadIdx.x / (4 * WARP);
    const int own_token = threadIdx.x / WARP * 16 + lane / 4, own_row = lane % 4 * 2;
    Place place;
#pragma unroll 1
    for (int n = blockIdx.x; n < tiles; n += gridDim.x) {
        const Tile tile(all, n, token_groups);
        const int token = tile.token + own_token;  // and the eighth one after it
        const float* scales_of[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
            scales_of[i] = (const float*)(x + min(token + 8 * i, tokens - 1) * x_stride + k);
        const float token_scales[2] = {*scales_of[0], *scales_of[1]};
        Sum sums[SUMS];
        multiply_tile(s, place, group, k, scales_of, sums);
        Matrix m = all.m[0];
        if (!GATED && tile.matrix == 1) m = all.m[1];
        if (!GATED && tile.matrix == 2) m = all.m[2];
        store(m, all.m[1], tile.row + own_row, token, tokens, token_scales, sums, act);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gemm_bytes(const __grid_constant__ Maps maps, const u8* x, i64 x_stride, const i64* live, int k,
               const __grid_constant__ Matrices all, int act TIMESTAMPS) {
    RECORD_TIMESTAMPS
    DYNAMIC_SHARED(uint4, memory);
    Shared& s = *(Shared*)((u8*)memory + (-shared_address(memory) & 1023));
    const int tokens = (int)begin(live);
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < STAGES; i++) {
            init_barrier(&s.full[i], 1);
            init_barrier(&s.empty[i], 4 * WARPGROUPS * CLUSTER);
        }
        publish_barriers();
    }
    meet_cluster();
    const int token_groups = (tokens + TOKENS * CLUSTER - 1) / (TOKENS * CLUSTER);
    const int tiles = count_tiles(all, token_groups);
    if (threadIdx.x >= 4 * WARP * WARPGROUPS) {
        release_registers<40>();
        if (threadIdx.x == 4 * WARP * WARPGROUPS) request(s, maps, all, tiles, token_groups, k);
        __syncwarp();
    } else {
        claim_registers<232>();
        compute(s, x, x_stride, all, tiles, token_groups, tokens, k, act);
    }
    meet_cluster();  // the other one may still write to this block's shared memory
}
