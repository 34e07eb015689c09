#pragma once
// How the blocks of attention_decode.cu share the work of a step. THREADS and WARPS are those of a block.

#include "attention.cuh"

// A part of the work: the tiles from `tile` to `end` of a query and a KV head.
struct Unit {
    bool there;
    int row, slot, kv, head, heads, tile, end;  // row and slot of the result; first query head, their number
    Query query;
};

// Partial results before a row: those that are not the last one of their row, the last ones, and tiles of these.
struct Count {
    int others, last, tiles;
    __device__ __forceinline__ void add(const Count& more) {
        others += more.others, last += more.last, tiles += more.tiles;
    }
};

// Partial result `slot` of a query and of a group of its heads, of which `partials` are all.
__device__ __forceinline__ void fill_unit(const Attention& a, const Query& query, const Partials& partials, int slot,
                                          int group, Unit& unit) {
    unit.row = query.token, unit.slot = slot, unit.query = query;
    unit.kv = a.groups == 1 ? group : group / a.groups;
    unit.head = unit.kv * a.shared + (group - unit.kv * a.groups) * GROUP;
    unit.heads = min(GROUP, (unit.kv + 1) * a.shared - unit.head);
    const int tile = partials.first + slot << partials.shift;
    unit.tile = max(tile, query.keys.low / TILE_KEYS);
    unit.end = min(tile + partials.each, (query.keys.high - 1) / TILE_KEYS + 1);
}

// The units of a step of one sequence. Block (x, y, z) has partial results x, x + gridDim.x, ... of group y of the query heads
// of token z, so that they take few instructions and one load to find: what precedes the first loads of keys is a chain
// that nothing hides.
struct SequenceUnits {
    Query query;
    Partials partials;

    __device__ __forceinline__ SequenceUnits(const Attention& a, int length, int tokens)
        : query{(int)blockIdx.z, visible_keys(a, 0, length, 0, tokens, blockIdx.z)},
          partials(a, query.keys, tokens * gridDim.y) {
        if (query.token >= tokens) partials.count = 0;
    }

    // Unit `number` of this block.
    __device__ __forceinline__ void get(const Attention& a, int number, Unit& unit) const {
        const int slot = blockIdx.x + number * gridDim.x;
        unit.there = slot < partials.count;
        fill_unit(a, query, partials, slot, blockIdx.y, unit);
    }
};

// The units of any step: partial results of rows, each for all groups of heads. The last ones of rows may be
// shorter than the others. The full units are dealt to the blocks round-robin, and then the short ones,
// so that blocks with fewer full units get more short ones.
struct Units {
    const Count* starts;  // of each row, and the end
    int rows, groups, tokens;

    // Number of the partial results of a query, of which all but one are not the last one.
    __device__ __forceinline__ Count count(const Attention& a, const VisibleKeys& keys) const {
        const Partials all(a, keys, rows * groups);
        if (!all.count) return {0, 0, 0};
        const int end = (keys.high - 1) / TILE_KEYS + 1, last = (all.first + all.count - 1) * all.each;
        return {all.count - 1, 1, end - max(last, keys.low / TILE_KEYS)};
    }

    __device__ __forceinline__ void fill(const Attention& a, int row, int slot, int group, const Query& query,
                                         Unit& unit) const {
        fill_unit(a, query, Partials(a, query.keys, rows * groups), slot, group, unit);
        unit.row = row;
    }

    // Unit `number` of this block.
    __device__ __forceinline__ void get(const Attention& a, int number, Unit& unit) const {
        const Count end = starts[rows];
        const int others = end.others * groups, blocks = gridDim.x, block = blockIdx.x;
        const int whole = others / blocks, more = others % blocks;  // blocks before `more` have one more
        const int after = number - whole - (block < more);
        const bool last = after >= 0;
        int index = block + number * blocks;
        if (last) {
            // Rounds in which the blocks with fewer of the others catch up. The average one has 4 tiles.
            const int rounds = more ? max(1, (4 * end.last + end.tiles / 2) / max(end.tiles, 1)) : 0;
            const int fewer = blocks - more, rest = (block + fewer) % blocks;  // the first of these come first
            const int own = block < more ? 0 : min(after, rounds);
            index = after < rounds && block >= more ? after * fewer + rest : rounds * fewer + (after - own) * blocks + rest;
        }
        const int item = index / groups, group = index % groups;
        unit.there = !last || item < end.last;
        if (!unit.there) return;
        int low = 0, high = rows;
#pragma unroll 1
        while (low + 1 < high) {
            int middle = (low + high) / 2;
            if ((last ? starts[middle].last : starts[middle].others) <= item) low = middle;
            else high = middle;
        }
        Query query = {};
        find_query(a, tokens, low, query);
        fill(a, low, last ? starts[low + 1].others - starts[low].others : item - starts[low].others, group, query, unit);
    }
};

// Count the partial results of all rows.
__device__ __forceinline__ void count_units(const Attention& a, const Units& units, Count* starts, Count* scan) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    Count before = {0, 0, 0};
#pragma unroll 1
    for (int first = 0; first == 0 || first < units.rows; first += THREADS) {
        const int row = first + threadIdx.x;
        Query query = {};
        Count own = {0, 0, 0};
        if (find_query(a, units.tokens, row, query)) own = units.count(a, query.keys);
        Count through = own;
#pragma unroll
        for (int o = 1; o < WARP; o <<= 1) {
            const Count other = {__shfl_up_sync(FULL, through.others, o), __shfl_up_sync(FULL, through.last, o),
                                 __shfl_up_sync(FULL, through.tiles, o)};
            if (lane >= o) through.add(other);
        }
        __syncthreads();
        if (lane == WARP - 1) scan[warp] = through;
        __syncthreads();
        Count all = {0, 0, 0};
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            if (w < warp) through.add(scan[w]);
            all.add(scan[w]);
        }
        if (row < units.rows)
            starts[row] = {before.others + through.others - own.others, before.last + through.last - own.last, 0};
        before.add(all);
    }
    if (threadIdx.x == 0) starts[units.rows] = before;
    __syncthreads();
}
