// Copies: contiguous, cast, gather_rows, gather_columns and concat. A block copies one row (x).

// A tensor of at most four axes: strides in bytes of all axes, dims of axes 1 to 3, elements of a row.
struct Shape {
    i64 stride[4];
    int dims[3], width;
};

template <class T>
__device__ __forceinline__ void pack_rows(const u8* x, const Shape& s, T* out, const i64* live) {
    const i64 rows = begin(live);
    i64 row = blockIdx.x;
    int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (row >= rows || i >= s.width) return;
    int c = i % s.dims[2], b = i / s.dims[2] % s.dims[1], a = i / s.dims[2] / s.dims[1];
    const u8* from = x + row * s.stride[0] + a * s.stride[1] + b * s.stride[2] + c * s.stride[3];
    out[row * s.width + i] = *(const T*)from;
}

#define PACK(NAME, T)                                                                           \
    extern "C" __global__ void NAME(const u8* x, Shape s, T* out, const i64* live TIMESTAMPS) { \
        RECORD_TIMESTAMPS                                                                       \
        pack_rows(x, s, out, live);                                                             \
    }
PACK(contiguous_1, u8)
PACK(contiguous_2, u16)
PACK(contiguous_4, u32)
PACK(contiguous_8, u64)

enum FloatKind { KIND_F32, KIND_F16, KIND_BF16 };

extern "C" __global__ void cast(const u8* x, i64 stride, u8* out, const i64* live, int width,
                                int source, int target TIMESTAMPS) {
    RECORD_TIMESTAMPS
    const i64 rows = begin(live);
    i64 row = blockIdx.x;
    int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (row >= rows || i >= width) return;
    const u8* from = x + row * stride;
    i64 at = row * width + i;
    float v = source == KIND_F32   ? ((const float*)from)[i]
              : source == KIND_F16 ? from_f16(((const u16*)from)[i])
                                   : from_bf16(((const u16*)from)[i]);
    if (target == KIND_F32) {
        ((float*)out)[at] = v;
    } else {
        ((u16*)out)[at] = target == KIND_F16 ? to_f16(v) : to_bf16(v);
    }
}

// out[n] = x[rows[n]], in words of 1, 2 or 4 bytes; `width` words a row.
template <class T>
__device__ __forceinline__ void gather(const u8* x, i64 stride, const int* rows, T* out,
                                       const i64* live, int width) {
    const i64 count = begin(live);
    i64 n = blockIdx.x;
    int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (n >= count || i >= width) return;
    out[n * width + i] = ((const T*)(x + rows[n] * stride))[i];
}

#define GATHER(NAME, T)                                                                         \
    extern "C" __global__ void NAME(const u8* x, i64 stride, const int* rows, T* out,           \
                                    const i64* live, int width TIMESTAMPS) {                    \
        RECORD_TIMESTAMPS                                                                       \
        gather(x, stride, rows, out, live, width);                                              \
    }
GATHER(gather_1, u8)
GATHER(gather_2, u16)
GATHER(gather_4, u32)
GATHER(gather_8, u64)

// out[n][i] = x[n][columns[i]]
extern "C" __global__ void gather_columns(const u8* x, i64 stride, const int* columns, float* out,
                                          const i64* live, int width TIMESTAMPS) {
    RECORD_TIMESTAMPS
    const i64 rows = begin(live);
    const i64 row = blockIdx.x;
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (row >= rows || i >= width) return;
    const int from = columns[i];
    const bool known = 0 <= from && from < width;
    out[row * width + i] = known ? ((const float*)(x + row * stride))[from] : NOT_A_NUMBER;
}

// Concatenate lines of a and b: `lines` of them in a row, with a_width and b_width elements.
extern "C" __global__ void concat(const u8* a, i64 a_stride, const u8* b, i64 b_stride, float* out,
                                  const i64* live, int lines, int a_width, int b_width TIMESTAMPS) {
    RECORD_TIMESTAMPS
    const i64 rows = begin(live);
    i64 row = blockIdx.x;
    int i = blockIdx.y * blockDim.x + threadIdx.x, width = a_width + b_width;
    if (row >= rows || i >= lines * width) return;
    int line = i / width, column = i % width;
    const float* left = (const float*)(a + row * a_stride) + line * a_width;
    const float* right = (const float*)(b + row * b_stride) + line * b_width;
    out[row * lines * width + i] = column < a_width ? left[column] : right[column - a_width];
}
