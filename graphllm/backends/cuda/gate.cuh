#pragma once
// Gated products on their way out.

#include "quantise.cuh"

// What becomes of a gated product: `act`, and where it goes. The warp that is the last to finish some
// of `unit` results quantises all of them, if there are targets. Counts begin and end as zeros.
struct Gate {
    i64 act, unit;
    u32* counts;
    Targets targets;
};

template <int N>
__device__ __forceinline__ void quantise_unit(const Gate& gate, const float* y, int first, int width) {
    float v[N];
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = __ldcg(y + first + 32 * i + threadIdx.x % WARP);
    emit<N>(v, gate.targets, 0, first, width);
}

// COUNT results from `row` on have been written by this warp.
template <int COUNT>
__device__ __forceinline__ void finish_gated(const Gate& gate, const float* y, int row, int width) {
    if (!gate.targets.count) return;
    int unit = (int)gate.unit, group = row / unit, last = 0;
    __threadfence();
    if (threadIdx.x % WARP == 0) {
        last = atomicAdd(gate.counts + group, COUNT) + COUNT == unit;
        if (last) gate.counts[group] = 0;
    }
    if (!__shfl_sync(FULL, last, 0)) return;
    __threadfence();
    if (unit == 32)
        quantise_unit<1>(gate, y, group * unit, width);
    else
        quantise_unit<8>(gate, y, group * unit, width);
}
