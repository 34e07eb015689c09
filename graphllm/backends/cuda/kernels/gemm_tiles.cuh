#pragma once
// Products of many tokens on tensor cores of capability 9.0, which copy their factors by the copy engine.
//
// EIGHT_BITS, GROUPED: see element_types.cuh. GATED: half of the columns are of one matrix and the other half
// the same rows of a second one. COLUMNS: rows of the matrices that a block multiplies at a time, which are
// columns of the result. STAGES: tiles of the depth in shared memory. ADJACENT: a thread has sums of eight
// adjacent columns, see `copy_interleaved`.
//
// A thread block computes one tile of the result after the other. One thread of its last warpgroup requests
// the factors by the copy engine, up to STAGES ahead, also for the next tile while the present one is stored;
// each of the other warpgroups multiplies 64 tokens. While one of them stores its results, tensor cores work for
// the other one, as far as STAGES let them be apart. The two blocks of a cluster have the same weights and
// different tokens: each requests half of the weights for both. The sum of a result has one order for any
// number of tokens. Grid: (any number of clusters, 1, 2).

#include "clusters.cuh"
#include "matrices.cuh"
#include "tensor_copies.cuh"
#include "wgmma.cuh"

#ifndef GATED
#define GATED 0
#endif

#define TOKENS 128
#define DEPTH 128  // of a tile
#define WARPGROUPS (TOKENS / 64)  // that multiply
#define THREADS (4 * WARP * (WARPGROUPS + 1))
#define STRIP 8  // groups of tokens whose tiles are computed before those of the next ones
#define ROWS (COLUMNS / (1 + GATED))  // of a matrix
#define CLUSTER 2
#define BOX (COLUMNS / CLUSTER)  // rows of a tensor map's tile
#define SUMS (COLUMNS / 2)  // of a thread

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
static_assert(sizeof(Shared) + 1024 <= SHARED, "see gemm_tiles.py");

// Tensor maps of the activations and of up to three matrices.
struct Maps {
    TensorMap x, w[3];
};

// Tiles of CLUSTER * TOKENS tokens, and tiles of all.
struct Counts {
    int token_groups, columns;

    __device__ __forceinline__ Counts(const Matrices& all, int tokens)
        : token_groups((tokens + TOKENS * CLUSTER - 1) / (TOKENS * CLUSTER)), columns(0) {
#pragma unroll
        for (int i = 0; i < (GATED ? 1 : 3); i++) columns += ((int)all.m[i].rows + ROWS - 1) / ROWS;
    }
    __device__ __forceinline__ int tiles() const { return token_groups * columns; }
};

// A tile of the results: its matrix, its first row there, its first token. Tiles that are computed at the same
// time are those of STRIP groups of tokens and about as many rows, so that few factors come from memory.
struct Tile {
    int matrix = 0, row, token;

    // `number` of a cluster, which has CLUSTER adjacent tiles.
    __device__ __forceinline__ Tile(const Matrices& all, const Counts& counts, int number) {
        const int strip = number / (STRIP * counts.columns) * STRIP, rest = number - strip * counts.columns;
        const int groups = min(STRIP, counts.token_groups - strip);
        row = rest / groups * ROWS;
        token = ((strip + rest % groups) * CLUSTER + (int)blockIdx.z) * TOKENS;
#pragma unroll
        for (int i = 0; i < (GATED ? 0 : 2); i++) {
            const int above = ((int)all.m[i].rows + ROWS - 1) / ROWS * ROWS;
            if (matrix == i && row >= above) row -= above, matrix = i + 1;
        }
    }
};

// A stage, and the parity of its phase.
struct Place {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// Request all factors, in the order in which they are multiplied; run by one thread.
__device__ __forceinline__ void request(Shared& s, const Maps& maps, const Matrices& all, const Counts& counts,
                                        int depth) {
    Place place;
#pragma unroll 1
    for (int n = blockIdx.x; n < counts.tiles(); n += gridDim.x) {
        const Tile tile(all, counts, n);
#pragma unroll 1
        for (int at = 0; at < depth; at += DEPTH, place.advance()) {
            wait_barrier(&s.empty[place.stage], place.parity ^ 1);
            Stage& to = s.stages[place.stage];
            u64* full = &s.full[place.stage];
            arrive_for_copies(full, sizeof(to.w) + sizeof(to.x) + GROUPED * 4 * COLUMNS);
            copy_tile(to.x, maps.x, at, tile.token, full);
            const int first = BOX * (int)blockIdx.z;
            const TensorMap& map = maps.w[GATED ? blockIdx.z : tile.matrix];
            const int row = tile.row + (GATED ? 0 : first);
#if ADJACENT
            copy_interleaved(to.w[first], map, at, row, full, (1 << CLUSTER) - 1);
#else
            copy_tile(to.w[first], map, at, row, full, (1 << CLUSTER) - 1);
#endif
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

// Multiply `depth` bytes of the depth. The caller releases the last stage, which is returned.
__device__ __forceinline__ int multiply_depth(Shared& s, Place& place, int group, int depth, Sum (&c)[SUMS]) {
    int previous = place.stage;  // whose products may be in flight
    multiply<false>(s, place, group, c);
    place.advance();
#pragma unroll 1
    for (int at = DEPTH; at < depth; at += DEPTH, place.advance()) {
        multiply<true>(s, place, group, c);
        wait_products<1>();
        release(&s.empty[previous]);
        previous = place.stage;
    }
    wait_products<0>();
#pragma unroll
    for (int i = 0; i < SUMS; i += 4) asm volatile("" : SUMS_OF(c, i));
    return previous;
}

// Run a block: one warpgroup requests factors of `depth` bytes, the others call `compute` with the number of a
// warpgroup, and multiply and store all tiles there.
template <class F>
__device__ __forceinline__ void run_warpgroups(Shared& s, const Maps& maps, const Matrices& all, const Counts& counts,
                                               int depth, F compute) {
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < STAGES; i++) {
            init_barrier(&s.full[i], 1);
            init_barrier(&s.empty[i], 4 * WARPGROUPS * CLUSTER);
        }
        publish_barriers();
    }
    meet_cluster();
    if (threadIdx.x >= 4 * WARP * WARPGROUPS) {
        release_registers<40>();
        if (threadIdx.x == 4 * WARP * WARPGROUPS) request(s, maps, all, counts, depth);
        __syncwarp();
    } else {
        claim_registers<232>();
        compute(threadIdx.x / (4 * WARP));
    }
    meet_cluster();  // the other one may still write to this block's shared memory
}

__device__ __forceinline__ Shared& aligned_memory(uint4* memory) {
    return *(Shared*)((u8*)memory + (-shared_address(memory) & 1023));
}
