// Expert products of many pairs: groups of pairs with one matrix (see `group` in experts.cu) are
// multiplied on tensor cores, in f16 or bf16.
//
// FORMAT: a struct of formats.cuh. PLAIN: weights have the dtype of x (BFLOAT: bfloat16). TOKENS: most
// pairs of a group. A block of WARPS warps computes SIDE rows, and takes the depth in tiles of 64, of
// which STAGES are in shared memory. Block weights are dequantized on the way there in the order of
// their items; the sum is the same, because x is stored in that order, too. GATED: eight rows of one
// matrix alternate with the same rows of another; the result is act(first) * second. WGMMA: use
// warpgroup instructions of capability 9.0, which read shared memory directly.

#include "experts.cuh"
#include "tensor_cores.cuh"

#define THREADS (WARP * WARPS)
#define SIDE 128
#define ROWS (GATED ? SIDE / 2 : SIDE)  // rows of the result
#define DEPTH_TILE 64
#if WGMMA
#include "wgmma.cuh"
#define STRIDE DEPTH_TILE  // halves between rows
#define COLUMNS TOKENS
#define AT_ONCE 64  // pairs of one instruction
#else
#define STRIDE (DEPTH_TILE + 8)  // eight rows cover all banks
#define COLUMNS (TOKENS < 64 ? TOKENS : 64)  // pairs of a warp
#define AT_ONCE 16
#endif
#define ACROSS (TOKENS / COLUMNS)  // warps side by side
#define DOWN (WARPS / ACROSS)      // warps one below the other
#define TILES (SIDE / DOWN / 16)   // of 16 rows, of a warp

struct Shared {
    u16 w[PLAIN ? STAGES : 2][SIDE][STRIDE], x[STAGES][TOKENS][STRIDE];
    int pairs[TOKENS];
};

// The address of eight halves of a row in shared memory.
__device__ __forceinline__ u16* place(u16 (*rows)[STRIDE], int row, int eight) {
#if WGMMA
    return &rows[row][8 * swizzled(row, eight)];
#else
    return &rows[row][8 * eight];
#endif
}

// For row r of a block's SIDE rows: whether it is of the second matrix, and its number in its matrix.
__device__ __forceinline__ bool is_up(int r) { return GATED && r / 8 % 2; }
__device__ __forceinline__ int row_in(int r) { return GATED ? r / 16 * 8 + r % 8 : r; }

// The pair of a group for column n of a warp. Adjacent warps take interleaved pairs, so that all have
// work if the group is not full.
__device__ __forceinline__ int pair_in(int n) {
    return (n / AT_ONCE * ACROSS + (int)threadIdx.x / WARP / DOWN) * AT_ONCE + n % AT_ONCE;
}

// The column in x of eight halves of a row of depth tile `number`.
__device__ __forceinline__ int column_of(int number, int eight) {
#if PLAIN
    return DEPTH_TILE * number + 8 * eight;
#else
    const int part = eight / 2;
    return FORMAT::at(DEPTH_TILE / FORMAT::ITEM * number + part / FORMAT::PARTS, part % FORMAT::PARTS) +
           8 * (eight % 2);
#endif
}

#if PLAIN
// Copies the matrix's part of a depth tile to shared memory.
struct Weights {
    const u8* at[SIDE * 8 / THREADS];

    __device__ __forceinline__ Weights(const Experts& e, int matrix, int row) {
#pragma unroll
        for (int i = 0; i < SIDE * 8 / THREADS; i++) {
            const int own = threadIdx.x / 8 + THREADS / 8 * i;
            const i64 r = (i64)matrix * e.rows + min(row + row_in(own), e.rows - 1);
            at[i] = (is_up(own) ? e.up.a : e.w.a) + (r * e.depth + threadIdx.x % 8 * 8) * 2;
        }
    }
    __device__ __forceinline__ void copy_tile(Shared& s, int number, int depth) const {
        const int column = DEPTH_TILE * number, eight = threadIdx.x % 8;
        const bool there = column + 8 * eight < depth;
#pragma unroll
        for (int i = 0; i < SIDE * 8 / THREADS; i++)
            copy16(place(s.w[number % STAGES], threadIdx.x / 8 + THREADS / 8 * i, eight),
                   at[i] + (there ? 2 * column : 0), there);
    }
};
#else
#define EACH (DEPTH_TILE / FORMAT::ITEM)  // items of a row of a depth tile
#define OWN ((SIDE * EACH + THREADS - 1) / THREADS)         // items of a thread
#define AHEAD (TOKENS < 64 ? 4 : 1)  // depth tiles in flight

// Loads items to registers, and dequantizes them into shared memory.
struct Weights {
    const Experts& e;
    const int items;
    size_t first[OWN];
    FORMAT q[AHEAD][OWN];

    __device__ __forceinline__ Weights(const Experts& e, int matrix, int row)
        : e(e), items(e.depth / FORMAT::ITEM) {
#pragma unroll
        for (int i = 0; i < OWN; i++)
            first[i] = ((size_t)matrix * e.rows + min(row + row_in(line(i)), e.rows - 1)) * items;
    }
    __device__ __forceinline__ static int line(int i) {
        return (threadIdx.x + THREADS * i) / EACH;
    }
    __device__ __forceinline__ bool own(int i) const {
        return SIDE * EACH % THREADS == 0 || (int)threadIdx.x + THREADS * i < SIDE * EACH;
    }
    // Request the items of depth tile `number`; `place` is `number` % AHEAD.
    __device__ __forceinline__ void request(int place, int number) {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            int j = EACH * number + (threadIdx.x + THREADS * i) % EACH;
            if (own(i) && j < items)
                q[place][i].load(FORMAT::item(is_up(line(i)) ? e.up : e.w, first[i] + j));
        }
    }
    __device__ __forceinline__ void dequantize(Shared& s, int place, int number) const {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int slot = (threadIdx.x + THREADS * i) % EACH, j = EACH * number + slot;
            if (!own(i)) continue;
            FORMAT::Values u;
            if (j < items) q[place][i].unpack(j, u);
#pragma unroll
            for (int p = 0; p < FORMAT::PARTS; p++) {
                uint4 halves[2] = {};
                if (j < items) expand_part(u, p, halves);
#pragma unroll
                for (int h = 0; h < 2; h++)
                    *(uint4*)::place(s.w[number % 2], line(i),
                                     FORMAT::ITEM / 8 * slot + 2 * p + h) = halves[h];
            }
        }
    }
};
#endif

// Copies the part of x of a depth tile to shared memory, for the `count` rows of a group.
struct Rows {
    const u8* at[TOKENS * 8 / THREADS];
    const int count;

    __device__ __forceinline__ Rows(const Experts& e, const Shared& s, int count) : count(count) {
#pragma unroll
        for (int i = 0; i < TOKENS * 8 / THREADS; i++)
            at[i] = row_of(e, s.pairs[threadIdx.x / 8 + THREADS / 8 * i]);
    }
    __device__ __forceinline__ void copy_tile(Shared& s, int number, int depth) const {
        const int eight = threadIdx.x % 8, column = column_of(number, eight);
        const bool there = column < depth;
#pragma unroll
        for (int i = 0; i < TOKENS * 8 / THREADS; i++) {
            const int row = threadIdx.x / 8 + THREADS / 8 * i;
            if (row < count)  // other columns are not stored
                copy16(place(s.x[number % STAGES], row, eight), at[i] + (there ? 2 * column : 0),
                       there);
        }
    }
};

typedef float Sums[TILES][COLUMNS / 8][4];

#if WGMMA
// The products of a depth tile with `live` times 64 pairs. `row`: the warp's first row.
__device__ __forceinline__ void multiply_tile(const u16 (*w)[STRIDE], const u16 (*x)[STRIDE], int row,
                                               int live, Sums& c) {
    begin_products();
#pragma unroll
    for (int k = 0; k < DEPTH_TILE / 16; k++)
#pragma unroll
        for (int n = 0; n < TOKENS / 64; n++)
            if (n < live)
                multiply64(&c[0][8 * n][0], factor(w[row / 64 * 64], k), factor(x[64 * n], k));
    end_products();
}
#else
// Operands of a warp's products over 16 of the depth.
template <int LIVE> struct Operands {
    u32 a[TILES][4], b[LIVE][4];

    __device__ __forceinline__ void load(const u16 (*w)[STRIDE], const u16 (*x)[STRIDE], int row,
                                         int k) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int t = 0; t < TILES; t++)
            load_matrices(a[t], &w[row + 16 * t + lane % 16][k + lane / 16 * 8]);
#pragma unroll
        for (int n = 0; n < LIVE; n++)
            load_matrices(b[n], &x[pair_in(16 * n) + lane % 8 + lane / 16 * 8][k + lane / 8 % 2 * 8]);
    }
    __device__ __forceinline__ void multiply_to(Sums& c) const {
#pragma unroll
        for (int n = 0; n < LIVE; n++)
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                multiply(c[t][2 * n], a[t], b[n][0], b[n][1]);
                multiply(c[t][2 * n + 1], a[t], b[n][2], b[n][3]);
            }
    }
};

// The products of a depth tile with 16 * LIVE pairs. `row`: the warp's first row. The next operands are
// loaded while the current ones are multiplied.
template <int LIVE>
__device__ __forceinline__ void multiply_live(const u16 (*w)[STRIDE], const u16 (*x)[STRIDE], int row,
                                              Sums& c) {
    Operands<LIVE> operands[2];
    operands[0].load(w, x, row, 0);
#pragma unroll
    for (int k = 0; k < DEPTH_TILE / 16; k++) {
        if (k + 1 < DEPTH_TILE / 16) operands[(k + 1) % 2].load(w, x, row, 16 * (k + 1));
        operands[k % 2].multiply_to(c);
    }
}

// The same for a runtime number of sixteens.
__device__ __forceinline__ void multiply_tile(const u16 (*w)[STRIDE], const u16 (*x)[STRIDE], int row,
                                               int live, Sums& c) {
    constexpr int ALL = COLUMNS / 16;
    if (live >= ALL) return multiply_live<ALL>(w, x, row, c);
    if (ALL > 3 && live == 3) multiply_live<ALL < 3 ? ALL : 3>(w, x, row, c);
    if (ALL > 2 && live == 2) multiply_live<ALL < 2 ? ALL : 2>(w, x, row, c);
    if (live == 1) multiply_live<1>(w, x, row, c);
}

__device__ __forceinline__ void publish() {}
#endif

// The products over the whole depth.
__device__ __forceinline__ void multiply_all(const Experts& e, Shared& s, int matrix, int first_row,
                                             int row, int count, Sums& c) {
    const int depth_tiles = (e.depth + DEPTH_TILE - 1) / DEPTH_TILE;
    const int live = max(0, (count - pair_in(0) + AT_ONCE * ACROSS - 1) / (AT_ONCE * ACROSS));
    Weights weights(e, matrix, first_row);
    const Rows rows(e, s, count);
#if PLAIN
    for (int i = 0; i < STAGES - 1; i++) {
        if (i < depth_tiles) weights.copy_tile(s, i, e.depth), rows.copy_tile(s, i, e.depth);
        close_copies();
    }
    for (int i = 0; i < depth_tiles; i++) {
        wait_copies<STAGES - 2>();
        publish();
        __syncthreads();  // the depth tile is loaded, and the previous one has been used
        const int next = i + STAGES - 1;
        if (next < depth_tiles) weights.copy_tile(s, next, e.depth), rows.copy_tile(s, next, e.depth);
        close_copies();
        multiply_tile(s.w[i % STAGES], s.x[i % STAGES], row, live, c);
    }
#else
#pragma unroll
    for (int i = 0; i < AHEAD; i++) weights.request(i, i);
    for (int i = 0; i < STAGES - 1; i++) {
        if (i < depth_tiles) rows.copy_tile(s, i, e.depth);
        close_copies();
    }
    for (int at = 0; at < depth_tiles; at += AHEAD) {
#pragma unroll
        for (int place = 0; place < AHEAD; place++) {
            const int i = at + place, next = i + STAGES - 1;
            if (i >= depth_tiles) break;
            weights.dequantize(s, place, i);
            weights.request(place, i + AHEAD);
            wait_copies<STAGES - 2>();
            publish();
            __syncthreads();
            if (next < depth_tiles) rows.copy_tile(s, next, e.depth);
            close_copies();
            multiply_tile(s.w[i % 2], s.x[i % STAGES], row, live, c);
        }
    }
#endif
}

// Grid: (groups, groups of rows of the matrix). Without `groups` each matrix has a row of every token.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    multiply_groups(Experts e, const Group* groups, const int* order TIMESTAMPS) {
    RECORD_TIMESTAMPS
    DYNAMIC_SHARED(u8, memory);
    Shared& s = *(Shared*)(WGMMA ? memory + (-shared_address(memory) & 1023) : memory);
    const int tokens = (int)*(volatile const i64*)e.live;
    wait_and_launch_next();
    Group g;
    if (groups) {
        g = groups[blockIdx.x];
    } else {
        const int of_one = gridDim.x / e.matrices;
        g.matrix = blockIdx.x / of_one, g.first = blockIdx.x % of_one * TOKENS;
        g.count = min(TOKENS, tokens - g.first);
    }
    if (g.count <= 0) return;
    for (int i = threadIdx.x; i < TOKENS; i += THREADS) {
        const int at = g.first + min(i, g.count - 1);
        s.pairs[i] = groups ? order[at] : at * e.each + g.matrix;
    }
    __syncthreads();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int row = warp % DOWN * 16 * TILES;
    Sums c = {};
    if (exists(e, g.matrix)) multiply_all(e, s, g.matrix, blockIdx.y * ROWS, row, g.count, c);
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
            for (int i = 0; i < (GATED ? 2 : 4); i++) {
                const int r = blockIdx.y * ROWS + row_in(row + 16 * t + 8 * (i / 2) + lane / 4);
                const int at = pair_in(8 * n) + lane % 4 * 2 + i % 2;
                if (r >= e.rows || at >= g.count) continue;
#if GATED
                finish_gated(e, s.pairs[at], g.matrix, r, c[t][n][i], c[t][n][i + 2]);
#else
                finish(e, s.pairs[at], g.matrix, r, c[t][n][i]);
#endif
            }
}
