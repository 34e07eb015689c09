#pragma once
// Rotary position embedding of one head. Pair p of an element: (p, p + half) or (2p, 2p + 1).

struct Rotation {
    const int* pos;        // position of each token
    const float* inverse;  // radians per position, for each pair
    const float* factors;  // divisors of `inverse`, or null
    int half, interleaved;
    float attention_factor;  // factor of cosine and sine
    int padding;
};

// Sine and cosine of pos * inverse radians.
__device__ __forceinline__ void angle_of(int pos, float inverse, float& s, float& c) {
    // In half rotations, reduced in float64: needs no table of digits of pi in local memory.
    double angle = (double)__fmul_rn((float)pos, inverse) * 0.3183098861837907;
    sincospif((float)(angle - 2 * rint(0.5 * angle)), &s, &c);
}

// Element i of the rotated head, computed from head x.
__device__ __forceinline__ float rotated(const Rotation& t, i64 token, const float* x, int i) {
    if (i >= 2 * t.half) return x[i];
    int pair = t.interleaved ? i >> 1 : i % t.half;
    bool second = t.interleaved ? i & 1 : i >= t.half;
    float inverse = t.inverse[pair];
    if (t.factors) inverse = __fdiv_rn(inverse, t.factors[pair]);
    float s, c;
    angle_of(t.pos[token], inverse, s, c);
    s *= t.attention_factor, c *= t.attention_factor;
    float other = x[t.interleaved ? i ^ 1 : second ? i - t.half : i + t.half];
    return second ? other * s + x[i] * c : x[i] * c - other * s;
}
