/* Checked allocation, and scratch buffers that a thread owns. */
#include "memory.h"
#include <inttypes.h>
#include <stdio.h>

enum { KEPT_BYTES = 16 << 20 };

typedef struct {
    void *data;
    int64_t bytes;
} Scratch;

void *allocate(int64_t bytes) {
    void *data = allocate_aligned(bytes > 0 ? (size_t)bytes : 1);
    if (!data) {
        fprintf(stderr, "outrider: the CPU kernels cannot allocate %" PRId64 " bytes\n", bytes);
        abort();
    }
    return data;
}

static void free_scratch(void *of_thread) {
    Scratch *scratch = of_thread;
    for (int use = 0; use < NUM_SCRATCH; use++) release(scratch[use].data);
    release(scratch);
}

#ifndef _WIN32
static _Thread_local void *value; /* what the key has for this thread, in fewer instructions */
static pthread_key_t key;
static pthread_once_t key_once = PTHREAD_ONCE_INIT;

static void make_key(void) {
    if (pthread_key_create(&key, free_scratch)) abort(); /* the process has used up its keys */
}

static void *thread_value(void) { return value; }

static void set_thread_value(void *made, void (*end)(void *)) {
    (void)end;
    pthread_once(&key_once, make_key);
    value = made;
    if (pthread_setspecific(key, made)) abort();
}
#endif

static Scratch *scratch_of_thread(void) {
    Scratch *scratch = thread_value();
    if (!scratch) {
        scratch = allocate(NUM_SCRATCH * sizeof *scratch);
        for (int use = 0; use < NUM_SCRATCH; use++) scratch[use] = (Scratch){0, 0};
        set_thread_value(scratch, free_scratch);
    }
    return scratch;
}

void *scratch_acquire(int use, int64_t bytes) {
    Scratch *scratch = scratch_of_thread() + use;
    if (scratch->bytes < bytes) {
        release(scratch->data);
        *scratch = (Scratch){allocate(bytes), bytes};
    }
    return scratch->data;
}

void scratch_release(int use) {
    Scratch *scratch = scratch_of_thread() + use;
    if (scratch->bytes <= KEPT_BYTES) return;
    release(scratch->data);
    *scratch = (Scratch){0, 0};
}
