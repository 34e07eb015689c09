#pragma once
// Matrix products of a walk, for one token. A warp has some neighbouring rows of the matrix, whose
// bytes flow through a ring of its own in shared memory. The ring is filled ahead of what is
// multiplied, over the end of one product into the next: weights are constants, so the memory need not
// wait for the steps between two products, nor for a meeting of the blocks.
//
// A chunk is what a slot of the ring holds: CHUNK items (blocks.cuh; a multiple of WARP) of the warp's
// rows, one row after the other, and the bytes of the other planes that belong to them.

#include "walk_copy.cuh"

#define BATCH WARP  // rows whose results a warp holds at a time, one to a lane

// One to three matrices of one format, one below the other; or two that give act(first) * second.
struct Linear {
    const u8* x;  // float32, or quantised
    int ahead;    // the walk's next step of this kind, or -1
    int k, items, rest;    // rest: bytes of quantised activations behind the k int8
    int rows, gated;       // of all matrices, or of each of the two
    int shift;             // a block has 1 << shift items
    int local;             // where the activations lie in shared memory already, or 0
    int act, unused;
    int bytes[3], at[3];   // of a block in planes b, c, d; where these begin in a slot
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

// The chunk's place in a plane of `bytes` a block, whose first item is number `first` of the matrix.
__device__ __forceinline__ u64 place_of(u32 first, int shift, int bytes) {
    return (u64)(first >> shift) * (u32)bytes;
}

// A slot after another, and how often all have been passed.
struct Position {
    int slot, round;

    __device__ __forceinline__ void next() {
        if (++slot == RING) slot = 0, round ^= 1;
    }
};

// A warp's ring, and what is to be fetched next.
struct Ring {
    u8* slots;
    Gates* gates;
    int bytes;          // of a slot
    Position head, tail;   // to be fetched next, to be taken next
    int held;           // chunks that are fetched and not yet released
    int level;          // 0: fetches from the present product, 1: from the next, 2: waits for another
    int lo, hi, part;   // rows that are left of the product; the matrix after the one at hand
    const Matrix* m;    // at hand
    u32 at, end;        // items of it to be fetched

    // The product `level` away begins.
    __device__ __forceinline__ void begin(const Linear* products, int present) {
        if (level > 1) return;
        int rows = products[(present + level) & 1].rows;
        lo = first_row(rows, 0), hi = first_row(rows, 1), part = 0;
    }

    // Have items at hand, if there are any.
    __device__ __forceinline__ bool more(const Linear* products, int present) {
        if (at < end) return true;
        while (level < 2) {
            const Linear& t = products[(present + level) & 1];
            for (; lo < hi; lo += BATCH, part = 0)
                while (part < 3) {
                    Rows own = rows_of(t, part++, lo, min(hi, lo + BATCH));
                    if (own.count <= 0) continue;
                    m = t.all.m + own.matrix;
                    at = (u32)own.first * t.items, end = at + (u32)own.count * t.items;
                    return true;
                }
            level = level == 0 && t.ahead >= 0 ? 1 : 2;
            begin(products, present);
        }
        return false;
    }

    // The next chunk, if there is one.
    __device__ __forceinline__ void fetch(const Linear* products, int present) {
        if (!more(products, present)) return;
        const Linear& t = products[(present + level) & 1];
        const int count = min((u32)CHUNK, end - at), shift = t.shift;
        Transfer transfer(gates, head.slot, slots + head.slot * bytes);
        transfer.add(0, m->w.a + 16 * (u64)at, 16 * count);
        const u8* const* planes = &m->w.b;
#pragma unroll
        for (int p = 0; p < 3; p++) {
            const int size = t.bytes[p];
            if (!size) break;
            u64 start = place_of(at, shift, size);
            int skip = (int)start & 15;
            transfer.add(t.at[p], planes[p] + (start - skip),
                         (skip + (count >> shift) * size + 15) & ~15);
        }
        transfer.close();
        at += count;
        head.next();
        held++;
    }

    __device__ __forceinline__ void fill(const Linear* products, int present) {
#pragma unroll 1
        while (held < RING && more(products, present)) fetch(products, present);
    }

    // Goes on to the next product, which may have begun: `products[present]`.
    __device__ __forceinline__ void turn(const Linear* products, int present) {
        if (level == 1) {
            level = 0;
        } else if (products[present].ahead >= 0) {
            level = 1;
            begin(products, present);
        }
    }

    // The oldest chunk, once it is here.
    __device__ __forceinline__ const u8* take() {
        gates->wait(tail.slot, tail.round, held);
        return slots + tail.slot * bytes;
    }

    // Its slot is free.
    __device__ __forceinline__ void release(const Linear* products, int present) {
        __syncwarp();
        tail.next();
        held--;
        fetch(products, present);
    }
};

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

template <class W, int N>
__device__ __forceinline__ float product(const Floats<N>& u, const Staged& x, int j) {
    float sum = 0;
#pragma unroll
    for (int p = 0; p < N / 4; p++) {
        float4 v = ((const float4*)x.at)[p * x.items + j];
        sum = fmaf(u.v[4 * p], v.x, sum), sum = fmaf(u.v[4 * p + 1], v.y, sum);
        sum = fmaf(u.v[4 * p + 2], v.z, sum), sum = fmaf(u.v[4 * p + 3], v.w, sum);
    }
    return sum;
}

template <class W, int N>
__device__ __forceinline__ float product(const Unpacked<N>& u, const Staged& x, int j) {
    const u8 *scales = x.at + x.k, *sums = scales + x.k / W::BLOCK * 4;
    const int block = W::at(j, 0) / W::BLOCK;
    float sum = 0;
    int all = 0;
#pragma unroll
    for (int p = 0; p < N; p++) {
        int4 v = ((const int4*)x.at)[p * x.items + j];
        int part = __dp4a(u.v[4 * p], v.x, 0);
        part = __dp4a(u.v[4 * p + 1], v.y, part);
        part = __dp4a(u.v[4 * p + 2], v.z, part);
        part = __dp4a(u.v[4 * p + 3], v.w, part);
        if (W::BLOCK == 32) {
            all += part;
        } else {
            sum = fmaf(u.scale[p], part, sum);
            if (W::OFFSET) sum = fmaf(u.offset[p], *(const i16*)(sums + W::at(j, p) / 8), sum);
        }
    }
    if (W::BLOCK == 32) {
        sum = u.scale[0] * all;
        if (W::OFFSET) sum = fmaf(u.offset[0], *(const int*)(sums + 4 * block), sum);
    }
    return *(const float*)(scales + 4 * block) * sum;
}

// ---------------------------------------------------------------------------------- products

// What a lane has of the product of items from..to of a chunk, the first of which is number `begun` of
// its row.
template <class W>
__device__ __forceinline__ float part_product(const Planes& w, const Staged& x, int begun, int from,
                                              int to) {
    const int lane = threadIdx.x % WARP, ahead = begun - from;
    float sum = 0;
    int l = from + lane;
#pragma unroll 1
    for (; l - lane + 4 * WARP <= to; l += 4 * WARP) {
        W items[4];
        float sums[4];
#pragma unroll
        for (int i = 0; i < 4; i++) items[i].load(w, l + WARP * i);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            typename W::Values u;
            items[i].unpack(ahead + l + WARP * i, u);
            sums[i] = product<W>(u, x, ahead + l + WARP * i);
        }
        sum += (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
#pragma unroll 1
    for (; l < to; l += WARP) {
        W item;
        typename W::Values u;
        item.load(w, l);
        item.unpack(ahead + l, u);
        sum += product<W>(u, x, ahead + l);
    }
    return sum;
}

// The products of up to BATCH rows of a matrix with the activations, row i's in lane i + `shown`. Their
// chunks are the next in the ring.
template <class W>
__device__ __forceinline__ void rows_product(const Linear* products, int present, Ring& ring,
                                             const Staged& x, const Rows& own, int shown,
                                             float& value) {
    const Linear& t = products[present];
    const int lane = threadIdx.x % WARP;
    u32 at = (u32)own.first * x.items;
    int begun = 0, row = shown, left = own.count * x.items;
    float sum = 0;
#pragma unroll 1
    while (left > 0) {
        const int count = min(CHUNK, left);
        const u8* slot = ring.take();
        auto plane = [&](int p) {
            return slot + t.at[p] + ((int)place_of(at, t.shift, t.bytes[p]) & 15);
        };
        const Planes w = {slot, plane(0), plane(1), plane(2)};
#pragma unroll 1
        for (int from = 0; from < count;) {
            int to = min(count, from + x.items - begun);
            sum += part_product<W>(w, x, begun, from, to);
            begun += to - from;
            from = to;
            if (begun < x.items) break;
            sum = warp_sum(sum);
            if (lane == row) value = sum;
            row++, begun = 0, sum = 0;
        }
        at += count, left -= count;
        ring.release(products, present);
    }
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
__device__ __forceinline__ void linear_step(const Linear* products, int present, Ring& ring,
                                            u8* stage) {
    const Linear& t = products[present];
    const Staged x = {stage, t.k, t.items};
    const int lane = threadIdx.x % WARP, gated = t.gated;
    const int first = first_row(t.rows, 0), last = first_row(t.rows, 1);
#pragma unroll 1
    for (int lo = first; lo < last; lo += BATCH) {
        const int hi = min(last, lo + BATCH);
        float value = 0, gate = 0;
        int shown = 0;
#pragma unroll 1
        for (int part = 0; part < 3; part++) {
            const Rows own = rows_of(t, part, lo, hi);
            if (own.count <= 0) continue;
            const Matrix& m = t.all.m[part];
            const float added = added_to(m, own, shown);
            rows_product<W>(products, present, ring, x, own, shown, value);
            if (!gated) {
                if (lane >= shown && lane < shown + own.count)
                    ((float*)m.y)[own.first + lane - shown] = value + added;
                shown += own.count;
            } else if (part == 0) {
                gate = value + added;
            } else if (lane < own.count) {
                ((float*)t.all.m[0].y)[lo + lane] =
                    activate(t.act, gate) * (value + added);
            }
        }
    }
}
