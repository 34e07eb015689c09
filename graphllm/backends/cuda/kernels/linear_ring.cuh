#pragma once
// The ring of linear_chain.cu: rows of weights that the copy engine brings to shared memory, slot after slot. WARPS: warps
// that multiply (consumers); one more, the producer, requests rows.

#include "dot.cuh"
#include "matrices.cuh"
#include "tensor_copies.cuh"

constexpr int MAX_SLOTS = 32, THREADS = WARP * WARPS;  // the latter of consumers

// Activations, or what is done with float32 to get them. NORMED_TWICE: the norm of a sum with a norm.
enum Source { AS_IS, NORMED, QUANTISED, NORMED_TWICE };

// A linear of up to three matrices of the format W, whose rows are numbered consecutively, or a gated unit of two.
// ROW_ITEMS: items of a row. LANES: lanes of a warp that share a row. ITEMS: items of each row that a lane multiplies.
// ROWS: rows of a slot, of each of MATRICES. BARRIER: it begins with one of the grid. SOURCE_STEP, STEP: steps after the launch's
// own that compute the activations and the linear.
template <class W, int ROW_ITEMS, int LANES, int ITEMS_, int ROWS_, int MATRICES_, int SOURCE_, bool BARRIER_, int SOURCE_STEP_,
          int STEP_>
struct Linear {
    typedef W Format;
    typedef SumOf<W> Sum;
    static constexpr int ROW_LANES = LANES, ITEMS = ITEMS_, ROWS = ROWS_, MATRICES = MATRICES_, SOURCE = SOURCE_;
    static constexpr int SOURCE_STEP = SOURCE_STEP_, STEP = STEP_, DEPTH = ROW_ITEMS * W::ITEM;
    static constexpr bool BARRIER = BARRIER_, WHOLE = ROW_ITEMS == WARPS * LANES * ITEMS_;  // all lanes have as many items
    static constexpr int GROUPS = WARP / LANES;              // rows that a warp multiplies together
    static constexpr int PASSES = ROWS * MATRICES / GROUPS;  // to multiply a slot
    static_assert(ROWS % GROUPS == 0 && PASSES <= LANES, "rows of one matrix; each lane gets at most one sum");

    // What a lane of a consumer multiplies: row `group` of those of a pass, and of each row item(0), item(1) and so on.
    __device__ static __forceinline__ int group() { return threadIdx.x % WARP / LANES; }
    __device__ static __forceinline__ int row_lane() { return threadIdx.x % WARP % LANES; }
    __device__ static __forceinline__ int item(int i) {
        return (int)threadIdx.x / WARP * LANES * ITEMS + row_lane() + LANES * i;
    }
    __device__ static __forceinline__ bool has_item(int i) { return WHOLE || item(i) < ROW_ITEMS; }

    // Bytes of a row in plane p.
    __device__ static constexpr int plane_nbytes(int p) { return p ? W::STEPS[p - 1] * ROW_ITEMS / WARP : 16 * ROW_ITEMS; }
    // Where plane p of a slot begins. Copies to addresses that are not multiples of 128 take up to 1.5 times as long.
    // Copies have whole units of 16 bytes, so that up to 30 bytes of other rows surround those of the slot.
    __device__ static constexpr int plane_at(int p) {
        return p ? plane_at(p - 1) + (ROWS * plane_nbytes(p - 1) + (apart(p - 1) ? 0 : 30) + 127) / 128 * 128 : 0;
    }
    // Whether each row of plane p begins at a multiple of 16 bytes.
    __device__ static constexpr bool apart(int p) { return plane_nbytes(p) % 16 == 0; }
    // Bytes in plane p of a slot before those of its first row.
    __device__ static constexpr int before(int p, int row) { return apart(p) ? 0 : row * plane_nbytes(p) % 16; }
    // Bytes of a slot, and of each matrix in it.
    __device__ static constexpr int matrix_nbytes() { return plane_at(4); }
    __device__ static constexpr int slot_nbytes() { return MATRICES * plane_at(4); }
};

__device__ constexpr int largest() { return 0; }
template <class... T> __device__ constexpr int largest(int first, T... rest) {
    return first > largest(rest...) ? first : largest(rest...);
}
template <class... S> struct List {
    static constexpr int COUNT = sizeof...(S);
    __device__ static constexpr int slot_nbytes() { return largest(S::slot_nbytes()...); }
    // Of a row of activations: int8, and for each 32 a scale and a sum at most.
    __device__ static constexpr int row_nbytes() { return INTEGER ? largest(S::DEPTH...) * 5 / 4 : 0; }
};
typedef List<STAGES> All;
constexpr int SLOT_NBYTES = All::slot_nbytes();

// The rows of a block. A slot has at most ROWS of them, all of one matrix.
template <class S> struct BlockRows {
    int first, end, ends[3];

    __device__ __forceinline__ explicit BlockRows(const Matrices& all) {
        ends[0] = (int)all.m[0].rows;
        ends[1] = S::MATRICES == 2 ? ends[0] : ends[0] + (int)all.m[1].rows;
        ends[2] = S::MATRICES == 2 ? ends[0] : ends[1] + (int)all.m[2].rows;
        const u32 each = (u32)ends[2] / gridDim.x, rest = (u32)ends[2] % gridDim.x;  // the first blocks have one more
        first = (int)(each * blockIdx.x + min(blockIdx.x, rest));
        end = first + (int)(each + (blockIdx.x < rest));
    }
    // The number of row `at` in its matrix.
    __device__ __forceinline__ int in_matrix(int at) const {
        return at < ends[0] ? at : at < ends[1] ? at - ends[0] : at - ends[1];
    }
    // Rows of the slot whose first row is `at`.
    __device__ __forceinline__ int count(int at) const {
        const int last = at < ends[0] ? ends[0] : at < ends[1] ? ends[1] : ends[2];
        return min(S::ROWS, min(last, end) - at);
    }
};

// Slot after slot: its number, and the parity of the barriers' phases.
struct SlotCursor {
    int slots, slot, parity;
    __device__ __forceinline__ void advance() {
        if (++slot == slots) slot = 0, parity ^= 1;
    }
};

__shared__ u64 full[MAX_SLOTS], released[MAX_SLOTS];  // barriers of the slots

// By one warp; the others may use the barriers after `sync_block`.
__device__ __forceinline__ void init_barriers(u64* barriers, int count, int arrivals) {
    if (threadIdx.x % WARP == 0) {
#pragma unroll 1
        for (int i = 0; i < count; i++) init_barrier(barriers + i, arrivals);
        publish_barriers();
    }
    __syncwarp();
}

// Barriers of all warps, which is used once, and of the consumers.
__device__ __forceinline__ void sync_block() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS + WARP) : "memory"); }
__device__ __forceinline__ void sync_consumers() { asm volatile("bar.sync 2, %0;" ::"n"(THREADS) : "memory"); }

// ------------------------------------------------------------------------------------ producer

// The producer. It requests all slots once before it waits for the consumers, which initialize the other barriers.
struct Producer {
    u8* ring;
    SlotCursor at;
    bool synced = false;

    __device__ __forceinline__ Producer(u8* ring, int slots) : ring(ring), at{slots, 0, 1} {
        init_barriers(full, slots, 1);
    }
    template <class S> __device__ __forceinline__ void request(const Matrices& all) {
        const int lane = threadIdx.x % WARP, plane = lane % 4, matrix = lane / 4;  // what the lane requests
        const int nbytes = plane == 0   ? S::plane_nbytes(0)
                           : plane == 1 ? S::plane_nbytes(1)
                           : plane == 2 ? S::plane_nbytes(2)
                                        : S::plane_nbytes(3);
        const int place = plane == 0 ? 0 : plane == 1 ? S::plane_at(1) : plane == 2 ? S::plane_at(2) : S::plane_at(3);
        const bool requests = matrix < S::MATRICES && nbytes;
        const BlockRows<S> rows(all);
        int n;
#pragma unroll 1
        for (int next = rows.first; next < rows.end; next += n) {
            if (synced) wait_barrier(released + at.slot, at.parity);
            n = rows.count(next);
            int row = next;
            Matrix m = all.m[S::MATRICES == 2 && matrix ? 1 : 0];
            if (S::MATRICES == 1) find_matrix<1>(all, row, m);
            const u8* const from = plane == 0 ? m.w.a : plane == 1 ? m.w.b : plane == 2 ? m.w.c : m.w.d;
            u8* const to = ring + at.slot * SLOT_NBYTES + matrix * S::matrix_nbytes() + place;
            const i64 begin = (i64)row * nbytes / 16 * 16, end = ((i64)(row + n) * nbytes + 15) / 16 * 16;
            const int copied = requests ? (int)(end - begin) : 0, total = warp_sum(copied);
            if (lane == 0) arrive_for_copies(full + at.slot, total);
            __syncwarp();
            if (requests) copy_bytes(to, from + begin, copied, full + at.slot);
            at.advance();
            if (!synced && at.slot == 0) sync_block(), synced = true;
        }
    }
    __device__ __forceinline__ void end() {
        if (!synced) sync_block();
    }
};
