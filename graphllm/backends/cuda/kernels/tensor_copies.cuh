#pragma once
// The copy engine of capability 9.0: tiles of a matrix to shared memory, and barriers that count their bytes.
// PTX ISA 8.x, 9.7.9.27 (asynchronous tensor copies) and 9.7.13.15 (mbarrier).

#include "tensor_cores.cuh"

// CUtensorMap, which the host encodes (runtime/tensor_map.py): a matrix and the size of its tiles.
struct __align__(64) TensorMap {
    u64 opaque[16];
};

__device__ __forceinline__ void init_barrier(u64* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}

// Make initialized barriers visible to the copy engine; call before a barrier of the block.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrive, and let the barrier's phase end when `nbytes` have been copied, too.
__device__ __forceinline__ void arrive_for_copies(u64* barrier, int nbytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(nbytes)
                 : "memory");
}

// Wait for the end of a phase: the first phase of a barrier has parity 0.
__device__ __forceinline__ void wait_barrier(u64* barrier, int parity) {
    asm volatile(
        "{.reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

__device__ __forceinline__ void arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrive at the same barrier of a block of the cluster. With release.cluster, linears of many tokens take up
// to twice the time.
__device__ __forceinline__ void arrive(u64* barrier, int block) {
    asm volatile(
        "{.reg .u32 at;\n"
        "mapa.shared::cluster.u32 at, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [at];}" ::"r"(shared_address(barrier)),
        "r"(block)
        : "memory");
}

// Copy the tile whose first element is `column` of row `row`. Elements beyond the matrix become zeros.
__device__ __forceinline__ void copy_tile(void* to, const TensorMap& map, int column, int row, u64* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            shared_address(to)),
        "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier))
        : "memory");
}

// The same to the same place of all blocks of the cluster whose bit is set.
__device__ __forceinline__ void copy_tile(void* to, const TensorMap& map, int column, int row, u64* barrier,
                                          u16 blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)),
        "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier)), "h"(blocks)
        : "memory");
}

// Copy a tile of a matrix whose map `interleaved_map` of runtime/tensor_map.py has made. Of each 32 rows from a
// multiple of 32 on, row 8 c + 2 j + e becomes row 8 j + 2 c + e of the tile (c, j < 4; e < 2). A thread that has
// sums of columns 2 c and 2 c + 1 of every eight, see wgmma.cuh, so has those of 8 adjacent rows of the matrix.
__device__ __forceinline__ void copy_interleaved(void* to, const TensorMap& map, int column, int row, u64* barrier,
                                                 u16 blocks) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%2, %3, %3, %3, %4}], [%5], %6;" ::"r"(shared_address(to)),
        "l"(&map), "r"(column), "r"(0), "r"(row / 32), "r"(shared_address(barrier)), "h"(blocks)
        : "memory");
}

// The L2 cache's policy for what is read once: it is evicted first.
__device__ __forceinline__ u64 evict_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Copy adjacent bytes that are read once: a multiple of 16, as both addresses are.
__device__ __forceinline__ void copy_bytes(void* to, const void* from, int nbytes, u64* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            shared_address(to)),
        "l"(from), "r"(nbytes), "r"(shared_address(barrier)), "l"(evict_first())
        : "memory");
}

// Change the registers of the threads of a warpgroup.
template <int COUNT> __device__ __forceinline__ void release_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void claim_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
