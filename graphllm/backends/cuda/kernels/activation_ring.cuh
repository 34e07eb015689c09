#pragma once
// A ring of permuted activations in shared memory for small_batch_blocks.cu, filled by bulk copies
// (capability 9.0). PTX ISA 8.x: mbarrier, cp.async.bulk.
//
// A slot holds a part of the depth, PART elements of all tokens, as permute_activations.cu stores it. The
// first thread requests a part when all warps have released its slot. There are no other barriers, so some
// warps expand weights while the tensor cores multiply those of others.

#include "tensor_cores.cuh"
#include "wgmma.cuh"

__device__ __forceinline__ void init_barrier(u32 at, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Wait for the end of the phase of a barrier with this parity.
__device__ __forceinline__ void wait_barrier(u32 at, u32 parity) {
    u32 done;
    do {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done) : "r"(at), "r"(parity) : "memory");
    } while (!done);
}

// Copy `bytes`, a multiple of 16, to shared memory, and let `barrier` complete a phase then.
__device__ __forceinline__ void copy_bulk(u32 to, const u8* from, int bytes, u32 barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

#define PART 128
#define PART_BYTES (2 * PART * TOKENS)

// What a ring keeps in shared memory. SLOTS is the number of slots, WARPS of warps.
struct RingState {
    u64 full[SLOTS], free[SLOTS];  // barriers
    const u8* next;                // the part that is requested next, by the first thread
    int left;                      // parts that have not been requested
};

// STATE: bytes from the slots to the RingState, which is computed from one register each time.
template <int STATE> struct ActivationRing {
    u32 at;            // address of the slots in shared memory
    u32 slot, parity;  // of the present part

    // A barrier of the block must follow.
    __device__ __forceinline__ explicit ActivationRing(u32 at) : at(at), slot(0), parity(0) {
        if (threadIdx.x) return;
        for (int i = 0; i < SLOTS; i++) init_barrier(full(i), 1), init_barrier(free(i), WARPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __device__ __forceinline__ RingState& state() const { return *(RingState*)__cvta_shared_to_generic(at + STATE); }
    __device__ __forceinline__ u32 full(u32 slot) const { return at + STATE + 8 * slot; }
    __device__ __forceinline__ u32 free(u32 slot) const { return full(SLOTS + slot); }
    __device__ __forceinline__ u32 address() const { return at + slot * PART_BYTES; }
    __device__ __forceinline__ u32 previous() const { return slot ? slot - 1 : SLOTS - 1; }

    // Request the first of `count` parts, which are one after the other in memory.
    __device__ __forceinline__ void start(const u8* first, int count) {
        if (threadIdx.x) return;
        state().next = first, state().left = count;
#pragma unroll 1
        for (int i = 0; i < min(SLOTS, count); i++) request(i);
    }
    __device__ __forceinline__ void request(u32 slot) {
        RingState& s = state();
        copy_bulk(at + slot * PART_BYTES, s.next, PART_BYTES, full(slot));
        s.next += PART_BYTES, s.left--;
    }
    // Wait until the present part has been copied.
    __device__ __forceinline__ void wait() const { wait_barrier(full(slot), parity); }
    // The warp's products of the part before the present one have ended.
    __device__ __forceinline__ void release_previous() const {
        if (threadIdx.x % WARP == 0) arrive(free(previous()));
    }
    // Request a part for the slot of the part before the present one, once all warps have released it.
    __device__ __forceinline__ void refill_previous() {
        if (threadIdx.x || !state().left) return;
        wait_barrier(free(previous()), slot ? parity : parity ^ 1);
        request(previous());
    }
    // Go on with the next part.
    __device__ __forceinline__ void advance() {
        if (++slot == SLOTS) slot = 0, parity ^= 1;
    }
};
