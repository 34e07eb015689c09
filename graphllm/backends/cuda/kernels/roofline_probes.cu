// What memory, the second-level cache and arithmetic give at best: nothing but moves, or nothing but
// multiply-adds. Blocks have 512 threads; what is kept in `sink` makes that nothing is left out.

#define PIECE 4096  // uint4: a block goes over every gridDim.x-th piece of 64 KB
#define THREADS 512
#define SUMS 8  // that a thread adds to in turns, so that none waits for itself

__device__ __forceinline__ u32 bits(uint4 v) { return v.x ^ v.y ^ v.z ^ v.w; }

__device__ __forceinline__ void keep(u32 sum, u32* sink) {
    if (sum == 0x12345678) *sink = sum;
}

extern "C" __global__ void read_all(const uint4* from, i64 count, u32* sink) {
    u32 sum = 0;
    for (i64 at = (i64)blockIdx.x * PIECE + threadIdx.x; at < count; at += (i64)gridDim.x * PIECE)
#pragma unroll 8
        for (int i = 0; i < PIECE; i += THREADS) sum ^= bits(__ldcs(from + at + i));
    keep(sum, sink);
}

extern "C" __global__ void write_all(uint4* to, i64 count, u32 value) {
    const uint4 all = make_uint4(value, value, value, value);
    for (i64 at = (i64)blockIdx.x * PIECE + threadIdx.x; at < count; at += (i64)gridDim.x * PIECE)
#pragma unroll 8
        for (int i = 0; i < PIECE; i += THREADS) __stcs(to + at + i, all);
}

extern "C" __global__ void copy_all(const uint4* from, i64 count, uint4* to) {
    for (i64 at = (i64)blockIdx.x * PIECE + threadIdx.x; at < count; at += (i64)gridDim.x * PIECE)
#pragma unroll 8
        for (int i = 0; i < PIECE; i += THREADS) __stcs(to + at + i, __ldcs(from + at + i));
}

// Every block reads all of `pieces` pieces, past the first-level cache; each begins at another one.
extern "C" __global__ void read_cached(const uint4* from, i64 pieces, u32* sink) {
    u32 sum = 0;
    for (i64 n = 0; n < pieces; n++) {
        const uint4* at = from + (n + blockIdx.x) % pieces * PIECE + threadIdx.x;
#pragma unroll 8
        for (int i = 0; i < PIECE; i += THREADS) sum ^= bits(__ldcg(at + i));
    }
    keep(sum, sink);
}

// SUMS multiply-adds in each of `turns`.
extern "C" __global__ void multiply_f32(i64 turns, float a, float b, u32* sink) {
    float sums[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; i++) sums[i] = (float)(threadIdx.x + i);
    for (i64 n = 0; n < turns; n++)
#pragma unroll
        for (int i = 0; i < SUMS; i++) sums[i] = fmaf(sums[i], a, b);
    u32 all = 0;
#pragma unroll
    for (int i = 0; i < SUMS; i++) all ^= __float_as_uint(sums[i]);
    keep(all, sink);
}

// The same of four int8 each.
extern "C" __global__ void multiply_int8(i64 turns, int a, u32* sink) {
    int sums[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; i++) sums[i] = (int)threadIdx.x + i;
    for (i64 n = 0; n < turns; n++)
#pragma unroll
        for (int i = 0; i < SUMS; i++) sums[i] = __dp4a(sums[i], a, sums[i]);
    u32 all = 0;
#pragma unroll
    for (int i = 0; i < SUMS; i++) all ^= (u32)sums[i];
    keep(all, sink);
}
