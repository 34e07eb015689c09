#pragma once
// How small_batch_blocks.cu brings weights and activations to shared memory; see there for the macros.

#include "tensor_cores.cuh"

#define THREADS (4 * WARP * WARPGROUPS)
#define WARPS (4 * WARPGROUPS)
#define SIDE 16  // rows of a warp

// Asynchronous copies to shared memory, at addresses in 32 bits.
__device__ __forceinline__ void copy_shared16(u32 to, const u8* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
}
// Zeros if `there` is false.
__device__ __forceinline__ void copy_shared4(u32 to, const u8* from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(there ? 4 : 0));
}

typedef Halves<FORMAT> Half;
constexpr int CHUNK = Half::CHUNK, GROUPS = CHUNK / 64;  // groups of 64 elements, a row of 128 bytes each
constexpr bool WHOLE = FORMAT::BLOCK == 256;             // no chunk is beyond the depth in part

__device__ constexpr int bytes_of(int i) {
    return i == 0 ? Half::BYTES[0] : i == 1 ? Half::BYTES[1] : i == 2 ? Half::BYTES[2] : Half::BYTES[3];
}
constexpr int PLANES = bytes_of(2) == 0 ? 2 : bytes_of(3) == 0 ? 3 : 4;

// Whether a chunk of plane i begins at a multiple of 16 bytes, as those of the first plane do.
__device__ constexpr bool aligned_plane(int i) { return i == 0 || WHOLE && bytes_of(i) % 16 == 0; }

// Units of 16 bytes that hold a chunk of a row of plane i, from a multiple of 16 bytes on.
__device__ constexpr int units_of(int i) {
    const int n = bytes_of(i);
    return aligned_plane(i) ? n / 16 : WHOLE && 16 % n == 0 ? 1 : (n + 30) / 16;
}
__device__ constexpr int plane_at(int i) {
    return SIDE * 16 * ((i > 0 ? units_of(0) : 0) + (i > 1 ? units_of(1) : 0) + (i > 2 ? units_of(2) : 0) +
                        (i > 3 ? units_of(3) : 0));
}
constexpr int WARP_BYTES = plane_at(PLANES);

// Where unit u of row r of plane i is: eight threads that load from two rows of 128 bytes use all banks.
__device__ __forceinline__ constexpr int unit_at(int i, int r, int u) {
    return plane_at(i) + 16 * (r * units_of(i) + (units_of(i) == 8 ? u ^ r & 1 : u));
}

// A value that is not computed again, if there are registers: the compiler would do so in every chunk.
__device__ __forceinline__ u32 kept(u32 v) {
    if (TOKENS < 64 || PLANES == 2) asm volatile("" : "+r"(v));
    return v;
}

__device__ __forceinline__ u32 row_bytes(int i, int k) {
    return WHOLE ? (u32)k / CHUNK * bytes_of(i) : (u32)k / 32 * (bytes_of(i) / (CHUNK / 32));
}

// Whether rows 8 apart start equally far from a multiple of 16 bytes, whatever the depth.
__device__ constexpr bool equal_starts(int i) {
    return (WHOLE ? 256 / CHUNK * bytes_of(i) : bytes_of(i) / (CHUNK / 32)) % 2 == 0;
}

// A chunk of a row in shared memory, as Halves load it. A thread has rows `group` and `group` + 8 of its
// warp's.
struct ChunkOfRow {
    u32 w;                // of the warp's rows
    u32 at[PLANES];       // of the thread's first row in its plane
    int second, part;     // 1 for the second row; thread of the row's four
    u32 start[PLANES];    // where the row starts in a plane in global memory
    u32 chunk;
    int k;
    u32 magic;  // see Expansion

    __device__ __forceinline__ u32 unit_address(int u) const {  // of the first plane, see unit_at
        const u32 offset = at[0] + 16 * u;
        return w + (units_of(0) == 8 ? offset ^ at[0] / 8 % 32 : offset) + second * 128 * units_of(0);
    }
    __device__ __forceinline__ uint4 unit(int u) const { return load_shared16(unit_address(u)); }
    template <int I> __device__ __forceinline__ u32 plane() const {
        const u32 offset = second * 128 * units_of(I);
        return w + at[I] + offset + (aligned_plane(I) ? 0 : start[I] + chunk * bytes_of(I) & 15);
    }
    // Whether the 32 elements from `first` on are within the depth.
    __device__ __forceinline__ bool there(int first) const { return (int)chunk * CHUNK + first < k; }
};

// Copies the rows of a warp, one chunk after the other.
struct WeightSource {
    const u8* at[PLANES];  // what the lane copies first of the next chunk
    u32 place[PLANES];     // and where to, of a stage's rows of the warp
    int k, chunk;

    __device__ static constexpr int lanes(int i) {  // that copy one row
        return units_of(i) > 4 ? 8 : units_of(i) > 2 ? 4 : units_of(i);
    }
    __device__ __forceinline__ WeightSource(const Planes& w, int row, int k, int chunk) : k(k), chunk(chunk) {
        const u8* planes[4] = {w.a, w.b, w.c, w.d};
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int i = 0; i < PLANES; i++) {
            at[i] = planes[i] + (i64)(row + lane / lanes(i)) * row_bytes(i, k) + (i64)chunk * bytes_of(i);
            if (aligned_plane(i)) at[i] += 16 * (lane % lanes(i));
            place[i] = kept(unit_at(i, lane / lanes(i), lane % lanes(i)));
        }
    }
    // Copy the next chunk to the warp's rows at `to`. Units beyond the end of a row are left as they are.
    __device__ __forceinline__ void copy(u32 to) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int i = 0; i < PLANES; i++) {
            const int u = lane % lanes(i), rows = WARP / lanes(i);
            const int bytes = bytes_of(i), left = row_bytes(i, k) - chunk * bytes;
#pragma unroll
            for (int r = 0; r < SIDE; r += rows) {
                const u8* from = at[i] + (u32)r * row_bytes(i, k);
                const u32 there = to + place[i] + r * 16 * units_of(i);
                if (rows > SIDE && lane >= SIDE) break;
                if (aligned_plane(i)) {
                    if (WHOLE || 16 * u < left) copy_shared16(there, from);
                } else {
                    const u8* first = (const u8*)((u64)from & ~15ull) + 16 * u;
                    const bool own = u < units_of(i) && first < from + (WHOLE ? bytes : min(bytes, left));
                    if (units_of(i) == 1 || own) copy_shared16(there, first);
                }
            }
            at[i] += bytes;
        }
        chunk++;
    }
};

typedef u16 Activations[GROUPS][TOKENS][64];  // see wgmma.cuh

// Copies tokens, one chunk after the other, in the order of Halves. Each warp copies some of them.
struct ActivationSource {
    static constexpr int COPIES = TOKENS / WARPS;  // of a chunk, by each warp
    const u8 *at, *next;  // what the lane copies first of the next chunk, and what next
    u32 stride;
    int count, left;  // tokens of the warp, of which each is WARPS after the one before; rest of the depth
    u32 place;

    // x: the first of `count` tokens.
    __device__ __forceinline__ ActivationSource(const u8* x, i64 stride, int count, int k, int chunk)
        : stride(WARPS * (u32)stride) {
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, eight = lane % 8;
        const int first = chunk * CHUNK + CHUNK / 4 * (lane / 8) + 2 * eight;
        next = at = x + warp * stride + 2 * (i64)first;
        this->count = (count - warp + WARPS - 1) / WARPS, left = k - first;
        place = kept(128 * warp + 16 * (eight ^ warp % 8) + lane / 8 * 4);
    }
    // Copy the next token of the warp, number n, to the chunk `to`; zeros beyond the depth.
    __device__ __forceinline__ void copy(u32 to, int n) {
        if (n >= count) return;
#pragma unroll
        for (int i = 0; i < GROUPS; i++)
            copy_shared4(to + place + (i * TOKENS + n * WARPS) * 128, next + 32 * i, WHOLE || 16 * i < left);
        next += stride;
    }
    // Go on with the next chunk.
    __device__ __forceinline__ void advance() { next = at += 2 * CHUNK, left -= CHUNK; }
};
