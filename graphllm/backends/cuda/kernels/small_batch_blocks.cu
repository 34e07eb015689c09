// Linears of several tokens with block weights and int8 activations, on tensor cores.
//
// FORMAT: a struct of formats.cuh. TOKENS: tokens of a block. RESIDENT: blocks that must fit on a
// multiprocessor. SHARED: bytes of shared memory.
//
// A block computes ROWS rows of a matrix, which has at least 16, 16 in each warp, and takes the depth in
// chunks of 256. A warp unpacks the items of its rows to int8 in shared memory, where only it reads
// them; the activations of a chunk are there for the whole block. `splits` divide the depth, see
// clusters.cuh.
//
// A result does not depend on the number of tokens: the order of its sum depends on the depth and on
// `splits` only. Integers are added exactly: those of 32 elements of blocks of 32, those of whole blocks
// of 256, whose integer scales multiply the sums of their groups.

#include "small_batch_blocks.cuh"

// -------------------------------------------------------------------------------------- products

typedef float Sums[TILES][4];  // as tensor cores have them: see `multiply`
typedef u8 Tokens[2][TOKENS][CHUNK / 2];

typedef int Dots[COUNT_AT_ONCE][TILES][4];
typedef Dots Products[OVERLAP + 1];

// Start the products of steps number `step` .. `step` + COUNT_AT_ONCE - 1 of SIZE (16 or 32) elements.
// With wgmma they are ready after `wait_for`.
template <int SIZE>
__device__ __forceinline__ void multiply_steps(Dots& c, const Rows& own, const Tokens& x, int step) {
    const int lane = threadIdx.x % WARP, r = lane % 16;
    u32 a[COUNT_AT_ONCE][4];
#pragma unroll
    for (int i = 0; i < COUNT_AT_ONCE; i++) {
        const int u = SIZE == 32 ? 2 * (step + i) + lane / 16 : step + i;
        const u16* from = (const u16*)(own.w[r] + unit_place(r, u));
        if (SIZE == 32)
            load_matrices(a[i], from);
        else
            load_two_matrices(a[i], from);
    }
#if WGMMA
    const u64 first = factor((const u16*)x[0], 0);
    begin_products();
#pragma unroll
    for (int i = 0; i < COUNT_AT_ONCE; i++) {
        const int at = SIZE * (step + i);
        const u64 b = first + (at / 128 * TOKENS * 128 + at % 128 / 32 * 32) / 16;
        if (SIZE == 32)
            multiply_bytes64<TOKENS>(&c[i][0][0], a[i][0], a[i][1], a[i][2], a[i][3], b);
        else if ((step + i) % 2 == 0)
            multiply_bytes64<TOKENS>(&c[i][0][0], a[i][0], a[i][1], 0, 0, b);
        else
            multiply_bytes64<TOKENS>(&c[i][0][0], 0, 0, a[i][0], a[i][1], b);
    }
    commit_products();
#else
#pragma unroll
    for (int i = 0; i < COUNT_AT_ONCE; i++)
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const int at = SIZE * (step + i), u = at % 128 / 32 * 2 + lane / 8 % 2;
            u32 b[2];
            load_two_matrices(b, (const u16*)(x[at / 128][8 * tile + lane % 8] + 16 * (u ^ lane % 8)));
            if (SIZE == 32)
                multiply_bytes(c[i][tile], a[i], b[0], b[1], 0);
            else
                multiply_bytes(c[i][tile], a[i], b[(step + i) % 2], 0);
        }
#endif
}

// Wait for products after which LEFT more groups were started.
template <int LEFT> __device__ __forceinline__ void wait_for(Dots& c) {
#if WGMMA
    wait_products<LEFT>();
#pragma unroll
    for (int i = 0; i < COUNT_AT_ONCE * TILES; i++) {  // nothing reads them earlier
        int* v = c[i / TILES][i % TILES];
        asm volatile("" : "+r"(v[0]), "+r"(v[1]), "+r"(v[2]), "+r"(v[3]));
    }
#endif
}

// Call use(c, step) with the products of all steps of a chunk, from STEP on. `c` has room for one more
// group if OVERLAP, and that of STEP has been started then. Not a loop, since the compiler would not
// unroll it, and index registers.
template <int SIZE, int STEP, class U>
__device__ __forceinline__ void each_product(Products& c, const Rows& own, const Tokens& x,
                                             U use) {
    constexpr int STEPS = CHUNK / SIZE, COUNT = COUNT_AT_ONCE, NEXT = STEP + COUNT * OVERLAP;
    constexpr int now = STEP / COUNT % (OVERLAP + 1);
    if constexpr (OVERLAP && STEP == 0) multiply_steps<SIZE>(c[0], own, x, 0);
    if constexpr (NEXT < STEPS) multiply_steps<SIZE>(c[NEXT / COUNT % (OVERLAP + 1)], own, x, NEXT);
    wait_for<OVERLAP && NEXT < STEPS>(c[now]);
#pragma unroll
    for (int i = 0; i < COUNT; i++) use(c[now][i], STEP + i);
    if constexpr (STEP + COUNT < STEPS) each_product<SIZE, STEP + COUNT>(c, own, x, use);
}

// Scale `i` of row r.
__device__ __forceinline__ int scale_of(const Rows& own, int r, int i) {
    const u8 byte = ((const u8*)own.groups[r])[i];
    return MINIMA ? byte : (i8)byte;
}

// Add the products of a chunk that is one block of 256.
template <class W>
__device__ __forceinline__ void add_block(Sums& sums, Products& c, const Rows& own, const Tokens& x,
                                          const ChunkScales& scales) {
    const int group = threadIdx.x % WARP / 4, part = threadIdx.x % 4;
    if (MINIMA) {
        float by[2];
        u32 minima[4];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            by[h] = -16777216.f * own.factors[group + 8 * h].y;
            minima[h] = own.minima[group + 8 * h][part], minima[2 + h] = own.minima[group + 8 * h][part + 4];
        }
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const float2 d = *(const float2*)&scales.d[0][8 * tile + 2 * part];
            const u32* from = scales.sums + (8 * tile + group) * WIDE + part;
            float least[4] = {};  // as f16, the bits of an integer are 2^-24 times it
            multiply(least, minima, from[0], from[4]);
#pragma unroll
            for (int e = 0; e < 4; e++)
                sums[tile][e] = fmaf(e % 2 ? d.y : d.x, by[e / 2] * least[e], sums[tile][e]);
        }
    }
    int all[TILES][4] = {};
    each_product<W::GROUP, 0>(c, own, x, [&](const int (&c)[TILES][4], int step) {
        const int by[2] = {scale_of(own, group, step), scale_of(own, group + 8, step)};
#pragma unroll
        for (int e = 0; e < 4 * TILES; e++) all[e / 4][e % 4] += by[e % 4 / 2] * c[e / 4][e % 4];
    });
    const float by[2] = {own.factors[group].x, own.factors[group + 8].x};
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        const float2 d = *(const float2*)&scales.d[0][8 * tile + 2 * part];
#pragma unroll
        for (int e = 0; e < 4; e++)
            sums[tile][e] = fmaf(e % 2 ? d.y : d.x, by[e / 2] * (float)all[tile][e], sums[tile][e]);
    }
}

// Add the products of a chunk of blocks of 32.
template <class W>
__device__ __forceinline__ void add_blocks(Sums& sums, Products& c, const Rows& own, const Tokens& x,
                                           const ChunkScales& scales) {
    const int group = threadIdx.x % WARP / 4, part = threadIdx.x % 4;
    each_product<32, 0>(c, own, x, [&](const int (&c)[TILES][4], int step) {
        float scale[2], offset[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            scale[h] = own.scale[step][group + 8 * h];
            if (MINIMA) offset[h] = own.offset[step][group + 8 * h];
        }
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const int n = 8 * tile + 2 * part;
            const float2 d = *(const float2*)&scales.d[step][n];
            float plain[2];
            if (MINIMA) {
                const int2 s = *(const int2*)&scales.sums[step * TOKENS + n];
                plain[0] = (float)s.x, plain[1] = (float)s.y;
            }
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float v = scale[e / 2] * (float)c[tile][e];
                if (MINIMA) v = fmaf(offset[e / 2], plain[e % 2], v);
                sums[tile][e] = fmaf(e % 2 ? d.y : d.x, v, sums[tile][e]);
            }
        }
    });
}

template <class W>
__device__ __forceinline__ void add_chunk(Sums& sums, Products& c, const Rows& own, const Tokens& x,
                                          const ChunkScales& scales) {
    if constexpr (WHOLE)
        add_block<W>(sums, c, own, x, scales);
    else
        add_blocks<W>(sums, c, own, x, scales);
}

// ---------------------------------------------------------------------------------------- kernel

extern "C" __global__ void __launch_bounds__(THREADS, FITTING)
    small_batch(const u8* x, i64 x_stride, const i64* live, int k, Matrices all, int splits TIMESTAMPS) {
    RECORD_TIMESTAMPS
    DYNAMIC_SHARED(uint4, memory);
    Shared& s = *(Shared*)((u8*)memory + (-shared_address(memory) & 1023));
    launch_next();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, group = lane / 4, part = lane % 4;
    int row = blockIdx.y * ROWS;
    Matrix m = all.m[0];
    find_matrix<ROWS>(all, row, m);
    auto own_row = [&](int row, const Matrix& m) {  // some warps may compute the same rows
        return min(row + SIDE * warp, (int)m.rows - SIDE);
    };
    const int items = k / FORMAT::ITEM, chunks = (k + CHUNK - 1) / CHUNK;
    const int first = blockIdx.x * TOKENS, last = (int)*live - 1;
    // Splits are added in pairs, and then the pairs in order.
    const int blocks = gridDim.z, from = splits * blockIdx.z / blocks;
    const int to = splits * (blockIdx.z + 1) / blocks;
    auto start_of = [&](int split) { return split * chunks / splits; };
    auto there = [&](int chunk) { return chunk * PER_ROW + lane % PER_ROW < items; };
    const int begin = start_of(from), end = start_of(to);
    Held<FORMAT> held(m.w, own_row(row, m), items, begin);
    held.load(there(begin));
    wait_for_previous();
    if (first > last) return;
    auto copy = [&](int stage, int chunk) {
        int token = first;
        asm volatile("" : "+r"(token));  // find the places again: keeping them would take registers
        const Source source(x, x_stride, k, token, last);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (chunk + i < end) source.copy(s.x[stage][i], s.scales[stage][i], chunk + i);
        close_copies();
    };
    copy(0, begin);
    Sums sums = {};
    Products c = {};  // kept in the same registers
    int split = from, next = start_of(from + 1), stage = 0;
#if !CLUSTERS
    Sums total = {};
#endif
#pragma unroll 1
    for (int at = begin; at < end; at += AT_ONCE, stage ^= 1) {
        wait_copies<0>();
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (at + i < end) convert_sums(s.scales[stage][i]);
#if WGMMA
        publish();
#endif
        __syncthreads();
        copy(stage ^ 1, at + AT_ONCE);
#pragma unroll 1
        for (int i = 0; i < AT_ONCE && at + i < end; i++) {
            const int chunk = at + i;
            held.store(s.rows[warp], there(chunk));
            __syncwarp();
            if (chunk + 1 < end) held.load(there(chunk + 1));
            add_chunk<FORMAT>(sums, c, s.rows[warp], s.x[stage][i], s.scales[stage][i]);
            __syncwarp();
            if (!SEVERAL || chunk + 1 < next) continue;
            // The split ends.
            float(*half)[THREADS] = s.half;
            if (split % 2 && split > from)
#pragma unroll
                for (int e = 0; e < TILES * 4; e++) sums[e / 4][e % 4] += half[e][threadIdx.x];
            const bool more = split % 2 == 0 && split + 1 < to;
#pragma unroll
            for (int e = 0; e < TILES * 4; e++) {
                float& sum = sums[e / 4][e % 4];
                if (more) half[e][threadIdx.x] = sum;
#if !CLUSTERS
                float& all = total[e / 4][e % 4];
                if (!more) all = split < 2 ? sum : all + sum;
#endif
                if (split + 1 < to) sum = 0;
            }
            split++, next = start_of(split + 1);
        }
    }
#if !CLUSTERS
#define RESULT total
#else
#define RESULT sums
#endif
    __syncthreads();
    row = blockIdx.y * ROWS;
    asm volatile("" : "+r"(row));  // find the matrix again: keeping its fields would take 20 registers
    m = all.m[0];
    find_matrix<ROWS>(all, row, m);
    float* out = (float*)&s;
#pragma unroll
    for (int i = 0; i < TILES * 4; i++) {
        const int r = own_row(row, m) - row + i % 4 / 2 * 8 + group;
        if (r >= 0) out[(i / 4 * 8 + 2 * part + i % 2) * STRIDE + r] = RESULT[i / 4][i % 4];
    }
    meet(blocks);
    const int r = threadIdx.x % ROWS;
    const RowEnd end_of_row(m, row + r);
    for (int t = threadIdx.x / ROWS + THREADS / ROWS * blockIdx.z; t < min(TOKENS, last + 1 - first);
         t += THREADS / ROWS * blocks) {
        const float value = sum_of_blocks(out + t * STRIDE + r, blocks, splits);
        if (row + r < m.rows) end_of_row.store(first + t, value);
    }
    if (blocks > 1) meet(blocks);  // the others have read this block's sums
}
