#pragma once
// Rows in the registers of a block, stored in the formats of a step's results.

#include "norm.cuh"
#include "quantize_rows.cuh"

// Store the block's row to a target with one scale.
template <int U>
__device__ __forceinline__ void emit_scaled(const RowRegisters<U>& row, const Target& t, int width) {
    u8* to = t.at + blockIdx.x * t.stride;
    u32 most = 0;
#pragma unroll
    for (int u = 0; u < U; u++) most = larger(most, largest8(row.v + 8 * u));
    const BlockScale scale = row_scale(t.block, most);
    int sum = 0;
#pragma unroll
    for (int u = 0; u < U; u++) {
        const int at = row.column(u);
        if (at < width) sum += store_elements(t.block, row.v + 8 * u, scale, to + at);
    }
    store_tail(t.block, scale, sum, to, width);
}

// Without `store`, for warm-up passes, nothing is stored, nor computed for targets with one scale.
template <int U>
__device__ __forceinline__ void emit_row(const RowRegisters<U>& row, const Targets& targets, int width,
                                         bool store = true) {
#pragma unroll 1
    for (int i = 0; i < targets.count; i++) {
        const Target t = i ? targets.t[1] : targets.t[0];
        if (has_row_scale(t.block)) {
            if (store) emit_scaled(row, t, width);
            continue;
        }
#pragma unroll
        for (int u = 0; u < U; u++) {
            const int first = RowRegisters<U>::unit(u);
            if (first < width) emit_to<8>(row.v + 8 * u, t, blockIdx.x, 0, first, width, store);
        }
    }
}
