// Position encodings. Unless stated otherwise, a block computes one row (x) and some elements of it (y).

#include "rope.cuh"

extern "C" __global__ void rope(const u8* x, i64 stride, float* out, const i64* live, int width,
                                int head, Rotation rotation TIMESTAMPS) {
    RECORD_TIMESTAMPS
    const i64 rows = begin(live);
    i64 row = blockIdx.x;
    int column = blockIdx.y * blockDim.x + threadIdx.x;
    if (row >= rows || column >= width) return;
    int in_head = column % head;
    const float* from = (const float*)(x + row * stride) + (column - in_head);
    out[row * width + column] = rotated(rotation, row, from, in_head);
}

// A thread computes one token: component `part` of its two positions, see graphllm.ops.rope.
extern "C" __global__ void positions_2d(const int* pos, const int* q_start, const int* prefix_len,
                                        int* out, const i64* live, const i64* sequences,
                                        int part TIMESTAMPS) {
    RECORD_TIMESTAMPS
    const i64 rows = begin(live);
    i64 token = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (token >= rows) return;
    int s = 0, count = (int)*sequences;
    while (s + 1 < count && q_start[s + 1] <= token) s++;
    int at = pos[token], prefix = prefix_len[s];
    int after = prefix > 0 ? max(0, at - prefix + 1) : 0;
    out[token] = part ? after : at - after;
}

extern "C" __global__ void sinusoids(const int* pos, const float* frequency, float* out,
                                     const i64* live, int width, int offset TIMESTAMPS) {
    RECORD_TIMESTAMPS
    const i64 rows = begin(live);
    i64 row = blockIdx.x;
    int column = blockIdx.y * blockDim.x + threadIdx.x, half = width / 2;
    if (row >= rows || column >= width) return;
    float s = 0, c = 0;
    if (column < 2 * half) angle_of(pos[row] + offset, frequency[column % half], s, c);
    out[row * width + column] = column < half ? s : c;
}
