#pragma once
// Matrix products of a walk, for one token. A warp has some neighbouring rows of the matrix and loads
// them into registers, a chunk of some items (blocks.cuh) to a lane ahead of the one that it multiplies.
// When it is done it has the memory send the first bytes of its rows of the next product to the
// second-level cache: weights are constants, so the memory need not wait for the steps in between, nor
// for a meeting of the blocks.

#define BATCH WARP         // rows whose results a warp holds at a time, one to a lane
#define SENT_AHEAD 8192    // bytes that a warp has sent to the cache

// One to three matrices of one format, one below the other; or two that give act(first) * second.
struct Linear {
    const u8* x;  // float32, or quantised
    int ahead;    // the walk's next step of this kind, or -1
    int k, items, rest;   // rest: bytes of quantised activations behind the k int8
    int rows, gated;      // of all matrices, or of each of the two
    int local;            // where the activations lie in shared memory already, or 0
    int act;
    Matrices all;
};

// Neighbouring rows of a matrix.
struct Rows {
    int matrix, first, count;
};

// What rows lo..hi of a product are in its matrix number `part`.
__device__ __forceinline__ Rows rows_of(const Linear& t, int part, int lo, int hi) {
    if (t.gated) return {part, lo, part < 2 ? hi - lo : 0};
    int base = 0;
    for (int i = 0; i < part; i++) base += (int)t.all.m[i].rows;
    int first = max(lo - base, 0);
    return {part, first, min(hi - base, (int)t.all.m[part].rows) - first};
}

// The rows of a warp: about as many as the others have.
__device__ __forceinline__ int first_row(int rows, int next) {
    u32 warp = blockIdx.x * WARPS + threadIdx.x / WARP + next, warps = gridDim.x * WARPS;
    return (int)((u32)rows * warp / warps);
}

// Has the beginning of the warp's rows sent to the cache.
__device__ __forceinline__ void send_ahead(const Linear& t) {
    const int lane = threadIdx.x % WARP, lo = first_row(t.rows, 0), hi = first_row(t.rows, 1);
    const int most = t.gated ? SENT_AHEAD / 2 : SENT_AHEAD;
    for (int part = 0; part < 3; part++) {
        const Rows own = rows_of(t, part, lo, hi);
        if (own.count <= 0) continue;
        const u8* from = t.all.m[part].w.a + 16 * (u64)own.first * t.items;
        const int bytes = min((i64)most, 16 * (i64)own.count * t.items);
        for (int at = 128 * lane; at < bytes; at += 128 * WARP)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at));
    }
}

// ------------------------------------------------------------------------------ activations

// Where the 16 bytes of activations begin that part p of item j is multiplied with: in shared memory
// they lie in the order (p, j), so that a warp reads whole lines.
template <class W, int N> __device__ __forceinline__ int part_at(const Floats<N>*, int j, int p) {
    return 16 * (N / 4 * j + p);
}
template <class W, int N> __device__ __forceinline__ int part_at(const Unpacked<N>*, int j, int p) {
    return W::at(j, p);
}
template <int N> __device__ __forceinline__ constexpr int parts_of(const Floats<N>*) { return N / 4; }
template <int N> __device__ __forceinline__ constexpr int parts_of(const Unpacked<N>*) { return N; }

template <class W> __device__ __forceinline__ void stage_activations(const Linear& t, u8* stage) {
    const typename W::Values* kind = nullptr;
    const u8* x = t.local ? stage + t.local : t.x;
    const int items = t.items, k = t.k;
#pragma unroll
    for (int p = 0; p < parts_of(kind); p++)
        in_batches<4>(items, [=](int j) { return *(const uint4*)(x + part_at<W>(kind, j, p)); },
                      [=](int j, uint4 v) { ((uint4*)stage)[p * items + j] = v; });
    in_batches<2>(t.rest / 4, [=](int i) { return ((const u32*)(x + k))[i]; },
                  [=](int i, u32 v) { ((u32*)(stage + k))[i] = v; });
}

// Activations as they lie in shared memory.
struct Staged {
    const u8* at;
    int k, items;
};

// What an item is multiplied with, in registers.
template <class W, class Values> struct Partner;

template <class W, int N> struct Partner<W, Floats<N>> {
    float4 v[N / 4];

    __device__ __forceinline__ Partner(const Staged& x, int j) {
#pragma unroll
        for (int p = 0; p < N / 4; p++) v[p] = ((const float4*)x.at)[p * x.items + j];
    }

    __device__ __forceinline__ float product(const Floats<N>& u) const {
        float sum = 0;
#pragma unroll
        for (int p = 0; p < N / 4; p++) {
            sum = fmaf(u.v[4 * p], v[p].x, sum), sum = fmaf(u.v[4 * p + 1], v[p].y, sum);
            sum = fmaf(u.v[4 * p + 2], v[p].z, sum), sum = fmaf(u.v[4 * p + 3], v[p].w, sum);
        }
        return sum;
    }
};

template <class W, int N> struct Partner<W, Unpacked<N>> {
    static constexpr int SUMS = !W::OFFSET ? 0 : W::BLOCK == 32 ? 1 : N;
    int4 v[N];
    float d;
    int sums[SUMS ? SUMS : 1];  // of 32 or of 16 of the int8

    __device__ __forceinline__ Partner(const Staged& x, int j) {
        const u8 *scales = x.at + x.k, *behind = scales + x.k / W::BLOCK * 4;
        const int block = W::at(j, 0) / W::BLOCK;
#pragma unroll
        for (int p = 0; p < N; p++) v[p] = ((const int4*)x.at)[p * x.items + j];
        d = ((const float*)scales)[block];
#pragma unroll
        for (int p = 0; p < SUMS; p++)
            sums[p] = W::BLOCK == 32 ? ((const int*)behind)[block]
                                     : *(const i16*)(behind + W::at(j, p) / 8);
    }

    __device__ __forceinline__ float product(const Unpacked<N>& u) const {
        float sum = 0;
        int all = 0;
#pragma unroll
        for (int p = 0; p < N; p++) {
            int part = __dp4a(u.v[4 * p], v[p].x, 0);
            part = __dp4a(u.v[4 * p + 1], v[p].y, part);
            part = __dp4a(u.v[4 * p + 2], v[p].z, part);
            part = __dp4a(u.v[4 * p + 3], v[p].w, part);
            if (W::BLOCK == 32) {
                all += part;
            } else {
                sum = fmaf(u.scale[p], part, sum);
                if (W::OFFSET) sum = fmaf(u.offset[p], sums[p], sum);
            }
        }
        if (W::BLOCK == 32) {
            sum = u.scale[0] * all;
            if (W::OFFSET) sum = fmaf(u.offset[0], sums[0], sum);
        }
        return d * sum;
    }
};

// ---------------------------------------------------------------------------------- products

// Items of a row on their way to a lane: number `begun` + lane, + 32, ..
template <class W> struct Chunk {
    static constexpr int OWN = sizeof(W) <= 20 ? 4 : 2, SIZE = OWN * WARP;  // more need registers
    W item[OWN];

    __device__ __forceinline__ void load(const Planes& w, u32 row, int begun, int items) {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            int j = begun + (int)(threadIdx.x % WARP) + WARP * i;
            item[i].load(w, (size_t)(row * items + min(j, items - 1)));
        }
    }

    // What a lane has of the product.
    __device__ __forceinline__ float product(const Staged& x, int begun) const {
        const int lane = threadIdx.x % WARP;
        float sum = 0;
        if (begun + SIZE <= x.items) {
#pragma unroll
            for (int i = 0; i < OWN; i++) sum += one(x, item[i], begun + lane + WARP * i);
        } else {
#pragma unroll
            for (int i = 0; i < OWN; i++) {
                int j = begun + lane + WARP * i;
                if (j < x.items) sum += one(x, item[i], j);
            }
        }
        return sum;
    }

    static __device__ __forceinline__ float one(const Staged& x, const W& item, int j) {
        const Partner<W, typename W::Values> partner(x, j);
        typename W::Values u;
        item.unpack(j, u);
        return partner.product(u);
    }
};

// Goes along the warp's rows, in the order in which they are multiplied.
template <class W> struct Stroll {
    const Linear& t;
    int lo, hi, part;     // rows that are left; the matrix after the one at hand
    Planes w;             // of the matrix at hand
    int row, end, begun;  // of the chunk that is loaded next

    __device__ __forceinline__ Stroll(const Linear& t, int lo, int hi)
        : t(t), lo(lo), hi(hi), part(0), row(0), end(0), begun(0) {}

    __device__ __forceinline__ bool more() {
        for (; lo < hi; lo += BATCH, part = 0)
            while (part < 3) {
                const Rows own = rows_of(t, part++, lo, min(hi, lo + BATCH));
                if (own.count <= 0) continue;
                w = t.all.m[own.matrix].w;
                row = own.first, end = row + own.count;
                return true;
            }
        return false;
    }

    __device__ __forceinline__ void load(Chunk<W>& chunk, int items) {
        if (row >= end && !more()) return;
        chunk.load(w, row, begun, items);
        begun += Chunk<W>::SIZE;
        if (begun >= items) begun = 0, row++;
    }
};

// The products of the next rows with the activations, row i's in lane i + `shown`.
template <class W>
__device__ __forceinline__ float rows_product(Stroll<W>& ahead, Chunk<W>& chunk, const Staged& x,
                                              int count, int shown, float value) {
    const int lane = threadIdx.x % WARP;
#pragma unroll 1
    for (int row = shown; row < shown + count; row++) {
        float sum = 0;
#pragma unroll 1
        for (int begun = 0; begun < x.items; begun += Chunk<W>::SIZE) {
            const Chunk<W> now = chunk;
            ahead.load(chunk, x.items);
            sum += now.product(x, begun);
        }
        sum = warp_sum(sum);
        if (lane == row) value = sum;
    }
    return value;
}

// What is added to a lane's row: lane i + `shown` has row i of `own`.
__device__ __forceinline__ float added_to(const Matrix& m, const Rows& own, int shown) {
    int i = (int)(threadIdx.x % WARP) - shown, row = own.first + i;
    if (i < 0 || i >= own.count) return 0;
    float value = m.bias ? m.bias[row] : 0;
    return m.added ? value + ((const float*)m.added)[row] : value;
}

// The step: every warp of all blocks does rows of its own.
template <class W>
__device__ __noinline__ void linear_step(const Linear& t, Ready ready, u8* stage) {
    const Staged x = {stage, t.k, t.items};
    const int lane = threadIdx.x % WARP, gated = t.gated;
    const int first = first_row(t.rows, 0), last = first_row(t.rows, 1);
    Stroll<W> ahead(t, first, last);
    Chunk<W> chunk;
    ahead.load(chunk, x.items);
    ready.wait();
    stage_activations<W>(t, stage);
    __syncthreads();
#pragma unroll 1
    for (int lo = first; lo < last; lo += BATCH) {
        float value = 0, gate = 0;
        int shown = 0;
#pragma unroll 1
        for (int part = 0; part < 3; part++) {
            const Rows own = rows_of(t, part, lo, min(last, lo + BATCH));
            if (own.count <= 0) continue;
            const Matrix& m = t.all.m[part];
            const float added = added_to(m, own, shown);
            value = rows_product<W>(ahead, chunk, x, own.count, shown, value);
            if (!gated) {
                if (lane >= shown && lane < shown + own.count)
                    ((float*)m.y)[own.first + lane - shown] = value + added;
                shown += own.count;
            } else if (part == 0) {
                gate = value + added;
            } else if (lane < own.count) {
                ((float*)t.all.m[0].y)[lo + lane] = activate(t.act, gate) * (value + added);
            }
        }
    }
}
