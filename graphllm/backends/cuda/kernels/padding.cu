// Padding: packed tokens as one rectangle [length, ...] for each sequence, and back. A thread copies one
// element. Rows that do not fit become NaN.

#include "sequences.cuh"

// out[s][p] = x[q_start[s] + p] for the tokens of sequence s, else 0. A block fills a part of one rectangle (x).
extern "C" __global__ void rebuild_padding(const u8* x, i64 stride, const int* q_start, float* out, const i64* live,
                                           int length, int width TIMESTAMPS) {
    RECORD_TIMESTAMPS
    const i64 starts = begin(live), sequence = blockIdx.x;
    const int i = blockIdx.y * blockDim.x + threadIdx.x, position = i / width;
    if (sequence >= starts || i >= length * width) return;
    const int first = q_start[sequence], end = sequence + 1 < starts ? q_start[sequence + 1] : first;
    const u8* row = x + (i64)(first + position) * stride;
    float v = end - first > length ? NOT_A_NUMBER : 0;
    if (end - first <= length && first + position < end) v = ((const float*)row)[i % width];
    out[sequence * length * width + i] = v;
}

// out[t] = x[s][t - q_start[s]] for the sequence s of token t. A block copies a part of one token's row (x).
extern "C" __global__ void remove_padding(const u8* x, i64 stride, const int* q_start, float* out, const i64* live,
                                          const i64* starts, const i64* rows, int length, int width TIMESTAMPS) {
    RECORD_TIMESTAMPS
    const i64 tokens = begin(live);
    const int token = blockIdx.x, sequences = (int)*starts - 1, i = blockIdx.y * blockDim.x + threadIdx.x;
    if (token >= tokens) return;
    const int sequence = find_sequence(q_start, sequences, token), position = token - q_start[sequence];
    if (i >= width) return;
    const bool known = sequence < sequences && sequence < *rows && position < length && token < q_start[sequence + 1];
    const float* row = (const float*)(x + sequence * stride) + (i64)position * width;
    out[(i64)token * width + i] = known ? row[i] : NOT_A_NUMBER;
}
