#pragma once
// A barrier of all blocks of a grid, which must all be resident: at most one per multiprocessor.

// `arrivals` counts all arrivals ever, so it is never reset: each barrier adds gridDim.x. All grids that share it have
// equally many blocks.
struct GridBarrier {
    u64* arrivals;
    u64 target;  // arrivals when the present barrier ends; 0 before the first one of the launch

    // By the first thread of each block, between two barriers of the block. What the threads of all blocks have
    // written before is visible after it, except through the L1 cache.
    __device__ __forceinline__ void wait() {
        u64 before, seen;
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
        asm volatile("atom.add.relaxed.gpu.global.u64 %0, [%1], 1;" : "=l"(before) : "l"(arrivals) : "memory");
        target = target ? target + gridDim.x : before - before % gridDim.x + gridDim.x;
        do {
            asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(arrivals) : "memory");
        } while (seen < target);
    }
};
