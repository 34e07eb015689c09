// advance: the end of a step. A thread updates one sequence.

struct TableGroup {
    int *slot, *table;
    i64 width;
};

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
    for (int g = 0; g < state.groups; g++) {
        TableGroup own = groups[g];
        int column = at / state.block;
        int first = column < own.width ? own.table[s * own.width + column] : -1;
        own.slot[s] = first >= 0 ? first * state.block + at % state.block : -1;
    }
    state.kv_len[s] = at + 1;
    state.count[s] += 1;
}
