#pragma once
// Matrix products of a walk, for one token: a warp goes along rows of the matrix, whose bytes flow
// through a ring of its own in shared memory. The ring is filled ahead of what is multiplied, over
// the end of one product into the next: weights are constants, so the memory need not wait for the
// steps between two products, nor for a meeting of the blocks.
//
// A chunk is what a slot of the ring holds: CHUNK items of a row, and the bytes of the other planes
// that belong to them (blocks.cuh). A row that is not a whole number of chunks ends with a short one.

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

__device__ __forceinline__ u32 shared_address(const void* p) {
    return (u32)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void copy16(u32 to, const u8* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from)
                 : "memory");
}

__device__ __forceinline__ void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING> __device__ __forceinline__ void wait_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Which matrix row `row` of all belongs to, and its number there.
__device__ __forceinline__ const Matrix& matrix_of(const Linear& t, int& row) {
    int m = 0;
    if (t.streams == 1) {
        if (row >= t.all.m[0].rows) {
            row -= (int)t.all.m[0].rows, m = 1;
            if (row >= t.all.m[1].rows) row -= (int)t.all.m[1].rows, m = 2;
        }
    }
    return t.all.m[m];
}

// A warp's ring, and what is to be fetched next.
struct Ring {
    u8* slots;
    int bytes;       // of a slot
    int head, tail;  // chunks fetched and taken so far
    int level;       // 0: fetches from the present product, 1: from the next, 2: waits for another
    int row, stream, piece;

    __device__ __forceinline__ u8* slot(int i) const { return slots + i % RING * bytes; }

    static __device__ __forceinline__ int first_row() {
        return threadIdx.x / WARP * gridDim.x + blockIdx.x;
    }

    // The next chunk, if there is one.
    __device__ __forceinline__ void fetch(const Linear* products, int present) {
        if (level > 1) return;
        const Linear& t = products[(present + level) & 1];
        const int lane = threadIdx.x % WARP;
        if (row < t.rows) {
            int own = row;
            const Matrix& m = stream ? t.all.m[1] : matrix_of(t, own);
            const int count = min(CHUNK, t.items - piece * CHUNK);
            const i64 first = (i64)own * t.items + piece * CHUNK;
            const u32 to = shared_address(slot(head));
            const u8* from = m.w.a + 16 * (first + lane);
#pragma unroll
            for (int i = 0; i < CHUNK / WARP; i++)
                if (lane + WARP * i < count) copy16(to + 16 * (lane + WARP * i), from + 512 * i);
            const u8* planes[3] = {m.w.b, m.w.c, m.w.d};
#pragma unroll
            for (int p = 0; p < 3; p++) {
                if (!t.bytes[p]) continue;
                i64 start = (first >> t.shift) * t.bytes[p];
                int skip = (int)start & 15, size = (count >> t.shift) * t.bytes[p];
                for (int i = 16 * lane; i < skip + size; i += 16 * WARP)
                    copy16(to + t.at[p] + i, planes[p] + (start - skip) + i);
            }
            close_group();
            head++;
            if (++piece < t.pieces) return;
            piece = 0;
            if (++stream < t.streams) return;
            stream = 0;
            row += gridDim.x * WARPS;
        }
        if (row < t.rows) return;
        row = first_row();
        level = level == 0 && t.ahead >= 0 ? 1 : 2;
    }

    __device__ __forceinline__ void fill(const Linear* products, int present) {
        while (head - tail < RING && level < 2) fetch(products, present);
    }

    // The oldest chunk, once it is here.
    __device__ __forceinline__ const u8* take() {
        if (head - tail == RING)
            wait_groups<RING - 1>();
        else
            wait_groups<0>();
        __syncwarp();
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
#pragma unroll
    for (int p = 0; p < parts_of(kind); p++)
#pragma unroll 4
        for (int j = threadIdx.x; j < t.items; j += THREADS)
            ((uint4*)stage)[p * t.items + j] = *(const uint4*)(t.x + part_at<W>(kind, j, p));
    for (int i = 4 * threadIdx.x; i < t.rest; i += 4 * THREADS)
        *(u32*)(stage + t.k + i) = *(const u32*)(t.x + t.k + i);
}

template <class W, int N>
__device__ __forceinline__ float product(const Floats<N>& u, const u8* stage, const Linear& t, int j) {
    float sum = 0;
#pragma unroll
    for (int p = 0; p < N / 4; p++) {
        float4 x = ((const float4*)stage)[p * t.items + j];
        sum = fmaf(u.v[4 * p], x.x, sum), sum = fmaf(u.v[4 * p + 1], x.y, sum);
        sum = fmaf(u.v[4 * p + 2], x.z, sum), sum = fmaf(u.v[4 * p + 3], x.w, sum);
    }
    return sum;
}

template <class W, int N>
__device__ __forceinline__ float product(const Unpacked<N>& u, const u8* stage, const Linear& t, int j) {
    const u8 *scales = stage + t.k, *sums = scales + t.k / W::BLOCK * 4;
    const int block = W::at(j, 0) / W::BLOCK;
    float sum = 0;
    int all = 0;
#pragma unroll
    for (int p = 0; p < N; p++) {
        int4 x = ((const int4*)stage)[p * t.items + j];
        int part = __dp4a(u.v[4 * p], x.x, 0);
        part = __dp4a(u.v[4 * p + 1], x.y, part);
        part = __dp4a(u.v[4 * p + 2], x.z, part);
        part = __dp4a(u.v[4 * p + 3], x.w, part);
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

// A row's product with the activations; its chunks are the next in the ring.
template <class W>
__device__ __forceinline__ float row_product(const Linear* products, int present, Ring& ring,
                                             const u8* stage, int own) {
    const Linear& t = products[present];
    const int lane = threadIdx.x % WARP;
    float sum = 0;
    for (int piece = 0; piece < t.pieces; piece++) {
        const int begun = piece * CHUNK, count = min(CHUNK, t.items - begun);
        const u8* slot = ring.take();
        Planes w = {slot, slot, slot, slot};
        const u8** planes[3] = {&w.b, &w.c, &w.d};
#pragma unroll
        for (int p = 0; p < 3; p++) {
            i64 start = (((i64)own * t.items + begun) >> t.shift) * t.bytes[p];
            *planes[p] += t.at[p] + ((int)start & 15);
        }
#pragma unroll
        for (int i = 0; i < CHUNK / WARP; i++) {
            int l = lane + WARP * i;
            if (l < count) {
                W item;
                typename W::Values u;
                item.load(w, l);
                item.unpack(begun + l, u);
                sum += product<W>(u, stage, t, begun + l);
            }
        }
        ring.release(products, present);
    }
    return warp_sum(sum);
}

__device__ __noinline__ float gated(int act, float gate, float up) {
    return activate(act, gate) * up;
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
    const int lane = threadIdx.x % WARP;
    for (int row = Ring::first_row(); row < t.rows; row += gridDim.x * WARPS) {
        int own = row;
        const Matrix& m = matrix_of(t, own);
        float value = 0, first = 0, added = 0;
        if (lane == 0 && m.added) added = ((const float*)m.added)[own];
#pragma unroll 1
        for (int stream = 0; stream < t.streams; stream++) {
            const float* bias = stream ? t.all.m[1].bias : m.bias;
            first = value;
            float more = bias && lane == 0 ? bias[own] : 0;
            value = row_product<W>(products, present, ring, stage, own) + more;
        }
        if (t.streams == 2) value = gated((int)t.gate.act, first, value);
        if (lane == 0) ((float*)m.y)[own] = value + added;
    }
    if (t.streams == 2 && t.gate.targets.count)
        finish_units(t.gate, (const float*)t.all.m[0].y, t.rows);
}
