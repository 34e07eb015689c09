#pragma once
// Steps of a walk other than matrix products, for one token; how blocks wait for each other, and how
// results are written.

// What the blocks count their arrivals with: `arrived` goes on and on, `before` is where it stood
// when the walk began.
struct Meeting {
    u32 arrived, before;
};

// What stands between a step and the one before. A step calls wait() once it needs what others have
// made; what it does before may read constants, and inputs that no step of the walk writes.
struct Ready {
    Meeting* meeting;
    u32 until;     // arrivals, once all are there
    i64* stamps;   // when each step was done is noted there, or null
    int meet, stamp;  // whether there is something to wait for; the number of the step before, or -1

    __device__ __forceinline__ void arrive() const {  // after a __syncthreads()
        if (meet && threadIdx.x == 0)
            asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(&meeting->arrived)
                         : "memory");
    }

    __device__ __forceinline__ void wait() const {
        if (meet) {
            if (threadIdx.x == 0) {
                u32 now;
                do {
                    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                                 : "=r"(now) : "l"(&meeting->arrived) : "memory");
                } while ((int)(now - until) < 0);
                __threadfence();
            }
            __syncthreads();
        }
        if (stamps && stamp >= 0 && blockIdx.x == 0 && threadIdx.x == 0) {
            u64 now;
            asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
            stamps[stamp] = (i64)now;
        }
    }
};

// put(i, get(i)) for all i < count, by all threads of the block; BATCH values of a thread are on
// their way at a time.
template <int BATCH, class Get, class Put>
__device__ __forceinline__ void in_batches(int count, Get get, Put put) {
#pragma unroll 1
    for (int first = threadIdx.x; first < count; first += BATCH * THREADS) {
        decltype(get(0)) held[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; b++)
            if (first + b * THREADS < count) held[b] = get(first + b * THREADS);
#pragma unroll
        for (int b = 0; b < BATCH; b++)
            if (first + b * THREADS < count) put(first + b * THREADS, held[b]);
    }
}

// ------------------------------------------------------------------------------------ norms

// Up to 256 numbers that lie at `from` as elements first..end of rows of `width`, by a warp. One
// function for all steps: it is long.
__device__ __noinline__ void emit_unit(const float* from, const Targets* targets, int first, int end,
                                       int width) {
    const int lane = threadIdx.x % WARP;
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = first + WARP * i + lane < end ? from[WARP * i + lane] : 0;
#pragma unroll 1
    for (int i = 0; i < targets->count; i++)
        emit_to<8>(v, targets->t[i], 0, first, end, width);
}

// y = norm(h) * w; then, if there is an x, `sum` = x + y; and if there is a w2, y = norm(sum) * w2.
// y goes to the targets. Every block does it, and writes what all the others write: it costs less
// than to wait for one that does.
struct Norm {
    const float *h, *w, *x, *w2;
    float* sum;
    int width;
    float eps, eps2;
    Targets targets;
};

// y = row * w / rms(row). Each thread looks after the same elements all along.
__device__ __forceinline__ void scale_row(float* row, const float* w, int width, float squares,
                                          float eps) {
    float factor = 1.f / sqrtf(block_sum(squares) / width + eps);
    in_batches<8>(width, [=](int c) { return row[c] * factor * w[c]; },
                  [=](int c, float v) { row[c] = v; });
}

__device__ __noinline__ void norm_step(const Norm& t, Ready ready, float* row) {
    const int width = t.width;
    const float *h = t.h, *base = t.x, *own = t.w;
    float *weight = row + width, *sum = t.sum, squares = 0;
    in_batches<8>(width, [=](int c) { return own[c]; }, [=](int c, float v) { weight[c] = v; });
    ready.wait();
    in_batches<8>(width, [=](int c) { return h[c]; }, [&](int c, float v) {
        row[c] = v;
        squares += v * v;
    });
    const float* w = weight;
    float eps = t.eps;
#pragma unroll 1
    for (int turn = 0; turn < 2; turn++) {
        scale_row(row, w, width, squares, eps);
        if (turn || !base) break;
        squares = 0;
        in_batches<8>(width, [=](int c) { return base[c]; }, [&](int c, float v) {
            v += row[c];
            sum[c] = row[c] = v;
            squares += v * v;
        });
        if (!t.w2) return;
        w = t.w2, eps = t.eps2;
    }
    __syncthreads();
    for (int first = threadIdx.x / WARP * UNIT; first < width; first += WARPS * UNIT)
        emit_unit(row + first, &t.targets, first, width, width);
}

// A row of several, by every block.
struct Copy {
    const u8* x;
    i64 stride;
    const int* row;
    float* out;
    i64 width;
};

__device__ __forceinline__ void copy_step(const Copy& t, Ready ready) {
    ready.wait();
    const float* from = (const float*)(t.x + *t.row * t.stride);
    for (int c = threadIdx.x; c < t.width; c += THREADS) t.out[c] = from[c];
}

// ------------------------------------------------------------------------------------- rope

// Heads of DEPTH elements: a warp of each block does one.
struct Rope {
    Heads q, k, v;
    float* out;
    Pool k_pool, v_pool;
    Turn turn;
    int width;
    float eps;
};

__device__ __noinline__ void rope_step(const Rope& t, Ready ready) {
    int warp = threadIdx.x / WARP * gridDim.x + blockIdx.x, count = gridDim.x * WARPS;
    bool needed = warp < t.q.count + t.k.count + t.v.count;
    Turning<DEPTH / 64> turn(t.turn);
    if (needed) turn.at(t.turn.pos[0]);
    ready.wait();
    if (needed)
        turn.heads(t.q, t.k, t.v, t.out, t.k_pool, t.v_pool, 0, t.eps, warp, count);
}

// -------------------------------------------------------------------------------- attention

// A block takes a piece of the keys of a kv head; the last of a head's blocks merges its pieces, and
// puts them where `target` says. Counts begin and end as zeros.
struct Attend {
    Attention a;
    Targets target;  // one
    u32* counts;
    int items, unused;  // parts of the heads, each with keys of its own
};

#define KEPT 1024  // keys of a piece whose slots are looked up beforehand

struct Merging {
    float weights[HEADS][MOST_PIECES], results[HEADS * WIDTH];
    int last, slots[KEPT];
};

// Everything of a part of the heads, once its last piece has come.
__device__ __forceinline__ void merge_parts(const Attend& t, const Piece& p, int pieces, Merging& s) {
    const int warp = threadIdx.x / WARP;
    const float* parts = t.a.parts + (i64)p.first * t.a.splits * PART;
    if (warp < p.heads)
        weigh(t.a, parts + warp * t.a.splits * PART, p.first + warp, pieces, s.weights[warp]);
    __syncthreads();
    for (int i = threadIdx.x; i < p.heads * WIDTH; i += THREADS) {
        const float *part = parts + i / WIDTH * t.a.splits * PART + i % WIDTH, *w = s.weights[i / WIDTH];
        float sum = 0;
#pragma unroll 4
        for (int n = 0; n < pieces; n++) sum = fmaf(__ldcg(part + n * PART), w[n], sum);
        s.results[i] = sum;
    }
}

// Where the keys of a piece lie; and have them brought nearer. The last one may not be written yet.
__device__ __forceinline__ void look_up(const Attention& a, const Piece& p, int* slots) {
    constexpr int LINE = 128, K_LINES = (DEPTH * 2 + LINE - 1) / LINE, LINES = 2 * K_LINES;
    const int count = min(KEPT, p.to - p.from);
    for (int i = threadIdx.x; i < count * LINES; i += THREADS) {
        int key = i / LINES, line = i % LINES / 2 * LINE;
        i64 slot = slot_of(a, p.sees.sequence, p.from + key);
        if (i % LINES == 0) slots[key] = (int)slot;
        const u8* at = i % 2 ? a.v + slot * a.v_stride : a.k + slot * a.k_stride;
        asm volatile("prefetch.global.L2 [%0];" ::"l"(at + p.kv * (i % 2 ? WIDTH : DEPTH) * 2 + line));
    }
}

__device__ __noinline__ void attend_step(const Attend& t, Ready ready, u8* stage) {
    const int item = blockIdx.x % t.items, index = blockIdx.x / t.items;
    Shared& s = *(Shared*)stage;
    Merging& m = *(Merging*)(stage + sizeof(Shared));
    const Piece p(t.a, item, 0, index);
    const bool there = index < t.a.splits && p.there();
    if (there) look_up(t.a, p, m.slots);
    ready.wait();
    if (!there) return;
    __syncthreads();
    attend_piece(t.a, p, s, [&](int j) {
        return j - p.from < KEPT ? m.slots[j - p.from] : slot_of(t.a, p.sees.sequence, j);
    });
    const int count = p.sees.high - p.sees.low, piece = piece_of(t.a, count);
    const int pieces = count > 0 ? (count + piece - 1) / piece : 1;
    for (int i = threadIdx.x; i < p.heads * WIDTH; i += THREADS) {
        int h = i / WIDTH, e = i % WIDTH;
        float most, all, sum = merged(s, h, e, most, all);
        if (pieces == 1)
            m.results[i] = sum * share_of(t.a, p.first + h, most, all);
        else
            put_part(t.a, p, h, e, sum, most, all);
    }
    if (pieces > 1) {
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            m.last = atomicAdd(t.counts + item, 1) + 1 == pieces;
            if (m.last) t.counts[item] = 0;
        }
        __syncthreads();
        if (!m.last) return;
        __threadfence();
        merge_parts(t, p, pieces, m);
    }
    __syncthreads();
    const int start = p.first * WIDTH, end = start + p.heads * WIDTH;
    for (int at = threadIdx.x / WARP * UNIT; at < end - start; at += WARPS * UNIT)
        emit_unit(m.results + at, &t.target, start + at, end, (int)t.a.heads * WIDTH);
}
