// Linears of several tokens with block weights and f16 activations, on tensor cores.
//
// FORMAT: a struct of formats.cuh. TOKENS: tokens of a block. WARPGROUPS: groups of four warps of a
// block, each of which computes 64 rows. GATED: half of the rows are of one matrix and the other half the
// same rows of a second one; the result is act(first) * second, in float32 or a kind of quantize.cuh.
// STAGES: parts of the depth in shared memory, PER_STAGE chunks each, of which all but one are requested
// before the activations are available. RESIDENT: blocks that must fit on a multiprocessor. SHARED: bytes
// of shared memory. SLOTS: if positive, permute_activations.cu has permuted the activations, and the ring of
// activation_ring.cuh has so many slots.
//
// A thread expands the weights of two rows to f16 in registers, which are a factor of the products as they
// are; see block_halves.cuh. The activations of a chunk are in shared memory for the whole block.
// `splits` divide the depth, see clusters.cuh. A result does not depend on the number of tokens: the
// order of its sum depends on the format, the depth and `splits` only.

#define BLOCK_HALVES 1
#include "clusters.cuh"
#include "matrices.cuh"
#include "quantize.cuh"
#include "small_batch_blocks.cuh"
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define WGMMA 1
#else
#define WGMMA 0
#endif
#include "wgmma.cuh"

#define SPLIT_CHUNK 256  // of which a split has whole ones
#define ROWS (SIDE * WARPS / (1 + GATED))  // of a matrix
#define TILES (TOKENS / 8)
#define STRIDE (SIDE * WARPS + 4)  // floats between the sums of two tokens: stores use all banks
#include "small_batch_results.cuh"
#define TURNS (CHUNK / 32)

// Turn of a part in which the first thread requests another one. It waits until all warps have released the
// part before, which most of them have done by then.
#define REFILL 3
#if SLOTS
#include "activation_ring.cuh"
struct Shared {
    u8 x[SLOTS][PART_BYTES], w[STAGES][WARPS][1][WARP_BYTES];
    RingState ring;
};
typedef ActivationRing<sizeof(Shared) - sizeof(RingState)> Ring;
static_assert(sizeof(Shared) % 16 == 0 && sizeof(RingState) % 16 == 0, "the state is at the end");
#else
struct Shared {
    Activations x[STAGES][PER_STAGE];
    u8 w[STAGES][WARPS][PER_STAGE][WARP_BYTES];
};
#endif
static_assert(sizeof(Shared) + 1024 <= SHARED && 4 * TOKENS * STRIDE + 1024 <= SHARED,
              "see small_batch_blocks.py");

// Start the products of 16 elements: number `step` of 64 elements of the tokens, which are at `x`.
__device__ __forceinline__ void multiply_step(float (&c)[TILES][4], const u32 (&a)[4], u32 x, int step) {
#if WGMMA
    multiply_registers64<TOKENS>(&c[0][0], a, factor(x) + step * 32 / 16);
#else
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        const int n = 8 * tile + lane % 8;
        u32 b[2];
        const int eight = swizzled(n, 2 * step + lane / 8 % 2);
        load_two_matrices(b, x + n * 128 + 16 * eight);
        multiply(c[tile], a, b[0], b[1]);
    }
#endif
}

// Products change sums until they have been waited for: nothing reads them earlier.
__device__ __forceinline__ void keep_sums(float (&c)[TILES][4]) {
#pragma unroll
    for (int i = 0; i < TILES; i++)
        asm volatile("" : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3]));
}

// Add the products of a chunk of two rows and of the activations `x`, a ChunkOfTokens.
template <class X>
__device__ __forceinline__ void add_chunk(float (&c)[TILES][4], const ChunkOfRow (&rows)[2], X& x) {
    Half half[2];
    half[0].load(rows[0]), half[1].load(rows[1]);
#pragma unroll
    for (int t = 0; t < TURNS; t++) {
        u32 a[2][4];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            u32 v[2][2];
            half[r].turn(t, v);
#pragma unroll
            for (int i = 0; i < 2; i++) a[i][r] = v[i][0], a[i][2 + r] = v[i][1];
        }
        x.before_products(t);
#if WGMMA
        begin_products();
#endif
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int gamma = Half::gamma(t, i);
            multiply_step(c, a[i], x.group(gamma / 4), gamma % 4);
        }
#if WGMMA
        commit_products();
#endif
        x.beside_products(t);
#if WGMMA
        wait_products<1>();  // the registers of the previous turn are free
#endif
        x.after_products(t);
    }
}

#if SLOTS
// Activations of a chunk in a ring.
struct ChunkOfTokens {
    Ring& ring;
    bool first;  // no part before this chunk

    static constexpr int PARTS = CHUNK / PART, TURNS_OF_PART = TURNS / PARTS;
    __device__ __forceinline__ u32 group(int i) const {
        return ring.address() + (Half::ADJACENT ? i % 2 : i / PARTS) * 128 * TOKENS;
    }
    __device__ __forceinline__ void before_products(int t) {
        if (t && t % TURNS_OF_PART == 0) ring.advance();
        if (t % TURNS_OF_PART == 0) ring.wait();
    }
    __device__ __forceinline__ void beside_products(int t) {
        if (t % TURNS_OF_PART == REFILL && !(first && t < TURNS_OF_PART)) ring.refill_previous();
    }
    __device__ __forceinline__ void after_products(int t) {
        if (t % TURNS_OF_PART == 0 && !(first && t < TURNS_OF_PART)) ring.release_previous();
        if (t == TURNS - 1) ring.advance();
    }
};
#else
// Activations of a chunk at `at`. Meanwhile another chunk is copied to `to`.
struct ChunkOfTokens {
    ActivationSource& source;
    u32 at, to;
    bool more;  // there is one to copy

    __device__ __forceinline__ u32 group(int i) const { return at + i * 128 * TOKENS; }
    __device__ __forceinline__ void before_products(int) {}
    __device__ __forceinline__ void beside_products(int t) {
        // Spread over the turns: the copies of many tokens would fill a queue.
        constexpr int EACH = (ActivationSource::COPIES + TURNS - 1) / TURNS;
#pragma unroll
        for (int n = t * EACH; n < min(ActivationSource::COPIES, (t + 1) * EACH); n++)
            if (more) source.copy(to, n);
    }
    __device__ __forceinline__ void after_products(int) {}
};
#endif

// Store the sums of a thread in shared memory.
__device__ __forceinline__ void store_sums(const float (&c)[TILES][4], float* out, const Matrices& all) {
    int row = blockIdx.y * ROWS, thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));  // computed again: there are no registers to keep them
    asm volatile("" : "+r"(row));
    Matrix m = all.m[0];
    if (!GATED) find_matrix<ROWS>(all, row, m);
    const int lane = thread % WARP, warp = thread / WARP, group = lane / 4, part = lane % 4;
    const int again = max(0, row + SIDE * warp % ROWS + SIDE - (int)m.rows);
#pragma unroll
    for (int i = 0; i < TILES * 4; i++) {
        // Rows that another warp has computed take the places of those beyond the matrix.
        const int r = (i % 4 / 2 * 8 + group - again) & (SIDE - 1);
        out[(i / 4 * 8 + 2 * part + i % 2) * STRIDE + SIDE * warp + r] = c[i / 4][i % 4];
    }
}

// Launches of one activation may run beside each other: the first one lets its successor start once the
// activation is complete, so that the others need not wait for it.
enum Order { ALONE, LEADS, FOLLOWS };

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    small_batch(const u8* x, i64 x_stride, const i64* live, int k, Matrices all, int splits, int act,
                int kind, int order TIMESTAMPS) {
    RECORD_TIMESTAMPS
    DYNAMIC_SHARED(uint4, memory);
    Shared& s = *(Shared*)((u8*)memory + (-shared_address(memory) & 1023));
    const u32 x_at = kept(shared_address(s.x)), w_at = kept(shared_address(s.w[0][threadIdx.x / WARP]));
    if (order != LEADS) launch_next();
#if SLOTS
    Ring ring(x_at);
#endif
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, group = lane / 4, part = lane % 4;
    const int first = blockIdx.x * TOKENS, last = (int)*live - 1;
    const int wholes = (k + SPLIT_CHUNK - 1) / SPLIT_CHUNK, chunks = (k + CHUNK - 1) / CHUNK;
    int row = blockIdx.y * ROWS;
    Matrix m = all.m[0];
    if (!GATED) find_matrix<ROWS>(all, row, m);
    // A warp computes 16 rows, some of them again if there are fewer.
    const int own = min(row + SIDE * warp % ROWS, (int)m.rows - SIDE);
    const Planes planes = GATED && warp >= WARPS / 2 ? all.m[GATED].w : m.w;
    // 0x64006400: if the compiler knew, it would copy selectors of bytes to registers again and again.
    const u32 magic = 0x64006400u | (u32)k >> 31;
    ChunkOfRow rows[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        rows[r].second = r, rows[r].part = part, rows[r].k = k, rows[r].magic = magic;
#pragma unroll
        for (int i = 0; i < PLANES; i++) {
            rows[r].at[i] = kept(plane_at(i) + 16 * group * units_of(i));
            if (aligned_plane(i)) continue;
            if (r && equal_starts(i)) rows[r].start[i] = rows[0].start[i];
            else rows[r].start[i] = kept((own + group + 8 * r) * row_bytes(i, k));
        }
    }
    float c[TILES][4] = {};
#if !SLOTS
    bool waited = false;
#endif
#if CLUSTERS
    const int split = blockIdx.z;
#else
    float total[TILES][4], half[TILES][4];
#pragma unroll 1
    for (int split = 0; split < splits; split++) {
#endif
        constexpr int AHEAD = STAGES - 1;
        const int begin = split * wholes / splits * (SPLIT_CHUNK / CHUNK);
        const int end = min((split + 1) * wholes / splits * (SPLIT_CHUNK / CHUNK), chunks);
        WeightSource w(planes, own, k, begin);
        auto copy_weights = [&](int stage) {
#pragma unroll
            for (int i = 0; i < PER_STAGE; i++)
                if (w.chunk < end) w.copy(w_at + stage * sizeof(s.w[0]) + i * WARP_BYTES);
        };
#if SLOTS
#pragma unroll
        for (int i = 0; i < AHEAD; i++) copy_weights(i), close_copies();
        __syncthreads();  // the barriers are initialized
        if (order != FOLLOWS) wait_for_previous();
        if (order == LEADS) launch_next();
        if (first > last) return order == FOLLOWS ? wait_for_previous() : void();
        constexpr int PARTS = CHUNK / PART;
        ring.start(x + ((i64)blockIdx.x * chunks + begin) * (PARTS * PART_BYTES), (end - begin) * PARTS);
        int stage = 0, later = AHEAD;
#pragma unroll 1
        for (int at = begin; at < end; at++) {
            wait_copies<AHEAD - 1>();
            __syncwarp();  // a warp copies its own rows
            copy_weights(later), close_copies();
            rows[0].w = rows[1].w = w_at + stage * sizeof(s.w[0]);
            rows[0].chunk = rows[1].chunk = at;
            ChunkOfTokens tokens = {ring, at == begin};
            add_chunk(c, rows, tokens);
            stage = stage + 1 < STAGES ? stage + 1 : 0, later = later + 1 < STAGES ? later + 1 : 0;
        }
        wait_products<0>();
        keep_sums(c);
#else
#pragma unroll
        for (int i = 0; i < AHEAD; i++) copy_weights(i);
        if (!waited && order != FOLLOWS) wait_for_previous();
        if (!waited && order == LEADS) launch_next();
        waited = true;
        if (first > last) return order == FOLLOWS ? wait_for_previous() : void();
        ActivationSource source(x + first * x_stride, x_stride, min(TOKENS, last + 1 - first), k, begin);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
#pragma unroll
            for (int j = 0; j < PER_STAGE; j++) {
                const u32 to = x_at + i * sizeof(s.x[0]) + j * sizeof(s.x[0][0]);
                if (begin + PER_STAGE * i + j < end)
#pragma unroll
                    for (int n = 0; n < ActivationSource::COPIES; n++) source.copy(to, n);
                source.advance();
            }
            close_copies();
        }
        int stage = 0, later = AHEAD;
#pragma unroll 1
        for (int at = begin; at < end; at += PER_STAGE) {
            wait_copies<AHEAD - 1>();
#if WGMMA
            publish();
#endif
            __syncthreads();
            copy_weights(later);
#pragma unroll
            for (int i = 0; i < PER_STAGE; i++) {
                if (at + i >= end) break;
                rows[0].w = rows[1].w = w_at + stage * sizeof(s.w[0]) + i * WARP_BYTES;
                rows[0].chunk = rows[1].chunk = at + i;
                const u32 from = x_at + stage * sizeof(s.x[0]) + i * sizeof(s.x[0][0]);
                const u32 to = x_at + later * sizeof(s.x[0]) + i * sizeof(s.x[0][0]);
                ChunkOfTokens tokens = {source, from, to, at + i + PER_STAGE * AHEAD < end};
                add_chunk(c, rows, tokens);
                source.advance();
            }
            close_copies();
#if WGMMA
            wait_products<0>();
            keep_sums(c);
#endif
            stage = stage + 1 < STAGES ? stage + 1 : 0, later = later + 1 < STAGES ? later + 1 : 0;
        }
#endif
        __syncthreads();
#if !CLUSTERS
        add_split(c, half, total, split, splits);
    }
#endif
    if (order == FOLLOWS) wait_for_previous();  // no kernel completes before its predecessors
    store_sums(c, (float*)&s, all);
    // Many tokens leave no register to keep the last one.
    const int last_again = TOKENS >= 64 ? (int)*(volatile const i64*)live - 1 : last;
    store_results((float*)&s, all, blockIdx.y * ROWS, first, last_again, splits, act, kind,
                  {x, x_stride, k});
}
