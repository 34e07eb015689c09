#pragma once
// Copies from global to shared memory that a warp does not wait for. Where there is the hardware, one
// lane asks for a whole range at a time, and bytes are counted as they come; else all lanes ask for 16
// bytes each, in groups that end in order.

__device__ __forceinline__ u32 shared_address(const void* p) {
    return (u32)__cvta_generic_to_shared(p);
}

#if __CUDA_ARCH__ >= 900

// What a warp waits at, one for each slot of its ring.
struct Gates {
    u64 gate[RING];

    __device__ __forceinline__ void open() {  // by one thread, before anybody uses them
#pragma unroll
        for (int i = 0; i < RING; i++)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(gate + i))
                         : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }

    // Until a slot is full, that is `round` & 1 times past the first time.
    __device__ __forceinline__ void wait(int slot, u32 round, int) const {
        u32 address = shared_address(gate + slot), done;
        do {
            asm volatile("{\n.reg .pred p;\n"
                         "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                         "selp.u32 %0, 1, 0, p;\n}"
                         : "=r"(done) : "r"(address), "r"(round) : "memory");
        } while (!done);
    }
};

// Ranges on their way to a slot: multiples of 16 bytes, from aligned addresses.
struct Transfer {
    u32 gate, to;
    bool mine;

    __device__ __forceinline__ Transfer(Gates* gates, int index, const u8* slot)
        : gate(shared_address(gates->gate + index)), to(shared_address(slot)),
          mine(threadIdx.x % WARP == 0) {}

    __device__ __forceinline__ void add(int at, const u8* from, int bytes) {
        if (!mine) return;
        asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(gate), "r"(bytes)
                     : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1], %2, [%3];" ::"r"(to + at), "l"(from), "r"(bytes), "r"(gate)
                     : "memory");
    }

    __device__ __forceinline__ void close() {
        if (mine)
            asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(gate) : "memory");
    }
};

#else

struct Gates {
    u64 unused;

    __device__ __forceinline__ void open() {}

    // Until the oldest of `held` transfers is there.
    __device__ __forceinline__ void wait(int, u32, int held) const {
        if (held == RING)
            asm volatile("cp.async.wait_group %0;" ::"n"(RING - 1) : "memory");
        else
            asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncwarp();
    }
};

struct Transfer {
    u32 to;

    __device__ __forceinline__ Transfer(Gates*, int, const u8* slot) : to(shared_address(slot)) {}

    __device__ __forceinline__ void add(int at, const u8* from, int bytes) {
        for (int i = 16 * (threadIdx.x % WARP); i < bytes; i += 16 * WARP)
            asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to + at + i),
                         "l"(from + i) : "memory");
    }

    __device__ __forceinline__ void close() { asm volatile("cp.async.commit_group;" ::: "memory"); }
};

#endif
