#pragma once
// How attention_decode.cu loads the keys and values of a tile. `Loads` has those of a thread:
//
//   load_keys, load_values   request those of a tile; `close` ends each
//   wait_keys, wait_values   until all but the last request are complete; values are there after a barrier
//   release_keys             before the next ones are requested
//   key, value               elements as pairs of f16
//
// A warp has 16 keys of a tile in all dimensions, and all values in its own dimensions: a thread has keys number
// g and g + 8, and OWN adjacent dimensions of the values 16 t + 2 c + {0, 1, 8, 9}.

#include "attention_units.cuh"

constexpr int PAGES = 16;  // keys of the smallest block of the table

// The blocks of the table with 32 times 16 keys, one in each lane.
struct Pages {
    int first, own;  // number of the first 16 keys; the lane's block

    __device__ __forceinline__ void load(const Attention& a, const VisibleKeys& keys, int tile) {
        first = tile * (TILE_KEYS / PAGES);
        int key = min(max((first + (int)threadIdx.x % WARP) * PAGES, keys.low), keys.high - 1);
        own = a.table[keys.sequence * a.table_width + (key >> (int)a.shift)];
    }
    __device__ __forceinline__ i64 slot(const Attention& a, int key) const {
        i64 page = __shfl_sync(FULL, own, key / PAGES - first);
        return (page << (int)a.shift) + (key & ((1 << (int)a.shift) - 1));
    }
};

// Whether all keys of a tile are visible and in one block of the table, so that they follow each other in the pool.
__device__ __forceinline__ bool is_whole(const Attention& a, const VisibleKeys& range, int tile) {
    return tile * TILE_KEYS >= range.low && (tile + 1) * TILE_KEYS <= range.high && a.block >= TILE_KEYS;
}

// The key to load for one that may be beyond either end of the visible ones: the last or first one, which is ignored.
__device__ __forceinline__ int within(const VisibleKeys& range, int key) {
    return min(max(key, range.low), range.high - 1);
}

#if POOL == 1
// In registers, as they are stored.
struct Loads {
    static constexpr bool EARLY_VALUES = false;  // the present ones have the registers of the next
    uint4 keys[2][VECTORS];
    u32 values[EACH][TILE_KEYS / 16][4][OWN / 2];
    const bool active;

    __device__ __forceinline__ Loads(const Attention& a, uint4* memory, bool active) : active(active) {}

    __device__ __forceinline__ void load_key(const Unit& u, int i, const u8* row) {
#pragma unroll
        for (int n = 0; n < VECTORS; n++)
            keys[i][n] = load_once16(row + 2 * (u.kv * DEPTH + 32 * n + 8 * (threadIdx.x % 4)));
    }
    __device__ __forceinline__ void load_value(const Unit& u, int t, int i, const u8* row) {
        const int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4;
        if (!active) return;
#pragma unroll
        for (int n = 0; n < EACH; n++) {
            const u8* from = row + 2 * (u.kv * DEPTH + (warp * EACH + n) * SPREAD + OWN * g);
            if (OWN == 4) {
                const uint2 two = load_once8(from);
                values[n][t][i][0] = two.x, values[n][t][i][OWN / 2 - 1] = two.y;
            } else {
                values[n][t][i][0] = *(const u32*)from;
            }
        }
    }
    __device__ __forceinline__ void load_keys(const Attention& a, const Unit& u, int tile, const Pages& pages) {
        const int warp = threadIdx.x / WARP, first = tile * TILE_KEYS + 16 * warp + threadIdx.x % WARP / 4;
        const VisibleKeys& range = u.query.keys;
        if (is_whole(a, range, tile)) {
            const u8* row = a.k + pages.slot(a, first) * a.k_stride;
#pragma unroll
            for (int i = 0; i < 2; i++) load_key(u, i, row + 8 * i * a.k_stride);
            return;
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
            load_key(u, i, a.k + pages.slot(a, within(range, first + 8 * i)) * a.k_stride);
    }
    __device__ __forceinline__ void load_values(const Attention& a, const Unit& u, int tile, const Pages& pages,
                                                int buffer) {
        const int first = tile * TILE_KEYS + threadIdx.x % 4 * 2;
        const VisibleKeys& range = u.query.keys;
        if (is_whole(a, range, tile)) {
            const u8* row = a.v + pages.slot(a, first) * a.v_stride;
#pragma unroll
            for (int t = 0; t < TILE_KEYS / 16; t++)
#pragma unroll
                for (int i = 0; i < 4; i++) load_value(u, t, i, row + (16 * t + i % 2 + i / 2 * 8) * a.v_stride);
            return;
        }
#pragma unroll
        for (int t = 0; t < TILE_KEYS / 16; t++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int key = within(range, first + 16 * t + i % 2 + i / 2 * 8);
                load_value(u, t, i, a.v + pages.slot(a, key) * a.v_stride);
            }
    }
    __device__ __forceinline__ void close() {}
    __device__ __forceinline__ void wait_keys() {}
    __device__ __forceinline__ void wait_values() {}
    __device__ __forceinline__ void release_keys() {}

    __device__ __forceinline__ void key(const Unit& u, int i, int n, u32* to) const {
        to[0] = keys[i][n].x, to[1] = keys[i][n].y, to[2] = keys[i][n].z, to[3] = keys[i][n].w;
    }
    __device__ __forceinline__ void value(const Unit& u, int n, int t, int i, int buffer, u32* to) const {
#pragma unroll
        for (int e = 0; e < OWN / 2; e++) to[e] = values[n][t][i][e];
    }
};
#else
// In shared memory, as they are stored: scales make rows of a few bytes more than a power of two, so that threads
// could load two or four bytes at a time. Heads are copied with what is before and after them in the same 16 bytes;
// if slots are not aligned to 16 bytes, in words of four.
constexpr int LOW_BIT = HEAD_BYTES & -HEAD_BYTES, MOST_BEFORE = LOW_BIT < 16 ? 16 - LOW_BIT : 0;
constexpr int PIECES = (MOST_BEFORE + HEAD_BYTES + 15) / 16;  // of 16 bytes
constexpr int PITCH = 16 * (PIECES | 1);                      // an odd number of them spreads rows over the banks
constexpr int STAGED_BYTES = 3 * TILE_KEYS * PITCH;           // a buffer of keys and two of values

struct Loads {
    static constexpr bool EARLY_VALUES = true;
    u8 *k, *v;
    const int align;

    __device__ __forceinline__ Loads(const Attention& a, uint4* memory, bool active)
        : k((u8*)memory), v((u8*)memory + TILE_KEYS * PITCH),
          align(((u64)a.k | (u64)a.v | a.k_stride | a.v_stride) % 16 ? 4 : 16) {}

    // Bytes that are copied before a head.
    __device__ __forceinline__ int before(int kv) const { return kv * HEAD_BYTES & (align - 1); }

    // Copy the heads of COUNT keys, from number `first` of a tile on, by BY threads of which `thread` is one.
    template <int COUNT, int BY>
    __device__ __forceinline__ void copy_heads(const Attention& a, u8* to, const u8* pool, i64 stride, const Unit& u,
                                               int tile, int first, const Pages& pages, int thread) const {
        const VisibleKeys range = u.query.keys;
        const int skipped = before(u.kv), end = skipped + HEAD_BYTES;
        pool += u.kv * HEAD_BYTES - skipped, first += tile * TILE_KEYS;
        constexpr int STEPS = (COUNT * PIECES + BY - 1) / BY;
        if (align == 16) {
            const bool whole = is_whole(a, range, tile);
            const u8* start = whole ? pool + pages.slot(a, first) * stride : pool;
#pragma unroll
            for (int n = 0; n < STEPS; n++) {
                const int i = thread + n * BY, row = i / PIECES, at = 16 * (i - row * PIECES);
                i64 slot = row;
                if (!whole) slot = pages.slot(a, within(range, first + min(row, COUNT - 1)));
                if (row < COUNT && at < end) copy16((u16*)(to + row * PITCH + at), start + slot * stride + at);
            }
            return;
        }
#pragma unroll 1
        for (int n = 0; n < STEPS; n++) {
            const int i = thread + n * BY, row = i / PIECES, at = 16 * (i - row * PIECES);
            const u8* from = pool + pages.slot(a, within(range, first + min(row, COUNT - 1))) * stride;
            if (row >= COUNT) continue;
#pragma unroll 1
            for (int j = at; j < min(at + 16, end); j += 4)
                copy4((float*)(to + row * PITCH + j), (const float*)(from + j));
        }
    }
    __device__ __forceinline__ void load_keys(const Attention& a, const Unit& u, int tile, const Pages& pages) {
        const int first = threadIdx.x / WARP * 16;
        copy_heads<16, WARP>(a, k + first * PITCH, a.k, a.k_stride, u, tile, first, pages, threadIdx.x % WARP);
    }
    __device__ __forceinline__ void load_values(const Attention& a, const Unit& u, int tile, const Pages& pages,
                                                int buffer) {
        copy_heads<TILE_KEYS, THREADS>(a, v + buffer * TILE_KEYS * PITCH, a.v, a.v_stride, u, tile, 0, pages,
                                       threadIdx.x);
    }
    __device__ __forceinline__ void close() { close_copies(); }
    __device__ __forceinline__ void wait_keys() {
        wait_copies<1>();
        __syncwarp();
    }
    __device__ __forceinline__ void wait_values() { wait_copies<1>(); }
    __device__ __forceinline__ void release_keys() { __syncwarp(); }

    __device__ __forceinline__ void key(const Unit& u, int i, int n, u32* to) const {
        const int row = threadIdx.x / WARP * 16 + threadIdx.x % WARP / 4 + 8 * i;
        StoredHead(k + row * PITCH, before(u.kv)).elements<8>(32 * n + 8 * (threadIdx.x % 4), to);
    }
    __device__ __forceinline__ void value(const Unit& u, int n, int t, int i, int buffer, u32* to) const {
        const int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4;
        const int row = buffer * TILE_KEYS + 16 * t + threadIdx.x % 4 * 2 + i % 2 + i / 2 * 8;
        StoredHead(v + row * PITCH, before(u.kv)).elements<OWN>((warp * EACH + n) * SPREAD + OWN * g, to);
    }
};
#endif
