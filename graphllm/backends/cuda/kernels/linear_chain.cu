// Linears of one token, one after the other in one launch, with the norms and quantizations between them. The copy
// engine brings the weights (capability 9.0): each multiprocessor has one block, whose ring of slots takes most of the
// shared memory. Rows of the next linears are requested as slots are released, while results are still exchanged, so that
// memory is not idle then. The first slots are filled while the kernels before still run.
//
// INTEGER: as in gemv.cu. WARPS: see linear_ring.cuh. STAGES: a list of `Linear`s.
//
// Each warp multiplies the same part of all rows of the block, so that it keeps the activations of that part in
// registers. The sums of its parts are added at the end of a stage, then comes a barrier of the grid.

#define TOKENS 1
#define LONE 1
#define ITEMS_IN_SHARED 1
#include "chain_activations.cuh"
#include "grid_barrier.cuh"

constexpr int ROW_NBYTES = (All::row_nbytes() + 127) / 128 * 128;  // of a row of activations in shared memory

struct Chain {
    ChainStage stages[All::COUNT];
};

// In the timed build, the steps of a chain have adjacent timestamps, those of the launch's own step first.
#if TIMED_BUILD
#define STAGE_TIMES , Timestamps *timestamps
#define PASS_TIMES , timestamps
#define RECORD_START(STEP) if (first_thread()) atomicMin(&timestamps[STEP].start, clock_ns());
#define RECORD_READY_OF(STEP) if (first_thread()) atomicMin(&timestamps[STEP].ready, clock_ns());
#define RECORD_END(STEP) if (threadIdx.x == 0) atomicMax(&timestamps[STEP].end, clock_ns());
#define SET_TIMESTAMPS if (first_thread()) timestamps_of_step = timestamps;
#else
#define STAGE_TIMES
#define PASS_TIMES
#define RECORD_START(STEP)
#define RECORD_READY_OF(STEP)
#define RECORD_END(STEP)
#define SET_TIMESTAMPS
#endif
#undef RECORD_TIMESTAMPS
#if BLOCK_TIMES
#define RECORD_TIMESTAMPS SET_TIMESTAMPS BlockScope block_scope(block_sample);
#else
#define RECORD_TIMESTAMPS SET_TIMESTAMPS
#endif

// ------------------------------------------------------------------------------------ consumers

// What a thread of the consumers keeps from stage to stage.
struct Consumer {
    u8 *ring, *row;
    float* parts;  // sums of parts, by warp and row
    int most;      // rows of a block at most, of all its matrices
    GridBarrier blocks;
    SlotCursor at;
    bool any;  // whether there is a token

    // Multiply the rows of a slot, `row` and n - 1 more of a matrix, and store the sums of this warp's part.
    template <class S> __device__ __forceinline__ void multiply(const LaneActivations<S>& x, const Planes& start, int row, int done, int n) {
        typedef typename S::Format W;
        typedef typename S::Sum Sum;
        const int own = S::row_lane(), warp = threadIdx.x / WARP;
        wait_barrier(full + at.slot, at.parity);
        Sum sums[S::PASSES] = {};
#pragma unroll
        for (int p = 0; p < S::PASSES; p++) {
            const int r = p * S::GROUPS % S::ROWS, of = at.slot * SLOT_NBYTES + p * S::GROUPS / S::ROWS * S::matrix_nbytes();
            Planes from = {start.a + of + r * S::plane_nbytes(0), start.b + of + r * S::plane_nbytes(1) + S::before(1, row),
                           start.c + of + r * S::plane_nbytes(2) + S::before(2, row),
                           start.d + of + r * S::plane_nbytes(3) + S::before(3, row)};
#pragma unroll
            for (int i = 0; i < S::ITEMS; i++) {
                W w;
                if (S::has_item(i)) {
                    w.load(from);
                    sums[p] += product(w, own, x.a[i]);
                }
                advance<W>(from, S::ROW_LANES);
            }
        }
        __syncwarp();
        if (threadIdx.x % WARP == 0) arrive(released + at.slot);
        at.advance();
        const Sum total = warp_sums<S::PASSES, S::ROW_LANES>(sums, own);
        constexpr int EACH = S::ROW_LANES / S::PASSES;  // lanes with the same sum
        const int sum = own / EACH * S::GROUPS + S::group(), r = sum % S::ROWS;
        if (own % EACH == 0 && r < n) ((Sum*)parts)[warp * most + (done + r) * S::MATRICES + sum / S::ROWS] = total;
    }

    template <class S> __device__ __forceinline__ float total(const Planes& w, int row, const u8* x, int which) const {
        typename S::Sum sum = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i++) sum += ((const typename S::Sum*)parts)[i * most + which];
        return scaled(sum, w, row, x, S::DEPTH);
    }

    __device__ __forceinline__ void sync_grid() {
        sync_consumers();
        if (threadIdx.x == 0) blocks.wait();
        sync_consumers();
    }

    // What is added to the result of a row.
    __device__ static __forceinline__ float added(const Matrices& all, int at) {
        Matrix m = all.m[0];
        find_matrix<1>(all, at, m);
        float sum = m.bias ? m.bias[at] : 0;
        return m.residual ? sum + fresh((const float*)m.residual + at) : sum;
    }

    template <class S> __device__ __forceinline__ void run(const ChainStage& stage, const u8* x, const LaneActivations<S>& activated) {
        const BlockRows<S> rows(stage.all);
        const int group = S::group();
        const Planes start = S::Format::item({ring + group * S::plane_nbytes(0), ring + S::plane_at(1) + group * S::plane_nbytes(1),
                                              ring + S::plane_at(2) + group * S::plane_nbytes(2),
                                              ring + S::plane_at(3) + group * S::plane_nbytes(3)},
                                             S::item(0));
        float more = 0;
        const int mine = rows.first + threadIdx.x;
        if (S::MATRICES == 1 && mine < rows.end) more = added(stage.all, mine);
        int n;
#pragma unroll 1
        for (int next = rows.first; next < rows.end; next += n) {
            n = rows.count(next);
            multiply<S>(activated, start, rows.in_matrix(next), next - rows.first, n);
        }
        sync_consumers();
        if (any)
#pragma unroll 1
            for (int next = mine; next < rows.end; next += THREADS) {
                const int which = (next - rows.first) * S::MATRICES;
                int row = next;
                Matrix m = stage.all.m[0];
                if constexpr (S::MATRICES == 2) {
                    const Matrix& up = stage.all.m[1];
                    const float sum = total<S>(m.w, row, x, which) + (m.bias ? m.bias[row] : 0);
                    const float other = total<S>(up.w, row, x, which + 1) + (up.bias ? up.bias[row] : 0);
                    ((float*)m.y)[row] = activate(stage.act, sum) * other;
                } else {
                    find_matrix<1>(stage.all, row, m);
                    if (next != mine) more = added(stage.all, next);
                    ((float*)m.y)[row] = total<S>(m.w, row, x, which) + more;
                }
            }
    }

    template <class S> __device__ __forceinline__ void stage(const ChainStage& stage, bool first STAGE_TIMES) {
        LaneActivations<S> x;
        const u8* from = stage.x;
        RECORD_START(S::SOURCE_STEP)
#if INTEGER
        RowUnits<S> units;
        if (S::SOURCE == NORMED || S::SOURCE == NORMED_TWICE) units.load_weights(stage);
#endif
        if (first)
            wait_for_previous();
        else if (S::BARRIER)
            sync_grid();
        RECORD_READY_OF(S::SOURCE_STEP)
#if INTEGER
        if (S::SOURCE != AS_IS) make_row<S>(stage, row, units), from = row;
        x.load(from);
#else
        load_floats_of<S>(stage, x);
#endif
        if (S::SOURCE != AS_IS) {
            RECORD_END(S::SOURCE_STEP)
            RECORD_START(S::STEP)
        }
        run<S>(stage, from, x);
        RECORD_END(S::STEP)
    }

    template <class S, class... REST>
    __device__ __forceinline__ void stages(const ChainStage* all, bool first, List<S, REST...> STAGE_TIMES) {
        stage<S>(*all, first PASS_TIMES);
        stages(all + 1, false, List<REST...>() PASS_TIMES);
    }
    __device__ __forceinline__ void stages(const ChainStage*, bool, List<> STAGE_TIMES) {}
};

template <class S, class... REST>
__device__ __forceinline__ void request_all(Producer& producer, const ChainStage* stages, List<S, REST...>) {
    producer.request<S>(stages->all);
    request_all(producer, stages + 1, List<REST...>());
}
__device__ __forceinline__ void request_all(Producer& producer, const ChainStage*, List<>) { producer.end(); }

extern "C" __global__ void __launch_bounds__(THREADS + WARP, 1)
    linear_chain(const __grid_constant__ Chain chain, const i64* live, u64* arrivals, int most, int slots TIMESTAMPS) {
    RECORD_TIMESTAMPS
    launch_next();
    extern __shared__ __align__(128) u8 ring[];
    if (threadIdx.x >= THREADS) {
        Producer producer(ring, slots);
        request_all(producer, chain.stages, All());
        return;
    }
    u8* const row = ring + slots * SLOT_NBYTES;
    Consumer consumer = {ring, row, (float*)(row + ROW_NBYTES), most, {arrivals, 0}, {slots, 0, 0}, *live > 0};
    if (threadIdx.x < WARP) init_barriers(released, slots, WARPS);
    sync_block();
    consumer.stages(chain.stages, true, All() PASS_TIMES);
}
