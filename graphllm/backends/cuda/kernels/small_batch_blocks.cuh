#pragma once
// How small_batch_blocks.cu brings chunks of weights and activations to shared memory; see there for the
// macros.

#include "clusters.cuh"
#include "matrices.cuh"
#include "tensor_cores.cuh"

// Capability 9.0 has tensor core instructions that read activations from shared memory.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define WGMMA 1
#include "wgmma.cuh"
#else
#define WGMMA 0
#endif

#define WARPS 8
#define THREADS (WARP * WARPS)
#define SIDE 16              // rows of a warp
#define ROWS (SIDE * WARPS)  // of a block
#define CHUNK 256
#define TILES (TOKENS / 8)
#define STRIDE (ROWS + 4)  // floats between the sums of two tokens: stores use all banks
#define AT_ONCE (TOKENS < 32 ? 4 : 2)  // chunks of activations that are copied together
#define SEVERAL (!CLUSTERS || TOKENS == 64)  // whether a block may compute several splits
#define COUNT_AT_ONCE (TILES == 1 ? 4 : TILES == 2 ? 2 : 1)  // steps whose products are in registers
#define OVERLAP (WGMMA && TOKENS == 64)  // whether products are computed while others are used

// Blocks that must fit into the registers of a multiprocessor. A format of large items has room for one.
#define LARGE (TOKENS == 32 && WHOLE && MINIMA && sizeof(FORMAT) > 32)
#define FITTING (WGMMA && !LARGE ? RESIDENT : 1)

constexpr bool WHOLE = FORMAT::BLOCK == CHUNK;  // a chunk is one block
constexpr bool MINIMA = FORMAT::OFFSET && FORMAT::ZERO_POINT < 0;
constexpr int PER_ROW = CHUNK / FORMAT::ITEM;       // items of a row in a chunk
constexpr int COUNT = SIDE * PER_ROW / WARP;        // of them, those that a thread unpacks
constexpr int SCALES = CHUNK / 32;                  // of a row, if blocks have 32 elements
constexpr int WIDE = 12;  // words between rows of sums or minima: stores use all banks

// Scales and sums of a chunk of activations.
struct ChunkScales {
    float d[WHOLE ? 1 : SCALES][TOKENS];
    u32 sums[MINIMA ? WHOLE ? TOKENS * WIDE : SCALES * TOKENS : 4];
};

// A warp's rows of a chunk: int8, scales, offsets.
struct Rows {
    u8 w[SIDE][CHUNK];
    float scale[WHOLE ? 1 : SCALES][SIDE + 4], offset[WHOLE || !MINIMA ? 1 : SCALES][SIDE + 4];
    u32 groups[WHOLE ? SIDE : 1][4];
    float2 factors[WHOLE ? SIDE : 2];
    u32 minima[WHOLE && MINIMA ? SIDE : 1][WIDE];
};

struct Shared {
    u8 x[2][AT_ONCE][2][TOKENS][CHUNK / 2];
    ChunkScales scales[2][AT_ONCE];
    Rows rows[WARPS];
    float half[TILES * 4][THREADS];  // sums of the first split of a pair
};
static_assert(sizeof(Shared) + 1024 <= SHARED && sizeof(Shared) >= 4 * TOKENS * STRIDE,
              "see small_batch_blocks.py");

// Where unit u of 16 int8 of row r of Rows::w is. Stores of items and loads of matrices use all banks.
__device__ __forceinline__ int unit_place(int r, int u) { return 16 * (u ^ (u & 8 ? 7 : 0) ^ r & 7); }

// What a thread holds of a chunk of its warp's rows: items and, of a block of 256, the scales of half a
// row.
template <class W> struct Held {
    W item[COUNT], head;
    Planes next, next_head;  // where the first item and the scales of the next chunk are
    u32 below[4];            // bytes of each plane between two items of a thread

    __device__ __forceinline__ Held(const Planes& w, int row, int items, int chunk) {
        const int lane = threadIdx.x % WARP, j = chunk * PER_ROW;
        next = W::item(w, (size_t)(row + lane / PER_ROW) * items + j + lane % PER_ROW);
        next_head = W::item(w, (size_t)(row + lane / 2) * items + j);
        constexpr int BELOW = WARP / PER_ROW;
        below[0] = 16 * items * BELOW;
#pragma unroll
        for (int i = 0; i < 3; i++) below[1 + i] = W::STEPS[i] * items / WARP * BELOW;
    }

    __device__ __forceinline__ static void advance(Planes& p) {
        p.a += 16 * PER_ROW, p.b += W::STEPS[0] * PER_ROW / WARP;
        p.c += W::STEPS[1] * PER_ROW / WARP, p.d += W::STEPS[2] * PER_ROW / WARP;
    }

    __device__ __forceinline__ void load(bool there) {
        Planes p = next;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            if (WHOLE || there) item[i].load(p);
            p.a += below[0], p.b += below[1], p.c += below[2], p.d += below[3];
        }
        advance(next);
        if constexpr (WHOLE) {
            head.load_head(next_head, threadIdx.x % 2);
            advance(next_head);
        }
    }

    __device__ __forceinline__ void store(Rows& to, bool there) const {
        const int lane = threadIdx.x % WARP, j = lane % PER_ROW;
        constexpr int BELOW = WARP / PER_ROW, VARIANTS = BELOW < 8 ? 8 / BELOW : 1;  // rows between items
        int place[VARIANTS][W::PARTS];
#pragma unroll
        for (int v = 0; v < VARIANTS * W::PARTS; v++) {
            const int r = v / W::PARTS * BELOW + lane / PER_ROW;
            place[v / W::PARTS][v % W::PARTS] =
                lane / PER_ROW * CHUNK + unit_place(r, W::at(j, v % W::PARTS) / 16);
        }
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int r = i * (WARP / PER_ROW) + lane / PER_ROW;
            typename W::Values u;
            if constexpr (WHOLE)
                item[i].integers(j, u.v);
            else
                item[i].unpack(j, u);
#pragma unroll
            for (int p = 0; p < W::PARTS; p++) {
                uint4 q;
                u32* words = &q.x;
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    u32 v = u.v[4 * p + e];
                    if (W::ZERO_POINT > 0) v = less_each<(W::ZERO_POINT > 0 ? W::ZERO_POINT : 0)>(v);
                    words[e] = WHOLE || there ? v : 0;
                }
                *(uint4*)(to.w[i * BELOW] + place[i * BELOW % 8 / BELOW % VARIANTS][p]) = q;
            }
            if constexpr (!WHOLE) {
                to.scale[j * W::ITEM / 32][r] = there ? u.scale[0] : 0;
                if (MINIMA) to.offset[j * W::ITEM / 32][r] = there ? u.offset[0] : 0;
            }
        }
        if constexpr (WHOLE) store_head(to, lane / 2, lane % 2);
    }

    __device__ __forceinline__ void store_head(Rows& to, int r, int half) const {
        u32 s[2], m[2];
        head.groups(half, s, m);
        if (W::GROUP == 32)
            to.groups[r][half] = s[0];
        else
            *(uint2*)&to.groups[r][2 * half] = make_uint2(s[0], s[1]);
        if (half == 0) to.factors[r] = head.factors();
        if (!MINIMA) return;
        // A minimum for each sum of 16 activations.
        uint4 all;
        u32* words = &all.x;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int at = W::GROUP == 32 ? i : 2 * i & 3;
            words[i] = __byte_perm(m[W::GROUP == 32 ? 0 : i / 2], 0,
                                   W::GROUP == 32 ? 0x4040 | at << 8 | at : 0x4040 | (at + 1) << 8 | at);
        }
        *(uint4*)&to.minima[r][4 * half] = all;
    }
};

// ----------------------------------------------------------------------------------- activations

constexpr int UNITS = TOKENS * CHUNK / 16;                          // of 16 int8 of a chunk
constexpr int SCALE_WORDS = TOKENS * (WHOLE ? 1 : SCALES);          // of a chunk
constexpr int SUM_UNITS = !MINIMA ? 0 : WHOLE ? TOKENS * 2 : SCALE_WORDS;  // of 16 bytes, or words
__device__ constexpr int each(int count) { return (count + THREADS - 1) / THREADS; }

// What a thread copies of each chunk of activations.
struct Source {
    const u8* x;
    int k;
    bool aligned;
    u32 at[each(UNITS)], d_at[each(SCALE_WORDS)], sums_at[each(SUM_UNITS) + 1];  // in x

    __device__ __forceinline__ Source(const u8* x, i64 stride, int k, int first, int last)
        : x(x), k(k), aligned(((u64)x | stride) % 16 == 0) {
        auto row = [&](int n) { return (u32)(min(first + n, last) * stride); };
#pragma unroll
        for (int j = 0; j < each(UNITS); j++) {
            const int i = threadIdx.x + THREADS * j;
            at[j] = row(i / 16) + i % 16 * 16;
        }
        const int d = k, sums = k + k / (WHOLE ? CHUNK : 32) * 4, scales = WHOLE ? 1 : SCALES;
#pragma unroll
        for (int j = 0; j < each(SCALE_WORDS); j++) {
            const int i = threadIdx.x + THREADS * j;
            d_at[j] = row(i / scales) + d + i % scales * 4;
        }
#pragma unroll
        for (int j = 0; j < each(SUM_UNITS); j++) {
            const int i = threadIdx.x + THREADS * j;
            sums_at[j] = WHOLE ? row(i / 2) + sums + i % 2 * 16 : row(i / SCALES) + sums + i % SCALES * 4;
        }
    }

    __device__ __forceinline__ void copy_unit(void* to, const u8* from, bool there, bool aligned) const {
        if (aligned)
            copy16((u16*)to, from, there);
        else
#pragma unroll
            for (int e = 0; e < 16; e += 4) copy4((u8*)to + e, from + e, there);
    }

    // Copy a chunk. Elements beyond the depth become zero.
    __device__ __forceinline__ void copy(u8 (&to)[2][TOKENS][CHUNK / 2], ChunkScales& scales,
                                         int chunk) const {
        const int left = k - chunk * CHUNK;
#pragma unroll
        for (int j = 0; j < each(UNITS); j++) {
            const int i = threadIdx.x + THREADS * j, n = i / 16, u = i % 16;
            if (UNITS % THREADS && i >= UNITS) break;
            copy_unit(to[u / 8][n] + 16 * (u % 8 ^ n % 8), x + at[j] + (u32)chunk * CHUNK,
                      WHOLE || 16 * u < left, aligned);
        }
#pragma unroll
        for (int j = 0; j < each(SCALE_WORDS); j++) {
            const int i = threadIdx.x + THREADS * j;
            if (SCALE_WORDS % THREADS && i >= SCALE_WORDS) break;
            if constexpr (WHOLE)
                copy4(&scales.d[0][i], x + d_at[j] + 4 * chunk, true);
            else
                copy4(&scales.d[i % SCALES][i / SCALES], x + d_at[j] + 4 * SCALES * chunk,
                      i % SCALES * 32 < left);
        }
#pragma unroll
        for (int j = 0; j < each(SUM_UNITS); j++) {
            const int i = threadIdx.x + THREADS * j;
            if (SUM_UNITS % THREADS && i >= SUM_UNITS) break;
            if constexpr (WHOLE)
                copy_unit(&scales.sums[i / 2 * WIDE + i % 2 * 4], x + sums_at[j] + 32 * chunk, true,
                          aligned && k % 1024 == 0);
            else
                copy4(&scales.sums[i % SCALES * TOKENS + i / SCALES], x + sums_at[j] + 4 * SCALES * chunk,
                      i % SCALES * 32 < left);
        }
    }
};

// Make the sums of 16 that this thread has copied f16, which has them exactly.
__device__ __forceinline__ void convert_sums(ChunkScales& own) {
    if (!WHOLE || !MINIMA || threadIdx.x >= SUM_UNITS) return;
    uint4& place = *(uint4*)&own.sums[threadIdx.x / 2 * WIDE + threadIdx.x % 2 * 4];
    uint4 all = place;
    u32* words = &all.x;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u16 low, high;
        asm("cvt.rn.f16.s16 %0, %1;" : "=h"(low) : "h"((i16)words[i]));
        asm("cvt.rn.f16.s16 %0, %1;" : "=h"(high) : "h"((i16)(words[i] >> 16)));
        words[i] = low | (u32)high << 16;
    }
    place = all;
}
