// advance: the end of a step. A thread updates one sequence.

#include "block_tables.cuh"

struct State {
    const int* sampled;
    int *ids, *pos, *kv_len, *count, *history;
    int ring, block, groups;
};

extern "C" __global__ void advance(State state, const TableGroup* groups, const i64* live TIMESTAMPS) {
    RECORD_TIMESTAMPS
    const i64 rows = begin(live);
    i64 s = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (s >= rows) return;
    int token = state.sampled[s], at = state.kv_len[s];
    state.ids[s] = token;
    state.pos[s] = at;
    state.history[s * state.ring + at % state.ring] = token;
    for (int g = 0; g < state.groups; g++) groups[g].slot[s] = slot_at(groups[g], s, at, state.block);
    state.kv_len[s] = at + 1;
    state.count[s] += 1;
}
