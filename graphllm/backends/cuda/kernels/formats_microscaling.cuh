// mxfp4. Planes: nibbles; exponents.

// MXFP4_VALUES of graphllm/formats/microscaling.py as int8.
__device__ __forceinline__ uint4 mxfp4_values() {
    return make_uint4(0x03020100, 0x0c080604, 0xfdfeff00, 0xf4f8fafc);
}

// Half of the scale of an e8m0 byte: 2 ** (e - 128).
__device__ __forceinline__ float half_e8m0(u32 e) {
    return __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
}

struct MXFP4 : By32 {
    static constexpr int ZERO_POINT = 0;
    static constexpr bool OFFSET = false;
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
};
