#pragma once
// Definitions that all kernels share; included before every .cu file. No header of the CUDA toolkit is
// included.
//
// Conventions. Kernels are extern "C" and take pointers, integers and structs by value. Grids are sized
// for the upper bounds of the plan; the live number of rows is in device memory (`live`), and blocks
// beyond it return at once. A kernel may be launched while its predecessors still run (programmatic
// dependent launch) and calls `begin()` or `wait_for_previous()` to wait for their results. Before that
// it may read live counts, operands that the launch declares as prefetched (weights), and operands
// that its arguments mark as ready; runtime/dependencies.py computes which these are. No kernel writes
// before it waits. What it reads in a warm-up pass (`first_pass`), or speculatively (experts_gemv.cu), may be incomplete.

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef short i16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#define INFINITE __int_as_float(0x7f800000)
#define NOT_A_NUMBER __int_as_float(0x7fc00000)
#define FULL 0xffffffffu
#define WARP 32
#define DYNAMIC_SHARED(T, NAME) extern __shared__ T NAME[]

// ------------------------------------------------------------------------------- timestamps

// When a step started, when its predecessors had completed, and when it ended, in nanoseconds of the
// GPU's clock.
struct Timestamps {
    u64 start, ready, end;
};

// When a thread block started and ended.
struct BlockTimes {
    u64 start, end;
};

// One in `every` blocks of a launch records its times, in order, from `to` on.
struct BlockSample {
    BlockTimes* to;
    u32 every;
};

__device__ __forceinline__ u64 clock_ns() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
    return t;
}

// In the timed build the last parameter of each kernel points at the timestamps of its step. `start`
// and `ready` are recorded by the first block, `end` by the last thread 0 of a block. Kernels overlap
// as in the plain build, which contains none of this. With BLOCK_TIMES, one more parameter says where blocks
// record their own times.
#if TIMED_BUILD
__shared__ Timestamps* timestamps_of_step;  // set by the first thread only

__device__ __forceinline__ bool first_thread() {
    return threadIdx.x + blockIdx.x + blockIdx.y + blockIdx.z == 0;
}

struct TimestampScope {
    Timestamps* const to;
    __device__ __forceinline__ TimestampScope(Timestamps* timestamps) : to(timestamps) {
        if (first_thread()) timestamps_of_step = to, atomicMin(&to->start, clock_ns());
    }
    __device__ __forceinline__ ~TimestampScope() {
        if (threadIdx.x == 0) atomicMax(&to->end, clock_ns());
    }
};
#if BLOCK_TIMES
struct BlockScope {
    const BlockSample& sample;  // the kernel's parameter, so that no register is taken meanwhile
    __device__ __forceinline__ BlockTimes* entry() const {
        const u32 block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
        return threadIdx.x || block % sample.every ? nullptr : sample.to + block / sample.every;
    }
    __device__ __forceinline__ BlockScope(const BlockSample& from) : sample(from) {
        if (BlockTimes* to = entry()) to->start = clock_ns();
    }
    __device__ __forceinline__ ~BlockScope() {
        if (BlockTimes* to = entry()) to->end = clock_ns();
    }
};
#define TIMESTAMPS , Timestamps *timestamps, BlockSample block_sample
#define RECORD_TIMESTAMPS TimestampScope timestamp_scope(timestamps); BlockScope block_scope(block_sample);
#else
#define TIMESTAMPS , Timestamps* timestamps
#define RECORD_TIMESTAMPS TimestampScope timestamp_scope(timestamps);
#endif
#define RECORD_READY if (first_thread()) atomicMin(&timestamps_of_step->ready, clock_ns());
#else
#define TIMESTAMPS
#define RECORD_TIMESTAMPS
#define RECORD_READY
#endif

// ----------------------------------------------------------------------------------- launches

__device__ __forceinline__ void launch_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    RECORD_READY
}

__device__ __forceinline__ void begin() {
    launch_next();
    wait_for_previous();
}

// `begin`, which also returns the live number of rows. It is written before any kernel of a run starts,
// so it is loaded during the wait.
__device__ __forceinline__ i64 begin(const i64* live) {
    launch_next();
    const i64 rows = *(volatile const i64*)live;
    wait_for_previous();
    return rows;
}

// `begin` for kernels that read some operands before `wait_for_previous`, which they call themselves.
// If the operands are not `ready`, the wait is here.
__device__ __forceinline__ i64 begin(const i64* live, bool ready) {
    launch_next();
    const i64 rows = *(volatile const i64*)live;
    if (!ready) wait_for_previous();
    return rows;
}

// ------------------------------------------------------------------------------ warm-up passes
//
// A launch finds little of its code in the instruction caches. A kernel of few blocks, which have to wait anyway, may run
// twice: in pass 0, before the wait, it brings its code there and stores nothing, and in pass 1 it computes.

constexpr u32 MOST_WARM_BLOCKS = 132;  // with more, blocks share a multiprocessor, or run after others

// The first pass of a launch. Pass 1 begins with `wait_for_previous`, and the last one is pass 1.
__device__ __forceinline__ int first_pass() { return gridDim.x * gridDim.y <= MOST_WARM_BLOCKS ? 0 : 1; }

// Load what another kernel may be writing, so that pass 1 does not find it in the L1 cache.
__device__ __forceinline__ float load_l2(const float* from) {
    float x;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(from));
    return x;
}
__device__ __forceinline__ float4 load_l2(const float4* from) {
    float4 x;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(from));
    return x;
}

// ------------------------------------------------------------------------------------ copies

// Copy `nbytes`, a multiple of 4, from global to shared memory, by all threads of a block. Both addresses
// are aligned to 16 bytes. The copy is complete after the next barrier of the block.
__device__ __forceinline__ void copy_to_shared(uint4* to, const void* from, int nbytes) {
    const int words = nbytes / 4, first = words & ~3, rest = first + (int)threadIdx.x;
    if (rest < words) ((u32*)to)[rest] = ((const u32*)from)[rest];
#pragma unroll 1
    for (int i = threadIdx.x; i < first / 4; i += blockDim.x) {
        const uint4* next = (const uint4*)from + i;
#if __CUDA_ARCH__ >= 800
        asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(
                         (u32)__cvta_generic_to_shared(to + i)),
                     "l"(next));
#else
        to[i] = *next;
#endif
    }
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// ------------------------------------------------------------------------------- reductions
//
// Over a warp; every lane gets the result. Integers use an instruction of capability 8.0.

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(FULL, x, o);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int o = 16; o; o >>= 1) x = fmaxf(x, __shfl_xor_sync(FULL, x, o));
    return x;
}

__device__ __forceinline__ u32 warp_max(u32 x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(FULL, x);
#else
#pragma unroll
    for (int o = 16; o; o >>= 1) {
        u32 y = __shfl_xor_sync(FULL, x, o);
        x = x > y ? x : y;
    }
    return x;
#endif
}

__device__ __forceinline__ int warp_sum(int x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(FULL, x);
#else
#pragma unroll
    for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(FULL, x, o);
    return x;
#endif
}

// Sums of COUNT values over each LANES lanes of a warp (powers of two); lane l of these gets number
// l / (LANES / COUNT). Adds in the order of warp_sum, with a few shuffles more than for one value.
template <int COUNT, int LANES = WARP, class T>
__device__ __forceinline__ T warp_sums(const T* values, int lane) {
    T v[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) v[i] = values[i];
    int o = LANES / 2;
#pragma unroll
    for (int n = COUNT / 2; n; n /= 2, o /= 2)
#pragma unroll
        for (int i = 0; i < n; i++) {
            const bool upper = lane & o;
            const T keep = upper ? v[i + n] : v[i], send = upper ? v[i] : v[i + n];
            v[i] = keep + __shfl_xor_sync(FULL, send, o);
        }
#pragma unroll
    for (int rest = LANES / 2 / COUNT; rest; rest /= 2) v[0] += __shfl_xor_sync(FULL, v[0], rest);
    return v[0];
}

// Over all threads of a block (a multiple of 32, at most 1024); every thread gets the result.
template <class T, class F> __device__ __forceinline__ T block_reduce(T x, T empty, F reduce) {
    __shared__ T parts[WARP];
    int warps = blockDim.x / WARP, lane = threadIdx.x % WARP;
    x = reduce(x);
    if (warps == 1) return x;
    __syncthreads();  // the partial results of the previous reduction have been read
    if (lane == 0) parts[threadIdx.x / WARP] = x;
    __syncthreads();
    return reduce(lane < warps ? parts[lane] : empty);
}

__device__ __forceinline__ float block_sum(float x) {
    return block_reduce(x, 0.f, [](float v) { return warp_sum(v); });
}

__device__ __forceinline__ float block_max(float x) {
    return block_reduce(x, -INFINITE, [](float v) { return warp_max(v); });
}

__device__ __forceinline__ u32 block_max(u32 x) {
    return block_reduce(x, 0u, [](u32 v) { return warp_max(v); });
}

__device__ __forceinline__ int block_sum(int x) {
    return block_reduce(x, 0, [](int v) { return warp_sum(v); });
}

// ----------------------------------------------------------------------------- small floats

__device__ __forceinline__ float from_f16(u16 h) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
    return x;
}

__device__ __forceinline__ u16 to_f16(float x) {  // to nearest even; out of range: infinity
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
}

__device__ __forceinline__ float within_f16(float x) {  // clamp to the finite range; NaN stays NaN
    return x > 65504.f ? 65504.f : x < -65504.f ? -65504.f : x;
}

// Two values as a pair of f16, the first one in the low half.
__device__ __forceinline__ u32 two_within_f16(float low, float high) {
#if __CUDA_ARCH__ >= 800
    u32 pair;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return to_f16(within_f16(low)) | (u32)to_f16(within_f16(high)) << 16;
#endif
}

__device__ __forceinline__ float from_bf16(u16 h) { return __uint_as_float((u32)h << 16); }

__device__ __forceinline__ u16 to_bf16(float x) {  // to nearest even; NaN stays NaN
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)(bits >> 16 | 0x40);
    return (u16)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

// e4m3 as float32, by its bits: the exponent of float32 has 120 more. A NaN becomes 480.
__device__ __forceinline__ float from_e4m3(u32 byte) {
    return __uint_as_float((byte & 0x80) << 24 | (byte & 0x7f) << 20) * 0x1p120f;
}

// ------------------------------------------------------------------- unaligned little-endian

__device__ __forceinline__ u16 load_u16(const u8* p) { return (u16)(p[0] | p[1] << 8); }

__device__ __forceinline__ float load_f16(const u8* p) { return from_f16(load_u16(p)); }

__device__ __forceinline__ i8 as_i8(u8 byte) { return (i8)byte; }

// --------------------------------------------------------------------------------- activations

__device__ __forceinline__ float act_silu(float x) { return x / (1.f + expf(-x)); }

__device__ __forceinline__ float act_gelu_tanh(float x) {
    return 0.5f * x * (1.f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
}

__device__ __forceinline__ float act_gelu_erf(float x) {
    return 0.5f * x * (1.f + erff(x * 0.7071067812f));
}

__device__ __forceinline__ float act_relu(float x) { return x < 0.f ? 0.f : x; }  // NaN stays NaN

enum Activation { SILU, GELU_TANH, GELU_ERF, RELU };

__device__ __forceinline__ float activate(int kind, float x) {
    if (kind == SILU) return act_silu(x);
    return kind == GELU_TANH ? act_gelu_tanh(x) : act_gelu_erf(x);
}

// The same for a result that is rounded to f16 or bf16. gelu_erf is x / 2 + |x| (probability of 0 .. |x|), which a
// polynomial gives for |x| < 4.5, with an error of 8e-6 and no exponential or division.
__device__ __forceinline__ float activate_half(int kind, float x) {
    if (kind == SILU) return __fdividef(x, 1.f + __expf(-x));
    if (kind == GELU_TANH) return __fdividef(x, 1.f + __expf(-1.5957691216f * (x + 0.044715f * x * x * x)));
    if (kind == RELU) return act_relu(x);
    const float coefficients[] = {1.933725263e-10f, -1.022935958e-08f, 3.208970156e-07f, -6.728143944e-06f,
                                  1.011057029e-04f, -1.140027889e-03f, 9.885612875e-03f, -6.641434133e-02f,
                                  3.989228010e-01f};
    const float size = fabsf(x), part = fminf(size, 4.5f), square = part * part;
    float p = -1.628655652e-12f;
#pragma unroll
    for (int i = 0; i < 9; i++) p = fmaf(p, square, coefficients[i]);
    return fmaf(size, fminf(part * p, 0.5f), 0.5f * x);
}

// The gated unit of gpt-oss; see the op clamped_glu.
__device__ __forceinline__ float act_clamped(float gate, float up, float alpha, float limit) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return gate / (1.f + expf(-alpha * gate)) * (up + 1.f);
}
