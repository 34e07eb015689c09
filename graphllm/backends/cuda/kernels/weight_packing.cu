// Copy `size` bytes of every stored block, which are `stride` bytes apart, to a plane: a byte a thread.
extern "C" __global__ void split(const u8* blocks, i64 stride, u8* plane, int size, i64 count) {
    begin();
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count * size) plane[i] = blocks[i / size * stride + i % size];
}
