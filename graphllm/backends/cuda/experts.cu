// Mixtures of experts: the choice, its weights, the order of rows by expert, the sum. Products with
// experts are in experts_few.cu and experts_many.cu.

#include "experts.cuh"

// Larger for larger numbers, never zero; the two zeros are equal, NaN is less than all else.
__device__ __forceinline__ u32 key_of(float v) {
    if (v != v) return 1;
    u32 bits = __float_as_uint(v + 0.f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float number_of(u32 key) {
    if (key == 1) return NOT_A_NUMBER;
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// The largest of `count` keys, among equals the first, of those that come after `last` in this order;
// as a key with what is left of the index below it. Over the lanes of a warp.
__device__ __forceinline__ u64 largest(const u32* keys, int count, u64 last = ~0ull) {
    u64 top = 0;
    for (int i = threadIdx.x % WARP; i < count; i += WARP) {
        u64 here = (u64)keys[i] << 32 | ~(u32)i;
        if (here < last && here > top) top = here;
    }
#pragma unroll
    for (int o = 16; o; o >>= 1) {
        u64 other = __shfl_xor_sync(FULL, top, o);
        top = other > top ? other : top;
    }
    return top;
}

__device__ __forceinline__ int index_of(u64 top) { return (int)~(u32)top; }

// A block does one row; each of its warps looks at some of the groups, and the first one chooses.
extern "C" __global__ void top_k(const u8* x, i64 stride, const float* bias, int* out,
                                 const i64* live, int columns, int k, int groups, int kept,
                                 int best STAMPS) {
    STAMPED
    DYNAMIC_SHARED(u32, keys);
    u32* worth = keys + columns;
    const i64 rows = begin(live);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, size = columns / groups;
    if (blockIdx.x >= rows) return;
    const float* from = (const float*)(x + blockIdx.x * stride);
    for (int i = threadIdx.x; i < columns; i += blockDim.x)
        keys[i] = key_of(bias ? from[i] + bias[i] : from[i]);
    __syncthreads();
    if (groups > 1) {
        for (int g = warp; g < groups; g += blockDim.x / WARP) {
            u64 top = largest(keys + g * size, size);
            float total = number_of((u32)(top >> 32));
            for (int i = 1; i < best; i++) {
                top = largest(keys + g * size, size, top);
                total += number_of((u32)(top >> 32));
            }
            if (lane == 0) worth[g] = key_of(total);
        }
        __syncthreads();
    }
    if (warp) return;
    if (groups > 1) {  // what is kept is worth nothing then, what is not has no keys
        for (int i = 0; i < kept; i++) {
            int g = index_of(largest(worth, groups));
            __syncwarp();
            if (lane == 0) worth[g] = 0;
            __syncwarp();
        }
        for (int i = lane; i < columns; i += WARP)
            if (worth[i / size]) keys[i] = 0;
        __syncwarp();
    }
    u64 top = ~0ull;
    for (int j = 0; j < k; j++) {
        top = largest(keys, columns, top);
        if (lane == 0) out[(i64)blockIdx.x * k + j] = index_of(top);
    }
}

// A thread does one of `k` results of a row.
extern "C" __global__ void pick(const u8* x, i64 stride, const int* ids, float* out,
                                const i64* live, int columns, int k STAMPS) {
    STAMPED
    const i64 rows = begin(live), i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= rows * k) return;
    const int id = ids[i];
    const bool known = 0 <= id && id < columns;
    out[i] = known ? ((const float*)(x + i / k * stride))[id] : NOT_A_NUMBER;
}

// A warp does one row.
extern "C" __global__ void sum_norm(const u8* x, i64 stride, float* out, const i64* live, int width,
                                    float eps STAMPS) {
    STAMPED
    const i64 rows = begin(live);
    const i64 row = (i64)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (row >= rows) return;
    const float* from = (const float*)(x + row * stride);
    float sum = 0;
    for (int i = threadIdx.x % WARP; i < width; i += WARP) sum += from[i];
    sum = warp_sum(sum) + eps;
    for (int i = threadIdx.x % WARP; i < width; i += WARP) out[row * width + i] = from[i] / sum;
}

// A block does one row (x) and some columns of it (y), a thread one of them.
extern "C" __global__ void combine(const u8* y, i64 stride, const float* weights, float* out,
                                   const i64* live, int each, int width STAMPS) {
    STAMPED
    const i64 rows = begin(live), row = blockIdx.x;
    const int column = blockIdx.y * blockDim.x + threadIdx.x;
    if (row >= rows || column >= width) return;
    const float* from = (const float*)(y + row * stride) + column;
    float sum = 0;
    for (int j = 0; j < each; j++) sum = fmaf(from[(i64)j * width], weights[row * each + j], sum);
    out[row * width + column] = sum;
}

// A warp's part of the pairs, and how many of them are of each matrix.
struct Part {
    const int* ids;
    int first, end, matrices;
    int* counts;
};

// f(pair, its matrix, how many before it are of the same), by lanes; the counts go along.
template <class F> __device__ __forceinline__ void visit(const Part& part, F f) {
    const int lane = threadIdx.x % WARP;
    for (int at = part.first; at < part.end; at += WARP) {
        const int pair = at + lane, id = pair < part.end ? part.ids[pair] : 0;
        const int matrix = (u32)id < (u32)part.matrices ? id : part.matrices;
        const u32 same = __match_any_sync(FULL, pair < part.end ? matrix : -1);
        const int before = __popc(same & ((1u << lane) - 1));
        const bool live = pair < part.end;
        if (live) f(pair, matrix, part.counts[matrix] + before);
        __syncwarp();
        if (live && before == 0) part.counts[matrix] += __popc(same);
        __syncwarp();
    }
}

// From how many pairs each matrix has to where they begin in order; and the groups, by one warp.
__device__ __forceinline__ void make_groups(int* counts, int buckets, int size, Group* groups,
                                            int most) {
    const int lane = threadIdx.x % WARP;
    int first = 0, made = 0;  // pairs, and groups, of the matrices before
    for (int at = 0; at < buckets; at += WARP) {
        const int m = at + lane, count = m < buckets ? counts[m] : 0;
        const int parts = (count + size - 1) / size;
        int pairs = count, through = parts;  // sums over the lanes up to this one
#pragma unroll
        for (int o = 1; o < WARP; o <<= 1) {
            const int p = __shfl_up_sync(FULL, pairs, o), g = __shfl_up_sync(FULL, through, o);
            if (lane >= o) pairs += p, through += g;
        }
        const int start = first + pairs - count;
        if (m < buckets) counts[m] = start;
        for (int i = 0; i < parts; i++)
            groups[made + through - parts + i] = {m, start + i * size, min(size, count - i * size),
                                                  0};
        first += __shfl_sync(FULL, pairs, WARP - 1);
        made += __shfl_sync(FULL, through, WARP - 1);
    }
    for (int i = made + lane; i < most; i += WARP) groups[i].count = 0;
}

// The pairs in the order of their matrices, which is `order`, and in groups of at most `size`: one block.
// Ids that are too large are one more matrix; groups that there is no use for are empty.
extern "C" __global__ void __launch_bounds__(1024)
    group(const int* ids, const i64* live, int each, int matrices, int size, Group* groups,
          int most, int* order STAMPS) {
    STAMPED
    DYNAMIC_SHARED(int, counts);  // of each warp and matrix, then of all warps
    const int warp = threadIdx.x / WARP, warps = blockDim.x / WARP, buckets = matrices + 1;
    int* const begins = counts + warps * buckets;
    for (int i = threadIdx.x; i < warps * buckets; i += blockDim.x) counts[i] = 0;
    const int pairs = (int)begin(live) * each;
    const int share = (pairs + blockDim.x - 1) / blockDim.x * WARP;
    const Part part = {ids, warp * share, min(pairs, (warp + 1) * share), matrices,
                       counts + warp * buckets};
    __syncthreads();
    visit(part, [](int, int, int) {});
    __syncthreads();
    for (int m = threadIdx.x; m < buckets; m += blockDim.x) {  // sums over the warps before
        int sum = 0;
        for (int w = 0; w < warps; w++) {
            const int own = counts[w * buckets + m];
            counts[w * buckets + m] = sum;
            sum += own;
        }
        begins[m] = sum;
    }
    __syncthreads();
    if (warp == 0) make_groups(begins, buckets, size, groups, most);
    __syncthreads();
    visit(part, [=](int pair, int matrix, int before) { order[begins[matrix] + before] = pair; });
}
