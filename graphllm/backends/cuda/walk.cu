// A walk: many steps for one token in one launch. One block on every processor goes along a list of
// steps; where a step needs what other blocks have made, all meet first. So the memory is not idle
// between two products: see walk_linear.cuh.
//
// WARPS: of a block. FORMATS: CASE(number, struct) for each format of weights. RING: slots of a warp's
// ring; CHUNK: items of one. POOL, DEPTH, WIDTH, HEADS: as in attention_pieces.cuh; heads that are
// turned are DEPTH wide.

#define SHARED_WEIGHTS  // items are loaded from a ring
#define THREADS (WARPS * WARP)
#define UNIT 256  // numbers that a warp quantises at a time
#define BIASED 0
#define EACH 2  // keys of a thread at a time: more do not fit in registers
#define POOL_KIND(pool) POOLED

#include "attention_pieces.cuh"
#include "matrices.cuh"
#include "plain.cuh"
#include "quantise.cuh"
#include "turning.cuh"

#include "walk_steps.cuh"

#include "walk_linear.cuh"

#define RECORD 512  // bytes of a step
enum Kind { NORM, COPY, ROPE, ATTEND, LINEAR };  // from LINEAR on: one for each format

struct Record {
    int kind, meet;     // whether all blocks meet before it
    int stamp, unused;  // where its time is noted, or -1
    union {
        Norm norm;
        Copy copy;
        Rope rope;
        Attend attend;
        Linear linear;
        u32 words[RECORD / 4 - 4];
    };
};

// `stamps`: when all blocks were known to be done with each step but the last, or null. `stage_bytes`:
// of shared memory before the rings. `product`: the first step that is one.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    walk(const Record* records, int count, Meeting* meeting, i64* stamps, int stage_bytes,
         int slot_bytes, int product) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ __align__(16) Record steps[2];
    __shared__ __align__(16) Linear products[2];
    __shared__ Gates gates[WARPS];
    __shared__ Targets local;  // of the last norm
    u8* stage = shared;
    const int thread = threadIdx.x;
    auto word = [&](int i) { return thread < RECORD / 4 ? ((const u32*)(records + i))[thread] : 0; };
    auto put = [&](Linear& to, u32 word) {  // of a record that is a product
        int at = thread - 4;
        if (at >= 0 && at < (int)sizeof(Linear) / 4) ((u32*)&to)[at] = word;
    };
    if (thread < RECORD / 4) ((u32*)&steps[0])[thread] = word(0);
    if (product >= 0) put(products[0], word(product));
    if (thread % WARP == 0) gates[thread / WARP].open();
    Ready ready = {meeting, *(volatile u32*)&meeting->before, stamps, 0, -1};
    __syncthreads();
    if (product >= 0 && products[0].ahead >= 0) put(products[1], word(products[0].ahead));
    __syncthreads();
    Ring ring = {shared + stage_bytes + thread / WARP * RING * slot_bytes, gates + thread / WARP,
                 slot_bytes, {0, 0}, {0, 0}, 0, product >= 0 ? 0 : 2, 0, 0, 0, nullptr, 0, 0};
    ring.begin(products, 0);
    ring.fill(products, 0);
    int present = 0;
    bool begun = false;  // whether products[present] has been a step
    for (int i = 0; i < count; i++) {
        const Record& step = steps[i & 1];
        u32 next = i + 1 < count ? word(i + 1) : 0;
        const int ahead = step.kind >= LINEAR ? step.linear.ahead : -1;
        u32 later = ahead >= 0 ? word(ahead) : 0;
        ready.meet = step.meet;
        if (step.meet) ready.until += gridDim.x;
        ready.arrive();
        switch (step.kind) {
            case NORM: norm_step(step.norm, ready, stage, local); break;
            case COPY: copy_step(step.copy, ready); break;
            case ROPE: rope_step(step.rope, ready, stage); break;
            case ATTEND: attend_step(step.attend, ready, stage); break;
#define CASE(NUMBER, FORMAT)                                                                    \
    case LINEAR + NUMBER:                                                                       \
        ready.wait();                                                                           \
        if (begun) present ^= 1;                                                                \
        if (begun && ahead >= 0) put(products[present ^ 1], later);                             \
        stage_activations<FORMAT>(step.linear, stage);                                         \
        __syncthreads();                                                                        \
        if (begun) ring.turn(products, present);                                                \
        begun = true;                                                                           \
        ring.fill(products, present);                                                           \
        linear_step<FORMAT>(products, present, ring, stage);                                    \
        break;
            FORMATS
#undef CASE
        }
        ready.stamp = step.stamp;
        if (i + 1 < count && thread < RECORD / 4) ((u32*)&steps[(i + 1) & 1])[thread] = next;
        __syncthreads();
    }
    if (blockIdx.x == 0 && thread == 0) meeting->before = ready.until;
}
