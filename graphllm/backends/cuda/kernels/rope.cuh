#pragma once
// Rotary position embedding of one head. Pair p of an element: (p, p + half) or (2p, 2p + 1).

struct Rotation {
    const int* pos;        // of each token
    const float* inverse;  // radians a position, for each pair
    const float* factors;  // that they are divided by, or null
    int half, interleaved;
    float attention_factor;  // that cosine and sine are multiplied with
};

// Sine and cosine of an angle: a position, times so many radians each.
__device__ __forceinline__ void angle_of(int pos, float inverse, float& s, float& c) {
    // In half turns, from float64: no table of digits of pi, which would lie in local memory.
    double angle = (double)__fmul_rn((float)pos, inverse) * 0.3183098861837907;
    sincospif((float)(angle - 2 * rint(0.5 * angle)), &s, &c);
}

// Element i of the rotated head, from the head before.
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
