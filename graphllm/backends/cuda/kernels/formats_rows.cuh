// w8a8, fp8 and fp8_128: bytes with a scale per row, or per 128 elements of a row.
//
// Planes: q; d: of fp8_128 those of all rows for the first 128 elements, then for the next 128, and so on.
// Instead of an address, Planes has numbers in `c`: items of a row; and in `d`: floats from the scales of 128
// elements to those of the next, see weight_packing.py.

__device__ __forceinline__ u32 number(const u8* field) { return (u32)(u64)field; }

struct ByRow {
    static constexpr int ZERO_POINT = 0, BLOCK = 32, PARTS = 1, ITEM = 16;
    static constexpr bool OFFSET = false, INTEGER_PRODUCT = false;
    static constexpr int STEPS[3] = {0, 0, 0};
    uint4 q;
    float d;
    __device__ static __forceinline__ int at(int j, int p) { return 16 * j; }
    __device__ static __forceinline__ Planes item(const Planes& w, size_t i) {
        return {w.a + 16 * i, w.b + 4 * ((u32)i / number(w.c)), w.c, w.d};
    }
    __device__ __forceinline__ void load(const Planes& p) {
        q = stream16(p.a);
        d = constant<float>(p.b);
    }
};

struct W8A8 : ByRow {
    typedef Unpacked<1> Values;
    __device__ __forceinline__ void unpack(int j, Values& u) const {
#pragma unroll
        for (int k = 0; k < 4; k++) u.v[k] = word(q, k);
        u.scale[0] = d;
        u.offset[0] = 0;
    }
};

struct FP8 : ByRow {
    typedef Floats<16> Values;
    __device__ __forceinline__ void unpack(int j, Values& u) const {
#pragma unroll
        for (int e = 0; e < 16; e++) u.v[e] = __fmul_rn(d, from_e4m3(word(q, e / 4) >> 8 * (e % 4) & 0xff));
    }
};

struct FP8_128 : FP8 {
    __device__ static __forceinline__ Planes item(const Planes& w, size_t i) {
        const u32 row = (u32)i / number(w.c), group = ((u32)i - row * number(w.c)) / 8;
        return {w.a + 16 * i, w.b + 4 * ((u64)group * number(w.d) + row), w.c, w.d};
    }
};

template <> __device__ __forceinline__ void advance<FP8_128>(Planes& p, int n) {
    p.a += 16 * n, p.b += (i64)(n / 2) * number(p.d);  // 8 items are a group of 4 bytes a row
}
