// Expert products of few pairs per matrix, with block weights, on tensor cores.
//
// FORMAT: a struct of formats.cuh. TOKENS: pairs that a block multiplies at a time. WARPS of a block
// compute 16 rows each. GATED: eight rows of one matrix and the same rows of another; the result is
// act(first) * second.
//
// Each block finds the pairs of its matrix in the ids. A thread loads items of rows lane / 4 and
// lane / 4 + 8, of four items the one with number lane % 4, and its registers are the operand of the
// tensor cores: the order of the depth is that of the items, and x is in shared memory in that order. So
// weights pass no shared memory, and warps meet only where a chunk of x ends. Weights are f16, multiplied
// by UNIT so that small ones stay normal.

#include "experts.cuh"
#include "tensor_cores.cuh"

#define THREADS (WARP * WARPS)
#define SIDE (16 * WARPS)
#define ROWS (GATED ? SIDE / 2 : SIDE)  // rows of the result
#define UNITS (CHUNK / 8)               // of eight halves
#define UNIT 64.f
#define TILES (TOKENS / 8)
#define AHEAD (sizeof(FORMAT) > 28 ? 2 : 4)  // rounds of items in flight

constexpr int PARTS = FORMAT::PARTS, ITEM = FORMAT::ITEM;
constexpr int ROUND = 4;  // items of a row that a warp takes at a time

struct Shared {
    uint4 x[TOKENS][UNITS];
    int count, pairs[1];  // of the matrix; there is room for all pairs of the step
};

// Find the pairs of a matrix; number `matrices` stands for ids out of range. Their order does not
// matter: each has a column of its own in the products.
__device__ __forceinline__ void find_pairs(const Experts& e, Shared& s, int matrix) {
    const int pairs = (int)*(volatile const i64*)e.live * e.each;
    if (threadIdx.x == 0) s.count = 0;
    __syncthreads();
    for (int pair = threadIdx.x; pair < pairs; pair += THREADS) {
        const int id = e.ids ? id_of(e.ids, e.ids_stride, e.each, pair) : pair % e.each;
        if (exists(e, id) ? id == matrix : matrix == e.matrices)
            s.pairs[atomicAdd(&s.count, 1)] = pair;
    }
    __syncthreads();
}

// Where unit u of row n is: loads of a warp use all banks.
__device__ __forceinline__ int unit_place(int n, int u) { return u ^ (u >> 2 & 3) ^ (n & 1); }

// Copy the chunk of x from item `first` on, in the order of the items, for some pairs.
__device__ __forceinline__ void copy_chunk(const Experts& e, Shared& s, const int* pairs, int count,
                                           int first) {
    for (int i = threadIdx.x; i < count * UNITS; i += THREADS) {
        const int n = i / UNITS, u = i % UNITS, part = u / 2;
        const int column = FORMAT::at(first + part / PARTS, part % PARTS) + u % 2 * 8;
        const bool there = column < e.depth;
        copy16((u16*)&s.x[n][unit_place(n, u)], row_of(e, pairs[n]) + (there ? 2 * column : 0), there);
    }
    close_copies();
    wait_copies<0>();
}

// Part p of an item, times UNIT, as eight pairs of f16. The bits 0x6400 | b are 1024 + b,
// and those of ZERO the negative number that is added.
__device__ __forceinline__ void halves(const FORMAT::Values& q, int p, u32 (&to)[8]) {
    constexpr bool SIGNED = FORMAT::ZERO_POINT == 0;
    constexpr u32 ZERO = 0xe400 + (SIGNED ? 128 : FORMAT::ZERO_POINT > 0 ? FORMAT::ZERO_POINT : 0);
    const u32 scale = two_within_f16(UNIT * q.scale[p], UNIT * q.scale[p]);
    u32 offset = 0;
    if (FORMAT::ZERO_POINT < 0) offset = two_within_f16(UNIT * q.offset[p], UNIT * q.offset[p]);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 v = (u32)q.v[4 * p + i] ^ (SIGNED ? 0x80808080 : 0);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u32 bits = __byte_perm(v, 0x64646464, h ? 0x4342 : 0x4140);
            to[2 * i + h] = fma_halves(add_halves(bits, ZERO * 0x10001u), scale, offset);
        }
    }
}

// The items of a warp's rows.
struct Weights {
    Planes first[2];  // of rows lane / 4 and lane / 4 + 8
    size_t at[2];
    int items;
    FORMAT q[AHEAD][2];

    __device__ __forceinline__ Weights(const Experts& e, int matrix, int row) : items(e.depth / ITEM) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            first[h] = GATED && h ? e.up : e.w;
            const int r = min(row + lane / 4 + (GATED ? 0 : 8 * h), e.rows - 1);
            at[h] = ((size_t)matrix * e.rows + r) * items + lane % 4;
        }
    }
    __device__ __forceinline__ bool there(int round) const {
        return ROUND * round + (int)threadIdx.x % 4 < items;
    }
    __device__ __forceinline__ void request(int place, int round) {
        if (!there(round)) return;
#pragma unroll
        for (int h = 0; h < 2; h++)
            q[place][h].load(FORMAT::item(first[h], at[h] + ROUND * round));
    }
};

typedef float Sums[TILES][4];

// Add the products of a round of items, of which x begins at item `begin`, with `live` tiles of pairs.
__device__ __forceinline__ void multiply_round(const Shared& s, const Weights& w, int place, int round,
                                               int begin, int live, Sums& c) {
    const int lane = threadIdx.x % WARP, n = lane / 4, j = ROUND * round + lane % 4;
    FORMAT::Values q[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        w.q[place][h].unpack(j, q[h]);
        if (w.there(round)) continue;
#pragma unroll
        for (int p = 0; p < PARTS; p++) q[h].scale[p] = q[h].offset[p] = 0;
    }
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        u32 a[2][8];
#pragma unroll
        for (int h = 0; h < 2; h++) halves(q[h], p, a[h]);
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            if (t && t >= live) break;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int u = ((j - begin) * PARTS + p) * 2 + half;
                const uint4 b = s.x[8 * t + n][unit_place(n, u)];
                const u32 even[4] = {a[0][4 * half], a[1][4 * half], a[0][4 * half + 1],
                                     a[1][4 * half + 1]};
                const u32 odd[4] = {a[0][4 * half + 2], a[1][4 * half + 2], a[0][4 * half + 3],
                                    a[1][4 * half + 3]};
                multiply(c[t], even, b.x, b.y);
                multiply(c[t], odd, b.z, b.w);
            }
        }
    }
}

// The products of some pairs over the whole depth. `wait`: x may not be complete yet.
__device__ __forceinline__ void multiply_all(const Experts& e, Shared& s, int matrix, int row,
                                             const int* pairs, int count, bool wait, Sums& c) {
    constexpr int ROUNDS = CHUNK / ITEM / ROUND;  // of a chunk
    const int rounds = (e.depth / ITEM + ROUND - 1) / ROUND, live = (count + 7) / 8;
    Weights w(e, matrix, row);
#pragma unroll
    for (int i = 0; i < AHEAD; i++) w.request(i, i);
    if (wait) wait_and_launch_next();
    int begin = 0;
#pragma unroll 1
    for (int at = 0; at < rounds; at += AHEAD) {
#pragma unroll
        for (int place = 0; place < AHEAD; place++) {
            const int round = at + place;
            if (round >= rounds) break;
            if (round % ROUNDS == 0) {
                __syncthreads();  // the chunk before has been used
                begin = ROUND * round;
                copy_chunk(e, s, pairs, count, begin);
                __syncthreads();
            }
            multiply_round(s, w, place, round, begin, live, c);
            w.request(place, round + AHEAD);
        }
    }
}

// Grid: (matrices and, with ids, one for ids out of range; groups of rows of the matrix).
extern "C" __global__ void __launch_bounds__(THREADS, 2) multiply_small_groups(Experts e TIMESTAMPS) {
    RECORD_TIMESTAMPS
    DYNAMIC_SHARED(uint4, memory);
    Shared& s = *(Shared*)memory;
    const int matrix = blockIdx.x, lane = threadIdx.x % WARP;
    const int row = blockIdx.y * ROWS + threadIdx.x / WARP * (ROWS / WARPS);
    bool wait = e.ids_ready || !e.ids;
    if (!wait) wait_and_launch_next();
    find_pairs(e, s, matrix);
    const int all = s.count;
    if (wait && (all == 0 || matrix == e.matrices)) wait_and_launch_next();
    for (int first = 0; first < all; first += TOKENS) {
        const int* const pairs = s.pairs + first;
        const int count = min(TOKENS, all - first);
        Sums c = {};
        if (matrix < e.matrices) multiply_all(e, s, matrix, row, pairs, count, wait, c);
        wait = false;
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int i = 0; i < (GATED ? 2 : 4); i++) {
                const int r = row + 8 * (i / 2) + lane / 4, at = 8 * t + lane % 4 * 2 + i % 2;
                if (r >= e.rows || at >= count) continue;
#if GATED
                finish_gated(e, pairs[at], matrix, r, c[t][i] / UNIT, c[t][i + 2] / UNIT);
#else
                finish(e, pairs[at], matrix, r, c[t][i] / UNIT);
#endif
            }
    }
}
