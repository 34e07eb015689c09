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
                    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];"
                                 : "=r"(now) : "l"(&meeting->arrived) : "memory");
                } while ((int)(now - until) < 0);
                asm volatile("fence.acq_rel.gpu;" ::: "memory");
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

// Adds to a count what the caller's block or warp has done, and gives what it was before. What others
// have done before they added is there for whoever sees their count; callers synchronise among
// themselves before and after.
__device__ __forceinline__ u32 join(u32* count, u32 own) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(before) : "l"(count), "r"(own) : "memory");
    return before;
}

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

// y = norm(h) * w, or h if there is no w; then, if there is an x, `sum` = x + y; and if there is a w2, y = norm(sum) * w2.
// y goes to the targets. Every block does it: that costs less than to wait for one that does. It has
// the results in its shared memory, from `local` on, each with room for a row of float32.
struct Norm {
    const float *h, *w, *x, *w2;
    float* sum;
    int width;
    float eps, eps2;
    int local;
    Targets targets;
};

// Up to 256 numbers of a row that lie at `from`, elements `first` and on, by a warp.
__device__ __forceinline__ void emit_unit(const float* from, const Targets& targets, int first,
                                          int width) {
    const int lane = threadIdx.x % WARP;
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = first + WARP * i + lane < width ? from[WARP * i + lane] : 0;
#pragma unroll 1
    for (int i = 0; i < targets.count; i++) emit_to<8>(v, targets.t[i], 0, first, width);
}

// The forms of a row, from shared memory to where others may look for them; every block writes a part.
__device__ __forceinline__ void publish(const Targets& targets, const Targets& local, int width) {
    for (int i = 0; i < targets.count; i++) {
        int block = targets.t[i].block, bytes = 4 * width;
        if (block == 32) bytes = width + width / 4;
        if (block == 256) bytes = width + width / 64 + width / 8;
        int at = 4 * (blockIdx.x * THREADS + threadIdx.x);
        for (; at < bytes; at += 4 * THREADS * gridDim.x)
            *(u32*)(targets.t[i].at + at) = *(const u32*)(local.t[i].at + at);
    }
}

// y = row * w / rms(row).
__device__ __forceinline__ void scale_row(float* row, const float* w, int width, float squares,
                                          float eps) {
    float factor = 1.f / sqrtf(block_sum(squares) / width + eps);
    in_batches<8>(width, [=](int c) { return row[c] * factor * w[c]; },
                  [=](int c, float v) { row[c] = v; });
}

__device__ __noinline__ void norm_step(const Norm& t, Ready ready, u8* stage, Targets& local) {
    const int width = t.width;
    float* row = (float*)stage;
    const float *h = t.h, *base = t.x, *own = t.w;
    float *weight = row + width, *sum = t.sum, squares = 0;
    if (threadIdx.x < 2) {
        local.t[threadIdx.x] = t.targets.t[threadIdx.x];
        local.t[threadIdx.x].at = stage + t.local + 4 * width * threadIdx.x;
        local.count = t.targets.count;
    }
    if (own) in_batches<8>(width, [=](int c) { return own[c]; }, [=](int c, float v) { weight[c] = v; });
    ready.wait();
    in_batches<4>(width / 4, [=](int c) { return ((const float4*)h)[c]; }, [&](int c, float4 v) {
        ((float4*)row)[c] = v;
        squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    });
    const float* w = weight;
    float eps = t.eps;
#pragma unroll 1
    for (int turn = 0; own && turn < 2; turn++) {
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
        emit_unit(row + first, local, first, width);
    __syncthreads();
    publish(t.targets, local, width);
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
    float* to = t.out;
    in_batches<8>((int)t.width, [=](int c) { return from[c]; }, [=](int c, float v) { to[c] = v; });
}

// -------------------------------------------------------------------------------- attention

// A block takes a piece of the keys of a kv head; the last of a head's blocks merges its pieces, and
// puts them where `target` says. Counts begin and end as zeros.
struct Attend {
    Attention a;
    u32* counts;
    int items, looked_up;  // parts of the heads, each with keys of its own; by the step before
};

#define KEPT 1024  // keys of a piece whose slots are looked up beforehand

// What a block goes along, and where the keys lie.
struct Sought {
    Piece piece;
    int there, slots[KEPT];
};

struct Merging {
    float weights[HEADS][MOST_PIECES];
    int last;
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
        t.a.out[p.first * WIDTH + i] = sum;
    }
}

// Where the keys of the block's piece lie; and has them brought nearer. The last one may not be written
// yet.
__device__ __forceinline__ void look_up(const Attention& a, int items, Sought& s) {
    constexpr int LINE = 128, K_LINES = (DEPTH * 2 + LINE - 1) / LINE, LINES = 2 * K_LINES;
    const int item = blockIdx.x % items, index = blockIdx.x / items;
    const Piece p(a, item, 0, index);
    const bool there = index < a.splits && p.there();
    if (threadIdx.x == 0) s.piece = p, s.there = there;
    if (!there) return;
    const int count = min(KEPT, p.to - p.from);
    for (int i = threadIdx.x; i < count * LINES; i += THREADS) {
        int key = i / LINES, line = i % LINES / 2 * LINE;
        i64 slot = slot_of(a, p.sees.sequence, p.from + key);
        if (i % LINES == 0) s.slots[key] = (int)slot;
        const u8* at = i % 2 ? a.v + slot * a.v_stride : a.k + slot * a.k_stride;
        asm volatile("prefetch.global.L2 [%0];" ::"l"(at + p.kv * (i % 2 ? WIDTH : DEPTH) * 2 + line));
    }
}

// Heads of DEPTH elements, a warp to each. Either the warps of all blocks share them, or a block does
// what its part of the attention that follows will read, so that it need not wait for others.
struct Rope {
    Heads q, k, v;
    float* out;
    Pool k_pool, v_pool;
    Turn turn;
    float eps;
    int items;    // of the attention that follows, or 0
    Attention a;  // of that
};

// The head that the calling warp does, of queries, then keys, then values; or -1.
__device__ __forceinline__ int own_head(const Rope& t) {
    int warp = threadIdx.x / WARP;
    if (!t.items) {
        int head = warp * gridDim.x + blockIdx.x;
        return head < t.q.count + t.k.count + t.v.count ? head : -1;
    }
    int item = blockIdx.x % t.items, shared = t.q.count / t.k.count;
    int per = (shared + HEADS - 1) / HEADS, kv = item / per, first = item % per * HEADS;
    if (blockIdx.x / t.items >= t.a.splits || warp >= HEADS + 2) return -1;
    if (warp >= HEADS) return t.q.count + (warp > HEADS) * t.k.count + kv;
    return first + warp < shared ? kv * shared + first + warp : -1;
}

__device__ __noinline__ void rope_step(const Rope& t, Ready ready, u8* stage) {
    int head = own_head(t);
    Turning<DEPTH / 64> turn(t.turn);
    if (head >= 0) turn.at(t.turn.pos[0]);
    if (t.items) look_up(t.a, t.items, *(Sought*)stage);
    ready.wait();
    if (head >= 0) turn.heads(t.q, t.k, t.v, t.out, t.k_pool, t.v_pool, 0, t.eps, head, 1 << 20);
}

__device__ __noinline__ void attend_step(const Attend& t, Ready ready, u8* stage) {
    Sought& sought = *(Sought*)stage;
    Shared& s = *(Shared*)(&sought + 1);
    Merging& m = *(Merging*)(&s + 1);
    if (!t.looked_up) look_up(t.a, t.items, sought);
    ready.wait();
    __syncthreads();
    if (!sought.there) return;
    const Piece p = sought.piece;
    const int item = blockIdx.x % t.items;
    attend_piece(t.a, p, s, [&](int j) {
        return j - p.from < KEPT ? sought.slots[j - p.from] : slot_of(t.a, p.sees.sequence, j);
    });
    const int count = p.sees.high - p.sees.low, piece = piece_of(t.a, count);
    const int pieces = count > 0 ? (count + piece - 1) / piece : 1;
    for (int i = threadIdx.x; i < p.heads * WIDTH; i += THREADS) {
        int h = i / WIDTH, e = i % WIDTH;
        float most, all, sum = merged(s, h, e, most, all);
        if (pieces == 1)
            t.a.out[p.first * WIDTH + i] = sum * share_of(t.a, p.first + h, most, all);
        else
            put_part(t.a, p, h, e, sum, most, all);
    }
    if (pieces == 1) return;
    __syncthreads();
    if (threadIdx.x == 0) {
        m.last = (int)join(t.counts + item, 1) + 1 == pieces;
        if (m.last) t.counts[item] = 0;
    }
    __syncthreads();
    if (m.last) merge_parts(t, p, pieces, m);
}
