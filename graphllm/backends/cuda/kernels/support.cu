// Kernels that the runtime launches itself.

struct Values {
    i64 v[16];
};

// Store the live values of a run, for all later kernels.
extern "C" __global__ void set_header(i64* to, Values values) {
#pragma unroll
    for (int i = 0; i < 16; i++) to[i] = values.v[i];
}

// Bytes at `at` of a staging buffer, a multiple of 16, which go to `to`, aligned to 16 bytes.
struct Part {
    u8* to;
    u32 at, nbytes;
};

struct Parts {
    Part part[32];
};

// Copy parts from the GPU's memory or the host's to the other one. Pinned memory of the host is read and written over
// the bus, past all caches.
extern "C" __global__ void scatter(const u8* staged, Parts parts) {
    const Part own = parts.part[blockIdx.y];
    const u8* from = staged + own.at;
    const u32 whole = own.nbytes & ~15u, first = blockIdx.x * blockDim.x + threadIdx.x;
    for (u32 i = first * 16; i < whole; i += gridDim.x * blockDim.x * 16) {
        uint4 v;
        asm volatile("ld.global.cv.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "l"(from + i));
        *(uint4*)(own.to + i) = v;
    }
    if (first < own.nbytes - whole) own.to[whole + first] = ((const volatile u8*)from)[whole + first];
}

// -------------------------------------------------------------------------------- timestamps

// Before a timed run: clear the timestamps of all steps; entry 0, before the first step, ends now.
extern "C" __global__ void begin_timestamps(Timestamps* times, int steps) {
    for (int i = threadIdx.x; i <= steps; i += blockDim.x) times[i] = {~0ull, ~0ull, 0};
    __syncthreads();
    if (threadIdx.x == 0) times[0].start = times[0].end = clock_ns();
}

// Record the end of a library call.
extern "C" __global__ void record_end(Timestamps* times) { atomicMax(&times->end, clock_ns()); }

// After a timed run: copy its timestamps to the next of `places` entries of a ring.
extern "C" __global__ void keep_timestamps(const Timestamps* times, int steps, Timestamps* kept, int places,
                                      u32* runs) {
    Timestamps* to = kept + (i64)(*runs % places) * (steps + 1);
    for (int i = threadIdx.x; i <= steps; i += blockDim.x) to[i] = times[i];
    __syncthreads();
    if (threadIdx.x == 0) ++*runs;
}

// The GPU's clock in nanoseconds.
extern "C" __global__ void read_clock(u64* to) { *to = clock_ns(); }
