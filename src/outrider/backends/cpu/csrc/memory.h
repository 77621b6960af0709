/* Memory of the kernels.  A failed allocation ends the process with a message: the kernels have no way to
 * report it. */
#pragma once
#include "system.h"

/* On a cache line's border, until it is released. */
void *allocate(int64_t bytes);
static inline void release(void *data) { free_aligned(data); }

enum {
    SCRATCH_ACTIVATIONS,
    SCRATCH_ATTENTION,
    SCRATCH_EXPERTS,
    SCRATCH_FOREST,
    SCRATCH_STATES,
    SCRATCH_SAMPLER,
    SCRATCH_RULES,
    NUM_SCRATCH
};

/* Scratch memory of the calling thread, one buffer a use.  Buffers of up to 16 MB stay with the thread until
 * it ends, since new pages cost more than the kernels that use them.  Larger ones are freed by
 * scratch_release. */
void *scratch_acquire(int use, int64_t bytes);
void scratch_release(int use);
