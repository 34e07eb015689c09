// Kernels that the runtime launches itself.

struct Values {
    i64 v[16];
};

// Store the live values of a run, for all later kernels.
extern "C" __global__ void set_header(i64* to, Values values) {
#pragma unroll
    for (int i = 0; i < 16; i++) to[i] = values.v[i];
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
