#pragma once
// Slots of the KV cache by the block tables of sequences.

// The slots [T] and tables [S, width] of a cache group.
struct TableGroup {
    int *slot, *table;
    i64 width;
};

// The slot of position `at` of sequence s; -1 if its table has no such block.
__device__ __forceinline__ int slot_at(const TableGroup& group, i64 s, int at, int block) {
    const int column = at / block, first = column < group.width ? group.table[s * group.width + column] : -1;
    return first >= 0 ? first * block + at % block : -1;
}
