// Rows of a float table, by token id, as float32. FORMAT: 0 float32, 1 float16, 2 bfloat16.
//
// A thread block does one token (x) and some columns (y), a thread one element.

extern "C" __global__ void embedding(const int* ids, const u8* table, i64 count, float* out,
                                     const i64* live, int width TIMESTAMPS) {
    RECORD_TIMESTAMPS
    const i64 rows = begin(live);
    const i64 row = blockIdx.x;
    const int column = blockIdx.y * blockDim.x + threadIdx.x;
    if (row >= rows || column >= width) return;
    const int id = ids[row];
    const i64 at = (i64)id * width + column;
    float value = NOT_A_NUMBER;
    if (0 <= id && id < count) {
#if FORMAT == 0
        value = ((const float*)table)[at];
#elif FORMAT == 1
        value = from_f16(((const u16*)table)[at]);
#else
        value = from_bf16(((const u16*)table)[at]);
#endif
    }
    out[row * width + column] = value;
}
