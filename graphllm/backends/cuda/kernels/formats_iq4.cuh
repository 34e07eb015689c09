// iq4_nl and iq4_xs: four bits number a value. Planes: nibbles; d and what belongs to it.

// IQ4_VALUES of graphllm/formats/iq4.py as int8.
__device__ __forceinline__ uint4 iq4_values() {
    return make_uint4(0xbfad9881, 0xf6eaddcf, 0x26190d01, 0x71594535);
}

struct IQ4_NL : By32 {
    static constexpr int ZERO_POINT = 0;
    static constexpr bool OFFSET = false;
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
