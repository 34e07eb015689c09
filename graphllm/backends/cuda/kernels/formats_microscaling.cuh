// mxfp4. Planes: nibbles; exponents.

// MXFP4_VALUES of graphllm/formats/microscaling.py as int8.
__device__ __forceinline__ uint4 mxfp4_values() {
    return make_uint4(0x03020100, 0x0c080604, 0xfdfeff00, 0xf4f8fafc);
}

// The values of the four low nibbles without the fourth bit, the sign; 0 for nibbles with it: prmt then
// replicates the sign bit of a byte of the table.
__device__ __forceinline__ u32 mxfp4_magnitudes(u32 nibbles) {
    u32 r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(mxfp4_values().x), "r"(mxfp4_values().y), "r"(nibbles));
    return r;
}

// Half of the scale of an e8m0 byte: 2 ** (e - 128).
__device__ __forceinline__ float half_e8m0(u32 e) {
    return __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
}

struct MXFP4 : By32 {
    static constexpr int ZERO_POINT = 0;
    static constexpr bool OFFSET = false;
    static constexpr bool INTEGER_PRODUCT = true;
    uint4 q;
    u32 e;
    static constexpr int STEPS[3] = {32, 0, 0};
    __device__ static __forceinline__ Planes item(const Planes& w, size_t i) {
        return {w.a + 16 * i, w.b + i};
    }
    __device__ __forceinline__ void load(const Planes& p) {
        q = stream16(p.a);
        e = constant<u8>(p.b);
    }
    __device__ __forceinline__ void unpack(int j, Unpacked<2>& u) const {
        looked_up(q, mxfp4_values(), u.v);
        u.scale[0] = u.scale[1] = half_e8m0(e);
        u.offset[0] = u.offset[1] = 0;
    }
    // One look-up gives the positive values, with zero for the negative ones, another one the magnitudes
    // of the negative ones. Activations are put in the order of the nibbles, once for all rows.
    template <class A> __device__ __forceinline__ float product(int lane, const A& a) const {
        const int* first = &a.x[0].x;
        const int* second = &a.x[1].x;
        int positive = 0, negative = 0;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const u32 bits = word(q, k), flipped = bits ^ 0x88888888;
            const int low = (int)__byte_perm((u32)first[k], (u32)second[k], 0x5140);
            const int high = (int)__byte_perm((u32)first[k], (u32)second[k], 0x7362);
            positive = dot4(mxfp4_magnitudes(bits), low, positive);
            positive = dot4(mxfp4_magnitudes(bits >> 16), high, positive);
            negative = dot4(mxfp4_magnitudes(flipped), low, negative);
            negative = dot4(mxfp4_magnitudes(flipped >> 16), high, negative);
        }
        return a.d * (half_e8m0(e) * (positive - negative));
    }
};

#if BLOCK_HALVES  // see block_halves.cuh
template <> struct Halves<MXFP4> : Halves32 {
    static constexpr int BYTES[4] = {64, 4, 0, 0};
    uint4 q;
    template <class P> __device__ __forceinline__ void load(const P& from) {
        magic = from.magic;
        q = from.unit(from.part);
        const float d = half_e8m0(load_shared1(from.template plane<1>() + from.part));
        load_scale(from, two_within_f16(d, 0));
    }
    __device__ __forceinline__ void turn(int t, u32 (&v)[2][2]) const {
        scaled_entries(word(q, t), positive(mxfp4_values()), v);
    }
};
#endif
