// Stores f16 activations in the order in which small_batch_blocks.cu multiplies them, so that it copies
// PART elements of the depth of `tokens` tokens at once. Of each CHUNK elements, pairs from the four quarters
// follow each other, in groups of 64 elements of all tokens (see wgmma.cuh). A part has two groups: of a chunk
// of 256 elements, number 2 p and 2 p + 1 if ADJACENT, else p and p + 2. Rows are padded with zeros to whole
// chunks.

#include "wgmma.cuh"

#define UNITS (CHUNK / 8)  // of 16 bytes
#define PARTS (CHUNK / 128)

// Grid: (blocks of a row, rows).
extern "C" __global__ void permute(const u8* x, i64 stride, const i64* live, int k, uint4* out, int chunks,
                                   int tokens TIMESTAMPS) {
    RECORD_TIMESTAMPS
    const i64 rows = begin(live), row = blockIdx.y;
    const int unit = blockIdx.x * blockDim.x + threadIdx.x, chunk = unit / UNITS;
    if (row >= rows || chunk >= chunks) return;
    const int first = chunk * CHUNK + unit % UNITS * 2;
    u32 v[4];
#pragma unroll
    for (int quarter = 0; quarter < 4; quarter++) {
        const int at = first + quarter * (CHUNK / 4);
        v[quarter] = at < k ? *(const u32*)(x + row * stride + 2 * at) : 0;
    }
    const int group = unit % UNITS / 8, token = (int)row % tokens;
    const i64 part = ((int)row / tokens * chunks + chunk) * PARTS + (ADJACENT ? group / 2 : group % PARTS);
    out[((part * 2 + (ADJACENT ? group % 2 : group / PARTS)) * tokens + token) * 8 + swizzled(token, unit % 8)] =
        make_uint4(v[0], v[1], v[2], v[3]);
}
