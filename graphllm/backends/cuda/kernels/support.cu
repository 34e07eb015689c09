// What the runtime itself launches.

struct Values {
    i64 v[16];
};

// The live values of a run, for all kernels after this one.
extern "C" __global__ void set_header(i64* to, Values values) {
#pragma unroll
    for (int i = 0; i < 16; i++) to[i] = values.v[i];
}

// ----------------------------------------------------------------------------- times of steps

// Before a timed run: no step has times yet; the one before the first, of none, ends now.
extern "C" __global__ void begin_timestamps(Timestamps* times, int steps) {
    for (int i = threadIdx.x; i <= steps; i += blockDim.x) times[i] = {~0ull, ~0ull, 0};
    __syncthreads();
    if (threadIdx.x == 0) times[0].start = times[0].end = clock_ns();
}

// What a library does for a step is over.
extern "C" __global__ void record_end(Timestamps* times) { atomicMax(&times->end, clock_ns()); }

// After a timed run: its times go to the next of `places` places for them.
extern "C" __global__ void keep_timestamps(const Timestamps* times, int steps, Timestamps* kept, int places,
                                      u32* runs) {
    Timestamps* to = kept + (i64)(*runs % places) * (steps + 1);
    for (int i = threadIdx.x; i <= steps; i += blockDim.x) to[i] = times[i];
    __syncthreads();
    if (threadIdx.x == 0) ++*runs;
}

// The GPU's clock in nanoseconds.
extern "C" __global__ void read_clock(u64* to) { *to = clock_ns(); }
