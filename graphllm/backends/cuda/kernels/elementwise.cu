// Sums, products and activations. A block computes one row (x) and some columns of it (y), a thread
// EACH columns: one for small operands, else four, whose loads are in flight together.

template <int EACH, class F>
__device__ __forceinline__ void unary(const u8* x, i64 stride, float* out, const i64* live,
                                      int width, F f) {
    const i64 rows = begin(live);
    i64 row = blockIdx.x;
    if (row >= rows) return;
    const float* from = (const float*)(x + row * stride);
    int first = blockIdx.y * EACH * blockDim.x + threadIdx.x;
    float v[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int column = first + i * blockDim.x;
        v[i] = column < width ? from[column] : 0.f;
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int column = first + i * blockDim.x;
        if (column < width) out[row * width + column] = f(v[i]);
    }
}

#define UNARY_EACH(NAME, EACH, EXPRESSION)                                                      \
    extern "C" __global__ void NAME##_##EACH(const u8* at, i64 stride, float* out,              \
                                             const i64* live, int width,                        \
                                             float parameter TIMESTAMPS) {                      \
        RECORD_TIMESTAMPS                                                                       \
        unary<EACH>(at, stride, out, live, width, [=](float x) { return EXPRESSION; });         \
    }
#define UNARY(NAME, EXPRESSION)                                                                 \
    UNARY_EACH(NAME, 1, EXPRESSION)                                                             \
    UNARY_EACH(NAME, 4, EXPRESSION)
UNARY(scale, x * parameter)
UNARY(softcap, parameter * tanhf(x / parameter))
UNARY(relu, act_relu(x))
UNARY(silu, act_silu(x))
UNARY(sigmoid, 1.f / (1.f + expf(-x)))
UNARY(gelu_tanh, act_gelu_tanh(x))
UNARY(gelu_erf, act_gelu_erf(x))

// Blocks of 16 columns times the normalised Hadamard matrix. Its sums have the order of the NumPy
// body, so that the bits are the same. A thread holds a column; a block's are neighbours in a warp.
extern "C" __global__ void hadamard(const u8* x, i64 stride, float* out, const i64* live,
                                    int width TIMESTAMPS) {
    RECORD_TIMESTAMPS
    const i64 rows = begin(live);
    i64 row = blockIdx.x;
    if (row >= rows) return;
    int column = blockIdx.y * blockDim.x + threadIdx.x;
    float v = column < width ? ((const float*)(x + row * stride))[column] : 0.f;
#pragma unroll
    for (int distance = 1; distance < 16; distance *= 2) {
        float other = __shfl_xor_sync(~0u, v, distance);
        v = column & distance ? other - v : v + other;
    }
    if (column < width) out[row * width + column] = 0.25f * v;
}

__device__ __forceinline__ float as_float(float x) { return x; }
__device__ __forceinline__ float as_float(u16 x) { return from_f16(x); }

// b has the shape of a, or `inner` elements that repeat along a row. A: type of the elements of a.
template <int EACH, class A, class F>
__device__ __forceinline__ void binary(const u8* a, i64 a_stride, const u8* b, i64 b_stride,
                                       float* out, const i64* live, int width, int inner, F f) {
    const i64 rows = begin(live);
    i64 row = blockIdx.x;
    if (row >= rows) return;
    const A* left = (const A*)(a + row * a_stride);
    const float* right = (const float*)(b + row * b_stride);
    int first = blockIdx.y * EACH * blockDim.x + threadIdx.x;
    float v[EACH], w[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int column = first + i * blockDim.x;
        v[i] = column < width ? as_float(left[column]) : 0.f;
        w[i] = column < width ? right[inner ? column % inner : column] : 0.f;
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int column = first + i * blockDim.x;
        if (column < width) out[row * width + column] = f(v[i], w[i]);
    }
}

#define BINARY_EACH(NAME, EACH, A, EXPRESSION)                                                  \
    extern "C" __global__ void NAME##_##EACH(const u8* a, i64 a_stride, const u8* b,            \
                                             i64 b_stride, float* out, const i64* live,         \
                                             int width, int inner TIMESTAMPS) {                 \
        RECORD_TIMESTAMPS                                                                       \
        binary<EACH, A>(a, a_stride, b, b_stride, out, live, width, inner,                      \
                        [](float x, float y) { return EXPRESSION; });                           \
    }
#define BINARY(NAME, A, EXPRESSION)                                                             \
    BINARY_EACH(NAME, 1, A, EXPRESSION)                                                         \
    BINARY_EACH(NAME, 4, A, EXPRESSION)
BINARY(add, float, x + y)
BINARY(add_half, u16, x + y)
BINARY(mul, float, x * y)

// The gated unit of gpt-oss; NaN stays NaN.
#define CLAMPED(EACH)                                                                           \
    extern "C" __global__ void clamped_glu_##EACH(                                              \
        const u8* a, i64 a_stride, const u8* b, i64 b_stride, float* out, const i64* live,      \
        int width, float alpha, float limit TIMESTAMPS) {                                       \
        RECORD_TIMESTAMPS                                                                       \
        binary<EACH, float>(a, a_stride, b, b_stride, out, live, width, 0,                      \
                            [=](float x, float y) { return act_clamped(x, y, alpha, limit); }); \
    }
CLAMPED(1)
CLAMPED(4)
