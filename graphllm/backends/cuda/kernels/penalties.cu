// Penalties for recent tokens, and a minimum number of tokens before an end token.

struct Penalties {
    const int *history, *count, *stop;
    const float *repeat, *presence, *frequency;
    const int* min_tokens;
    int ring, stops;
};

// A block copies some columns (y) of a row (x), and penalizes the ids among them.
extern "C" __global__ void penalise(const u8* x, i64 stride, float* out, const i64* live,
                                    int width, Penalties p TIMESTAMPS) {
    RECORD_TIMESTAMPS
    const i64 rows = begin(live);
    i64 n = blockIdx.x;
    if (n >= rows) return;
    const float* from = (const float*)(x + n * stride);
    const int* past = p.history + n * p.ring;
    out += n * width;
    int first = blockIdx.y * 4 * blockDim.x, last = min(width, first + 4 * (int)blockDim.x);
    for (int i = first + threadIdx.x; i < last; i += blockDim.x) out[i] = from[i];
    __syncthreads();
    for (int j = threadIdx.x; j < p.ring; j += blockDim.x) {
        int id = past[j], times = 0;
        if (id < first || id >= last) continue;
        bool seen = false;
        for (int i = 0; i < p.ring; i++) {
            seen |= past[i] == id && i < j;
            times += past[i] == id;
        }
        if (seen) continue;  // the first of equal entries applies the penalty
        float v = from[id], repeat = p.repeat[n];
        v = v > 0 ? v / repeat : v * repeat;
        out[id] = v - (p.presence[n] + (float)times * p.frequency[n]);
    }
    if (p.count[n] >= p.min_tokens[n]) return;
    __syncthreads();
    for (int e = threadIdx.x; e < p.stops; e += blockDim.x) {
        int id = p.stop[e];
        if (first <= id && id < last) out[id] -= INFINITE;  // NaN stays, +infinity becomes NaN
    }
}
