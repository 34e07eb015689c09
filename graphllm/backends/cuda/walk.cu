// A walk: many steps for one token in one launch. One block on every processor goes along a list of
// steps; where a step needs what other blocks have made, all meet first. So the memory is not idle
// between two products: see walk_linear.cuh.
//
// WARPS: of a block. FORMATS: CASE(number, struct) for each format of weights. POOL, DEPTH, WIDTH,
// HEADS: as in attention_pieces.cuh; heads that are turned are DEPTH wide.

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

// `stamps`: when all blocks were known to be done with each step but the last, or null. `first`: the
// first step that is a product, or -1.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    walk(const Record* records, int count, Meeting* meeting, i64* stamps, int first) {
    extern __shared__ __align__(128) u8 stage[];
    __shared__ __align__(16) Record steps[2];
    __shared__ __align__(16) Linear product;  // the one that comes next
    __shared__ Targets local;  // of the last norm
    const int thread = threadIdx.x;
    auto word = [&](int i) { return thread < RECORD / 4 ? ((const u32*)(records + i))[thread] : 0; };
    auto put = [&](u32 word) {  // of a record that is a product
        int at = thread - 4;
        if (at >= 0 && at < (int)sizeof(Linear) / 4) ((u32*)&product)[at] = word;
    };
    if (thread < RECORD / 4) ((u32*)&steps[0])[thread] = word(0);
    if (first >= 0) put(word(first));
    Ready ready = {meeting, *(volatile u32*)&meeting->before, stamps, 0, -1};
    bool fresh = first >= 0;  // whether `product` has not been sent ahead
    __syncthreads();
    for (int i = 0; i < count; i++) {
        const Record& step = steps[i & 1];
        const int ahead = step.kind >= LINEAR ? step.linear.ahead : -1;
        const u32 next = i + 1 < count ? word(i + 1) : 0, later = ahead >= 0 ? word(ahead) : 0;
        ready.meet = step.meet;
        if (step.meet) ready.until += gridDim.x;
        ready.arrive();
        if (fresh) send_ahead(product);
        switch (step.kind) {
            case NORM: norm_step(step.norm, ready, stage, local); break;
            case COPY: copy_step(step.copy, ready); break;
            case ROPE: rope_step(step.rope, ready, stage); break;
            case ATTEND: attend_step(step.attend, ready, stage); break;
#define CASE(NUMBER, FORMAT)                                                                    \
    case LINEAR + NUMBER:                                                                       \
        linear_step<FORMAT>(step.linear, ready, stage);                                         \
        break;
            FORMATS
#undef CASE
        }
        ready.stamp = step.stamp;
        fresh = ahead >= 0;
        if (fresh) put(later);
        if (i + 1 < count && thread < RECORD / 4) ((u32*)&steps[(i + 1) & 1])[thread] = next;
        __syncthreads();
    }
    if (blockIdx.x == 0 && thread == 0) meeting->before = ready.until;
}
