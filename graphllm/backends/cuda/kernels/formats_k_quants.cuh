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
