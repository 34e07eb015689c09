// Rows of a float table, by token id, as float32. FORMAT: 0 float32, 1 float16, 2 bfloat16.
//
// A block does one token (x) and some columns (y), a thread EACH adjacent elements.

template <int EACH> struct __align__(4 * EACH) Floats {
    float v[EACH];
};

template <int EACH>
__device__ __forceinline__ void gather(const int* ids, const u8* table, i64 count, float* out, i64 row, int column,
                                       int width) {
    const int id = ids[row];
    const i64 at = (i64)id * width + column;
    Floats<EACH> values;
#pragma unroll
    for (int i = 0; i < EACH; i++) values.v[i] = NOT_A_NUMBER;
    if (0 <= id && id < count) {
#if FORMAT == 0
        values = *(const Floats<EACH>*)((const float*)table + at);
#else
        struct __align__(2 * EACH) Halves { u16 v[EACH]; };
        const Halves halves = *(const Halves*)((const u16*)table + at);
#pragma unroll
        for (int i = 0; i < EACH; i++) values.v[i] = FORMAT == 1 ? from_f16(halves.v[i]) : from_bf16(halves.v[i]);
#endif
    }
    *(Floats<EACH>*)(out + row * width + column) = values;
}

extern "C" __global__ void embedding(const int* ids, const u8* table, i64 count, float* out,
                                     const i64* live, int width TIMESTAMPS) {
    RECORD_TIMESTAMPS
    const i64 rows = begin(live);
    const i64 row = blockIdx.x;
    const int unit = blockIdx.y * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    if (width % 4 == 0 && 4 * unit < width) gather<4>(ids, table, count, out, row, 4 * unit, width);
    if (width % 4 && unit < width) gather<1>(ids, table, count, out, row, unit, width);
}
