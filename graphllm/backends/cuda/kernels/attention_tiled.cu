// Attention of many tokens on tensor cores: 64 queries of a head against tiles of keys (FlashAttention-2, Dao
// 2023). Scores stay in registers.
//
// POOL: as in attention_pools.cuh. DEPTH: elements of queries, keys and values, a multiple of 32. BIASED: logits
// are capped, or have ALiBi slopes or biases by distance.
//
// A query's bits are those of attention_decode.cu: results of a tile are added to those of its split, and at
// the end of a split these to the query's. Elements of keys and queries are permuted as there: number
// 32 n + 8 c + 4 h + i of a row is number 16 (2 n + h) + 2 c + i % 2 + 8 (i / 2) of the product.

#include "attention.cuh"
#include "attention_pools.cuh"
#include "quantize.cuh"
#include "tensor_cores.cuh"

#define QUERIES 64
#define KEYS TILE_KEYS
// A warp has 16 queries. If heads are wide, two warps do, which compute the same scores, and half of the
// results each.
constexpr int SHARES = DEPTH > 128 ? 2 : 1, THREADS = 128 * SHARES;
constexpr int VECTORS = DEPTH / 8, STEPS = DEPTH / 32;
constexpr int OWN = VECTORS / SHARES;  // vectors of a thread's results
constexpr int STRIDE = DEPTH + 8;  // halves between rows of values: eight rows cover all banks
// Of queries and keys, which are read 16 bytes at a time by four threads for a row: two rows cover all banks.
constexpr int WIDE_STRIDE = DEPTH + (DEPTH % 64 ? 0 : 32);
constexpr bool SHARED_QUERIES = DEPTH > 128;  // too many for registers
constexpr int COPIES = POOL == 1 ? 4 : 2;  // vectors of a tile that a thread loads together
constexpr u32 ONES = 0x3c003c00u;

struct __align__(16) Tile {
    u16 k[KEYS][WIDE_STRIDE], v[KEYS][STRIDE];
    u16 q[SHARED_QUERIES ? QUERIES : 1][WIDE_STRIDE];
    float2 splits[OWN * 2][THREADS];  // sums of the splits before
};

// Copy eight elements of a head of a slot to shared memory, from number `at` on.
__device__ __forceinline__ void load_elements(u16* to, const u8* slot, i64 scales_at, int kv, int at) {
#if POOL == 1
    copy16(to, slot + kv * HEAD_BYTES + 2 * at);
#else
    const u8* from = slot + kv * HEAD_BYTES + byte_of(at);
    const u8* scales = slot + scales_at + kv * SCALE_BYTES;
    const u32 scale = scale_half(POOL == 4 ? *(const u32*)scales : ((const u16*)scales)[at / 32]) * 0x10001u;
    u32 words[4];
    eight_halves(make_uint2(load_once4(from), load_once4(from + 4)), at, scale, words);
    *(uint4*)to = make_uint4(words[0], words[1], words[2], words[3]);
#endif
}

// The keys of a query and of its splits, and the sums of the splits before the present one. Warps that
// share a query have copies of their own.
struct Row {
    int low, high, position, split;
    float top[SHARES], total[SHARES];
    int begun[SHARES];  // there are such splits
};

// Find tile `tile` of the queries: its sequence and first query. False if there is no such tile. All threads
// take part.
__device__ __forceinline__ bool find(const Attention& a, int tile, int& sequence, int& first) {
    __shared__ int scan[THREADS / WARP], found[2];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, count = (int)*a.sequences;
    if (threadIdx.x == 0) found[0] = -1;
    int before = 0;
#pragma unroll 1
    for (int base = 0; base < count && before <= tile; base += THREADS) {
        const int s = base + threadIdx.x, start = s < count ? a.q_start[s] : 0;
        const int queries = s < count ? a.q_start[s + 1] - start : 0;
        const int own = queries == 1 && a.queries == SEVERAL ? 0 : (queries + QUERIES - 1) / QUERIES;
        int through = own;
#pragma unroll
        for (int o = 1; o < WARP; o <<= 1) {
            int other = __shfl_up_sync(FULL, through, o);
            if (lane >= o) through += other;
        }
        __syncthreads();
        if (lane == WARP - 1) scan[warp] = through;
        __syncthreads();
        int all = 0;
#pragma unroll
        for (int w = 0; w < THREADS / WARP; w++) {
            if (w < warp) through += scan[w];
            all += scan[w];
        }
        const int rest = before + through - 1 - tile;  // tiles with the most keys first
        if (0 <= rest && rest < own) found[0] = s, found[1] = start + rest * QUERIES;
        before += all;
    }
    __syncthreads();
    sequence = found[0], first = found[1];
    return sequence >= 0;
}

// Grid: (tiles of queries, heads). kind: of the results, as in quantize.cuh.
extern "C" __global__ void __launch_bounds__(THREADS, 2 / SHARES) attend(Attention a, int kind TIMESTAMPS) {
    RECORD_TIMESTAMPS
    DYNAMIC_SHARED(Tile, memory);
    Tile& s = *memory;
    begin();
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP % 4;
    const int part = thread / 128, column = part * OWN * 8;  // share of the results
    const int head = blockIdx.y, kv = head / ((int)a.heads / (int)a.kv_heads);
    int sequence, first;
    if (!find(a, blockIdx.x, sequence, first)) return;
    const int queries = min(QUERIES, a.q_start[sequence + 1] - first);

    // Fragments of queries of 8 elements of a row.
    auto load_query = [&](u32* to, int row, int at) {
        const float* q = (const float*)(a.q + (first + min(row, queries - 1)) * a.q_stride) + head * DEPTH + at;
#pragma unroll
        for (int e = 0; e < 4; e++) to[e] = pair(q[2 * e] * a.scale, q[2 * e + 1] * a.scale);
    };
    __shared__ Row rows[QUERIES];
    if (thread < QUERIES) {
        const VisibleKeys own = visible_keys(a, sequence, first + min(thread, queries - 1));
        rows[thread] = {own.low, own.high, own.position, split_of(own.high, (int)a.split_keys)};
        for (int i = 0; i < SHARES; i++) rows[thread].top[i] = -INFINITE, rows[thread].total[i] = 0, rows[thread].begun[i] = 0;
    }
    __syncthreads();
    int low = 0x7fffffff, high = 0, clear_low = 0, clear_high = 0x7fffffff;
    {
        VisibleKeys start = visible_keys(a, sequence, first), end = visible_keys(a, sequence, first + queries - 1);
        // Both ends of the visible range never decrease from one query to the next, except for a prefix.
        low = start.low, high = max(start.high, end.high);
        clear_low = end.low, clear_high = min(start.high, end.high);
        if (a.causal && a.prefix_len) clear_high = min(clear_high, start.position + 1);
    }
    const HeadBias bias = BIASED ? HeadBias(a, head) : HeadBias();
    float acc[OWN][4] = {}, tops[2] = {-INFINITE, -INFINITE}, totals[2] = {};  // of the present split
    u32 mine_q[2][SHARED_QUERIES ? 1 : STEPS][4];
    // A thread has results of two queries: number lane / 4 of its warp's 16, and the eighth after it.
    const int mine_row = warp * 16 + lane / 4, mine_at = lane % 4 * 8;

    const bool whole = (1 << a.shift) % KEYS == 0;  // then a tile is within one block of the table
    const int least = low;
    low -= low % KEYS;
    auto load_tile = [&](u16* to, int width, const u8* pool, i64 stride, i64 scales, int at) {
        auto load = [&](int i, const u8* slot) {
            load_elements(to + i / VECTORS * width + i % VECTORS * 8, slot, scales, kv, i % VECTORS * 8);
        };
        if (whole && at >= least && at + KEYS <= high) {
            const u8* block = pool + slot_of(a, sequence, at) * stride;
#pragma unroll COPIES
            for (int n = 0; n < KEYS * VECTORS / THREADS; n++) {
                const int i = thread + n * THREADS;
                load(i, block + i / VECTORS * stride);
            }
        } else {
#pragma unroll 1
            for (int i = thread; i < KEYS * VECTORS; i += THREADS) {
                const int j = min(max(at + i / VECTORS, least), high - 1);
                load(i, pool + slot_of(a, sequence, j) * stride);
            }
        }
        close_copies();
    };
    auto load_keys = [&](int at) { load_tile(s.k[0], WIDE_STRIDE, a.k, a.k_stride, a.k_scales, at); };
    auto load_values = [&](int at) { load_tile(s.v[0], STRIDE, a.v, a.v_stride, a.v_scales, at); };
    if (low < high) load_keys(low);
    if (SHARED_QUERIES)
        for (int i = thread; i < QUERIES * VECTORS; i += THREADS)
            load_query((u32*)&s.q[i / VECTORS][i % VECTORS * 8], i / VECTORS, i % VECTORS * 8);
#pragma unroll
    for (int n = 0; n < (SHARED_QUERIES ? 0 : STEPS); n++)
#pragma unroll
        for (int r = 0; r < 2; r++) load_query(mine_q[r][n], mine_row + 8 * r, 32 * n + mine_at);

#pragma unroll 1
    for (int at = low; at < high; at += KEYS) {
        wait_copies<0>();
        __syncthreads();  // keys are loaded, and the previous values have been used
        load_values(at);
        float scores[KEYS / 8][4] = {};
#pragma unroll (SHARED_QUERIES ? 1 : STEPS)
        for (int n = 0; n < STEPS; n++) {
            u32 other[2][4];
            if (SHARED_QUERIES)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    uint4 x = *(const uint4*)&s.q[mine_row + 8 * r][32 * n + mine_at];
                    other[r][0] = x.x, other[r][1] = x.y, other[r][2] = x.z, other[r][3] = x.w;
                }
            const u32 *q0 = SHARED_QUERIES ? other[0] : mine_q[0][SHARED_QUERIES ? 0 : n];
            const u32 *q1 = SHARED_QUERIES ? other[1] : mine_q[1][SHARED_QUERIES ? 0 : n];
            const u32 q[2][4] = {{q0[0], q1[0], q0[1], q1[1]}, {q0[2], q1[2], q0[3], q1[3]}};
#pragma unroll
            for (int i = 0; i < KEYS / 8; i++) {
                const uint4 keys = *(const uint4*)&s.k[8 * i + lane / 4][32 * n + mine_at];
                multiply(scores[i], q[0], keys.x, keys.y);
                multiply(scores[i], q[1], keys.z, keys.w);
            }
        }
        if (BIASED || at < clear_low || at + KEYS > clear_high) {
            const Row row[2] = {rows[mine_row], rows[mine_row + 8]};
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const Row& m = row[e / 2];
                    int j = at + 8 * n + lane % 4 * 2 + e % 2;
                    float x = scores[n][e];
                    if (BIASED) x = logit(a, x, j - m.position, bias);
                    scores[n][e] = (j >= m.low) & (j < m.high) ? x : -INFINITE;
                }
        }
        float keep[2], share[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float most = -INFINITE;
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
                most = fmaxf(most, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
            most = largest_of_row(most);
            const float exponent = exponent_of(most);
            const Merge merge(tops[r], most);
            keep[r] = merge.keep, share[r] = merge.share;
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; e++) scores[n][e] = weight_of(scores[n][e], exponent);
        }
        u32 weights[KEYS / 16][4];
        float sums[4] = {};
#pragma unroll
        for (int t = 0; t < KEYS / 16; t++) {
            weights[t][0] = pair(scores[2 * t][0], scores[2 * t][1]);
            weights[t][1] = pair(scores[2 * t][2], scores[2 * t][3]);
            weights[t][2] = pair(scores[2 * t + 1][0], scores[2 * t + 1][1]);
            weights[t][3] = pair(scores[2 * t + 1][2], scores[2 * t + 1][3]);
            multiply(sums, weights[t], ONES, ONES);
        }
#pragma unroll
        for (int r = 0; r < 2; r++)
            totals[r] = fmaf(sums[2 * r], share[r], __fmul_rn(totals[r], keep[r]));
        if (__any_sync(FULL, keep[0] != 1.f || keep[1] != 1.f))
#pragma unroll
            for (int n = 0; n < OWN; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) acc[n][e] = __fmul_rn(acc[n][e], keep[e / 2]);
        wait_copies<0>();
        __syncthreads();  // values are loaded, and the keys have been used
        if (at + KEYS < high) load_keys(at + KEYS);
#pragma unroll
        for (int n = 0; n < OWN / 2; n++) {
            float parts[2][4] = {};
#pragma unroll
            for (int t = 0; t < KEYS / 16; t++) {
                u32 values[4];
                load_matrices_transposed(values, &s.v[16 * t + lane % 16][column + 16 * n + lane / 16 * 8]);
                multiply(parts[0], weights[t], values[0], values[1]);
                multiply(parts[1], weights[t], values[2], values[3]);
            }
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int e = 0; e < 4; e++) acc[2 * n + i][e] = fmaf(parts[i][e], share[e / 2], acc[2 * n + i][e]);
        }
        // At the end of a split, and in the last tile, its sums are added to those of the splits before.
#pragma unroll
        for (int r = 0; r < 2; r++) {
            Row& row = rows[mine_row + 8 * r];
            const bool ends = (at + KEYS) % row.split == 0 && at + KEYS < high;
            if (!__any_sync(FULL, ends)) continue;
            const int begun = row.begun[part];
            float top = row.top[part], total = row.total[part];
            __syncwarp();
            if (ends) {
                const Merge merge(top, tops[r]);
                merge.add(total, totals[r]);
                if (lane % 4 == 0) row.top[part] = top, row.total[part] = total, row.begun[part] = 1;
#pragma unroll
                for (int n = 0; n < OWN; n++) {
                    float2* at_n = &s.splits[2 * n + r][thread];
                    float2 sum = begun ? *at_n : make_float2(0, 0);
                    merge.add(sum.x, acc[n][2 * r]), merge.add(sum.y, acc[n][2 * r + 1]);
                    *at_n = sum;
                    acc[n][2 * r] = acc[n][2 * r + 1] = 0;
                }
                tops[r] = -INFINITE, totals[r] = 0;
            }
            __syncwarp();
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = mine_row + 8 * r;
        if (row >= queries) continue;
        const int begun = rows[row].begun[part];
        float top = rows[row].top[part], total = rows[row].total[part];
        const Merge merge(top, tops[r]);
        merge.add(total, totals[r]);
        const float factor = normalizer(a, head, top, total);
        const i64 to = ((i64)(first + row) * a.heads + head) * DEPTH + column + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < OWN; n++) {
            float2 sum = begun ? s.splits[2 * n + r][thread] : make_float2(0, 0);
            merge.add(sum.x, acc[n][2 * r]), merge.add(sum.y, acc[n][2 * r + 1]);
            const float x = __fmul_rn(sum.x, factor), y = __fmul_rn(sum.y, factor);
            if (kind)
                *(u32*)((u16*)a.out + to + 8 * n) = to_half(kind, x) | (u32)to_half(kind, y) << 16;
            else
                *(float2*)(a.out + to + 8 * n) = make_float2(x, y);
        }
    }
}
