// Probes of memory and L2 bandwidth and of arithmetic throughput. Blocks have 512 threads; a store to
// `sink` keeps the compiler from removing the work.

#define CHUNK 4096  // vectors of 16 bytes: a block takes every gridDim.x-th chunk of 64 KB
#define THREADS 512
#define ACCUMULATORS 8  // independent sums of a thread

__device__ __forceinline__ u32 bits(uint4 v) { return v.x ^ v.y ^ v.z ^ v.w; }

__device__ __forceinline__ void keep(u32 sum, u32* sink) {
    if (sum == 0x12345678) *sink = sum;
}

extern "C" __global__ void read_all(const uint4* from, i64 count, u32* sink) {
    u32 sum = 0;
    for (i64 at = (i64)blockIdx.x * CHUNK + threadIdx.x; at < count; at += (i64)gridDim.x * CHUNK)
#pragma unroll 8
        for (int i = 0; i < CHUNK; i += THREADS) sum ^= bits(__ldcs(from + at + i));
    keep(sum, sink);
}

extern "C" __global__ void write_all(uint4* to, i64 count, u32 value) {
    const uint4 all = make_uint4(value, value, value, value);
    for (i64 at = (i64)blockIdx.x * CHUNK + threadIdx.x; at < count; at += (i64)gridDim.x * CHUNK)
#pragma unroll 8
        for (int i = 0; i < CHUNK; i += THREADS) __stcs(to + at + i, all);
}

extern "C" __global__ void copy_all(const uint4* from, i64 count, uint4* to) {
    for (i64 at = (i64)blockIdx.x * CHUNK + threadIdx.x; at < count; at += (i64)gridDim.x * CHUNK)
#pragma unroll 8
        for (int i = 0; i < CHUNK; i += THREADS) __stcs(to + at + i, __ldcs(from + at + i));
}

// Every block reads all chunks, bypassing L1; each block begins at a different chunk.
extern "C" __global__ void read_cached(const uint4* from, i64 chunks, u32* sink) {
    u32 sum = 0;
    for (i64 n = 0; n < chunks; n++) {
        const uint4* at = from + (n + blockIdx.x) % chunks * CHUNK + threadIdx.x;
#pragma unroll 8
        for (int i = 0; i < CHUNK; i += THREADS) sum ^= bits(__ldcg(at + i));
    }
    keep(sum, sink);
}

// ACCUMULATORS multiply-adds per iteration.
extern "C" __global__ void multiply_f32(i64 iterations, float a, float b, u32* sink) {
    float sums[ACCUMULATORS];
#pragma unroll
    for (int i = 0; i < ACCUMULATORS; i++) sums[i] = (float)(threadIdx.x + i);
    for (i64 n = 0; n < iterations; n++)
#pragma unroll
        for (int i = 0; i < ACCUMULATORS; i++) sums[i] = fmaf(sums[i], a, b);
    u32 all = 0;
#pragma unroll
    for (int i = 0; i < ACCUMULATORS; i++) all ^= __float_as_uint(sums[i]);
    keep(all, sink);
}

// The same with four int8 products each.
extern "C" __global__ void multiply_int8(i64 iterations, int a, u32* sink) {
    int sums[ACCUMULATORS];
#pragma unroll
    for (int i = 0; i < ACCUMULATORS; i++) sums[i] = (int)threadIdx.x + i;
    for (i64 n = 0; n < iterations; n++)
#pragma unroll
        for (int i = 0; i < ACCUMULATORS; i++) sums[i] = __dp4a(sums[i], a, sums[i]);
    u32 all = 0;
#pragma unroll
    for (int i = 0; i < ACCUMULATORS; i++) all ^= (u32)sums[i];
    keep(all, sink);
}
