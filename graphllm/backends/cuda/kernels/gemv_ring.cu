// GEMV of one token whose weights the copy engine brings (capability 9.0): linears of one activation, or a gated unit.
// Each multiprocessor has one block, whose ring of slots takes most of the shared memory. One warp, the producer, requests
// rows, slot after slot; the others, the consumers, multiply them. The first slots are filled while the kernels before
// still run.
//
// FORMAT, INTEGER: as in gemv.cu. MATRICES: 1: up to three matrices, whose rows are numbered consecutively; 2: a gated unit,
// act(first) * second. WARPS: consumers. ROW_ITEMS: items of a row. ROW_LANES: lanes of a warp that share a row. ITEMS: items
// of each row that a lane multiplies. ROWS: rows of a slot, of each of MATRICES.
//
// Each consumer multiplies the same part of all rows of the block, so that it keeps the activations of that part in
// registers. The sums of the parts are added at the end.

#define LONE 1
#define ITEMS_IN_SHARED 1
#include "dot.cuh"
#include "matrices.cuh"
#include "tensor_copies.cuh"

constexpr int MAX_SLOTS = 32, THREADS = WARP * WARPS;           // the latter of consumers
constexpr int DEPTH = ROW_ITEMS * FORMAT::ITEM;                 // elements of a row
constexpr bool WHOLE = ROW_ITEMS == WARPS * ROW_LANES * ITEMS;  // all lanes have as many items
constexpr int GROUPS = WARP / ROW_LANES;                        // rows that a warp multiplies together
constexpr int PASSES = ROWS * MATRICES / GROUPS;                // to multiply a slot
static_assert(ROWS % GROUPS == 0 && PASSES <= ROW_LANES, "rows of one matrix; each lane gets at most one sum");

// What a lane of a consumer multiplies: row `group` of those of a pass, and of each row item(0), item(1) and so on.
__device__ __forceinline__ int group() { return threadIdx.x % WARP / ROW_LANES; }
__device__ __forceinline__ int row_lane() { return threadIdx.x % WARP % ROW_LANES; }
__device__ __forceinline__ int item(int i) {
    return (int)threadIdx.x / WARP * ROW_LANES * ITEMS + row_lane() + ROW_LANES * i;
}
__device__ __forceinline__ bool has_item(int i) { return WHOLE || item(i) < ROW_ITEMS; }

// Bytes of a row in plane p.
__device__ constexpr int plane_nbytes(int p) { return p ? FORMAT::STEPS[p - 1] * ROW_ITEMS / WARP : 16 * ROW_ITEMS; }
// Whether each row of plane p begins at a multiple of 16 bytes.
__device__ constexpr bool rows_are_aligned(int p) { return plane_nbytes(p) % 16 == 0; }
// Where plane p of a slot begins. Copies to addresses that are not multiples of 128 take up to 1.5 times as long.
// Copies have whole units of 16 bytes, so that up to 30 bytes of other rows surround those of the slot.
__device__ constexpr int plane_at(int p) {
    return p ? plane_at(p - 1) + (ROWS * plane_nbytes(p - 1) + (rows_are_aligned(p - 1) ? 0 : 30) + 127) / 128 * 128 : 0;
}
// Bytes in plane p of a slot before those of its first row.
__device__ __forceinline__ int lead_nbytes(int p, int row) { return rows_are_aligned(p) ? 0 : row * plane_nbytes(p) % 16; }
constexpr int MATRIX_NBYTES = plane_at(4), SLOT_NBYTES = MATRICES * MATRIX_NBYTES;  // of a slot, the former of each matrix

// The rows of a block. A slot has at most ROWS of them, all of one matrix.
struct BlockRows {
    int first, end, ends[3];

    __device__ __forceinline__ explicit BlockRows(const Matrices& all) {
        ends[0] = (int)all.m[0].rows;
        ends[1] = MATRICES == 2 ? ends[0] : ends[0] + (int)all.m[1].rows;
        ends[2] = MATRICES == 2 ? ends[0] : ends[1] + (int)all.m[2].rows;
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
        return min(ROWS, min(last, end) - at);
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

// Request the rows of the block. All slots are requested once before the producer waits for the consumers, which
// initialize the other barriers.
__device__ __forceinline__ void request_rows(u8* ring, int slots, const Matrices& all) {
    SlotCursor at = {slots, 0, 1};
    bool synced = false;
    init_barriers(full, slots, 1);
    const int lane = threadIdx.x % WARP, plane = lane % 4, matrix = lane / 4;  // what the lane requests
    const int nbytes = plane == 0   ? plane_nbytes(0)
                       : plane == 1 ? plane_nbytes(1)
                       : plane == 2 ? plane_nbytes(2)
                                    : plane_nbytes(3);
    const int place = plane == 0 ? 0 : plane == 1 ? plane_at(1) : plane == 2 ? plane_at(2) : plane_at(3);
    const bool requests = matrix < MATRICES && nbytes;
    const BlockRows rows(all);
    int n;
#pragma unroll 1
    for (int next = rows.first; next < rows.end; next += n) {
        if (synced) wait_barrier(released + at.slot, at.parity);
        n = rows.count(next);
        int row = next;
        Matrix m = all.m[MATRICES == 2 && matrix ? 1 : 0];
        if (MATRICES == 1) find_matrix<1>(all, row, m);
        const u8* const from = plane == 0 ? m.w.a : plane == 1 ? m.w.b : plane == 2 ? m.w.c : m.w.d;
        u8* const to = ring + at.slot * SLOT_NBYTES + matrix * MATRIX_NBYTES + place;
        const i64 begin = (i64)row * nbytes / 16 * 16, end = ((i64)(row + n) * nbytes + 15) / 16 * 16;
        const int copied = requests ? (int)(end - begin) : 0, total = warp_sum(copied);
        if (lane == 0) arrive_for_copies(full + at.slot, total);
        __syncwarp();
        if (requests) copy_bytes(to, from + begin, copied, full + at.slot);
        at.advance();
        if (!synced && at.slot == 0) sync_block(), synced = true;
    }
    if (!synced) sync_block();
}

// ------------------------------------------------------------------------------------ consumers

struct Consumer {
    typedef SumOf<FORMAT> Sum;
    u8* ring;
    Sum* parts;  // sums of parts, by warp and row
    int most;    // rows of a block at most, of all its matrices
    SlotCursor at;
    Activations<FORMAT> x[ITEMS] = {};  // of the items that the lane multiplies

    __device__ __forceinline__ void load_activations(const u8* row) {
#pragma unroll
        for (int i = 0; i < ITEMS; i++)
            if (has_item(i)) x[i].load(Activations<FORMAT>::place(row, DEPTH, item(i)), true);
    }

    // Multiply the rows of a slot, `row` and n - 1 more of a matrix, and store the sums of this warp's part.
    __device__ __forceinline__ void multiply(const Planes& start, int row, int done, int n) {
        const int own = row_lane(), warp = threadIdx.x / WARP;
        wait_barrier(full + at.slot, at.parity);
        Sum sums[PASSES] = {};
#pragma unroll
        for (int p = 0; p < PASSES; p++) {
            const int r = p * GROUPS % ROWS, of = at.slot * SLOT_NBYTES + p * GROUPS / ROWS * MATRIX_NBYTES;
            Planes from = {start.a + of + r * plane_nbytes(0), start.b + of + r * plane_nbytes(1) + lead_nbytes(1, row),
                           start.c + of + r * plane_nbytes(2) + lead_nbytes(2, row),
                           start.d + of + r * plane_nbytes(3) + lead_nbytes(3, row)};
#pragma unroll
            for (int i = 0; i < ITEMS; i++) {
                FORMAT w;
                if (has_item(i)) {
                    w.load(from);
                    sums[p] += product(w, own, x[i]);
                }
                advance<FORMAT>(from, ROW_LANES);
            }
        }
        __syncwarp();
        if (threadIdx.x % WARP == 0) arrive(released + at.slot);
        at.advance();
        const Sum total = warp_sums<PASSES, ROW_LANES>(sums, own);
        constexpr int EACH = ROW_LANES / PASSES;  // lanes with the same sum
        const int sum = own / EACH * GROUPS + group(), r = sum % ROWS;
        if (own % EACH == 0 && r < n) parts[warp * most + (done + r) * MATRICES + sum / ROWS] = total;
    }

    // Sum number `which` of the block, for row `row` of a matrix.
    __device__ __forceinline__ float total(const Planes& w, int row, const u8* activations, int which) const {
        Sum sum = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i++) sum += parts[i * most + which];
        return scaled(sum, w, row, activations, DEPTH);
    }
};

// What is added to the result of a row.
struct Addends {
    float bias = 0, residual = 0;

    __device__ __forceinline__ void load(const Matrices& all, int row) {
        Matrix m = all.m[0];
        find_matrix<1>(all, row, m);
        bias = m.bias ? m.bias[row] : 0;
        residual = m.residual ? ((const float*)m.residual)[row] : 0;
    }
};

// `most`: rows of a block at most, of all its matrices.
extern "C" __global__ void __launch_bounds__(THREADS + WARP, 1)
    gemv_ring(const u8* x, const i64* live, const __grid_constant__ Matrices all, int act, int most, int slots TIMESTAMPS) {
    RECORD_TIMESTAMPS
    launch_next();
    extern __shared__ __align__(128) u8 ring[];
    if (threadIdx.x >= THREADS) return request_rows(ring, slots, all);
    Consumer consumer = {ring, (Consumer::Sum*)(ring + slots * SLOT_NBYTES), most, {slots, 0, 0}};
    const bool any = *live > 0;  // whether there is a token
    if (threadIdx.x < WARP) init_barriers(released, slots, WARPS);
    sync_block();
    wait_for_previous();
    consumer.load_activations(x);
    const BlockRows rows(all);
    const Planes start = FORMAT::item({ring + group() * plane_nbytes(0), ring + plane_at(1) + group() * plane_nbytes(1),
                                       ring + plane_at(2) + group() * plane_nbytes(2),
                                       ring + plane_at(3) + group() * plane_nbytes(3)},
                                      item(0));
    const int mine = rows.first + threadIdx.x;  // the first row that the thread stores
    Addends more;
    if (MATRICES == 1 && mine < rows.end) more.load(all, mine);
    int n;
#pragma unroll 1
    for (int next = rows.first; next < rows.end; next += n) {
        n = rows.count(next);
        consumer.multiply(start, rows.in_matrix(next), next - rows.first, n);
    }
    sync_consumers();
    if (!any) return;
#pragma unroll 1
    for (int next = mine; next < rows.end; next += THREADS) {
        const int which = (next - rows.first) * MATRICES;
        int row = next;
        Matrix m = all.m[0];
        if constexpr (MATRICES == 2) {
            const Matrix& up = all.m[1];
            const float sum = consumer.total(m.w, row, x, which) + (m.bias ? m.bias[row] : 0);
            const float other = consumer.total(up.w, row, x, which + 1) + (up.bias ? up.bias[row] : 0);
            ((float*)m.y)[row] = activate(act, sum) * other;
        } else {
            find_matrix<1>(all, row, m);
            if (next != mine) more.load(all, next);
            ((float*)m.y)[row] = consumer.total(m.w, row, x, which) + more.bias + more.residual;
        }
    }
}
