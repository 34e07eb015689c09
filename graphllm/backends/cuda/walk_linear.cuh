#pragma once
// Matrix products of a walk, for one token: a warp goes along rows of the matrix, whose bytes flow
// through a ring of its own in shared memory. The ring is filled ahead of what is multiplied, over
// the end of one product into the next: weights are constants, so the memory need not wait for the
// steps between two products, nor for a meeting of the blocks.
//
// A chunk is what a slot of the ring holds: CHUNK items of a row, and the bytes of the other planes
// that belong to them (blocks.cuh). A row that is not a whole number of chunks ends with a short one.

#include "walk_copy.cuh"

#define CHUNK 128  // items, four to a lane

// One to three matrices of one format, or two that give act(first) * second; see linear.cu.
struct Linear {
    const u8* x;  // float32, or quantised
    int ahead;    // the walk's next step of this kind, or -1
    int k, items, rest;         // rest: bytes of quantised activations behind the k int8
    int rows, streams, pieces;  // of all matrices; matrices of a row; chunks of each of its rows
    int shift;                  // a block has 1 << shift items
    int bytes[3], at[3];        // of a block in planes b, c, d; where these begin in a slot
    Matrices all;
    Gate gate;
};

// Which matrix row `row` of all belongs to, and its number there.
__device__ __forceinline__ const Matrix& matrix_of(const Linear& t, int& row) {
    int m = 0;
    if (t.streams == 1) {
        int first = (int)t.all.m[0].rows, second = (int)t.all.m[1].rows;
        if (row >= first) {
            row -= first, m = 1;
            if (row >= second) row -= second, m = 2;
        }
    }
    return t.all.m[m];
}

// The chunk's place in a plane of `bytes` a block, whose first item is number `first` of the matrix.
__device__ __forceinline__ u64 place_of(u32 first, int shift, int bytes) {
    return (u64)(first >> shift) * (u32)bytes;
}

// A warp's ring, and what is to be fetched next.
struct Ring {
    u8* slots;
    Gates* gates;
    int bytes;       // of a slot
    int head, tail;  // chunks fetched and taken so far
    int level;       // 0: fetches from the present product, 1: from the next, 2: waits for another
    int row, stream, piece;

    __device__ __forceinline__ u8* slot(int i) const { return slots + i % RING * bytes; }

    static __device__ __forceinline__ int first_row() {
        return threadIdx.x / WARP * gridDim.x + blockIdx.x;
    }

    // Chunk `piece` of a row, on its way to a slot.
    __device__ __forceinline__ void copy(const Linear& t) {
        int own = row;
        const Matrix& m = stream ? t.all.m[1] : matrix_of(t, own);
        const int items = t.items, count = min(CHUNK, items - piece * CHUNK), shift = t.shift;
        const u32 first = (u32)own * items + piece * CHUNK;
        const u8* planes[3] = {m.w.b, m.w.c, m.w.d};
        Transfer transfer(gates, head % RING, slot(head));
        transfer.add(0, m.w.a + 16 * (u64)first, 16 * count);
#pragma unroll
        for (int p = 0; p < 3; p++) {
            const int bytes = t.bytes[p];
            if (!bytes) break;
            u64 start = place_of(first, shift, bytes);
            int skip = (int)start & 15, size = (count >> shift) * bytes;
            transfer.add(t.at[p], planes[p] + (start - skip), (skip + size + 15) & ~15);
        }
        transfer.close();
    }

    // The next chunk, if there is one.
    __device__ __forceinline__ void fetch(const Linear* products, int present) {
        if (level > 1) return;
        const Linear& t = products[(present + level) & 1];
        const int rows = t.rows;
        if (row < rows) {
            copy(t);
            head++;
            if (++piece < t.pieces) return;
            piece = 0;
            if (++stream < t.streams) return;
            stream = 0;
            row += gridDim.x * WARPS;
            if (row < rows) return;
        }
        row = first_row();
        level = level == 0 && t.ahead >= 0 ? 1 : 2;
    }

    __device__ __forceinline__ void fill(const Linear* products, int present) {
        while (head - tail < RING && level < 2) fetch(products, present);
    }

    // The oldest chunk, once it is here.
    __device__ __forceinline__ const u8* take() {
        gates->wait(tail, head);
        return slot(tail);
    }

    // Its slot is free.
    __device__ __forceinline__ void release(const Linear* products, int present) {
        __syncwarp();
        tail++;
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
    const u8* x = t.x;
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

// What a lane has of a chunk's product: items `lane`, `lane` + 32, .. of those from item `begun` of a
// row on.
template <class W>
__device__ __forceinline__ float chunk_product(const Planes& w, const Staged& x, int begun, int count) {
    constexpr int EACH_LANE = CHUNK / WARP;
    const int lane = threadIdx.x % WARP;
    float sum = 0;
    if (count == CHUNK) {
        W items[EACH_LANE];
        float sums[EACH_LANE];
#pragma unroll
        for (int i = 0; i < EACH_LANE; i++) items[i].load(w, lane + WARP * i);
#pragma unroll
        for (int i = 0; i < EACH_LANE; i++) {
            typename W::Values u;
            items[i].unpack(begun + lane + WARP * i, u);
            sums[i] = product<W>(u, x, begun + lane + WARP * i);
        }
#pragma unroll
        for (int i = 0; i < EACH_LANE; i++) sum += sums[i];
    } else {
#pragma unroll 1
        for (int l = lane; l < count; l += WARP) {
            W item;
            typename W::Values u;
            item.load(w, l);
            item.unpack(begun + l, u);
            sum += product<W>(u, x, begun + l);
        }
    }
    return sum;
}

// A row's product with the activations; its chunks are the next in the ring.
template <class W>
__device__ __forceinline__ float row_product(const Linear* products, int present, Ring& ring,
                                             const Staged& x, int own) {
    const Linear& t = products[present];
    const int pieces = t.pieces;
    float sum = 0;
#pragma unroll 1
    for (int piece = 0; piece < pieces; piece++) {
        const int begun = piece * CHUNK;
        const u32 first = (u32)own * x.items + begun;
        const u8* slot = ring.take();
        auto plane = [&](int p) {
            return slot + t.at[p] + ((int)place_of(first, t.shift, t.bytes[p]) & 15);
        };
        const Planes w = {slot, plane(0), plane(1), plane(2)};
        sum += chunk_product<W>(w, x, begun, min(CHUNK, x.items - begun));
        ring.release(products, present);
    }
    return warp_sum(sum);
}

// The warp's rows of a gated product are written. Whoever is the last to finish one of UNIT results
// quantises them. That is told once for all rows: to wait for the memory takes long while weights are
// on their way.
__device__ __forceinline__ void finish_units(const Gate& gate, const float* y, int width) {
    const int lane = threadIdx.x % WARP, by = gridDim.x * WARPS;
    __threadfence();
    for (int first = Ring::first_row(); first < width; first += WARP * by) {
        int row = first + lane * by, group = row / UNIT, last = 0;
        if (row < width) {
            last = (int)atomicAdd(gate.counts + group, 1) + 1 == min(UNIT, width - group * UNIT);
            if (last) gate.counts[group] = 0;
        }
        for (u32 left = __ballot_sync(FULL, last); left; left &= left - 1) {
            int start = __shfl_sync(FULL, group, __ffs(left) - 1) * UNIT;
            __threadfence();
            emit_unit(y + start, &gate.targets, start, width, width);
        }
    }
}

// The step: every warp of all blocks does rows of its own.
template <class W>
__device__ __forceinline__ void linear_step(const Linear* products, int present, Ring& ring,
                                            u8* stage) {
    const Linear& t = products[present];
    const Staged x = {stage, t.k, t.items};
    const int lane = threadIdx.x % WARP, rows = t.rows;
    for (int row = Ring::first_row(); row < rows; row += gridDim.x * WARPS) {
        int own = row;
        const Matrix& m = matrix_of(t, own);
        float value = 0, first = 0, added = 0;
        if (lane == 0 && m.added) added = ((const float*)m.added)[own];
#pragma unroll 1
        for (int stream = 0; stream < t.streams; stream++) {
            const float* bias = stream ? t.all.m[1].bias : m.bias;
            first = value;
            float more = bias && lane == 0 ? bias[own] : 0;
            value = row_product<W>(products, present, ring, x, own) + more;
        }
        if (t.streams == 2) value = activate((int)t.gate.act, first) * value;
        if (lane == 0) ((float*)m.y)[own] = value + added;
    }
    if (t.streams == 2 && t.gate.targets.count)
        finish_units(t.gate, (const float*)t.all.m[0].y, t.rows);
}
