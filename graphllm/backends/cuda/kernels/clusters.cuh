#pragma once
// Sums over the blocks of a cluster (capability 9.0), and how a depth is divided among them.
//
// The depth of a matrix is divided into splits, whose sums are added in pairs, and then the pairs in
// order. A block computes one split, or a pair; without clusters it computes all.

#include "element_types.cuh"

#define CLUSTERS (__CUDA_ARCH__ >= 900)
#define MAX_SPLITS 8

#if CLUSTERS
__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The sums at the same address of the shared memory of block `rank` of the cluster: one, or four that are
// aligned to 16 bytes.
template <int N> __device__ __forceinline__ void of_block(const Sum* own, int rank, Sum (&v)[N]) {
    u32 at, bits[N];
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(at) : "r"((u32)__cvta_generic_to_shared(own)), "r"(rank));
    if (N == 1)
        asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(bits[0]) : "r"(at));
    else
        asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(bits[0]), "=r"(bits[N / 4]), "=r"(bits[N / 2]), "=r"(bits[N - 1]) : "r"(at));
#pragma unroll
    for (int e = 0; e < N; e++) v[e] = from_bits<Sum>(bits[e]);
}
#endif

// Wait until all blocks that share a sum have stored their parts in shared memory, or have read them.
__device__ __forceinline__ void meet(int blocks) {
#if CLUSTERS
    if (blocks > 1) return meet_cluster();
#endif
    __syncthreads();
}

// The sums of all blocks at N adjacent addresses, as for `of_block`. A block has the sum of a pair of splits,
// or of one.
template <int N>
__device__ __forceinline__ void sums_of_blocks(const Sum* own, int blocks, int splits, Sum (&sums)[N]) {
#if CLUSTERS
    if (blocks > 1) {
        Sum parts[MAX_SPLITS][N] = {};
#pragma unroll
        for (int i = 0; i < MAX_SPLITS; i++)
            if (i < blocks) of_block(own, i, parts[i]);
        const bool single = blocks == splits;
#pragma unroll
        for (int e = 0; e < N; e++) {
            if (single)
#pragma unroll
                for (int i = 0; i < MAX_SPLITS / 2; i++) parts[i][e] = parts[2 * i][e] + parts[2 * i + 1][e];
            sums[e] = parts[0][e];
#pragma unroll
            for (int i = 1; i < MAX_SPLITS; i++)
                if (i < (single ? (blocks + 1) / 2 : blocks)) sums[e] += parts[i][e];
        }
        return;
    }
#endif
#pragma unroll
    for (int e = 0; e < N; e++) sums[e] = own[e];
}

// Without clusters: add the sums of `split`, which becomes zero, to those of the splits before it. `half`
// is the first one of a pair. After the last split, `sums` is the total.
template <int TILES>
__device__ __forceinline__ void add_split(Sum (&sums)[TILES][4], Sum (&half)[TILES][4],
                                          Sum (&total)[TILES][4], int split, int splits) {
#pragma unroll
    for (int i = 0; i < TILES * 4; i++) {
        Sum &sum = sums[i / 4][i % 4], &one = half[i / 4][i % 4], &all = total[i / 4][i % 4];
        if (split % 2) sum = one + sum;
        if (split % 2 == 0 && split + 1 < splits)
            one = sum;
        else
            all = split < 2 ? sum : all + sum;
        sum = split + 1 < splits ? 0 : all;
    }
}
