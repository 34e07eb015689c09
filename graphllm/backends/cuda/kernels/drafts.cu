// Draft tokens of one sequence: accepted and predicted at the end of a step, placed at the beginning.

#include "block_tables.cuh"

struct Drafts {
    int *drafts, *tokens, *progress;  // progress: numbers of tokens, and of those of the prompt
    int count, capacity, shortest, longest;
};

// Tokens that agree before two places, `at` < `end`, at most `longest`.
__device__ __forceinline__ int match(const int* tokens, int at, int end, int longest) {
    const int most = min(at, longest);
    int same = 0;
    while (same < most && tokens[at - 1 - same] == tokens[end - 1 - same]) same++;
    return same;
}

// The place behind the earlier occurrence of the last tokens with the longest match, of equals the latest;
// 0: there is none. The block computes it.
__device__ __forceinline__ int look_up(const Drafts& d, int end) {
    __shared__ u64 best;  // length of the match, and place
    if (threadIdx.x == 0) best = 0;
    __syncthreads();
    u64 own = 0;
    const int last = end > 1 ? d.tokens[end - 1] : 0, before = end > 1 ? d.tokens[end - 2] : 0;
#pragma unroll 4
    for (int at = 2 + threadIdx.x; at < end; at += blockDim.x) {
        if (d.tokens[at - 1] != last || d.tokens[at - 2] != before) continue;
        const int same = match(d.tokens, at, end, d.longest);
        if (same >= d.shortest) own = max(own, (u64)same << 32 | at);
    }
    if (own) atomicMax(&best, own);
    __syncthreads();
    return (int)best;
}

// One block.
extern "C" __global__ void accept_drafts(const int* sampled, Drafts d, const i64* live TIMESTAMPS) {
    RECORD_TIMESTAMPS
    __shared__ int accepted;  // and the token after them
    const int rows = (int)min(begin(live), (i64)d.count + 1), length = d.progress[0];
    if (threadIdx.x == 0) accepted = rows;
    __syncthreads();
    for (int r = threadIdx.x; r < rows - 1; r += blockDim.x)
        if (d.drafts[r] < 0 || d.drafts[r] != sampled[r]) atomicMin(&accepted, r + 1);
    __syncthreads();
    const int end = min(length + accepted, d.capacity);
    for (int r = threadIdx.x; length + r < end; r += blockDim.x) d.tokens[length + r] = sampled[r];
    __syncthreads();
    const int source = look_up(d, end);
    for (int i = threadIdx.x; i < d.count; i += blockDim.x)
        d.drafts[i] = source ? d.tokens[source + i % (end - source)] : -1;
    if (threadIdx.x == 0) d.progress[0] = end;
}

struct Rows {
    int *ids, *pos, *kv_len, *count;
    int block, groups;
};

// A thread places one row.
extern "C" __global__ void place_drafts(Drafts d, Rows to, const TableGroup* groups,
                                        const i64* live TIMESTAMPS) {
    RECORD_TIMESTAMPS
    const i64 rows = begin(live), r = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= rows) return;
    const int length = d.progress[0], at = length - 1 + (int)r;
    const int draft = r > 0 && r <= d.count ? d.drafts[r - 1] : -1;
    to.ids[r] = draft >= 0 ? draft : d.tokens[length - 1];
    to.pos[r] = at;
    to.kv_len[r] = at + 1;
    to.count[r] = at + 1 - d.progress[1];
    for (int g = 0; g < to.groups; g++) groups[g].slot[r] = slot_at(groups[g], r, at, to.block);
}
