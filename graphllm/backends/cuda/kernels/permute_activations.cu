// Stores f16 activations in the order in which small_batch_blocks.cu multiplies them, so that it copies 16
// bytes at a time. Of each CHUNK elements, pairs from the four quarters follow each other. Rows are padded
// with zeros to whole chunks.

#define UNITS (CHUNK / 8)  // of 16 bytes

// Grid: (blocks of a row, rows).
extern "C" __global__ void permute(const u8* x, i64 stride, const i64* live, int k, uint4* out,
                                   int out_units TIMESTAMPS) {
    RECORD_TIMESTAMPS
    const i64 rows = begin(live), row = blockIdx.y;
    const int unit = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows || unit >= out_units) return;
    const int first = unit / UNITS * CHUNK + unit % UNITS * 2;
    u32 v[4];
#pragma unroll
    for (int quarter = 0; quarter < 4; quarter++) {
        const int at = first + quarter * (CHUNK / 4);
        v[quarter] = at < k ? *(const u32*)(x + row * stride + 2 * at) : 0;
    }
    out[row * out_units + unit] = make_uint4(v[0], v[1], v[2], v[3]);
}
