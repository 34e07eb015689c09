// Block weights as float16, for the library's matrix products. FORMAT: of the weights.

#include "blocks.cuh"
#include "quantise.cuh"

// `count` items of a matrix, whole rows from item `first` on, as float16. The 32 items of a warp are
// neighbours: they are put in order in shared memory, and leave it as whole lines.
extern "C" __global__ void __launch_bounds__(128)
    expand(Planes w, i64 first, i64 count, int items, u16* y STAMPS) {
    STAMPED
    __shared__ uint4 stage[4][WARP * FORMAT::ITEM / 8];
    begin();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const i64 start = ((i64)blockIdx.x * 4 + warp) * WARP, i = start + lane;
    if (i < count) {
        int j = (int)(i % items);
        FORMAT item;
        item.load(w, first + i);
        FORMAT::Values u;
        item.unpack(j, u);
        u16* row = (u16*)stage[warp] + (i - j - start) * FORMAT::ITEM;
#pragma unroll
        for (int p = 0; p < FORMAT::PARTS; p++) {
            u32 r[8];
#pragma unroll
            for (int e = 0; e < 8; e++) {
                int v = u.v[4 * p + e / 2] >> 16 * (e % 2);
                float low = fmaf(u.scale[p], (float)(i8)v, u.offset[p]);
                float high = fmaf(u.scale[p], (float)(i8)(v >> 8), u.offset[p]);
                r[e] = to_half(1, low) | (u32)to_half(1, high) << 16;
            }
            uint4* to = (uint4*)(row + FORMAT::at(j, p));
            to[0] = make_uint4(r[0], r[1], r[2], r[3]);
            to[1] = make_uint4(r[4], r[5], r[6], r[7]);
        }
    }
    __syncwarp();
    uint4* to = (uint4*)(y + start * FORMAT::ITEM);
    const int pieces = (int)min((i64)WARP, count - start) * FORMAT::ITEM / 8;
    for (int n = lane; n < pieces; n += WARP) to[n] = stage[warp][n];
}
