// Dequantize block weights to f16, for cuBLASLt. FORMAT: format of the weights.

#include "formats.cuh"

// Dequantize `count` items of a matrix, whole rows from item `first` on. The 32 items of a warp are
// adjacent: they are ordered in shared memory and stored as whole cache lines.
extern "C" __global__ void __launch_bounds__(128)
    dequantize(Planes w, i64 first, i64 count, int items, u16* y TIMESTAMPS) {
    RECORD_TIMESTAMPS
    __shared__ uint4 stage[4][WARP * FORMAT::ITEM / 8];
    begin();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const i64 start = ((i64)blockIdx.x * 4 + warp) * WARP, i = start + lane;
    if (i < count) {
        int j = (int)(i % items);
        FORMAT item;
        item.load(FORMAT::item(w, first + i));
        FORMAT::Values u;
        item.unpack(j, u);
        u16* row = (u16*)stage[warp] + (i - j - start) * FORMAT::ITEM;
#pragma unroll
        for (int p = 0; p < FORMAT::PARTS; p++) expand_part(u, p, (uint4*)(row + FORMAT::at(j, p)));
    }
    __syncwarp();
    uint4* to = (uint4*)(y + start * FORMAT::ITEM);
    const int vectors = (int)min((i64)WARP, count - start) * FORMAT::ITEM / 8;
    for (int n = lane; n < vectors; n += WARP) to[n] = stage[warp][n];
}
