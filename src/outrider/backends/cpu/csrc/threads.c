/* A pool of threads that share loops.
 *
 * Order: each thread begins with a part of the loop of its own, and takes `grain` items at a time.  Then it
 * takes items of the other parts.  So a thread that the system wakes late or interrupts delays a loop by one
 * grain at most.
 * Exact: every thread computes an item in the same way (see kernels.h), and rounds as the caller does.
 * Threads without a loop look for one for SPIN_NANOSECONDS, then sleep.  A forked process has none of its
 * parent's threads, and starts its own. */
#include "threads.h"
#include <stdatomic.h>
#include "simd.h"
#include "system.h"
#ifndef _WIN32
#include <sched.h>
#endif

enum { MAX_THREADS = 256, CHECKS = 32, SPIN_NANOSECONDS = 30000 };
enum { OPEN = 1 << 30, AWAITED = 1 << 29 }; /* `members`: more may join; the caller sleeps until they leave */

/* What a thread begins with; on a cache line of its own. */
typedef struct {
    _Alignas(64) _Atomic int64_t next;
    int64_t end;
} Part;

/* The loop in progress.  Workers read it between join_loop and leave_loop. */
static struct {
    LoopBody *body;
    const void *loop;
    int64_t grain, threads;
    uint64_t float_mode; /* of the caller: rounding, denormals (torch.set_flush_denormal) */
    Part parts[MAX_THREADS];
} current;

static _Atomic int64_t wanted = 1;           /* threads, the caller among them */
static atomic_flag taken = ATOMIC_FLAG_INIT; /* by a caller, while its loop lasts */
static _Atomic uint32_t loops;               /* how many have begun */
static _Atomic uint32_t members;             /* workers at the loop, and the bits above */
static _Atomic uint32_t sleeping;            /* workers */
static _Atomic int stopped;
static Lock lock = FREE_LOCK; /* of both conditions */
static Condition begun = NEW_CONDITION, left = NEW_CONDITION;
static int64_t num_workers; /* belongs to who has `taken` */

static void compute_parts(int64_t self) {
    for (int64_t i = 0; i < current.threads; i++) {
        Part *part = &current.parts[(self + i) % current.threads];
        while (atomic_load_explicit(&part->next, memory_order_relaxed) < part->end) {
            const int64_t first = atomic_fetch_add_explicit(&part->next, current.grain, memory_order_relaxed);
            if (first < part->end) current.body(current.loop, first, min64(first + current.grain, part->end));
        }
    }
}

/* ---- floating-point mode of a thread */

INLINE uint64_t float_mode(void) {
    uint64_t mode = 0;
#ifdef __x86_64__
    mode = _mm_getcsr();
#elif defined __aarch64__
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
#endif
    return mode;
}

INLINE void set_float_mode(uint64_t mode) {
#ifdef __x86_64__
    _mm_setcsr((uint32_t)mode);
#elif defined __aarch64__
    __asm__ volatile("msr fpcr, %0" : : "r"(mode));
#else
    (void)mode;
#endif
}

/* ---- waiting */

INLINE void pause_briefly(void) {
#ifdef __x86_64__
    _mm_pause();
#elif defined __aarch64__
    __asm__ volatile("yield");
#endif
}

/* Whether (*word == value) becomes `equal` soon. */
static int spin(const _Atomic uint32_t *word, uint32_t value, int equal) {
    const int64_t end = nanoseconds() + SPIN_NANOSECONDS;
    do
        for (int i = 0; i < CHECKS; i++, pause_briefly())
            if ((atomic_load(word) == value) == equal) return 1;
    while (nanoseconds() < end);
    return 0;
}

/* Waits for a loop after the first `seen`; returns how many have begun. */
static uint32_t await_loop(uint32_t seen) {
    if (!spin(&loops, seen, 0)) {
        lock_acquire(&lock);
        atomic_fetch_add(&sleeping, 1); /* before `loops` is read: announce reads them in the other order */
        while (atomic_load(&loops) == seen) condition_wait(&begun, &lock);
        atomic_fetch_sub(&sleeping, 1);
        lock_release(&lock);
    }
    return atomic_load(&loops);
}

static void announce(void) {
    atomic_fetch_add(&loops, 1);
    if (!atomic_load(&sleeping)) return;
    lock_acquire(&lock);
    condition_broadcast(&begun);
    lock_release(&lock);
}

/* ---- workers */

static int join_loop(void) {
    uint32_t now = atomic_load(&members);
    while (now & OPEN)
        if (atomic_compare_exchange_weak(&members, &now, now + 1)) return 1;
    return 0;
}

static void leave_loop(void) {
    if (atomic_fetch_sub(&members, 1) != (AWAITED | 1)) return;
    lock_acquire(&lock);
    condition_signal(&left);
    lock_release(&lock);
}

/* Closes the loop, and waits until the workers have left it. */
static void close_loop(void) {
    if (atomic_fetch_and(&members, ~(uint32_t)OPEN) == OPEN || spin(&members, 0, 1)) return;
    lock_acquire(&lock);
    atomic_fetch_or(&members, AWAITED);
    while (atomic_load(&members) != AWAITED) condition_wait(&left, &lock);
    lock_release(&lock);
}

static void *work(void *number) {
    for (uint32_t seen = await_loop(0); !atomic_load(&stopped); seen = await_loop(seen)) {
        if (!join_loop()) continue;
        if ((intptr_t)number < current.threads) {
            set_float_mode(current.float_mode);
            compute_parts((intptr_t)number);
        }
        leave_loop();
    }
    return 0;
}

#ifdef _WIN32 /* its processes do not fork, and end with all their threads */
static void start_workers(int64_t count) {
    for (; num_workers < count; num_workers++)
        if (!start_thread(work, (void *)(intptr_t)(num_workers + 1))) return;
}
#else
static pthread_t workers[MAX_THREADS]; /* belong to who has `taken` */

static void forget_workers(void) {
    num_workers = 0;
    atomic_store(&members, 0); /* another thread's loop may have been open */
    atomic_store(&sleeping, 0);
    atomic_flag_clear(&taken);
    lock = (Lock)FREE_LOCK;
    begun = left = (Condition)NEW_CONDITION;
}

static void watch_forks(void) { pthread_atfork(0, 0, forget_workers); }

static void start_workers(int64_t count) {
    static pthread_once_t watched = PTHREAD_ONCE_INIT;
    pthread_once(&watched, watch_forks);
    for (; num_workers < count; num_workers++)
        if (pthread_create(workers + num_workers, 0, work, (void *)(intptr_t)(num_workers + 1))) return;
}

__attribute__((destructor)) static void stop_workers(void) {
    while (atomic_flag_test_and_set(&taken)) sched_yield(); /* for good: callers are alone from now on */
    atomic_store(&stopped, 1);
    announce();
    while (num_workers) pthread_join(workers[--num_workers], 0);
}
#endif

/* ---- callers */

void set_threads(int64_t count) { atomic_store(&wanted, min64(count, MAX_THREADS)); }
int64_t most_threads(void) { return atomic_load(&wanted); }

void parallel_for(int64_t count, int64_t grain, LoopBody *body, const void *loop) {
    const int64_t threads = min64(atomic_load(&wanted), divide_up(count, grain));
    if (threads < 2 || atomic_flag_test_and_set(&taken)) {
        if (count > 0) body(loop, 0, count);
        return;
    }
    start_workers(threads - 1);
    current.body = body;
    current.loop = loop;
    current.grain = grain;
    current.threads = threads;
    current.float_mode = float_mode();
    for (int64_t i = 0; i < threads; i++) {
        atomic_store_explicit(&current.parts[i].next, i * count / threads, memory_order_relaxed);
        current.parts[i].end = (i + 1) * count / threads;
    }
    atomic_store(&members, OPEN);
    announce();
    compute_parts(0);
    close_loop();
    atomic_flag_clear(&taken);
}
