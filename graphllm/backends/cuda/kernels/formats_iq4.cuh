// iq4_nl, iq4_xs and nf4: four bits number a value. Planes: nibbles; d and what belongs to it.

// IQ4_VALUES of graphllm/formats/iq4.py as int8.
__device__ __forceinline__ uint4 iq4_values() {
    return make_uint4(0xbfad9881, 0xf6eaddcf, 0x26190d01, 0x71594535);
}

struct IQ4_NL : NibblesBy32 {
    static constexpr int ZERO_POINT = 0;
    static constexpr bool OFFSET = false;
    __device__ __forceinline__ void unpack(int j, Unpacked<2>& u) const {
        looked_up(q, iq4_values(), u.v);
        u.scale[0] = u.scale[1] = from_f16(d);
        u.offset[0] = u.offset[1] = 0;
    }
};

struct IQ4_XS : By256 {
    static constexpr int ZERO_POINT = 0;
    static constexpr bool OFFSET = false;
    uint4 q;
    uint2 head;  // d: f16, the top bit pairs of eight scales, their nibbles
    __device__ static __forceinline__ int at(int j, int p) { return 32 * j + 16 * p; }
    static constexpr int STEPS[3] = {32, 0, 0};
    __device__ static __forceinline__ Planes item(const Planes& w, size_t i) {
        return {w.a + 16 * i, w.b + 8 * (i >> 3)};
    }
    __device__ __forceinline__ void load(const Planes& p) {
        q = stream16(p.a);
        head = constant<uint2>(p.b);
    }
    __device__ __forceinline__ void unpack(int j, Unpacked<2>& u) const {
        int s = j & 7;
        int scale = (head.y >> 4 * s & 15 | (head.x >> (16 + 2 * s) & 3) << 4) - 32;
        looked_up(q, iq4_values(), u.v);
        u.scale[0] = u.scale[1] = low_half(head.x) * scale;
        u.offset[0] = u.offset[1] = 0;
    }
};

// The low and the high bytes of NF4_VALUES of graphllm/formats/iq4.py, which are float16.
__device__ __forceinline__ uint4 nf4_low_bytes() { return make_uint4(0x52339200, 0x00d4ea8d, 0x68e02618, 0x00c9800d); }
__device__ __forceinline__ uint4 nf4_high_bytes() { return make_uint4(0xb6b8b9bc, 0x00adb1b4, 0x3533312d, 0x3c393837); }

// The values of the nibbles of a word as pairs of f16: the low ones, then the high ones.
__device__ __forceinline__ void nf4_halves(u32 bits, u32 (&v)[2][2]) {
    u32 low[2], high[2];
    look_up(bits, nf4_low_bytes(), low[0], low[1]);
    look_up(bits, nf4_high_bytes(), high[0], high[1]);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        v[i][0] = __byte_perm(low[i], high[i], 0x5140);
        v[i][1] = __byte_perm(low[i], high[i], 0x7362);
    }
}

struct NF4 : NibblesBy32 {
    typedef Floats<32> Values;
    __device__ __forceinline__ void unpack(int j, Values& u) const {
        const float scale = from_f16(d);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            u32 v[2][2];
            nf4_halves(word(q, k), v);
#pragma unroll
            for (int e = 0; e < 8; e++) {
                const u32 pair = v[e / 4][e / 2 % 2];
                const float x = e % 2 ? high_half(pair) : low_half(pair);
                u.v[16 * (e / 4) + 4 * k + e % 4] = __fmul_rn(scale, x);
            }
        }
    }
};

#if BLOCK_HALVES  // see block_halves.cuh
template <> struct Halves<IQ4_NL> : Halves32 {
    static constexpr int BYTES[4] = {64, 8, 0, 0};
    uint4 q;
    template <class P> __device__ __forceinline__ void load(const P& from) {
        magic = from.magic;
        q = from.unit(from.part);
        load_scale(from, load_half(from.template plane<1>(), from.part));
    }
    __device__ __forceinline__ void turn(int t, u32 (&v)[2][2]) const {
        scaled_entries(word(q, t), positive(iq4_values()), v);
    }
};

// Each thread has two sub-blocks of 32.
template <> struct Halves<IQ4_XS> : Expansion {
    static constexpr int CHUNK = 256, BYTES[4] = {128, 8, 0, 0};
    uint4 q;  // of one sub-block
    u32 at, scale[2];
    __device__ __forceinline__ static constexpr int gamma(int t, int i) {
        return 8 * (t / 4) + t % 4 + 4 * i;
    }
    template <class P> __device__ __forceinline__ void load(const P& from) {
        magic = from.magic;
        at = from.unit_address(2 * from.part);
        const u32 scales_at = from.template plane<1>();
        const u32 head[2] = {load_shared4(scales_at), load_shared4(scales_at + 4)};
        const u32 low = head[1] >> 8 * from.part, high = head[0] >> (16 + 4 * from.part);
        const u32 s = low & 15 | (high & 3) << 4 | (low >> 4 & 15 | (high >> 2 & 3) << 4) << 8;
        const u32 scales = multiply_halves(two_bytes<32>(s), both_low(head[0]));
        scale[0] = both_low(scales), scale[1] = both_high(scales);
    }
    __device__ __forceinline__ void turn(int t, u32 (&v)[2][2]) {
        if (t % 4 == 0) q = load_shared16(at ^ 4 * t);
        u32 values[2];
        look_up(word(q, t % 4), positive(iq4_values()), values[0], values[1]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            bytes<128>(values[i], v[i]);
            v[i][0] = multiply_halves(v[i][0], scale[t / 4]);
            v[i][1] = multiply_halves(v[i][1], scale[t / 4]);
        }
    }
};

template <> struct Halves<NF4> : Halves32 {
    static constexpr int BYTES[4] = {64, 8, 0, 0};
    uint4 q;
    template <class P> __device__ __forceinline__ void load(const P& from) {
        magic = from.magic;
        q = from.unit(from.part);
        load_scale(from, load_half(from.template plane<1>(), from.part));
    }
    __device__ __forceinline__ void turn(int t, u32 (&v)[2][2]) const {
        nf4_halves(word(q, t), v);
#pragma unroll
        for (int i = 0; i < 4; i++) v[i / 2][i % 2] = scaled(v[i / 2][i % 2]);
    }
};
#endif
