// Attention of few tokens, a block of threads to each piece of a token's keys: attention_pieces.cuh
// says which macros there are. Where there are several pieces, a second kernel merges them.

#define WARPS 4

#include "attention_pieces.cuh"
#include "quantise.cuh"

// Blocks that a processor has room for: what keeps to its registers.
constexpr int RESIDENT = HEADS <= 4 && sizeof(Pooled) <= 16 && !BIASED ? 4 : 2;

// blockIdx: (kv head and part of its heads, token, piece).
extern "C" __global__ void __launch_bounds__(WARP* WARPS, RESIDENT) attend(Attention a) {
    __shared__ Shared s;
    begin();
    const Piece p(a, blockIdx.x, blockIdx.y, blockIdx.z);
    if (p.token >= *a.tokens || !p.there()) return;
    attend_piece(a, p, s, [&](int j) { return slot_of(a, p.sees.sequence, j); });
#pragma unroll 1
    for (int i = threadIdx.x; i < p.heads * WIDTH; i += WARP * WARPS) {
        int h = i / WIDTH, e = i % WIDTH;
        float most, all, sum = merged(s, h, e, most, all);
        i64 row = (i64)p.token * a.heads + p.first + h;
        if (a.splits == 1)
            a.out[row * WIDTH + e] = sum * share_of(a, p.first + h, most, all);
        else
            put_part(a, p, h, e, sum, most, all);
    }
}

// blockIdx: (token, 256 of its results), a thread to each: float32 or quantised, as `target` says.
template <int N> __device__ __forceinline__ void merge(const Attention& a, const Target& target) {
    constexpr int SPAN = 256 / WIDTH + 2;  // heads that a block may meet
    __shared__ float weights[SPAN][MOST_PIECES], results[256];
    begin();
    int token = blockIdx.x, width = (int)a.heads * WIDTH, lane = threadIdx.x % WARP;
    int start = blockIdx.y * 256, at = start + threadIdx.x, first = at - lane;
    const Sight sees = sight(a, token);
    if (token >= *a.tokens) return;
    int count = sees.high - sees.low, piece = piece_of(a, count);
    int pieces = count > 0 ? (count + piece - 1) / piece : 0;
    const float* parts = a.parts + (i64)token * a.heads * a.splits * PART;
    int head = start / WIDTH + threadIdx.x / WARP;
    if (threadIdx.x / WARP < SPAN && head < a.heads)
        weigh(a, parts + head * a.splits * PART, head, pieces, weights[threadIdx.x / WARP]);
    __syncthreads();
    float v[N];
    v[0] = 0;
    if (at < width) {
        const float* part = parts + at / WIDTH * a.splits * PART + at % WIDTH;
        const float* weight = weights[at / WIDTH - start / WIDTH];
#pragma unroll 4
        for (int i = 0; i < pieces; i++) v[0] = fmaf(part[i * PART], weight[i], v[0]);
    }
    if (N > 1) {
        first = start;
        results[threadIdx.x] = v[0];
        __syncthreads();
        if (threadIdx.x >= WARP) return;
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = results[32 * i + lane];
    }
    if (first < width) emit_to<N>(v, target, token, first, width);
}

extern "C" __global__ void merge_1(Attention a, Target target) { merge<1>(a, target); }
extern "C" __global__ void merge_8(Attention a, Target target) { merge<8>(a, target); }
