// What stands around the library's matrix products for many tokens.
//
// KIND of the operands: 0 float32, 1 float16, 2 bfloat16. FORMAT: of the weights, for `expand`.

#include "blocks.cuh"

#if KIND == 0
typedef float Number;
__device__ __forceinline__ Number number(float x) { return x; }
#elif KIND == 1
typedef u16 Number;  // beyond the range: the largest
__device__ __forceinline__ Number number(float x) {
    return to_f16(x > 65504.f ? 65504.f : x < -65504.f ? -65504.f : x);  // NaN stays NaN
}
#else
typedef u16 Number;
__device__ __forceinline__ Number number(float x) { return to_bf16(x); }
#endif

// Rows of float32 as dense rows of numbers.
extern "C" __global__ void narrow(const u8* x, i64 x_stride, Number* y, const i64* live, int k) {
    begin();
    int row = blockIdx.y, at = 2 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (row >= *live || at >= k) return;
    const float* from = (const float*)(x + row * x_stride) + at;
    Number* to = y + (i64)row * k + at;
    to[0] = number(from[0]);
    if (at + 1 < k) to[1] = number(from[1]);
}

// What a matrix product is added to: y = bias + added.
extern "C" __global__ void base(float* y, i64 y_stride, const float* bias, const u8* added,
                                i64 added_stride, const i64* live, int rows) {
    begin();
    int token = blockIdx.y, row = blockIdx.x * blockDim.x + threadIdx.x;
    if (token >= *live || row >= rows) return;
    float value = bias ? bias[row] : 0;
    if (added) value += ((const float*)(added + token * added_stride))[row];
    ((float*)((u8*)y + token * y_stride))[row] = value;
}

#ifdef FORMAT
// `count` items of a matrix, whole rows from item `first` on, as numbers. The 32 items of a warp are
// neighbours: they are put in order in shared memory, and leave it as whole lines.
extern "C" __global__ void __launch_bounds__(128)
    expand(Planes w, i64 first, i64 count, int items, u16* y) {
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
                r[e] = number(low) |
                       (u32)number(fmaf(u.scale[p], (float)(i8)(v >> 8), u.offset[p])) << 16;
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
#endif
