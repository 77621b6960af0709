/* What the kernels take from the operating system: locks, threads, a clock, and memory of any alignment.
 * POSIX has them in line.  Those of Windows are in windows.c, as its header defines names that are in use
 * here.  C11's own threads.h is missing on macOS and in MinGW. */
#pragma once
#include <stdint.h>
#include <stdlib.h>

enum { CACHE_LINE = 64 };

typedef void *ThreadBody(void *argument);

#ifdef _WIN32
typedef struct {
    void *word; /* SRWLOCK */
} Lock;
typedef struct {
    void *word; /* CONDITION_VARIABLE */
} Condition;
#define FREE_LOCK {0}
#define NEW_CONDITION {0}

void lock_acquire(Lock *lock);
void lock_release(Lock *lock);
void condition_wait(Condition *condition, Lock *lock);
void condition_signal(Condition *condition);
void condition_broadcast(Condition *condition);

/* Starts a thread that ends with the process.  Returns 0 on failure. */
int start_thread(ThreadBody *body, void *argument);

/* A value of the calling thread, null at first.  set_thread_value may be called once in a thread; `end` is
 * called with the value when the thread ends, and is the same for all. */
void *thread_value(void);
void set_thread_value(void *value, void (*end)(void *));

/* Of a clock that only goes forward. */
int64_t nanoseconds(void);

/* On a cache line's border; null on failure. */
void *allocate_aligned(size_t bytes);
void free_aligned(void *data);

#else
#include <pthread.h>
#include <time.h>

typedef pthread_mutex_t Lock;
typedef pthread_cond_t Condition;
#define FREE_LOCK PTHREAD_MUTEX_INITIALIZER
#define NEW_CONDITION PTHREAD_COND_INITIALIZER

static inline void lock_acquire(Lock *lock) { pthread_mutex_lock(lock); }
static inline void lock_release(Lock *lock) { pthread_mutex_unlock(lock); }
static inline void condition_wait(Condition *condition, Lock *lock) { pthread_cond_wait(condition, lock); }
static inline void condition_signal(Condition *condition) { pthread_cond_signal(condition); }
static inline void condition_broadcast(Condition *condition) { pthread_cond_broadcast(condition); }

static inline int64_t nanoseconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static inline void *allocate_aligned(size_t bytes) {
    void *data;
    return posix_memalign(&data, CACHE_LINE, bytes) ? 0 : data;
}
static inline void free_aligned(void *data) { free(data); }
#endif
