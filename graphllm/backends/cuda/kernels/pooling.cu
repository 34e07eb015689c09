// One row for the rows of each sequence. A block computes a sequence (x) and some columns (y), a thread a column.

enum Pooling { CLS, MAX, MEAN, MEAN_SQRT_LEN, WEIGHTED_MEAN, LAST };  // in the order of POOLINGS of ops/pooling.py

extern "C" __global__ void pool(const u8* x, i64 stride, const int* q_start, float* out, const i64* live,
                                int width, int kind TIMESTAMPS) {
    RECORD_TIMESTAMPS
    const i64 starts = begin(live);
    const i64 sequence = blockIdx.x;
    const int column = blockIdx.y * blockDim.x + threadIdx.x;
    if (sequence >= starts || column >= width) return;
    const int first = sequence + 1 < starts ? q_start[sequence] : 0, end = sequence + 1 < starts ? q_start[sequence + 1] : 0;
    auto at = [&](int row) { return ((const float*)(x + row * stride))[column]; };
    const int count = end - first;
    float result = 0;
    if (count > 0 && kind == CLS) {
        result = at(first);
    } else if (count > 0 && kind == LAST) {
        result = at(end - 1);
    } else if (count > 0 && kind == MAX) {
        result = at(first);
        for (int i = first + 1; i < end; i++) {
            const float v = at(i);
            result = v > result || v != v ? v : result;  // NaN stays NaN, as it compares false
        }
    } else if (count > 0) {
#pragma unroll 8
        for (int i = first; i < end; i++) result += at(i) * (kind == WEIGHTED_MEAN ? (float)(i - first + 1) : 1.f);
        const float weights = kind == WEIGHTED_MEAN ? 0.5f * (float)count * (float)(count + 1) : (float)count;
        result /= kind == MEAN_SQRT_LEN ? sqrtf(weights) : weights;
    }
    out[sequence * width + column] = result;
}
