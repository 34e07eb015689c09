// q4_0, q4_1, q5_0, q5_1 and q8_0. Planes: q; the fifth bits, if any; d, or d and m.

struct Q8_0 {
    static constexpr int ZERO_POINT = 0;
    static constexpr int BLOCK = 32, PARTS = 1, ITEM = 16;
    typedef Unpacked<1> Values;
    static constexpr bool OFFSET = false;
    static constexpr bool INTEGER_PRODUCT = false;
    uint4 q;
    u16 d;
    __device__ static __forceinline__ int at(int j, int p) { return 16 * j; }
    static constexpr int STEPS[3] = {32, 0, 0};
    __device__ static __forceinline__ Planes item(const Planes& w, size_t i) {
        return {w.a + 16 * i, w.b + 2 * (i >> 1)};
    }
    __device__ __forceinline__ void load(const Planes& p) {
        q = stream16(p.a);
        d = constant<u16>(p.b);
    }
    __device__ __forceinline__ void unpack(int j, Unpacked<1>& u) const {
#pragma unroll
        for (int k = 0; k < 4; k++) u.v[k] = word(q, k);
        u.scale[0] = from_f16(d);
        u.offset[0] = 0;
    }
};

template <int ZERO> struct Nibbles : NibblesBy32 {  // scale * (nibble - ZERO)
    static constexpr int ZERO_POINT = ZERO;
    static constexpr bool INTEGER_PRODUCT = true;
    __device__ __forceinline__ void unpack(int j, Unpacked<2>& u) const {
        nibbles(q, u.v);
        u.scale[0] = u.scale[1] = from_f16(d);
        u.offset[0] = u.offset[1] = -ZERO * u.scale[0];
    }
    template <class A> __device__ __forceinline__ float product(int lane, const A& a) const {
        int low, high;
        dot_nibbles(q, a.x, low, high);
        return a.d * from_f16(d) * (low + high - ZERO * a.sums[0]);
    }
};

using Q4_0 = Nibbles<8>;

struct Q4_1 : By32 {
    uint4 q;
    u32 dm;
    static constexpr int STEPS[3] = {128, 0, 0};
    __device__ static __forceinline__ Planes item(const Planes& w, size_t i) {
        return {w.a + 16 * i, w.b + 4 * i};
    }
    __device__ __forceinline__ void load(const Planes& p) {
        q = stream16(p.a);
        dm = constant<u32>(p.b);
    }
    __device__ __forceinline__ void unpack(int j, Unpacked<2>& u) const {
        nibbles(q, u.v);
        u.scale[0] = u.scale[1] = low_half(dm);
        u.offset[0] = u.offset[1] = high_half(dm);
    }
};

struct Fifths : By32 {
    uint4 q;
    u32 high;
    __device__ __forceinline__ void load(const Planes& p) {
        q = stream16(p.a);
        high = constant<u32>(p.b);
    }
    __device__ __forceinline__ void integers(int* v) const {
        nibbles(q, v);
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] |= fifth(high, k);
    }
};

struct Q5_0 : Fifths {
    static constexpr int ZERO_POINT = 16;
    u16 d;
    static constexpr int STEPS[3] = {128, 64, 0};
    __device__ static __forceinline__ Planes item(const Planes& w, size_t i) {
        return {w.a + 16 * i, w.b + 4 * i, w.c + 2 * i};
    }
    __device__ __forceinline__ void load(const Planes& p) {
        Fifths::load(p);
        d = constant<u16>(p.c);
    }
    __device__ __forceinline__ void unpack(int j, Unpacked<2>& u) const {
        integers(u.v);
        u.scale[0] = u.scale[1] = from_f16(d);
        u.offset[0] = u.offset[1] = -16 * u.scale[0];
    }
};

struct Q5_1 : Fifths {
    u32 dm;
    static constexpr int STEPS[3] = {128, 128, 0};
    __device__ static __forceinline__ Planes item(const Planes& w, size_t i) {
        return {w.a + 16 * i, w.b + 4 * i, w.c + 4 * i};
    }
    __device__ __forceinline__ void load(const Planes& p) {
        Fifths::load(p);
        dm = constant<u32>(p.c);
    }
    __device__ __forceinline__ void unpack(int j, Unpacked<2>& u) const {
        integers(u.v);
        u.scale[0] = u.scale[1] = low_half(dm);
        u.offset[0] = u.offset[1] = high_half(dm);
    }
};

#if BLOCK_HALVES  // see block_halves.cuh
template <> struct Halves<Q8_0> : Halves32 {
    static constexpr int BYTES[4] = {128, 8, 0, 0};
    uint4 q[2];
    __device__ __forceinline__ static constexpr int gamma(int t, int i) { return 2 * t + i; }
    template <class P> __device__ __forceinline__ void load(const P& from) {
        magic = from.magic;
        q[0] = from.unit(2 * from.part), q[1] = from.unit(2 * from.part + 1);
        load_scale(from, load_half(from.template plane<1>(), from.part));
    }
    __device__ __forceinline__ void turn(int t, u32 (&v)[2][2]) const {
#pragma unroll
        for (int i = 0; i < 2; i++)
            scaled_bytes<128>(word(q[t / 2], 2 * t % 4 + i) ^ 0x80808080, v[i]);
    }
};

template <> struct Halves<Q4_0> : Halves32 {
    static constexpr int BYTES[4] = {64, 8, 0, 0};
    uint4 q;
    template <class P> __device__ __forceinline__ void load(const P& from) {
        magic = from.magic;
        q = from.unit(from.part);
        load_scale(from, load_half(from.template plane<1>(), from.part));
    }
    __device__ __forceinline__ void turn(int t, u32 (&v)[2][2]) const {
        nibbles<8>(word(q, t), v);
#pragma unroll
        for (int i = 0; i < 4; i++) v[i / 2][i % 2] = scaled(v[i / 2][i % 2]);
    }
};

template <> struct Halves<Q4_1> : Halves32 {
    static constexpr int BYTES[4] = {64, 16, 0, 0};
    uint4 q;
    template <class P> __device__ __forceinline__ void load(const P& from) {
        magic = from.magic;
        q = from.unit(from.part);
        load_both(from, load_shared4(from.template plane<1>() + 4 * from.part));
    }
    __device__ __forceinline__ void turn(int t, u32 (&v)[2][2]) const {
        nibbles<0>(word(q, t), v);
#pragma unroll
        for (int i = 0; i < 4; i++) v[i / 2][i % 2] = shifted(v[i / 2][i % 2]);
    }
};

// The five bits of elements 4 t .. 4 t + 3 of each half of a block.
__device__ __forceinline__ u32 five_bits(u32 nibbles, u32 high, int t, int i) {
    return nibbles >> 4 * i & 0x0f0f0f0f | (u32)fifth(high, t + 4 * i);
}

template <> struct Halves<Q5_0> : Halves32 {
    static constexpr int BYTES[4] = {64, 16, 8, 0};
    uint4 q;
    u32 high;
    template <class P> __device__ __forceinline__ void load(const P& from) {
        magic = from.magic;
        q = from.unit(from.part);
        high = load_shared4(from.template plane<1>() + 4 * from.part);
        load_scale(from, load_half(from.template plane<2>(), from.part));
    }
    __device__ __forceinline__ void turn(int t, u32 (&v)[2][2]) const {
#pragma unroll
        for (int i = 0; i < 2; i++) scaled_bytes<16>(five_bits(word(q, t), high, t, i), v[i]);
    }
};

template <> struct Halves<Q5_1> : Halves32 {
    static constexpr int BYTES[4] = {64, 16, 16, 0};
    uint4 q;
    u32 high;
    template <class P> __device__ __forceinline__ void load(const P& from) {
        magic = from.magic;
        q = from.unit(from.part);
        high = load_shared4(from.template plane<1>() + 4 * from.part);
        load_both(from, load_shared4(from.template plane<2>() + 4 * from.part));
    }
    __device__ __forceinline__ void turn(int t, u32 (&v)[2][2]) const {
#pragma unroll
        for (int i = 0; i < 2; i++) shifted_bytes<0>(five_bits(word(q, t), high, t, i), v[i]);
    }
};
#endif
