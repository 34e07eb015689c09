#pragma once
// How attention_decode.cu loads the keys and values of a tile. `Loads` has those of a thread, in registers, as they
// are stored. A warp has 16 keys of a tile in all dimensions, and all values in its own dimensions: a thread has
// keys number g and g + 8, and OWN adjacent dimensions of the values 16 t + 2 c + {0, 1, 8, 9}.

#include "attention_units.cuh"

constexpr int PAGES = 16;  // keys of the smallest block of the table

// The blocks of the table with 32 times 16 keys, one in each lane.
struct Pages {
    int first, own;  // number of the first 16 keys; the lane's block

    // Those of a tile and of later ones. Beyond the last key, any block will do.
    __device__ __forceinline__ void load(const Attention& a, const VisibleKeys& keys, int tile) {
        first = tile * (TILE_KEYS / PAGES);
        int key = min(max((first + (int)threadIdx.x % WARP) * PAGES, keys.low), keys.high - 1);
        own = a.table[keys.sequence * a.table_width + (key >> (int)a.shift)];
    }
    // The same of the only sequence, without waiting for its length.
    __device__ __forceinline__ void load_ahead(const Attention& a, int tile) {
        first = tile * (TILE_KEYS / PAGES);
        const int key = (first + (int)threadIdx.x % WARP) * PAGES;
        own = a.table[min(key >> (int)a.shift, (int)a.table_width - 1)];
    }
    __device__ __forceinline__ i64 slot(const Attention& a, int key) const {
        i64 page = __shfl_sync(FULL, own, key / PAGES - first);
        return (page << (int)a.shift) + (key & ((1 << (int)a.shift) - 1));
    }
};

// The keys of a tile, by their number in it. What is loaded in place of one that is not visible is ignored, but must be finite
// where visible ones are: a visible key, and if there is one not a new key, which would have to be replaced.
struct TileKeys {
    int low, high, other;  // visible ones, and the one that is loaded in place of those behind them

    __device__ __forceinline__ TileKeys(const VisibleKeys& range, int tile) {
        const int start = tile * TILE_KEYS;
        low = max(range.low - start, 0), high = range.high - start;
        other = max(low, (ROTATED ? min(range.high, range.old) : range.high) - 1 - start);
    }
    // The key to load for number j.
    __device__ __forceinline__ int loaded(int j) const {
        j = max(j, low);
        return j < high ? j : other;
    }
};

// Addresses of the slots of a tile's keys: of one in a single block of the table, where they follow each other, and of any,
// for which all threads of a warp ask together.
struct AdjacentSlots {
    const TileKeys keys;
    const u8* first;
    i64 stride;
    __device__ __forceinline__ const u8* at(int j) const { return first + keys.loaded(j) * stride; }
};

struct TableSlots {
    const TileKeys keys;
    const Attention& a;
    const Pages& pages;
    int tile;
    const u8* pool;
    i64 stride;
    __device__ __forceinline__ const u8* at(int j) const {
        return pool + pages.slot(a, tile * TILE_KEYS + keys.loaded(j)) * stride;
    }
};

// A key of a thread: 8 elements of every 32.
struct Key {
#if POOL == 1
    uint4 vectors[VECTORS];

    __device__ __forceinline__ void load(const u8* slot, i64 scales_at, int kv, bool aligned) {
#pragma unroll
        for (int n = 0; n < VECTORS; n++)
            vectors[n] = load_once16(slot + 2 * (kv * DEPTH + 32 * n + 8 * (threadIdx.x % 4)));
    }
    // Elements of vector n as pairs of f16.
    __device__ __forceinline__ void pairs(int n, u32* to) const {
        to[0] = vectors[n].x, to[1] = vectors[n].y, to[2] = vectors[n].z, to[3] = vectors[n].w;
    }
#else
    uint2 vectors[VECTORS];
    u32 scales[(SCALES + 1) / 2];  // two f16, or a float32

    // `aligned`: the slot, to eight bytes.
    __device__ __forceinline__ void load(const u8* slot, i64 scales_at, int kv, bool aligned) {
#pragma unroll
        for (int n = 0; n < VECTORS; n++) {
            const u8* from = slot + kv * HEAD_BYTES + byte_of(32 * n + 8 * (threadIdx.x % 4));
            vectors[n] = aligned ? load_once8(from) : make_uint2(load_once4(from), load_once4(from + 4));
        }
        const u8* from = slot + scales_at + kv * SCALE_BYTES;
#pragma unroll
        for (int n = 0; n < (SCALES + 1) / 2; n++) {
            if (SCALE_BYTES % 4 == 0) scales[n] = load_once4(from + 4 * n);
            else scales[n] = load_once2(from + 4 * n) | (2 * n + 1 < SCALES ? load_once2(from + 4 * n + 2) << 16 : 0);
        }
    }
    __device__ __forceinline__ void pairs(int n, u32* to) const {
        const u32 scale = POOL == 4 ? scale_half(scales[0]) * 0x10001u
                                    : __byte_perm(scales[n / 2], 0, n % 2 ? 0x3232 : 0x1010);
        eight_halves(vectors[n], 32 * n + 8 * (threadIdx.x % 4), scale, to);
    }
#endif
};

struct Loads {
    Key keys[2];
    u32 values[EACH][TILE_KEYS / 16][4][POOL == 1 ? OWN / 2 : 1];
    const bool active, aligned;
#if POOL != 1
    // Scales of the values of a tile, which the threads of a block load for each other, UNIT bytes at a time.
    static constexpr int UNIT = SCALE_BYTES % 4 ? 2 : 4, UNITS = SCALE_BYTES / UNIT;
    static constexpr int SHARE = (TILE_KEYS * UNITS + THREADS - 1) / THREADS;  // of a thread
    u32 scales[SHARE];
#endif

#if ROTATED
#if ROTATED == 1
    int slot;  // of the new key
#else
    const int* slots;  // of new keys, by token
#endif
    u64 new_keys;      // a bit for each number in the tile for which a new key is loaded: not with its bits

    // Finds the new keys of a tile.
    __device__ __forceinline__ void find_new_keys(const Attention& a, const VisibleKeys& range, const TileKeys& keys,
                                                  int tile, const Pages& pages) {
        new_keys = 0;
        if (min(range.high, (tile + 1) * TILE_KEYS) <= range.old) return;
#if ROTATED == 1
        const int n = range.old - tile * TILE_KEYS;
        if (n < 0 || pages.slot(a, range.old) != slot) return;
        new_keys = 1ull << n | (keys.other == n && keys.high < TILE_KEYS ? ~0ull << keys.high : 0);
#else
        u32 found[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int key = tile * TILE_KEYS + keys.loaded(i * WARP + threadIdx.x % WARP);
            const i64 slot = pages.slot(a, key);
            found[i] = __ballot_sync(FULL, key >= range.old && slots[max(0, key - range.old)] == slot);
        }
        new_keys = found[0] | (u64)found[1] << 32;
#endif
    }

    // Whether one of the 16 keys from number 16 t on is new.
    __device__ __forceinline__ bool any_new(int t) const { return (u32)(new_keys >> 16 * t) & 0xffff; }

    // Replace new keys and their values, which are in shared memory by token.
    __device__ __forceinline__ void replace_new_keys(const VisibleKeys& range, int tile, const u16 (*rows)[ROTATED][DEPTH]) {
        const int warp = threadIdx.x / WARP, first = warp * 16 + threadIdx.x % WARP / 4;
        const TileKeys tile_keys(range, tile);
        auto row_of = [&](int value, int j) { return rows[value][tile * TILE_KEYS + tile_keys.loaded(j) - range.old]; };
        if (any_new(warp))
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (new_keys >> (first + 8 * i) & 1) {
                    const u16* row = row_of(0, first + 8 * i);
#pragma unroll
                    for (int n = 0; n < VECTORS; n++)
                        keys[i].vectors[n] = *(const uint4*)&row[32 * n + 8 * (threadIdx.x % 4)];
                }
#pragma unroll
        for (int t = 0; t < TILE_KEYS / 16; t++)
            if (active && any_new(t))
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (new_keys >> value_key(t, i) & 1) {
                        const u16* row = row_of(1, value_key(t, i));
#pragma unroll
                        for (int n = 0; n < EACH; n++)
#pragma unroll
                            for (int e = 0; e < OWN / 2; e++) values[n][t][i][e] = *(const u32*)&row[dimension(n) + 2 * e];
                    }
    }
#endif

    __device__ __forceinline__ Loads(const Attention& a, bool active)
        : active(active), aligned(((u64)a.k | a.k_stride) % 8 == 0) {}

    // The key whose value is values[n][t][i].
    static __device__ __forceinline__ int value_key(int t, int i) {
        return 16 * t + (int)threadIdx.x % 4 * 2 + i % 2 + i / 2 * 8;
    }
    // First of the OWN dimensions of product n.
    static __device__ __forceinline__ int dimension(int n) {
        return (threadIdx.x / WARP * EACH + n) * SPREAD + OWN * (int)(threadIdx.x % WARP / 4);
    }

    template <class S> __device__ __forceinline__ void load_keys(const Attention& a, const Unit& u, const S& slots) {
        const int first = threadIdx.x / WARP * 16 + threadIdx.x % WARP / 4;
#pragma unroll
        for (int i = 0; i < 2; i++) keys[i].load(slots.at(first + 8 * i), a.k_scales, u.kv, aligned);
    }
    __device__ __forceinline__ void load_value(const Unit& u, int t, int i, const u8* slot) {
        if (!active) return;
#pragma unroll
        for (int n = 0; n < EACH; n++) {
            u32* to = values[n][t][i];
#if POOL == 1
            const u8* from = slot + 2 * (u.kv * DEPTH + dimension(n));
            if (OWN == 4) {
                const uint2 two = load_once8(from);
                to[0] = two.x, to[OWN / 2 - 1] = two.y;
            } else {
                to[0] = load_once4(from);
            }
#else
            const u8* from = slot + u.kv * HEAD_BYTES + byte_of(dimension(n));
            to[0] = OWN == 4 ? load_once4(from) : load_once2(from);
#endif
        }
    }
    template <class S> __device__ __forceinline__ void load_values(const Attention& a, const Unit& u, const S& slots) {
#pragma unroll
        for (int t = 0; t < TILE_KEYS / 16; t++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                load_value(u, t, i, slots.at(value_key(t, i)));
#if POOL != 1
#pragma unroll
        for (int n = 0; n < SHARE; n++) {
            const int i = threadIdx.x + n * THREADS;
            const u8* from = slots.at(min(i / UNITS, TILE_KEYS - 1)) + a.v_scales;
            from += u.kv * SCALE_BYTES + i % UNITS * UNIT;
            if (i < TILE_KEYS * UNITS) scales[n] = UNIT == 4 ? load_once4(from) : load_once2(from);
        }
#endif
    }
    // The same for a tile of a query.
    __device__ __forceinline__ void load_keys(const Attention& a, const Unit& u, int tile, const Pages& pages) {
        const TileKeys keys(u.query.keys, tile);
#if ROTATED > 1
        find_new_keys(a, u.query.keys, keys, tile, pages);
#endif
        if (a.block >= TILE_KEYS)
            load_keys(a, u, AdjacentSlots{keys, a.k + pages.slot(a, tile * TILE_KEYS) * a.k_stride, a.k_stride});
        else
            load_keys(a, u, TableSlots{keys, a, pages, tile, a.k, a.k_stride});
    }
    __device__ __forceinline__ void load_values(const Attention& a, const Unit& u, int tile, const Pages& pages) {
        const TileKeys keys(u.query.keys, tile);
        if (a.block >= TILE_KEYS)
            load_values(a, u, AdjacentSlots{keys, a.v + pages.slot(a, tile * TILE_KEYS) * a.v_stride, a.v_stride});
        else
            load_values(a, u, TableSlots{keys, a, pages, tile, a.v, a.v_stride});
#if ROTATED == 1  // after all loads, for which it would take registers
        find_new_keys(a, u.query.keys, keys, tile, pages);
#endif
    }

#if POOL != 1
    // Store the scales of values in shared memory, by number and key.
    __device__ __forceinline__ void share_scales(u16 (*to)[TILE_KEYS]) const {
#pragma unroll
        for (int n = 0; n < SHARE; n++) {
            const int i = threadIdx.x + n * THREADS, key = i / UNITS, unit = i % UNITS;
            if (i >= TILE_KEYS * UNITS) break;
            constexpr bool TWO = UNIT == 4 && POOL != 4;
            to[TWO ? 2 * unit : unit][key] = scale_half(scales[n]);
            if (TWO) to[2 * unit + 1][key] = (u16)(scales[n] >> 16);
        }
    }
#endif

    // Values 16 t + 2 c and the next one (j = 0), and the two 8 after them (1), as pairs, in the dimensions of product
    // n. `shared`: their scales, by number and key.
    __device__ __forceinline__ void value_pairs(int n, int t, const u16 (*shared)[TILE_KEYS], u32 (&to)[2][OWN]) const {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const u32 *one = values[n][t][2 * j], *two = values[n][t][2 * j + 1];
#if POOL == 1
#pragma unroll
            for (int e = 0; e < OWN; e++) to[j][e] = __byte_perm(one[e / 2], two[e / 2], e % 2 ? 0x7632 : 0x5410);
#else
            const int first = dimension(n), number = POOL == 4 ? 0 : first / 32;
            const u32 scale = *(const u32*)&shared[number][16 * t + 8 * j + (int)threadIdx.x % 4 * 2];
#pragma unroll
            for (int e = 0; e < OWN; e += 2) {
                const u32 four = unsigned_bytes(__byte_perm(one[0], two[0], e ? 0x7362 : 0x5140), shift_of(first));
                to[j][e] = two_halves<0, 1>(four, scale), to[j][e + 1] = two_halves<2, 3>(four, scale);
            }
#endif
        }
    }
};
