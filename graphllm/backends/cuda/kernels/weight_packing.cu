// Copy `size` bytes of every stored block, which are `stride` bytes apart, to a plane: a byte a thread.
extern "C" __global__ void split(const u8* blocks, i64 stride, u8* plane, int size, i64 count) {
    begin();
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count * size) plane[i] = blocks[i / size * stride + i % size];
}

// Copy scales of 128 elements each, `count` of a row, to a plane with those of all rows for the first 128
// elements, then for the next, `next` floats later. A thread copies one scale, which may not be aligned.
extern "C" __global__ void transpose_scales(const u8* rows, i64 stride, float* plane, int count, i64 next,
                                            i64 all) {
    begin();
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= all) return;
    const u8* from = rows + i / count * stride + i % count * 4;
    const u32 bits = load_u16(from) | (u32)load_u16(from + 2) << 16;
    plane[i % count * next + i / count] = __uint_as_float(bits);
}
