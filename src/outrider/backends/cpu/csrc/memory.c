/* Checked allocation, and scratch buffers that a thread owns. */
#include "memory.h"
#include <pthread.h>
#include <stdio.h>

enum { KEPT_BYTES = 16 << 20, CACHE_LINE = 64 };

typedef struct {
    void *data;
    int64_t bytes;
} Scratch;

static _Thread_local Scratch *thread_scratch; /* [NUM_SCRATCH], or null before the first use */
static pthread_key_t key;
static pthread_once_t key_once = PTHREAD_ONCE_INIT;

void *allocate(int64_t bytes) {
    const size_t size = bytes > 0 ? (size_t)bytes : 1;
    void *data;
#ifdef _WIN32 /* free() does not take what Windows aligns */
    data = malloc(size);
    const int failed = !data;
#else
    const int failed = posix_memalign(&data, CACHE_LINE, size);
#endif
    if (failed) {
        fprintf(stderr, "outrider: the CPU kernels cannot allocate %lld bytes\n", (long long)bytes);
        abort();
    }
    return data;
}

static void free_scratch(void *of_thread) {
    Scratch *scratch = of_thread;
    for (int use = 0; use < NUM_SCRATCH; use++) free(scratch[use].data);
    free(scratch);
}

static void make_key(void) {
    if (pthread_key_create(&key, free_scratch)) abort(); /* the process has used up its keys */
}

static Scratch *scratch_of_thread(void) {
    if (!thread_scratch) {
        pthread_once(&key_once, make_key);
        thread_scratch = allocate(NUM_SCRATCH * sizeof *thread_scratch);
        for (int use = 0; use < NUM_SCRATCH; use++) thread_scratch[use] = (Scratch){0, 0};
        if (pthread_setspecific(key, thread_scratch)) abort();
    }
    return thread_scratch;
}

void *scratch_acquire(int use, int64_t bytes) {
    Scratch *scratch = scratch_of_thread() + use;
    if (scratch->bytes < bytes) {
        free(scratch->data);
        *scratch = (Scratch){allocate(bytes), bytes};
    }
    return scratch->data;
}

void scratch_release(int use) {
    Scratch *scratch = scratch_of_thread() + use;
    if (scratch->bytes <= KEPT_BYTES) return;
    free(scratch->data);
    *scratch = (Scratch){0, 0};
}
