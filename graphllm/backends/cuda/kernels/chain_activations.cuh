#pragma once
// Activations of linear_chain.cu: as they are, or made of a row of float32 that all blocks of the launch have written.

#include "chain_stage.cuh"
#include "linear_ring.cuh"
#include "norm.cuh"
#include "quantize.cuh"

// A row of float32 that other blocks may have written in this launch: not from the L1 cache.
__device__ __forceinline__ float4 fresh4(const float* at) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at) : "memory");
    return v;
}
__device__ __forceinline__ float fresh(const float* at) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(at) : "memory");
    return v;
}
__device__ __forceinline__ void fresh8(float* v, const float* at) { unpack8(v, fresh4(at), fresh4(at + 4)); }

// The factor of an RMS norm from the sums of squares of its units, added as norm.cuh adds them.
__device__ __forceinline__ float factor_of(const float* units, int count, int width, float eps) {
    const int lane = threadIdx.x % WARP;
    return rms_factor(warp_sum(lane < count ? units[lane] : 0), width, eps);
}

// The activations of the items that a lane multiplies.
template <class S> struct LaneActivations {
    typedef typename S::Format W;
    Activations<W> a[S::ITEMS] = {};

    // Load them from a row of activations.
    __device__ __forceinline__ void load(const u8* row) {
#pragma unroll
        for (int i = 0; i < S::ITEMS; i++)
            if (S::has_item(i)) a[i].load(Activations<W>::place(row, S::DEPTH, S::item(i)), true);
    }
};

#if INTEGER
// What is computed of a row of float32, unit after unit of 256 elements.
template <class S> struct RowUnits {
    static constexpr int UNITS = (S::DEPTH + UNIT - 1) / UNIT, EACH = (UNITS + WARPS - 1) / WARPS;
    static_assert(S::SOURCE == AS_IS || S::SOURCE == QUANTISED || UNITS <= WARP, "a lane for the sum of each unit");
    static constexpr bool TWICE = S::SOURCE == NORMED_TWICE;
    float v[EACH][8], w[EACH][8], w2[TWICE ? EACH : 1][8];

    __device__ static __forceinline__ int first(int u) { return UNIT * ((int)threadIdx.x / WARP + u * WARPS); }
    __device__ static __forceinline__ int column(int u) { return first(u) + 8 * ((int)threadIdx.x % WARP); }

    static constexpr bool WHOLE = S::DEPTH % (UNIT * WARPS) == 0;  // all lanes have as many elements
    __device__ static __forceinline__ bool has(int u) { return WHOLE || column(u) < S::DEPTH; }

    __device__ __forceinline__ void load_weights(const ChainStage& stage) {
#pragma unroll
        for (int u = 0; u < EACH; u++) {
            load_unit(w[u], stage.norm, u);
            if (TWICE) load_unit(w2[TWICE ? u : 0], stage.norm2, u);
        }
    }
    __device__ static __forceinline__ void load_unit(float* to, const float* row, int u) {
#pragma unroll
        for (int k = 0; k < 8; k++) to[k] = 0;
        const float4* at = (const float4*)(row + column(u));
        if (has(u)) unpack8(to, at[0], at[1]);
    }
    __device__ __forceinline__ void load(const float* x) {
#pragma unroll
        for (int u = 0; u < EACH; u++) {
            if (has(u))
                fresh8(v[u], x + column(u));
            else
#pragma unroll
                for (int k = 0; k < 8; k++) v[u][k] = 0;
        }
    }
    __device__ __forceinline__ void norm(float eps, const float (*weight)[8], float* squares) {
#pragma unroll
        for (int u = 0; u < EACH; u++) {
            float sum = 0;
#pragma unroll
            for (int k = 0; k < 8; k++) sum += v[u][k] * v[u][k];
            sum = warp_sum(sum);
            if (threadIdx.x % WARP == 0 && (WHOLE || first(u) < S::DEPTH)) squares[first(u) / UNIT] = sum;
        }
        sync_consumers();
        const float factor = factor_of(squares, UNITS, S::DEPTH, eps);
#pragma unroll
        for (int u = 0; u < EACH; u++)
#pragma unroll
            for (int k = 0; k < 8; k++) v[u][k] = v[u][k] * factor * weight[u][k];
    }
    // Add a row of float32, and let the first block store the sum.
    __device__ __forceinline__ void add(const ChainStage& stage) {
#pragma unroll
        for (int u = 0; u < EACH; u++) {
            if (!has(u)) continue;
            float base[8];
            fresh8(base, stage.base + column(u));
#pragma unroll
            for (int k = 0; k < 8; k++) v[u][k] += base[k];
            if (blockIdx.x == 0 && stage.total) store_floats(v[u], stage.total, column(u), S::DEPTH);
        }
    }
    __device__ __forceinline__ void store(u8* row) const {
#pragma unroll
        for (int u = 0; u < EACH; u++) {
            if (!WHOLE && first(u) >= S::DEPTH) break;
            if (S::Format::BLOCK == 32)
                emit_32(v[u], row, first(u), S::DEPTH);
            else
                emit_256(v[u], row, first(u), S::DEPTH);
        }
    }
};

// Compute the row of activations in shared memory; the first block stores it for other kernels.
template <class S> __device__ __forceinline__ void make_row(const ChainStage& stage, u8* row, RowUnits<S>& units) {
    __shared__ float squares[2][WARP];
    units.load((const float*)stage.x);
    if (S::SOURCE != QUANTISED) units.norm(stage.eps, units.w, squares[0]);
    if (S::SOURCE == NORMED_TWICE) units.add(stage), units.norm(stage.eps2, units.w2, squares[1]);
    units.store(row);
    sync_consumers();
    constexpr int nbytes = S::Format::BLOCK == 32 ? S::DEPTH + S::DEPTH / 4 : S::DEPTH + S::DEPTH / 64 + S::DEPTH / 8;
    if (blockIdx.x == 0 && stage.row)
#pragma unroll 1
        for (int i = threadIdx.x; i < nbytes / 4; i += THREADS) ((u32*)stage.row)[i] = ((const u32*)row)[i];
}
#else
// A row of float32 is multiplied as it is, or normed by every warp for the part that it multiplies.
template <class S> __device__ __forceinline__ void load_floats_of(const ChainStage& stage, LaneActivations<S>& to) {
    static_assert(S::Format::ITEM == 8, "two vectors of float32");
    float4 w[S::ITEMS][2];
    float sum = 0;
#pragma unroll
    for (int i = 0; i < S::ITEMS; i++) {
        if (!S::has_item(i)) continue;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int at = 8 * S::item(i) + 4 * e;
            to.a[i].x[e] = fresh4((const float*)stage.x + at);
            if (S::SOURCE == NORMED) w[i][e] = *(const float4*)(stage.norm + at);
        }
    }
    if (S::SOURCE != NORMED) return;
    __shared__ float squares[WARP];
#pragma unroll
    for (int i = 0; i < S::ITEMS; i++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float4 v = to.a[i].x[e];  // zeros where there is no item
            sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        }
    if (threadIdx.x % WARP >= S::ROW_LANES) sum = 0;  // the same elements as those of the first lanes
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) squares[threadIdx.x / WARP] = sum;
    sync_consumers();
    const float factor = factor_of(squares, WARPS, S::DEPTH, stage.eps);
#pragma unroll
    for (int i = 0; i < S::ITEMS; i++) {
        if (!S::has_item(i)) continue;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float4& v = to.a[i].x[e];
            const float4 g = w[i][e];
            v = make_float4(v.x * factor * g.x, v.y * factor * g.y, v.z * factor * g.z, v.w * factor * g.w);
            if (blockIdx.x == 0 && stage.row && threadIdx.x % WARP < S::ROW_LANES)
                ((float4*)stage.row)[2 * S::item(i) + e] = v;
        }
    }
}
#endif
