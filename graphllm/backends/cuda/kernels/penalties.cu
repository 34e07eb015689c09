// Changes of single logits of a row: biases and excluded ids, and penalties for recent tokens.
//
// A block copies some columns (y) of a row (x), and changes the ids among them.

#include "copy_row.cuh"

struct Biases {
    const int* ids;
    const float* bias;
    const int *allowed, *stop, *count, *min_tokens;
    const int* mask;  // bitmaps of allowed ids, (width + 31) / 32 words a row; null for none
    int id_count, allowed_count, stop_count;
};

extern "C" __global__ void bias_logits(const u8* x, i64 stride, float* out, const i64* live,
                                       int width, Biases b TIMESTAMPS) {
    RECORD_TIMESTAMPS
    const i64 rows = begin(live);
    i64 n = blockIdx.x;
    if (n >= rows) return;
    const float* from = (const float*)(x + n * stride);
    const int* allowed = b.allowed + n * b.allowed_count;
    out += n * width;
    const int each = columns_of(width), first = blockIdx.y * each, last = min(width, first + each);
    bool some = false;
    for (int j = threadIdx.x; j < b.allowed_count; j += blockDim.x)
        some |= 0 <= allowed[j] && allowed[j] < width;
    bool limited = __syncthreads_or(some);
    if (!limited) copy_columns(from, out, first, last);
    for (int i = first + threadIdx.x; limited && i < last; i += blockDim.x)
        out[i] = from[i] - INFINITE;  // NaN stays, +infinity becomes NaN
    __syncthreads();
    for (int j = threadIdx.x; limited && j < b.allowed_count; j += blockDim.x)
        if (first <= allowed[j] && allowed[j] < last) out[allowed[j]] = from[allowed[j]];
    __syncthreads();
    for (int j = threadIdx.x; j < b.id_count; j += blockDim.x) {
        int id = b.ids[n * b.id_count + j];
        if (first <= id && id < last) out[id] += b.bias[n * b.id_count + j];
    }
    __syncthreads();
    const int* mask = b.mask ? b.mask + n * ((width + 31) / 32) : nullptr;
    for (int i = first + threadIdx.x; mask && i < last; i += blockDim.x)
        if (!(mask[i / 32] >> (i % 32) & 1)) out[i] -= INFINITE;
    if (b.count[n] >= b.min_tokens[n]) return;
    __syncthreads();
    for (int j = threadIdx.x; j < b.stop_count; j += blockDim.x) {
        int id = b.stop[n * b.stop_count + j];
        if (first <= id && id < last) out[id] -= INFINITE;
    }
}

struct Penalties {
    const int *history, *length, *breakers;
    const float* factors;
    const int* windows;
    int ring, breaker_count;
};

// The last tokens of a sequence, the latest first.
struct Past {
    const int* history;
    int ring, length, count;

    __device__ __forceinline__ Past(const Penalties& p, i64 n, int window)
        : history(p.history + n * p.ring), ring(p.ring), length(p.length[n]) {
        count = min(length, ring);
        if (window >= 0) count = min(count, window);
    }
    __device__ __forceinline__ int operator[](int i) const { return history[(length - 1 - i) % ring]; }
};

// The settings of DRY.
struct Dry {
    float multiplier, base;
    int least, window;

    __device__ __forceinline__ Dry(const Penalties& p, i64 n)
        : multiplier(p.factors[5 * n + 3]),
          base(p.factors[5 * n + 4]),
          least(p.windows[3 * n + 1]),
          window(p.windows[3 * n + 2]) {}
    __device__ __forceinline__ bool on() const { return multiplier != 0 && base >= 1; }
};

// Store how many of the last tokens follow up to token k, counted from the latest, for k > 0; -1 if they
// are fewer than DRY penalizes. A block computes a row of found [rows, ring].
extern "C" __global__ void repetitions(Penalties p, const i64* live, int* found TIMESTAMPS) {
    RECORD_TIMESTAMPS
    __shared__ int limit;  // position of the last sequence breaker
    const i64 rows = begin(live);
    i64 n = blockIdx.x;
    if (n >= rows) return;
    Dry dry(p, n);
    if (!dry.on()) return;
    Past past(p, n, dry.window);
    if (threadIdx.x == 0) limit = past.count;
    __syncthreads();
    for (int i = threadIdx.x; i < past.count; i += blockDim.x)
        for (int b = 0; b < p.breaker_count; b++) {
            int breaker = p.breakers[n * p.breaker_count + b];
            if (breaker >= 0 && past[i] == breaker) atomicMin(&limit, i);
        }
    __syncthreads();
    for (int k = threadIdx.x; k < past.count; k += blockDim.x) {
        int same = 0;
        while (k && same < limit && same + k < past.count && past[same] == past[same + k]) same++;
        found[n * p.ring + k] = k && limit >= dry.least && same >= dry.least ? same : -1;
    }
}

// multiplier * base^excess, the power at most 2^127.
__device__ __forceinline__ float dry_penalty(const Dry& dry, int excess) {
    double penalty = (double)dry.multiplier * fmin(pow((double)dry.base, (double)excess), 0x1p127);
    return (float)fmax(fmin(penalty, 3.4e38), -3.4e38);
}

// `found`: see `repetitions`.
extern "C" __global__ void penalise(const u8* x, i64 stride, float* out, const i64* live,
                                    int width, Penalties p, const int* found TIMESTAMPS) {
    RECORD_TIMESTAMPS
    const i64 rows = begin(live);
    i64 n = blockIdx.x;
    if (n >= rows) return;
    const float* from = (const float*)(x + n * stride);
    out += n * width;
    found += n * p.ring;
    const int each = columns_of(width), first = blockIdx.y * each, last = min(width, first + each);
    copy_columns(from, out, first, last);
    const float *factors = p.factors + 5 * n;
    const bool on = factors[0] != 1 || factors[1] != 0 || factors[2] != 0;
    Dry dry(p, n);
    if (!on && !dry.on()) return;
    __syncthreads();
    Past past(p, n, p.windows[3 * n]);
    for (int j = threadIdx.x; on && j < past.count; j += blockDim.x) {
        int id = past[j], times = 0;
        if (id < first || id >= last) continue;
        bool seen = false;
        for (int i = 0; i < past.count; i++) {
            bool equal = past[i] == id;
            seen |= equal && i < j;
            times += equal;
        }
        if (seen) continue;  // the first of equal entries applies the penalty
        float v = from[id], repeat = factors[0];
        v = v > 0 ? v / repeat : v * repeat;
        out[id] = v - (factors[1] + (float)times * factors[2]);
    }
    if (!dry.on()) return;
    __syncthreads();
    Past all(p, n, dry.window);
    for (int k = 1 + threadIdx.x; k < all.count; k += blockDim.x) {
        int id = all[k - 1], most = 0;
        if (id < first || id >= last || found[k] < 0) continue;
        bool seen = false;
        for (int j = 1; j < all.count; j++) {
            if (found[j] < 0 || all[j - 1] != id) continue;
            seen |= j < k;
            most = max(most, found[j]);
        }
        if (!seen) out[id] -= dry_penalty(dry, most - dry.least);
    }
}
