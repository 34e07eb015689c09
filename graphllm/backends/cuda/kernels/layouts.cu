// From blocks as a file has them to planes: a thread moves a byte of every block's `size`.
extern "C" __global__ void split(const u8* blocks, i64 stride, u8* plane, int size, i64 count) {
    begin();
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count * size) plane[i] = blocks[i / size * stride + i % size];
}
