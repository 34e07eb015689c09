// The norm of one token before a mixture of experts, and its products with the rows of the router. A block
// computes one product; further blocks store the norm. Each computes the sum of squares itself, which takes
// less time than a launch for the norm alone.
//
// HALVES: type of the router's weights: 0: float32, 1: f16, 2: bf16. ITEMS: times that a thread loads four
// adjacent columns.

#define THREADS 128
#include "dot.cuh"
#include "norm.cuh"
#include "quantize.cuh"

// Four columns of a thread: number `item`.
__device__ __forceinline__ int column_of(int item) { return 4 * ((int)threadIdx.x + THREADS * item); }

// Store one unit of the norm per warp, from unit `first` on.
__device__ __forceinline__ void store_norm(const float* h, const float* g, float factor, const Targets& targets,
                                           int first, int width, bool store) {
    const int unit = UNIT * (first + (int)threadIdx.x / WARP), at = unit + 8 * (threadIdx.x % WARP);
    if (unit >= width) return;
    float v[8], own[8];
    load_floats<true>(v, h, at, width);
    load_floats(own, g, at, width);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = v[i] * factor * own[i];
    emit<8>(v, targets, 0, 0, unit, width, store);
}

// h and g are aligned to 16 bytes, and `width` is a multiple of four. bias may be null.
extern "C" __global__ void __launch_bounds__(THREADS)
    norm_router(const float* h, const float* g, Targets targets, const u8* w, const float* bias,
                float* logits, const i64* live, int width, int experts, float eps TIMESTAMPS) {
    RECORD_TIMESTAMPS
    launch_next();
    const int row = blockIdx.x;
    const bool product = row < experts;
    float4 weight[ITEMS] = {};  // of the router, times those of the norm
    if (product) {
        const u8* from = w + (i64)row * width * (HALVES ? 2 : 4);
#pragma unroll
        for (int i = 0; i < ITEMS; i++)
            if (column_of(i) < width) weight[i] = floats4(from, column_of(i));
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            if (column_of(i) >= width) break;
            const float4 own = *(const float4*)(g + column_of(i));
            weight[i].x *= own.x, weight[i].y *= own.y, weight[i].z *= own.z, weight[i].w *= own.w;
        }
    }
    const float more = product && bias ? bias[row] : 0.f;
    const i64 rows = *(volatile const i64*)live;
    __shared__ float2 parts[THREADS / WARP];
#pragma unroll 1
    for (int pass = first_pass(); pass < 2; pass++) {
        __syncthreads();  // all have read the parts
        if (pass) wait_for_previous();
        if (rows < 1) continue;
        float4 v[ITEMS] = {};
#pragma unroll
        for (int i = 0; i < ITEMS; i++)
            if (column_of(i) < width) v[i] = load_l2((const float4*)(h + column_of(i)));
        float sum = 0, squares = 0;
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            squares += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
            sum += v[i].x * weight[i].x + v[i].y * weight[i].y + v[i].z * weight[i].z + v[i].w * weight[i].w;
        }
        sum = warp_sum(sum), squares = warp_sum(squares);
        if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = make_float2(sum, squares);
        __syncthreads();
        sum = squares = 0;
#pragma unroll
        for (int i = 0; i < THREADS / WARP; i++) sum += parts[i].x, squares += parts[i].y;
        const float factor = rms_factor(squares, width, eps);
        if (!product)
            store_norm(h, g, factor, targets, (row - experts) * (THREADS / WARP), width, pass);
        else if (threadIdx.x == 0 && pass)
            logits[row] = sum * factor + more;
    }
}
