// q2_k, q3_k, q4_k, q5_k and q6_k. Planes: low bits; higher bits, if any; scales; d.

// 128 bytes of nibbles: of 64 neighbouring elements, 32 in low halves and 32 in high halves.
struct Scales : By256 {
    static constexpr bool INTEGER_PRODUCT = true;
    uint4 q, head;  // head: d, dmin: f16, then 6-bit scales and minima in 12 bytes
    __device__ static __forceinline__ int at(int j, int p) {
        return 256 * (j >> 3) + 64 * (j >> 1 & 3) + 16 * (j & 1) + 32 * p;
    }
    // Scales and minima of sub-blocks 2 pair and 2 pair + 1, a byte each. Sub-blocks from 4 on have their
    // low nibbles in the last word, their high bits above the scales and minima of the first ones. Shifts
    // and masks depend on j only, so that they are computed once.
    __device__ __forceinline__ void coefficients(int j, u32& s, u32& m) const {
        const int pair = j >> 1 & 3, shift = 16 * (pair & 1);
        const bool late = pair >= 2;
        const u32 low = late ? 0x0f0f : 0x3f3f, high = late ? 0x3030 : 0;
        s = (late ? head.w : head.y) >> shift & low | head.y >> (shift + 2) & high;
        m = (late ? head.w : head.z) >> (late ? shift + 4 : shift) & low | head.z >> (shift + 2) & high;
    }
    __device__ __forceinline__ void coefficients(int j, Unpacked<2>& u) const {
        u32 s, m;
        coefficients(j, s, m);
        float d = low_half(head.x), least = -high_half(head.x);
        u.scale[0] = d * (s & 255), u.scale[1] = d * (s >> 8 & 255);
        u.offset[0] = least * (m & 255), u.offset[1] = least * (m >> 8 & 255);
    }
    // The product of the item, from the dot of scaled integers with activations.
    __device__ __forceinline__ float scaled(int all, u32 m, const int* sums, float d) const {
        const int least = dot2(pair_of(sums[0], sums[1]), m, 0);
        return d * (low_half(head.x) * all - high_half(head.x) * least);
    }
};

struct Q4_K : Scales {
    static constexpr int STEPS[3] = {64, 0, 0};
    __device__ static __forceinline__ Planes item(const Planes& w, size_t i) {
        return {w.a + 16 * i, w.b + 16 * (i >> 3)};
    }
    __device__ __forceinline__ void load(const Planes& p) {
        q = stream16(p.a);
        head = constant<uint4>(p.b);
    }
    __device__ __forceinline__ void unpack(int j, Unpacked<2>& u) const {
        nibbles(q, u.v);
        coefficients(j, u);
    }
    template <class A> __device__ __forceinline__ float product(int lane, const A& a) const {
        int low, high;
        dot_nibbles(q, a.x, low, high);
        u32 s, m;
        coefficients(lane, s, m);
        return scaled(dot2(pair_of(low, high), s, 0), m, a.sums, a.d);  // 16 nibbles: 16 bits
    }
};

struct Q5_K : Scales {
    uint4 high;  // bit s belongs to sub-block s
    static constexpr int STEPS[3] = {128, 64, 0};
    __device__ static __forceinline__ Planes item(const Planes& w, size_t i) {
        return {w.a + 16 * i, w.b + 32 * (i >> 3) + 16 * (i & 1), w.c + 16 * (i >> 3)};
    }
    __device__ __forceinline__ void load(const Planes& p) {
        q = stream16(p.a);
        high = constant<uint4>(p.b);
        head = constant<uint4>(p.c);
    }
    __device__ __forceinline__ void integers(int j, int* v) const {
        int pair = j >> 1 & 3;
        nibbles(q, v);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            u32 bits = word(high, k) >> 2 * pair;
            v[k] |= (bits & 0x01010101) << 4;
            v[4 + k] |= (bits & 0x02020202) << 3;
        }
    }
    __device__ __forceinline__ void unpack(int j, Unpacked<2>& u) const {
        integers(j, u.v);
        coefficients(j, u);
    }
    template <class A> __device__ __forceinline__ float product(int lane, const A& a) const {
        int v[8];
        integers(lane, v);
        u32 s, m;
        coefficients(lane, s, m);
        const int first = dot16(v, a.x[0]), second = dot16(v + 4, a.x[1]);
        const int all = (int)(s & 255) * first + (int)(s >> 8) * second;
        return scaled(all, m, a.sums, a.d);
    }
};

struct Q6_K : By256 {
    static constexpr int ZERO_POINT = 32;
    static constexpr bool INTEGER_PRODUCT = true;
    uint4 q, high;  // high: bits 2 r and 2 r + 1 belong to run r of the half
    u16 d;
    int low_scale, high_scale;
    __device__ static __forceinline__ int at(int j, int p) {
        return 256 * (j >> 3) + 128 * (j >> 2 & 1) + 16 * (j & 3) + 64 * p;
    }
    static constexpr int STEPS[3] = {256, 64, 8};
    __device__ static __forceinline__ Planes item(const Planes& w, size_t i) {
        const size_t block = i >> 3;
        const int half = i >> 2 & 1, place = i & 3;
        return {w.a + 16 * i, w.b + 64 * block + 32 * half + 16 * (place & 1),
                w.c + 16 * block + 8 * half + place, w.d + 2 * block};
    }
    __device__ __forceinline__ void load(const Planes& p) {
        q = stream16(p.a);
        high = constant<uint4>(p.b);
        low_scale = constant<i8>(p.c), high_scale = constant<i8>(p.c + 4);
        d = constant<u16>(p.d);
    }
    __device__ __forceinline__ void integers(int j, int* v) const {
        int shift = j & 2;
        nibbles(q, v);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            u32 bits = word(high, k) >> shift;
            v[k] |= (bits & 0x03030303) << 4;
            v[4 + k] |= bits & 0x30303030;
        }
    }
    __device__ __forceinline__ void unpack(int j, Unpacked<2>& u) const {
        integers(j, u.v);
        float unit = from_f16(d);
        u.scale[0] = unit * low_scale, u.scale[1] = unit * high_scale;
        u.offset[0] = -32 * u.scale[0], u.offset[1] = -32 * u.scale[1];
    }
    template <class A> __device__ __forceinline__ float product(int lane, const A& a) const {
        int v[8];
        integers(lane, v);
        const int first = dot16(v, a.x[0]) - 32 * a.sums[0];
        const int second = dot16(v + 4, a.x[1]) - 32 * a.sums[1];
        return a.d * from_f16(d) * (low_scale * first + high_scale * second);
    }
};

// 64 bytes of bit pairs: of each half (32 bytes) the lowest pairs of all bytes, then the next pairs.
struct Pairs {
    static constexpr int BLOCK = 256, PARTS = 4, ITEM = 64;
    typedef Unpacked<4> Values;
    static constexpr bool INTEGER_PRODUCT = false;
    static constexpr bool OFFSET = true;
    uint4 q;
    __device__ static __forceinline__ int at(int j, int p) {
        return 256 * (j >> 2) + 128 * (j >> 1 & 1) + 16 * (j & 1) + 32 * p;
    }
    __device__ __forceinline__ void integers(int j, int* v) const {
#pragma unroll
        for (int k = 0; k < 16; k++) v[k] = word(q, k & 3) >> 2 * (k >> 2) & 0x03030303;
    }
};

struct Q2_K : Pairs {
    static constexpr int ZERO_POINT = -1;
    uint2 scales;  // of the half: scales in low nibbles, minima in high ones
    u32 dm;
    static constexpr int STEPS[3] = {128, 32, 0};
    __device__ static __forceinline__ Planes item(const Planes& w, size_t i) {
        return {w.a + 16 * i, w.b + 8 * (i >> 1), w.c + 4 * (i >> 2)};
    }
    __device__ __forceinline__ void load(const Planes& p) {
        q = stream16(p.a);
        scales = constant<uint2>(p.b);
        dm = constant<u32>(p.c);
    }
    __device__ __forceinline__ void unpack(int j, Unpacked<4>& u) const {
        integers(j, u.v);
        float d = low_half(dm), least = -high_half(dm);
#pragma unroll
        for (int p = 0; p < 4; p++) {
            u32 s = (p < 2 ? scales.x : scales.y) >> (16 * (p & 1) + 8 * (j & 1));
            u.scale[p] = d * (s & 15);
            u.offset[p] = least * (s >> 4 & 15);
        }
    }
};

struct Q3_K : Pairs {
    static constexpr int ZERO_POINT = 4;
    uint4 third;  // bit 4 half + r belongs to run r
    u32 low0, low1, top;  // sixteen 6-bit scales: nibbles, and their top bit pairs
    u16 d;
    static constexpr int STEPS[3] = {256, 96, 16};
    __device__ static __forceinline__ Planes item(const Planes& w, size_t i) {
        const size_t block = i >> 2;
        return {w.a + 16 * i, w.b + 32 * block + 16 * (i & 1), w.c + 12 * block, w.d + 2 * block};
    }
    __device__ __forceinline__ void load(const Planes& p) {
        q = stream16(p.a);
        third = constant<uint4>(p.b);
        low0 = constant<u32>(p.c), low1 = constant<u32>(p.c + 4), top = constant<u32>(p.c + 8);
        d = constant<u16>(p.d);
    }
    __device__ __forceinline__ void integers(int j, int* v) const {
        const int half = j >> 1 & 1;
        Pairs::integers(j, v);
#pragma unroll
        for (int k = 0; k < 16; k++)
            v[k] |= (word(third, k & 3) >> (4 * half + (k >> 2)) & 0x01010101) << 2;
    }
    __device__ __forceinline__ void unpack(int j, Unpacked<4>& u) const {
        int half = j >> 1 & 1, odd = j & 1;
        integers(j, u.v);
        float unit = from_f16(d);
#pragma unroll
        for (int p = 0; p < 4; p++) {  // scale number 8 half + 2 p + odd
            u32 low = (p < 2 ? low0 : low1) >> (16 * (p & 1) + 8 * odd + 4 * half);
            u32 high = top >> (8 * (2 * (p & 1) + odd) + 4 * half + 2 * (p >> 1));
            u.scale[p] = unit * (int)((low & 15 | (high & 3) << 4) - 32);
            u.offset[p] = -4 * u.scale[p];
        }
    }
};

#if BLOCK_HALVES  // see block_halves.cuh
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
        const u32 at = from.unit_address(2 * from.part);
        q[0] = load_shared16(at), q[1] = load_shared16(at ^ 16);
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

// Each thread has a run of 32 elements of half of a block, with two scales. Their second half is loaded when it
// is needed, too.
template <> struct Halves<Q6_K> : Expansion {
    static constexpr int CHUNK = 128, BYTES[4] = {64, 32, 8, 1};
    uint4 q, high;
    u32 at, high_at, scale[2];
    int shift, turned;
    __device__ __forceinline__ static constexpr int gamma(int t, int i) { return 2 * t + i; }
    template <class P> __device__ __forceinline__ void load(const P& from) {
        magic = from.magic;
        at = from.unit_address(from.part % 2 * 2), shift = from.part / 2 * 4;
        high_at = from.template plane<1>(), turned = 4 - 2 * from.part;
        const u32 s = load_half(from.template plane<2>(), from.part) ^ 0x8080;
        const u32 d = load_shared2(from.template plane<3>() & ~1u);
        const u32 scales = multiply_halves(two_bytes<128>(s), d | d << 16);
        scale[0] = both_low(scales), scale[1] = both_high(scales);
    }
    __device__ __forceinline__ void turn(int t, u32 (&v)[2][2]) {
        if (t % 2 == 0) q = load_shared16(at + 8 * t), high = load_shared16(high_at + 8 * t);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int n = 2 * t % 4 + i;
            const u32 low = word(q, n) >> shift & 0x0f0f0f0f, bits = word(high, n);
            bytes<32>(low | __funnelshift_l(bits, bits, turned) & 0x30303030, v[i]);
            v[i][0] = multiply_halves(v[i][0], scale[t / 2]);
            v[i][1] = multiply_halves(v[i][1], scale[t / 2]);
        }
    }
};

// q2_k and q3_k: each thread has two runs of 32 elements, each with two scales.
struct HalvesOfPairs : Halves64 {
    uint4 q;  // of half of the turns
    u32 at;
    int shift;
    template <class P> __device__ __forceinline__ void load_pairs(const P& from) {
        at = from.unit_address(from.part / 2 * 2), shift = from.part % 2 * 4;
    }
    __device__ __forceinline__ void begin_turn(int t) {
        if (t % 4 == 0) q = load_shared16(at + 4 * t);
    }
    __device__ __forceinline__ u32 pairs(int t, int i) const {
        return word(q, t % 4) >> (shift + 2 * i) & 0x03030303;
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
    __device__ __forceinline__ void turn(int t, u32 (&v)[2][2]) {
        begin_turn(t);
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
    uint4 third;  // bit 4 half + r belongs to run r
    int bit;
    u32 third_at, scale[2];
    template <class P> __device__ __forceinline__ void load(const P& from) {
        magic = from.magic;
        load_pairs(from);
        third_at = from.template plane<1>(), bit = 2 * from.part;
        const u32 scales = from.template plane<2>();
        const int half = from.part / 2, odd = from.part % 2;
        const u32 low = load_shared4(scales + 4 * odd) >> 4 * half & 0x0f0f0f0f;
        const u32 high = load_shared4(scales + 8) >> (4 * half + 2 * odd) & 0x03030303;
        bytes<32>(low | high << 4, scale);
        const u32 d = load_half(from.template plane<3>(), 0);
#pragma unroll
        for (int i = 0; i < 2; i++) scale[i] = multiply_halves(scale[i], d | d << 16);
    }
    __device__ __forceinline__ void turn(int t, u32 (&v)[2][2]) {
        begin_turn(t);
        if (t % 4 == 0) third = load_shared16(third_at + 4 * t);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 bits = word(third, t % 4) >> (bit + i) & 0x01010101;
            bytes<4>(pairs(t, i) | bits << 2, v[i]);
            const u32 s = both(scale[i], t / 4);
            v[i][0] = multiply_halves(v[i][0], s), v[i][1] = multiply_halves(v[i][1], s);
        }
    }
};
#endif
