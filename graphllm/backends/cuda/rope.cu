// Rotary position embedding. A block does one row (x) and some elements of it (y).

#include "rope.cuh"

extern "C" __global__ void rope(const u8* x, i64 stride, float* out, const i64* live, int width,
                                int head, Turn turn STAMPS) {
    STAMPED
    const i64 rows = begin(live);
    i64 row = blockIdx.x;
    int column = blockIdx.y * blockDim.x + threadIdx.x;
    if (row >= rows || column >= width) return;
    int in_head = column % head;
    const float* from = (const float*)(x + row * stride) + (column - in_head);
    out[row * width + column] = turned(turn, row, from, in_head);
}
