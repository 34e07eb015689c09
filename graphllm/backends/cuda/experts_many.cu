// Products of rows with matrices of their own, for many rows: those of one matrix, of which experts.cu
// makes groups, are multiplied together on tensor cores, as halves.
//
// FORMAT: a struct of blocks.cuh, or PLAIN: the weights are halves as x is (BFLOAT: bfloat16). TOKENS:
// pairs of a group. A block takes SIDE rows of the matrix and goes along the depth 64 at a time; parts
// of STAGES such pieces are in shared memory. Blocks of numbers are expanded on the way there, in the
// order of their items: for the sum it is all the same, as long as x follows.

#include "experts.cuh"
#include "tensor.cuh"

#define WARPS 8
#define THREADS (WARP * WARPS)
#define SIDE 128
#define PIECE 64
#define STRIDE (PIECE + 8)  // halves from row to row: eight rows meet all banks
#define COLUMNS (TOKENS < 64 ? TOKENS : 64)  // pairs of a warp
#define DOWN (WARPS / (TOKENS / COLUMNS))    // warps one below the other
#define TILES (SIDE / DOWN / 16)             // of 16 rows, of a warp
#define STAGES (TOKENS < 64 ? 4 : 2)

struct Shared {
    u16 w[PLAIN ? STAGES : 2][SIDE][STRIDE], x[STAGES][TOKENS][STRIDE];
    int pairs[TOKENS];
};

// Eight halves of a row of the piece: where they are in a row of x. `number`: of the piece.
__device__ __forceinline__ int column_of(int number, int eight) {
#if PLAIN
    return PIECE * number + 8 * eight;
#else
    const int part = eight / 2;
    return FORMAT::at(PIECE / FORMAT::ITEM * number + part / FORMAT::PARTS, part % FORMAT::PARTS) +
           8 * (eight % 2);
#endif
}

#if PLAIN
// The matrix's part of a piece on its way to shared memory.
struct Weights {
    const u8* at[SIDE * 8 / THREADS];

    __device__ __forceinline__ Weights(const Experts& e, int matrix, int row) {
#pragma unroll
        for (int i = 0; i < SIDE * 8 / THREADS; i++) {
            i64 r = min(row + (int)threadIdx.x / 8 + THREADS / 8 * i, e.rows - 1);
            at[i] = e.w.a + (((i64)matrix * e.rows + r) * e.depth + threadIdx.x % 8 * 8) * 2;
        }
    }
    __device__ __forceinline__ void bring(Shared& s, int number, int depth) const {
        const int column = PIECE * number, eight = threadIdx.x % 8;
        const bool there = column + 8 * eight < depth;
#pragma unroll
        for (int i = 0; i < SIDE * 8 / THREADS; i++)
            copy16(&s.w[number % STAGES][threadIdx.x / 8 + THREADS / 8 * i][8 * eight],
                   at[i] + (there ? 2 * column : 0), there);
    }
};
#else
#define EACH (PIECE / FORMAT::ITEM)                         // items of a row of the piece
#define OWN ((SIDE * EACH + THREADS - 1) / THREADS)         // items of a thread
#define AHEAD (TOKENS < 64 ? 4 : 1)                         // pieces of which they are on their way

// Items on their way to registers, and from there to shared memory.
struct Weights {
    const Planes& w;
    const int items;
    size_t first[OWN];
    FORMAT q[AHEAD][OWN];

    __device__ __forceinline__ Weights(const Experts& e, int matrix, int row)
        : w(e.w), items(e.depth / FORMAT::ITEM) {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            int r = min(row + (int)(threadIdx.x + THREADS * i) / EACH, e.rows - 1);
            first[i] = ((size_t)matrix * e.rows + r) * items;
        }
    }
    __device__ __forceinline__ bool own(int i) const {
        return SIDE * EACH % THREADS == 0 || (int)threadIdx.x + THREADS * i < SIDE * EACH;
    }
    // Place: `number` % AHEAD.
    __device__ __forceinline__ void ask(int place, int number) {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            int j = EACH * number + (threadIdx.x + THREADS * i) % EACH;
            if (own(i) && j < items) q[place][i].load(w, first[i] + j);
        }
    }
    __device__ __forceinline__ void expand(Shared& s, int place, int number) const {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int slot = (threadIdx.x + THREADS * i) % EACH, j = EACH * number + slot;
            if (!own(i)) continue;
            uint4* to = (uint4*)&s.w[number % 2][(threadIdx.x + THREADS * i) / EACH]
                                    [FORMAT::ITEM * slot];
            if (j < items) {
                FORMAT::Values u;
                q[place][i].unpack(j, u);
#pragma unroll
                for (int p = 0; p < FORMAT::PARTS; p++) expand_part(u, p, to + 2 * p);
            } else {
#pragma unroll
                for (int p = 0; p < 2 * FORMAT::PARTS; p++) to[p] = make_uint4(0, 0, 0, 0);
            }
        }
    }
};
#endif

// The rows' part of a piece on its way to shared memory.
struct Rows {
    const u8* at[TOKENS * 8 / THREADS];

    __device__ __forceinline__ Rows(const Experts& e, const Shared& s) {
#pragma unroll
        for (int i = 0; i < TOKENS * 8 / THREADS; i++)
            at[i] = row_of(e, s.pairs[threadIdx.x / 8 + THREADS / 8 * i]);
    }
    __device__ __forceinline__ void bring(Shared& s, int number, int depth) const {
        const int eight = threadIdx.x % 8, column = column_of(number, eight);
        const bool there = column < depth;
#pragma unroll
        for (int i = 0; i < TOKENS * 8 / THREADS; i++)
            copy16(&s.x[number % STAGES][threadIdx.x / 8 + THREADS / 8 * i][8 * eight],
                   at[i] + (there ? 2 * column : 0), there);
    }
};

typedef float Sums[TILES][COLUMNS / 8][4];

// A piece's products. `row`, `column`: where the warp's begin; `count`: its columns that are wanted.
__device__ __forceinline__ void multiply_piece(const u16 (*w)[STRIDE], const u16 (*x)[STRIDE], int row,
                                               int column, int count, Sums& c) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int k = 0; k < PIECE; k += 16) {
        u32 a[TILES][4];
#pragma unroll
        for (int t = 0; t < TILES; t++)
            load_matrices(a[t], &w[row + 16 * t + lane % 16][k + lane / 16 * 8]);
#pragma unroll
        for (int n = 0; n < COLUMNS; n += 16) {
            if (n >= count) break;
            u32 b[4];
            load_matrices(b, &x[column + n + lane % 8 + lane / 16 * 8][k + lane / 8 % 2 * 8]);
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                multiply(c[t][n / 8], a[t], b[0], b[1]);
                multiply(c[t][n / 8 + 1], a[t], b[2], b[3]);
            }
        }
    }
}

// All pieces of the depth.
__device__ __forceinline__ void multiply_all(const Experts& e, Shared& s, int matrix, int first_row,
                                             int row, int column, int count, Sums& c) {
    const int pieces = (e.depth + PIECE - 1) / PIECE;
    Weights weights(e, matrix, first_row);
    const Rows rows(e, s);
#if PLAIN
    for (int i = 0; i < STAGES - 1; i++) {
        if (i < pieces) weights.bring(s, i, e.depth), rows.bring(s, i, e.depth);
        close_copies();
    }
    for (int i = 0; i < pieces; i++) {
        wait_copies<STAGES - 2>();
        __syncthreads();  // the piece is there, and the one before it has been used
        const int next = i + STAGES - 1;
        if (next < pieces) weights.bring(s, next, e.depth), rows.bring(s, next, e.depth);
        close_copies();
        multiply_piece(s.w[i % STAGES], s.x[i % STAGES], row, column, count, c);
    }
#else
#pragma unroll
    for (int i = 0; i < AHEAD; i++) weights.ask(i, i);
    for (int i = 0; i < STAGES - 1; i++) {
        if (i < pieces) rows.bring(s, i, e.depth);
        close_copies();
    }
    for (int at = 0; at < pieces; at += AHEAD) {
#pragma unroll
        for (int place = 0; place < AHEAD; place++) {
            const int i = at + place, next = i + STAGES - 1;
            if (i >= pieces) break;
            weights.expand(s, place, i);
            weights.ask(place, i + AHEAD);
            wait_copies<STAGES - 2>();
            __syncthreads();
            if (next < pieces) rows.bring(s, next, e.depth);
            close_copies();
            multiply_piece(s.w[i % 2], s.x[i % STAGES], row, column, count, c);
        }
    }
#endif
}

// blockIdx: (group, some rows of its matrix). Without groups each matrix meets a row of every token.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    multiply_groups(Experts e, const Group* groups, const int* order STAMPS) {
    STAMPED
    DYNAMIC_SHARED(Shared, memory);
    Shared& s = *memory;
    const int tokens = (int)begin(e.live);
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
    const int row = warp % DOWN * 16 * TILES, column = warp / DOWN * COLUMNS;
    Sums c = {};
    const bool there = exists(e, g.matrix);
    if (there)
        multiply_all(e, s, g.matrix, blockIdx.y * SIDE, row, column, g.count - column, c);
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int r = blockIdx.y * SIDE + row + 16 * t + 8 * (i / 2) + lane / 4;
                const int at = column + 8 * n + lane % 4 * 2 + i % 2;
                if (r >= e.rows || at >= g.count) continue;
                if (there)
                    finish(e, s.pairs[at], g.matrix, r, c[t][n][i]);
                else
                    e.y[(i64)s.pairs[at] * e.rows + r] = NOT_A_NUMBER;
            }
}
