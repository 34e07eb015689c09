// Attention without tensor cores: of float32 pools, and of shapes that attention_decode.cu does not take.
// Splits of a token's keys are computed by blocks of their own and merged by attention_merge.cu, or by one
// block if there are many tokens.
//
// POOL: F32, F16, Q8_0, Q4_0 or FP8, dtype of the pools. DEPTH: elements of a query and a key; WIDTH: of a value;
// both multiples of 8 from 64 to 576. HEADS: query heads of one KV head that are computed together: 1,
// 2, 4 or 8. BIASED: logits are capped, or have ALiBi slopes or biases by distance. A warp takes TILE keys at a time, with
// K_LANES threads for a key and V_LANES for a value; a thread has eight elements of every SPAN.

#include "attention.cuh"
#include "attention_pool_floats.cuh"

#define SPAN 256
#define SPANS(width) (((width) + SPAN - 1) / SPAN)
#define WIDE (DEPTH > SPAN || WIDTH > SPAN)
#define AHEAD (HEADS <= 2)  // enough registers to load the first keys before the queries,
#define PIPELINED (AHEAD && !WIDE)  // and to load the next keys before the current ones are used
#define THREADS 128
#define EACH (WIDE ? 2 : 4)  // keys of a thread
#define LANES_FOR(width) ((width) <= 64 ? 8 : (width) <= 128 ? 16 : 32)

constexpr int K_LANES = LANES_FOR(DEPTH), V_LANES = LANES_FOR(WIDTH);
constexpr int WARPS = THREADS / WARP, K_ROWS = WARP / K_LANES, V_ROWS = WARP / V_LANES;
// Keys that a warp takes at a time. Few: unrolled code that runs once costs instruction fetches.
constexpr int TILE = EACH * (K_ROWS > V_ROWS ? K_ROWS : V_ROWS);
constexpr int K_EACH = TILE / K_ROWS, V_EACH = TILE / V_ROWS;
constexpr int K_SPANS = SPANS(DEPTH), V_SPANS = SPANS(WIDTH);
constexpr int PARTIAL = WIDTH + 4;  // floats of a split's result: accumulated values, top, total

// Sum `v` over groups of LANES threads; each thread gets the sum of one head, in v[0].
template <int LANES> __device__ __forceinline__ void spread_sums(float (&v)[HEADS], int lane) {
#pragma unroll
    for (int o = LANES / 2, n = HEADS; o; o >>= 1) {
        bool upper = lane & o;
        if (n > 1) {
            n /= 2;
#pragma unroll
            for (int i = 0; i < n; i++) {
                float keep = upper ? v[i + n] : v[i], send = upper ? v[i] : v[i + n];
                v[i] = keep + __shfl_xor_sync(FULL, send, o);
            }
        } else {
            v[0] += __shfl_xor_sync(FULL, v[0], o);
        }
    }
}

// The head whose sum `spread_sums` gives to a thread, and the first thread with the sum of a head.
template <int LANES> __device__ __forceinline__ int own_head(int lane) {
    return lane % LANES / (LANES / HEADS);
}
template <int LANES> __device__ __forceinline__ int holder(int head) {
    return head * (LANES / HEADS);
}

// The weight of row `row` of a tile for a head. Thread `holder` of the group that took its key has it
// in weights[row / K_ROWS].
__device__ __forceinline__ float weight_of(const float (&weights)[K_EACH], int row, int i, int h) {
    if (K_LANES == V_LANES)
        return __shfl_sync(FULL, weights[i], row % K_ROWS * K_LANES + holder<K_LANES>(h));
    float found = 0;
#pragma unroll
    for (int n = 0; n < K_EACH; n++) {
        float other = __shfl_sync(FULL, weights[n], row % K_ROWS * K_LANES + holder<K_LANES>(h));
        if (row / K_ROWS == n) found = other;
    }
    return found;
}

// Resident blocks of a multiprocessor, by register use.
constexpr int RESIDENT = HEADS == 4 && sizeof(POOL) <= 16 && !BIASED && EACH == 4 ? 4 : 2;

struct Shared {
    float tops[WARPS][HEADS], totals[WARPS][HEADS];
    float acc[WARPS][HEADS][WIDTH];
    float all_tops[2][HEADS], all_totals[2][HEADS];  // of the splits before
    float sums[HEADS][WIDTH];
};

// Grid: (KV heads and groups of their query heads, tokens, splits or one). Every warp takes keys of its own,
// with an online softmax of its own; the warps are merged at the end of a split.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) attend(Attention a TIMESTAMPS) {
    RECORD_TIMESTAMPS
    __shared__ Shared s;
    const int tokens = (int)begin(a.tokens, a.metadata_ready);
    const int token = blockIdx.y, thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    const VisibleKeys visible = visible_keys(a, token);
    const int shared = ((int)a.heads / (int)a.kv_heads), per = (shared + HEADS - 1) / HEADS;
    const int kv = blockIdx.x / per, first = kv * shared + blockIdx.x % per * HEADS;
    const int heads = min(HEADS, (kv + 1) * shared - first);
    const Partials partials(a, visible, 1);
    const int split_keys = partials.each * TILE_KEYS;
    int split = partials.first + blockIdx.z, last_split = a.slots ? split : split + partials.count - 1;
    int from = max(visible.low, split * split_keys), to = min(visible.high, (split + 1) * split_keys);
    if (token >= tokens || (a.slots && (int)blockIdx.z >= partials.count)) {
        wait_for_previous();  // else this kernel could complete before its predecessor
        return;
    }
    // Keys of earlier runs are complete: the first of them are loaded while this kernel waits.
    const bool ahead = AHEAD && a.metadata_ready && min(to, from + TILE * WARPS) <= visible.old;
    if (!ahead) wait_for_previous();

    // Threads without a part of a row, and keys beyond the end, repeat the work of others and are
    // ignored: code without branches is a third as long.
    const int k_row = warp * TILE + lane / K_LANES, v_row = warp * TILE + lane / V_LANES;
    bool k_mine[K_SPANS], v_mine[V_SPANS];
    int k_at[K_SPANS], v_at[V_SPANS];
#pragma unroll
    for (int n = 0; n < K_SPANS; n++) {
        int own = n * SPAN + lane % K_LANES * 8;
        k_mine[n] = own < DEPTH, k_at[n] = k_mine[n] ? own : 0;
    }
#pragma unroll
    for (int n = 0; n < V_SPANS; n++) {
        int own = n * SPAN + lane % V_LANES * 8;
        v_mine[n] = own < WIDTH, v_at[n] = v_mine[n] ? own : 0;
    }
    float q[HEADS][K_SPANS][8], acc[HEADS][V_SPANS][8] = {};
    auto load_queries = [&]() {
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            int head = first + min(h, heads - 1);
            const float* row = (const float*)(a.q + token * a.q_stride) + head * DEPTH;
#pragma unroll
            for (int n = 0; n < K_SPANS; n++)
#pragma unroll
                for (int e = 0; e < 8; e++)
                    q[h][n][e] = k_mine[n] ? row[k_at[n] + e] * a.scale : 0;
        }
    };
    if (!AHEAD) load_queries();
    if (threadIdx.x < HEADS) s.all_tops[0][threadIdx.x] = -INFINITE, s.all_totals[0][threadIdx.x] = 0;
    const int own = own_head<K_LANES>(lane);  // head whose logits this thread gets
    const HeadBias bias = BIASED ? HeadBias(a, first + min(own, heads - 1)) : HeadBias();
    float top = -INFINITE, total = 0;  // of that head
    POOL keys[K_EACH][K_SPANS], values[V_EACH][V_SPANS];
    auto load_keys = [&](POOL (&k)[K_EACH][K_SPANS], POOL (&v)[V_EACH][V_SPANS], int at) {
        auto slot = [&](int j) { return slot_of(a, visible.sequence, min(at + j, to - 1)); };
#pragma unroll
        for (int i = 0; i < K_EACH; i++) {
            const u8* own = a.k + slot(i * K_ROWS + k_row) * a.k_stride;
#pragma unroll
            for (int n = 0; n < K_SPANS; n++) k[i][n].load(own, a.k_scales, kv, k_at[n], DEPTH);
        }
#pragma unroll
        for (int i = 0; i < V_EACH; i++) {
            const u8* own = a.v + slot(i * V_ROWS + v_row) * a.v_stride;
#pragma unroll
            for (int n = 0; n < V_SPANS; n++) v[i][n].load(own, a.v_scales, kv, v_at[n], WIDTH);
        }
    };
    if (AHEAD) {
        if (from < to) load_keys(keys, values, from);
        wait_for_previous();
        load_queries();
    }
    bool again = false;  // not the first split
    for (int parity = 0;; parity ^= 1) {
#pragma unroll 1
    for (int at = from; at < to; at += TILE * WARPS) {
        POOL next_keys[K_EACH][K_SPANS], next_values[V_EACH][V_SPANS];
        const bool more = at + TILE * WARPS < to;
        if (!AHEAD || (PIPELINED ? again && at == from : again || at != from)) load_keys(keys, values, at);
        if (PIPELINED && more) load_keys(next_keys, next_values, at + TILE * WARPS);
        float weights[K_EACH], most = top;
#pragma unroll
        for (int i = 0; i < K_EACH; i++) {
            int j = at + i * K_ROWS + k_row;
            float sums[HEADS] = {};
#pragma unroll
            for (int n = 0; n < K_SPANS; n++) {
                float key[8];
                keys[i][n].read(key);
#pragma unroll
                for (int h = 0; h < HEADS; h++)
#pragma unroll
                    for (int e = 0; e < 8; e++) sums[h] = fmaf(q[h][n][e], key[e], sums[h]);
            }
            spread_sums<K_LANES>(sums, lane);
            if (BIASED) sums[0] = logit(a, sums[0], j - visible.position, bias);
            weights[i] = j < to ? sums[0] : -INFINITE;
            most = fmaxf(most, weights[i]);
        }
#pragma unroll
        for (int o = K_LANES; o < WARP; o <<= 1)
            most = fmaxf(most, __shfl_xor_sync(FULL, most, o));
        float shrink = top == -INFINITE ? 0 : __expf(top - most);
        total *= shrink;
        top = most;
#pragma unroll
        for (int i = 0; i < K_EACH; i++) {
            weights[i] = weights[i] == -INFINITE ? 0 : __expf(weights[i] - most);  // NaN: NaN
            total += weights[i];
        }
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            float less = __shfl_sync(FULL, shrink, holder<K_LANES>(h));
#pragma unroll
            for (int n = 0; n < V_SPANS; n++)
#pragma unroll
                for (int e = 0; e < 8; e++) acc[h][n][e] *= less;
        }
#pragma unroll
        for (int i = 0; i < V_EACH; i++) {
            float value[V_SPANS][8];
#pragma unroll
            for (int n = 0; n < V_SPANS; n++) values[i][n].read(value[n]);
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                float weight = weight_of(weights, i * V_ROWS + lane / V_LANES, i, h);
#pragma unroll
                for (int n = 0; n < V_SPANS; n++)
#pragma unroll
                    for (int e = 0; e < 8; e++)
                        acc[h][n][e] = fmaf(weight, value[n][e], acc[h][n][e]);
            }
        }
        if (!PIPELINED || !more) continue;
#pragma unroll
        for (int i = 0; i < K_EACH; i++)
#pragma unroll
            for (int n = 0; n < K_SPANS; n++) keys[i][n] = next_keys[i][n];
#pragma unroll
        for (int i = 0; i < V_EACH; i++)
#pragma unroll
            for (int n = 0; n < V_SPANS; n++) values[i][n] = next_values[i][n];
    }
#pragma unroll
    for (int o = K_LANES; o < WARP; o <<= 1) total += __shfl_xor_sync(FULL, total, o);
    if (lane < K_LANES && lane % (K_LANES / HEADS) == 0)
        s.tops[warp][own] = top, s.totals[warp][own] = total;
#pragma unroll
    for (int h = 0; h < HEADS; h++)
#pragma unroll
        for (int n = 0; n < V_SPANS; n++)
#pragma unroll
            for (int e = 0; e < 8; e++) {
                float& x = acc[h][n][e];
#pragma unroll
                for (int o = V_LANES; o < WARP; o <<= 1) x += __shfl_xor_sync(FULL, x, o);
                if (lane < V_LANES && v_mine[n]) s.acc[warp][h][v_at[n] + e] = x;
            }
    __syncthreads();
#pragma unroll 1
    for (int i = thread; i < heads * WIDTH; i += THREADS) {
        int h = i / WIDTH, e = i % WIDTH;
        float most = -INFINITE, sum = 0, all = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) most = fmaxf(most, s.tops[w][h]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            float weight = s.tops[w][h] == -INFINITE ? 0 : __expf(s.tops[w][h] - most);
            sum = fmaf(s.acc[w][h][e], weight, sum);
            all = fmaf(s.totals[w][h], weight, all);
        }
        if (a.slots) {
            float* partial = a.partials + ((token * a.slots + blockIdx.z) * a.heads + first + h) * PARTIAL;
            partial[e] = sum;
            if (e == 0) partial[WIDTH] = most, partial[WIDTH + 1] = all;
            continue;
        }
        float all_top = s.all_tops[parity][h], all_total = s.all_totals[parity][h];
        float x = again ? s.sums[h][e] : 0;
        const Merge merge(all_top, most);
        merge.add(x, sum), merge.add(all_total, all);
        s.sums[h][e] = x;
        if (e == 0) s.all_tops[parity ^ 1][h] = all_top, s.all_totals[parity ^ 1][h] = all_total;
        if (split >= last_split)
            a.out[((i64)token * a.heads + first + h) * WIDTH + e] =
                __fmul_rn(x, normalizer(a, first + h, all_top, all_total));
    }
    if (split >= last_split) return;
    __syncthreads();
    again = true, split++, from = to, to = min(visible.high, (split + 1) * split_keys);
    top = -INFINITE, total = 0;
#pragma unroll
    for (int h = 0; h < HEADS; h++)
#pragma unroll
        for (int n = 0; n < V_SPANS; n++)
#pragma unroll
            for (int e = 0; e < 8; e++) acc[h][n][e] = 0;
    }
}
