#pragma once
// Eight adjacent elements of a row of float32 or f16, of which a thread reads or stores those before `width`.

// Whether a thread may access the elements from `at` on 16 bytes at a time.
__device__ __forceinline__ bool whole_vectors(const float* row, int at, int width) {
    return at + 8 <= width && (u64)(row + at) % 16 == 0;
}

// Load them; those beyond the row become zero. L2: by `load_l2`.
template <bool L2 = false>
__device__ __forceinline__ void load_floats(float* v, const float* row, int at, int width) {
    if (whole_vectors(row, at, width)) {
        const float4 *one = (const float4*)(row + at), *two = one + 1;
        const float4 a = L2 ? load_l2(one) : *one, b = L2 ? load_l2(two) : *two;
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
        v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = at + i >= width ? 0.f : L2 ? load_l2(row + at + i) : row[at + i];
}

// The same of a row of f16 if `half`, else of float32.
__device__ __forceinline__ void load_row(float* v, const void* row, bool half, int at, int width) {
    if (!half) return load_floats(v, (const float*)row, at, width);
    const u16* from = (const u16*)row + at;
    if (at + 8 <= width && (u64)from % 16 == 0) {
        const uint4 own = *(const uint4*)from;
        const u32 pairs[4] = {own.x, own.y, own.z, own.w};
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = from_f16((u16)(pairs[i / 2] >> 16 * (i % 2)));
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = at + i < width ? from_f16(from[i]) : 0.f;
}

__device__ __forceinline__ void store_floats(const float* v, float* row, int at, int width) {
    if (whole_vectors(row, at, width)) {
        *(float4*)(row + at) = make_float4(v[0], v[1], v[2], v[3]);
        *(float4*)(row + at + 4) = make_float4(v[4], v[5], v[6], v[7]);
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (at + i < width) row[at + i] = v[i];
}
