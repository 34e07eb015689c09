// Products of rows with matrices of their own, for many rows: those of one matrix, of which experts.cu
// makes groups, are multiplied together on tensor cores, as halves.
//
// FORMAT: a struct of formats.cuh, or PLAIN: the weights are halves as x is (BFLOAT: bfloat16). TOKENS:
// pairs of a group, at most. A block of WARPS takes SIDE rows and goes along the depth 64 at a time;
// parts of STAGES such pieces are in shared memory. Blocks of numbers are expanded on the way there, in
// the order of their items: for the sum it is all the same, as long as x follows. GATED: eight rows of
// one matrix and the same of another take turns, and give act(first) * second. WGMMA: by the tensor
// cores of capability 9.0, which read shared memory themselves.

#include "experts.cuh"
#include "tensor_cores.cuh"

#define THREADS (WARP * WARPS)
#define SIDE 128
#define ROWS (GATED ? SIDE / 2 : SIDE)  // of a result
#define PIECE 64
#if WGMMA
#include "wgmma.cuh"
#define STRIDE PIECE  // halves from row to row
#define COLUMNS TOKENS
#define AT_ONCE 64  // pairs of a product
#else
#define STRIDE (PIECE + 8)                // eight rows meet all banks
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

// Where eight halves of a row are in shared memory.
__device__ __forceinline__ u16* place(u16 (*rows)[STRIDE], int row, int eight) {
#if WGMMA
    return &rows[row][8 * swizzled(row, eight)];
#else
    return &rows[row][8 * eight];
#endif
}

// Where row r of a block's SIDE rows is: of which matrix, and its number from the block's first on.
__device__ __forceinline__ bool is_up(int r) { return GATED && r / 8 % 2; }
__device__ __forceinline__ int row_in(int r) { return GATED ? r / 16 * 8 + r % 8 : r; }

// The pair, of a group, of column n of a warp: what warps side by side multiply at once takes turns, so
// that all have their share of a group that is not full.
__device__ __forceinline__ int pair_in(int n) {
    return (n / AT_ONCE * ACROSS + (int)threadIdx.x / WARP / DOWN) * AT_ONCE + n % AT_ONCE;
}

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
            const int own = threadIdx.x / 8 + THREADS / 8 * i;
            const i64 r = (i64)matrix * e.rows + min(row + row_in(own), e.rows - 1);
            at[i] = (is_up(own) ? e.up.a : e.w.a) + (r * e.depth + threadIdx.x % 8 * 8) * 2;
        }
    }
    __device__ __forceinline__ void bring(Shared& s, int number, int depth) const {
        const int column = PIECE * number, eight = threadIdx.x % 8;
        const bool there = column + 8 * eight < depth;
#pragma unroll
        for (int i = 0; i < SIDE * 8 / THREADS; i++)
            copy16(place(s.w[number % STAGES], threadIdx.x / 8 + THREADS / 8 * i, eight),
                   at[i] + (there ? 2 * column : 0), there);
    }
};
#else
#define EACH (PIECE / FORMAT::ITEM)                         // items of a row of the piece
#define OWN ((SIDE * EACH + THREADS - 1) / THREADS)         // items of a thread
#define AHEAD (TOKENS < 64 ? 4 : 1)                         // pieces of which they are on their way

// Items on their way to registers, and from there to shared memory.
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
    // Place: `number` % AHEAD.
    __device__ __forceinline__ void ask(int place, int number) {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            int j = EACH * number + (threadIdx.x + THREADS * i) % EACH;
            if (own(i) && j < items)
                q[place][i].load(is_up(line(i)) ? e.up : e.w, first[i] + j);
        }
    }
    __device__ __forceinline__ void expand(Shared& s, int place, int number) const {
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

// The rows' part of a piece on its way to shared memory, of a group's `count` rows.
struct Rows {
    const u8* at[TOKENS * 8 / THREADS];
    const int count;

    __device__ __forceinline__ Rows(const Experts& e, const Shared& s, int count) : count(count) {
#pragma unroll
        for (int i = 0; i < TOKENS * 8 / THREADS; i++)
            at[i] = row_of(e, s.pairs[threadIdx.x / 8 + THREADS / 8 * i]);
    }
    __device__ __forceinline__ void bring(Shared& s, int number, int depth) const {
        const int eight = threadIdx.x % 8, column = column_of(number, eight);
        const bool there = column < depth;
#pragma unroll
        for (int i = 0; i < TOKENS * 8 / THREADS; i++) {
            const int row = threadIdx.x / 8 + THREADS / 8 * i;
            if (row < count)  // what is behind them gives columns that nobody wants
                copy16(place(s.x[number % STAGES], row, eight), at[i] + (there ? 2 * column : 0),
                       there);
        }
    }
};

typedef float Sums[TILES][COLUMNS / 8][4];

#if WGMMA
// A piece's products, with `live` times 64 pairs. `row`: where the warp's begin.
__device__ __forceinline__ void multiply_piece(const u16 (*w)[STRIDE], const u16 (*x)[STRIDE], int row,
                                               int live, Sums& c) {
    begin_products();
#pragma unroll
    for (int k = 0; k < PIECE / 16; k++)
#pragma unroll
        for (int n = 0; n < TOKENS / 64; n++)
            if (n < live)
                multiply64(&c[0][8 * n][0], factor(w[row / 64 * 64], k), factor(x[64 * n], k));
    end_products();
}
#else
// What the warp's products of sixteen of the depth are made of.
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

// A piece's products with 16 * LIVE pairs. `row`: where the warp's begin. The next operands are on their
// way while some are multiplied.
template <int LIVE>
__device__ __forceinline__ void multiply_live(const u16 (*w)[STRIDE], const u16 (*x)[STRIDE], int row,
                                              Sums& c) {
    Operands<LIVE> operands[2];
    operands[0].load(w, x, row, 0);
#pragma unroll
    for (int k = 0; k < PIECE / 16; k++) {
        if (k + 1 < PIECE / 16) operands[(k + 1) % 2].load(w, x, row, 16 * (k + 1));
        operands[k % 2].multiply_to(c);
    }
}

// The same, with `live` sixteens.
__device__ __forceinline__ void multiply_piece(const u16 (*w)[STRIDE], const u16 (*x)[STRIDE], int row,
                                               int live, Sums& c) {
    constexpr int ALL = COLUMNS / 16;
    if (live >= ALL) return multiply_live<ALL>(w, x, row, c);
    if (ALL > 3 && live == 3) multiply_live<ALL < 3 ? ALL : 3>(w, x, row, c);
    if (ALL > 2 && live == 2) multiply_live<ALL < 2 ? ALL : 2>(w, x, row, c);
    if (live == 1) multiply_live<1>(w, x, row, c);
}

__device__ __forceinline__ void publish() {}
#endif

// All pieces of the depth.
__device__ __forceinline__ void multiply_all(const Experts& e, Shared& s, int matrix, int first_row,
                                             int row, int count, Sums& c) {
    const int pieces = (e.depth + PIECE - 1) / PIECE;
    const int live = max(0, (count - pair_in(0) + AT_ONCE * ACROSS - 1) / (AT_ONCE * ACROSS));
    Weights weights(e, matrix, first_row);
    const Rows rows(e, s, count);
#if PLAIN
    for (int i = 0; i < STAGES - 1; i++) {
        if (i < pieces) weights.bring(s, i, e.depth), rows.bring(s, i, e.depth);
        close_copies();
    }
    for (int i = 0; i < pieces; i++) {
        wait_copies<STAGES - 2>();
        publish();
        __syncthreads();  // the piece is there, and the one before it has been used
        const int next = i + STAGES - 1;
        if (next < pieces) weights.bring(s, next, e.depth), rows.bring(s, next, e.depth);
        close_copies();
        multiply_piece(s.w[i % STAGES], s.x[i % STAGES], row, live, c);
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
            publish();
            __syncthreads();
            if (next < pieces) rows.bring(s, next, e.depth);
            close_copies();
            multiply_piece(s.w[i % 2], s.x[i % STAGES], row, live, c);
        }
    }
#endif
}

// blockIdx: (group, some rows of its matrix). Without groups each matrix meets a row of every token.
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
