#pragma once
// Stores elements of a row to a pool of keys or values.

enum PoolKind { POOL_F32, POOL_F16, POOL_Q8_0 };

struct Pool {
    u8* at;
    i64 stride;  // bytes between slots
    const int* slot;  // slot of each token; negative: do not store
    int kind, padding;
};

// Store element i of a row. For q8_0 the lanes of a warp hold a block, lane l its element l. Rounding is
// that of graphllm.formats.quantization.quantise; the declaration of kv_write says what becomes of
// values that are not finite or almost zero.
__device__ __forceinline__ void store_kv(const Pool& pool, i64 slot, int i, float x) {
    u8* row = pool.at + slot * pool.stride;
    if (pool.kind == POOL_F32) {
        ((float*)row)[i] = x;
    } else if (pool.kind == POOL_F16) {
        ((u16*)row)[i] = to_f16(x);
    } else {
        u32 most = warp_max(__float_as_uint(x) & 0x7fffffffu);
        bool finite = most < 0x7f800000u, held = finite && most >= 0x0d800000u;  // 2^-100
        float d = held ? __fdiv_rn(__uint_as_float(most), 127.f) : 0.f;
        float scaled = held ? __fmul_rn(x, __fdiv_rn(1.f, d)) : 0.f;
        u8* block = row + i / 32 * 34;
        block[2 + i % 32] = (u8)(int)truncf(__fadd_rn(scaled, copysignf(0.5f, scaled)));
        if (i % 32 == 0) *(u16*)block = finite ? to_f16(d) : 0x7e00;
    }
}
