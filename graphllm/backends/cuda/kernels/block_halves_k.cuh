// Halves of blocks of 256; see block_halves.cuh.

// Two halves of 32 elements, each with its scale.
struct Halves64 : Expansion {
    static constexpr int CHUNK = 256;
    __device__ __forceinline__ static constexpr int gamma(int t, int i) { return t + 8 * i; }
};

// q4_k and q5_k: each thread has two sub-blocks of 32, one in low and one in high nibbles.
struct HalvesOfScales : Halves64 {
    uint4 q[2];
    u32 scale[2], least[2];  // twice each; minima are negative

    template <class P> __device__ __forceinline__ void load_scales(const P& from, uint4 head) {
        Scales scales;
        scales.head = head;
        u32 s, m;
        scales.coefficients(2 * from.part, s, m);
        const u32 d = both_low(head.x), dmin = both_high(head.x) ^ 0x80008000;
        s = multiply_halves(two_bytes<0>(s), d);
        m = multiply_halves(two_bytes<0>(m), dmin);
#pragma unroll
        for (int i = 0; i < 2; i++) scale[i] = both(s, i), least[i] = both(m, i);
    }
    template <class P> __device__ __forceinline__ void load_nibbles(const P& from) {
        q[0] = from.unit(2 * from.part), q[1] = from.unit(2 * from.part + 1);
    }
    __device__ __forceinline__ void scale_all(u32 (&v)[2][2]) const {
#pragma unroll
        for (int i = 0; i < 4; i++)
            v[i / 2][i % 2] = fma_halves(v[i / 2][i % 2], scale[i / 2], least[i / 2]);
    }
};

template <> struct Halves<Q4_K> : HalvesOfScales {
    static constexpr int BYTES[4] = {128, 16, 0, 0};
    template <class P> __device__ __forceinline__ void load(const P& from) {
        magic = from.magic;
        load_nibbles(from);
        load_scales(from, load_shared16(from.template plane<1>()));
    }
    __device__ __forceinline__ void turn(int t, u32 (&v)[2][2]) const {
        nibbles<0>(word(q[t / 4], t % 4), v);
        scale_all(v);
    }
};

// The second half of the items is loaded when it is needed, since registers are scarce.
template <> struct Halves<Q5_K> : HalvesOfScales {
    static constexpr int BYTES[4] = {128, 32, 16, 0};
    uint4 high;  // bit s belongs to sub-block s
    u32 at, high_at;
    int shift;
    template <class P> __device__ __forceinline__ void load(const P& from) {
        magic = from.magic;
        at = from.unit_address(2 * from.part), high_at = from.template plane<1>();
        shift = 2 * from.part;
        load_scales(from, load_shared16(from.template plane<2>()));
    }
    __device__ __forceinline__ void turn(int t, u32 (&v)[2][2]) {
        if (t % 4 == 0) q[0] = load_shared16(at ^ 4 * t), high = load_shared16(high_at + 4 * t);
        const u32 nibbles = word(q[0], t % 4), bits = word(high, t % 4) >> shift;
        bytes<0>(nibbles & 0x0f0f0f0f | bits << 4 & 0x10101010, v[0]);
        bytes<0>(nibbles >> 4 & 0x0f0f0f0f | bits << 3 & 0x10101010, v[1]);
        scale_all(v);
    }
};

// Each thread has a run of 32 elements of half of a block, with two scales.
template <> struct Halves<Q6_K> : Expansion {
    static constexpr int CHUNK = 128, BYTES[4] = {64, 32, 8, 1};
    uint4 q[2], high[2];
    u32 scale[2];
    int shift, turned;
    __device__ __forceinline__ static constexpr int gamma(int t, int i) { return 2 * t + i; }
    template <class P> __device__ __forceinline__ void load(const P& from) {
        magic = from.magic;
        const int first = from.part % 2 * 2;
        q[0] = from.unit(first), q[1] = from.unit(first + 1), shift = from.part / 2 * 4;
        const u32 bits = from.template plane<1>();
        high[0] = load_shared16(bits), high[1] = load_shared16(bits + 16), turned = 4 - 2 * from.part;
        const u32 s = load_half(from.template plane<2>(), from.part) ^ 0x8080;
        const u32 d = load_shared2(from.template plane<3>() & ~1u);
        const u32 scales = multiply_halves(
            two_bytes<128>(s), d | d << 16);
        scale[0] = both_low(scales), scale[1] = both_high(scales);
    }
    __device__ __forceinline__ void turn(int t, u32 (&v)[2][2]) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int at = 2 * t % 4 + i;
            const u32 low = word(q[t / 2], at) >> shift & 0x0f0f0f0f, bits = word(high[t / 2], at);
            bytes<32>(low | __funnelshift_l(bits, bits, turned) & 0x30303030, v[i]);
            v[i][0] = multiply_halves(v[i][0], scale[t / 2]);
            v[i][1] = multiply_halves(v[i][1], scale[t / 2]);
        }
    }
};

// q2_k and q3_k: each thread has two runs of 32 elements, each with two scales.
struct HalvesOfPairs : Halves64 {
    uint4 q[2];
    int shift;
    template <class P> __device__ __forceinline__ void load_pairs(const P& from) {
        const int first = from.part / 2 * 2;
        q[0] = from.unit(first), q[1] = from.unit(first + 1), shift = from.part % 2 * 4;
    }
    __device__ __forceinline__ u32 pairs(int t, int i) const {
        return word(q[t / 4], t % 4) >> (shift + 2 * i) & 0x03030303;
    }
};

template <> struct Halves<Q2_K> : HalvesOfPairs {
    static constexpr int BYTES[4] = {64, 16, 4, 0};
    u32 scale[2], least[2];  // of the halves of each run
    template <class P> __device__ __forceinline__ void load(const P& from) {
        magic = from.magic;
        load_pairs(from);
        const u32 all = load_shared4(from.template plane<1>() + 4 * from.part);
        const u32 dm = load_shared4(from.template plane<2>());
        const u32 d = both_low(dm), dmin = both_high(dm) ^ 0x80008000;
        bytes<0>(all & 0x0f0f0f0f, scale);
        bytes<0>(all >> 4 & 0x0f0f0f0f, least);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            scale[i] = multiply_halves(scale[i], d);
            least[i] = multiply_halves(least[i], dmin);
        }
    }
    __device__ __forceinline__ void turn(int t, u32 (&v)[2][2]) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            bytes<0>(pairs(t, i), v[i]);
            const u32 s = both(scale[i], t / 4), m = both(least[i], t / 4);
            v[i][0] = fma_halves(v[i][0], s, m), v[i][1] = fma_halves(v[i][1], s, m);
        }
    }
};

template <> struct Halves<Q3_K> : HalvesOfPairs {
    static constexpr int BYTES[4] = {64, 32, 12, 2};
    uint4 third[2];  // bit 4 half + r belongs to run r
    int bit;
    u32 scale[2];
    template <class P> __device__ __forceinline__ void load(const P& from) {
        magic = from.magic;
        load_pairs(from);
        const u32 bits = from.template plane<1>();
        third[0] = load_shared16(bits), third[1] = load_shared16(bits + 16), bit = 2 * from.part;
        const u32 scales = from.template plane<2>();
        const int half = from.part / 2, odd = from.part % 2;
        const u32 low = load_shared4(scales + 4 * odd) >> 4 * half & 0x0f0f0f0f;
        const u32 high = load_shared4(scales + 8) >> (4 * half + 2 * odd) & 0x03030303;
        bytes<32>(low | high << 4, scale);
        const u32 d = load_half(from.template plane<3>(), 0);
#pragma unroll
        for (int i = 0; i < 2; i++) scale[i] = multiply_halves(scale[i], d | d << 16);
    }
    __device__ __forceinline__ void turn(int t, u32 (&v)[2][2]) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 bits = word(third[t / 4], t % 4) >> (bit + i) & 0x01010101;
            bytes<4>(pairs(t, i) | bits << 2, v[i]);
            const u32 s = both(scale[i], t / 4);
            v[i][0] = multiply_halves(v[i][0], s), v[i][1] = multiply_halves(v[i][1], s);
        }
    }
};

// Each thread has two sub-blocks of 32.
template <> struct Halves<IQ4_XS> : Expansion {
    static constexpr int CHUNK = 256, BYTES[4] = {128, 8, 0, 0};
    uint4 q[2];
    u32 scale[2];
    __device__ __forceinline__ static constexpr int gamma(int t, int i) {
        return 8 * (t / 4) + t % 4 + 4 * i;
    }
    template <class P> __device__ __forceinline__ void load(const P& from) {
        magic = from.magic;
        q[0] = from.unit(2 * from.part), q[1] = from.unit(2 * from.part + 1);
        const u32 at = from.template plane<1>(), head[2] = {load_shared4(at), load_shared4(at + 4)};
        const u32 low = head[1] >> 8 * from.part, high = head[0] >> (16 + 4 * from.part);
        const u32 s = low & 15 | (high & 3) << 4 | (low >> 4 & 15 | (high >> 2 & 3) << 4) << 8;
        const u32 scales = multiply_halves(
            two_bytes<32>(s), both_low(head[0]));
        scale[0] = both_low(scales), scale[1] = both_high(scales);
    }
    __device__ __forceinline__ void turn(int t, u32 (&v)[2][2]) const {
        u32 values[2];
        look_up(word(q[t / 4], t % 4), positive(iq4_values()), values);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            bytes<128>(values[i], v[i]);
            v[i][0] = multiply_halves(v[i][0], scale[t / 4]);
            v[i][1] = multiply_halves(v[i][1], scale[t / 4]);
        }
    }
};
