// Attention of few queries per sequence on tensor cores, bound by memory: the keys of each query are divided
// among thread blocks, and attention_merge.cu merges their results.
//
// POOL: as in attention_pools.cuh. DEPTH: elements of queries, keys and values: 64, 96, 128 or 256. BIASED: logits
// are capped, or have ALiBi slopes or biases by distance. ONE_SEQUENCE: the step has one sequence, with few tokens. ROTATED: if not 0,
// heads of its tokens, so many at most, are normed, rotated and written first (attention_rotation.cuh).
//
// A block takes 64 keys of a KV head at a time, for up to eight of its query heads. Matrices are transposed,
// so that heads are the eight columns of a product. Keys: a warp multiplies 16 of them with all queries, and
// shares the logits. Values: a warp multiplies all of them in its dimensions. Fragments are loaded from the
// pools without shared memory: threads take eight adjacent elements of a key, so that the elements of a
// product's steps are permuted, in the keys as in the queries, and attention_tiled.cu has them in the same
// order. The bits of a query's result are those of attention_tiled.cu.

#include "attention.cuh"
#include "attention_pools.cuh"
#include "tensor_cores.cuh"

#define THREADS 128
constexpr int WARPS = THREADS / WARP, VECTORS = DEPTH / 32;
constexpr int OWN = DEPTH == 64 ? 2 : 4;           // adjacent dimensions of values of a thread
constexpr int SPREAD = 8 * OWN, PARTS = DEPTH / SPREAD;  // dimensions of a warp's products, their number
constexpr int EACH = (PARTS + WARPS - 1) / WARPS;  // products of a warp
#include "attention_loads.cuh"

constexpr int PARTIAL = DEPTH + 4;                 // floats of a partial result: sums, top, total
constexpr int LOGITS = TILE_KEYS + 8;              // floats between heads: reads cover all banks
// Blocks of a multiprocessor, as in attention.py: as many as registers allow.
constexpr bool FOUR = DEPTH == 64 || DEPTH == 128 && !BIASED && ROTATED < 2 && (POOL != 1 || __CUDA_ARCH__ >= 900);
constexpr int RESIDENT = DEPTH > 128 ? 2 : FOUR ? 4 : 3;
constexpr int QUERY = DEPTH + (DEPTH % 64 ? 0 : 32);  // halves between queries: two rows of 64 bytes cover all banks
constexpr int CHUNKS = (DEPTH + THREADS - 1) / THREADS;  // of eight elements of queries that a thread loads
constexpr u32 ONES = 0x3c003c00u;
#if ROTATED
#include "attention_rotation.cuh"
#define NEW_TOKENS , NewTokens new_tokens
#define FEW_HEADS new_tokens.few_heads
#else
#define NEW_TOKENS
#define FEW_HEADS false
#endif
// Rows up to which the next kernel starts late: it would request its weights while `rope_write` and then this
// kernel wait for small loads, and blocks without work leave it the whole GPU.
constexpr int LATE_ROWS = 16;

struct __align__(16) Shared {
    u16 q[2][GROUP][QUERY];
    float logits[2][GROUP][LOGITS];
#if POOL != 1
    u16 scales[2][SCALES][TILE_KEYS];  // of values
#endif
#if ROTATED
    u16 new_rows[2][ROTATED][DEPTH];  // new keys, and their values
#endif
    Unit units[4];  // number n in n % 4: the present one, two before it and the next
    Count scan[WARPS];
};

// Grid: blocks that share the units, or if ONE_SEQUENCE those of `SequenceUnits`, so that all units of a block have the same
// queries.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) attend(Attention a NEW_TOKENS TIMESTAMPS) {
    RECORD_TIMESTAMPS
    __shared__ Shared s;
    DYNAMIC_SHARED(Count, starts);
    const bool late = a.most_rows <= LATE_ROWS;
    if (!late) launch_next();
    const int tokens = (int)*(volatile const i64*)a.tokens;
    if (!a.metadata_ready) wait_for_previous();
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP, g = lane / 4, c = lane % 4;
    // What follows is a chain of loads while other kernels use the memory. In a step of one sequence it is short: if the
    // sequence is short, too, its part of the table is loaded together with the length.
    Unit unit = {};
    Pages pages, later;  // of the present and the next unit
#if ONE_SEQUENCE
    pages.load_ahead(a, blockIdx.x);
    const int length = a.kv_len[0];
#if ROTATED
    if (!new_tokens.position_ready) wait_for_previous();
    TokenRotation rotation(new_tokens);
#endif
    const SequenceUnits units(a, length, tokens);
    const int count = units.partials.count;
    units.get(a, 0, unit);
    // Further units, which few blocks have, are found again: keeping the others' fields would take too many registers.
    auto get_unit = [&](int number, Unit& to) {
        to.there = blockIdx.x + number * gridDim.x < count;
        if (to.there) SequenceUnits(a, a.kv_len[0], (int)*a.tokens).get(a, number, to);
    };
#else
    const Units units = {starts, a.queries == SINGLE ? (int)*a.sequences : tokens, head_groups(a), tokens};
    if (!BIASED || tokens) {  // without the condition, registers of a kernel with biases are spilled
        count_units(a, units, starts, s.scan);
        units.get(a, 0, unit);
    }
    auto get_unit = [&](int number, Unit& to) { units.get(a, number, to); };
#endif
    if (!unit.there) {
        // Blocks without work leave room for the next kernel at once. One must wait, else this kernel could
        // complete before its predecessor.
        if (blockIdx.x == 0 && (!ONE_SEQUENCE || blockIdx.y + blockIdx.z == 0)) wait_for_previous();
        return;
    }

    const bool active = EACH > 1 || PARTS == WARPS || warp < PARTS;  // has dimensions of values
    Loads loads(a, active);
#if ROTATED == 1
    loads.slot = rotation.slot;
#elif ROTATED
    loads.slots = new_tokens.k_pool.slot;
#endif
    // Load queries of a unit, and store them in shared memory as f16: eight elements of a chunk.
    auto load_queries = [&](const Unit& u, float4 (&x)[CHUNKS][2]) {
        const float* from = (const float*)(a.q + u.query.token * a.q_stride) + u.head * DEPTH;
#pragma unroll
        for (int n = 0; n < CHUNKS; n++) {
            const int at = min(8 * (thread + n * THREADS), u.heads * DEPTH - 8);
            x[n][0] = *(const float4*)(from + at), x[n][1] = *(const float4*)(from + at + 4);
        }
    };
    auto store_queries = [&](const float4 (&x)[CHUNKS][2], int buffer) {
#pragma unroll
        for (int n = 0; n < CHUNKS; n++) {
            const int at = 8 * (thread + n * THREADS);
            const float4 &y = x[n][0], &z = x[n][1];
            if (at < GROUP * DEPTH)
                *(uint4*)&s.q[buffer][at / DEPTH][at % DEPTH] =
                    make_uint4(pair(y.x * a.scale, y.y * a.scale), pair(y.z * a.scale, y.w * a.scale),
                               pair(z.x * a.scale, z.y * a.scale), pair(z.z * a.scale, z.w * a.scale));
        }
    };

    {
        const VisibleKeys& range = unit.query.keys;
        const bool ahead =
            a.metadata_ready && (ROTATED || min(range.high, (unit.tile + 1) * TILE_KEYS) <= range.old);
        if (!ONE_SEQUENCE || pages.first != unit.tile * (TILE_KEYS / PAGES)) pages.load(a, range, unit.tile);
        auto load = [&]() {
            loads.load_keys(a, unit, unit.tile, pages);
            loads.load_values(a, unit, unit.tile, pages);
        };
        if (ahead) load();
#if ROTATED
        rotation.prepare(a, unit, count > gridDim.x);
#endif
        if (thread == 0) s.units[0] = unit, get_unit(1, s.units[1]);
        wait_for_previous();
        if (late && !FEW_HEADS) launch_next();
        float4 x[CHUNKS][2];
        if (!ROTATED) load_queries(unit, x);
        if (!ahead) load();
#if ROTATED
        rotation.compute(a, unit, s.q[0], s.new_rows);
#else
        store_queries(x, 0);
#endif
        if (FEW_HEADS) launch_next();
        __syncthreads();
    }
    int parity = 0;
#pragma unroll 1
    for (int number = 0;; number++) {
        const Unit &unit = s.units[number % 4], &after = s.units[(number + 1) % 4];
        if (!unit.there) return;
        if (thread == 0) get_unit(number + 2, s.units[(number + 2) % 4]);
        const int heads = unit.heads, end = unit.end;
        if (after.there) later.load(a, after.query.keys, after.tile);
        float acc[EACH][OWN / 2][4] = {}, totals[2] = {}, top = -INFINITE;  // top: of head g
#pragma unroll 1
        for (int tile = unit.tile; tile < end; tile++, parity ^= 1) {
            const bool last = tile + 1 == end;
            float4 queries[CHUNKS][2];
            if (!ONE_SEQUENCE && last && after.there) load_queries(after, queries);
#if ROTATED
            if (loads.new_keys) loads.replace_new_keys(unit.query.keys, tile, s.new_rows);
#endif
            float scores[4] = {};
#pragma unroll
            for (int n = 0; n < VECTORS; n++) {
                const uint4 q = *(const uint4*)&s.q[ONE_SEQUENCE ? 0 : number % 2][g][32 * n + 8 * c];
                u32 one[4], two[4];
                loads.keys[0].pairs(n, one), loads.keys[1].pairs(n, two);
                const u32 low[4] = {one[0], two[0], one[1], two[1]}, high[4] = {one[2], two[2], one[3], two[3]};
                multiply(scores, low, q.x, q.y);
                multiply(scores, high, q.z, q.w);
            }
#pragma unroll
            for (int e = 0; e < 4; e++)
                s.logits[parity][2 * c + e % 2][16 * warp + g + e / 2 * 8] = scores[e];
            // The next keys and values are loaded as soon as there is room for them.
            const Unit& next = last ? after : unit;
            const int next_tile = last ? after.tile : tile + 1;
            if (next.there) {
                if (last) pages = later;
                else if (next_tile * (TILE_KEYS / PAGES) - pages.first >= WARP) pages.load(a, next.query.keys, next_tile);
                loads.load_keys(a, next, next_tile, pages);
            }
            if (!ONE_SEQUENCE && last && after.there) store_queries(queries, (number + 1) % 2);
#if POOL == 1
            const u16(*scales)[TILE_KEYS] = nullptr;
#else
            u16(*scales)[TILE_KEYS] = s.scales[parity];
            loads.share_scales(scales);
#endif
            __syncthreads();

            float weights[TILE_KEYS / 16][4], most = -INFINITE;
            const HeadBias bias = BIASED ? HeadBias(a, unit.head + min(g, heads - 1)) : HeadBias();
            const VisibleKeys& range = unit.query.keys;
            const bool inside = tile * TILE_KEYS >= range.low && (tile + 1) * TILE_KEYS <= range.high;
#pragma unroll
            for (int t = 0; t < TILE_KEYS / 16; t++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float2 two = *(const float2*)&s.logits[parity][g][16 * t + 2 * c + 8 * i];
                    weights[t][2 * i] = two.x, weights[t][2 * i + 1] = two.y;
                }
                if (BIASED || !inside)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        int j = tile * TILE_KEYS + 16 * t + 2 * c + i % 2 + i / 2 * 8;
                        float x = weights[t][i];
                        if (BIASED) x = logit(a, x, j - range.position, bias);
                        weights[t][i] = (j >= range.low) & (j < range.high) ? x : -INFINITE;
                    }
#pragma unroll
                for (int i = 0; i < 4; i++) most = fmaxf(most, weights[t][i]);
            }
            most = largest_of_row(most);
            const float exponent = exponent_of(most);
            const Merge merge(top, most);
            u32 p[TILE_KEYS / 16][2];
#pragma unroll
            for (int t = 0; t < TILE_KEYS / 16; t++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    p[t][i] = pair(weight_of(weights[t][2 * i], exponent), weight_of(weights[t][2 * i + 1], exponent));
            // Sums are in columns: a thread has those of heads 2 c and 2 c + 1.
            Merge merges[2] = {merge, merge};
#pragma unroll
            for (int i = 0; i < 2; i++) {
                merges[i].keep = __shfl_sync(FULL, merge.keep, 4 * (2 * c + i));
                merges[i].share = __shfl_sync(FULL, merge.share, 4 * (2 * c + i));
            }
            const u32 ones[4] = {ONES, ONES, ONES, ONES};
            float sums[4] = {};
#pragma unroll
            for (int t = 0; t < TILE_KEYS / 16; t++) multiply(sums, ones, p[t][0], p[t][1]);
#pragma unroll
            for (int i = 0; i < 2; i++) merges[i].add(totals[i], sums[i]);
            if (active)
#pragma unroll
                for (int n = 0; n < EACH; n++) {
                    float parts[OWN / 2][4] = {};
#pragma unroll
                    for (int t = 0; t < TILE_KEYS / 16; t++) {
                        u32 v[2][OWN];
                        loads.value_pairs(n, t, scales, v);
#pragma unroll
                        for (int i = 0; i < OWN / 2; i++) {
                            const u32 two[4] = {v[0][2 * i], v[0][2 * i + 1], v[1][2 * i], v[1][2 * i + 1]};
                            multiply(parts[i], two, p[t][0], p[t][1]);
                        }
                    }
#pragma unroll
                    for (int i = 0; i < OWN / 2; i++)
#pragma unroll
                        for (int e = 0; e < 4; e++) merges[e % 2].add(acc[n][i][e], parts[i][e]);
                }
            if (next.there) loads.load_values(a, next, next_tile, pages);
        }
        float* partial = a.partials + ((unit.row * a.slots + unit.slot) * a.heads + unit.head) * PARTIAL;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int h = 2 * c + i;
            if (h >= heads) continue;
            float* to = partial + h * PARTIAL;
            if (active)
#pragma unroll
                for (int n = 0; n < EACH; n++) {
                    float* own = to + (warp * EACH + n) * SPREAD + OWN * g;
                    const float(*x)[4] = acc[n];
                    if (OWN == 4) *(float4*)own = make_float4(x[0][i], x[0][2 + i], x[OWN / 2 - 1][i], x[OWN / 2 - 1][2 + i]);
                    else *(float2*)own = make_float2(x[0][i], x[0][2 + i]);
                }
            if (warp == 0 && g == 0) to[DEPTH + 1] = totals[i];
        }
        if (warp == 0 && c == 0 && g < heads) partial[g * PARTIAL + DEPTH] = top;
    }
}
