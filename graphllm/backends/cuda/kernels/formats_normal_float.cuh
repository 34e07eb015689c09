// nf4. Planes: nibbles; d.

// The low and the high bytes of NF4_VALUES of graphllm/formats/normal_float.py, which are float16.
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

struct NF4 : By32 {
    typedef Floats<32> Values;
    uint4 q;
    u16 d;
    static constexpr int STEPS[3] = {64, 0, 0};
    __device__ static __forceinline__ Planes item(const Planes& w, size_t i) {
        return {w.a + 16 * i, w.b + 2 * i};
    }
    __device__ __forceinline__ void load(const Planes& p) {
        q = stream16(p.a);
        d = constant<u16>(p.b);
    }
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
