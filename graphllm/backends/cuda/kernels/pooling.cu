// One row for the rows of each sequence. A block computes some columns (y) of several sequences (x); each of its
// GROUPS warps takes some of the rows, in an order that depends on the sequence only.

enum Pooling { CLS, MAX, MEAN, MEAN_SQRT_LEN, WEIGHTED_MEAN, LAST };  // in the order of POOLINGS of ops/pooling.py

#define GROUPS 8

__device__ __forceinline__ void combine(int kind, float& a, float b) {
    if (kind == MAX) a = b > a || b != b ? b : a;  // NaN stays NaN, as it compares false
    else a += b;
}

// A thread computes EACH adjacent columns.
template <int EACH>
__device__ __forceinline__ void pool(const u8* x, i64 stride, const int* q_start, float* out, const i64* live,
                                     int width, int kind) {
    struct __align__(4 * EACH) Floats {
        float v[EACH];
    };
    __shared__ Floats parts[GROUPS][WARP];
    const i64 starts = begin(live);
    const int lane = threadIdx.x % WARP, group = threadIdx.x / WARP, column = (blockIdx.y * WARP + lane) * EACH;
#pragma unroll 1
    for (i64 sequence = blockIdx.x; sequence < starts; sequence += gridDim.x) {
        const bool last = sequence + 1 == starts;  // no sequence starts at the last element of q_start
        int first = last ? 0 : q_start[sequence], end = last ? 0 : q_start[sequence + 1];
        const int start = first, count = end - first;
        if (kind == CLS) end = min(end, first + 1);
        if (kind == LAST) first = max(first, end - 1);
        Floats own;
#pragma unroll
        for (int e = 0; e < EACH; e++) own.v[e] = kind == MAX ? -INFINITE : 0;
        if (column < width) {
#pragma unroll 4
            for (int i = first + group; i < end; i += GROUPS) {
                const Floats row = *(const Floats*)((const float*)(x + i * stride) + column);
                const float weight = kind == WEIGHTED_MEAN ? (float)(i - start + 1) : 1.f;
#pragma unroll
                for (int e = 0; e < EACH; e++) combine(kind, own.v[e], row.v[e] * weight);
            }
        }
        parts[group][lane] = own;
        __syncthreads();
        if (group == 0 && column < width) {
            const float n = (float)count, tokens = kind == MEAN ? n : kind == MEAN_SQRT_LEN ? sqrtf(n) : 1;
            const float weights = kind == WEIGHTED_MEAN ? 0.5f * n * (n + 1) : tokens;
#pragma unroll
            for (int e = 0; e < EACH; e++) {
#pragma unroll
                for (int g = 1; g < GROUPS; g++) combine(kind, own.v[e], parts[g][lane].v[e]);
                own.v[e] = count > 0 ? own.v[e] / weights : 0;
            }
            *(Floats*)(out + sequence * width + column) = own;
        }
        __syncthreads();
    }
}

#define POOL(EACH)                                                                                          \
    extern "C" __global__ void pool_##EACH(const u8* x, i64 stride, const int* q_start, float* out,         \
                                           const i64* live, int width, int kind TIMESTAMPS) {               \
        RECORD_TIMESTAMPS                                                                                   \
        pool<EACH>(x, stride, q_start, out, live, width, kind);                                             \
    }
POOL(1)
POOL(4)
