/* Checks of threads.c, built and run by test_thread_pool.py.  Prints what does not hold. */
#include "threads.h"
#include <fenv.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "kernels.h"

enum { MOST = 1000, CALLERS = 4, ROUNDS = 300 };

static void check(int holds, const char *what) {
    if (holds) return;
    printf("%s\n", what);
    fflush(stdout);
    _exit(1);
}

static double seconds(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void count_items(const void *loop, int64_t first, int64_t end) {
    int *counts = *(int *const *)loop;
    for (; first < end; first++) counts[first]++; /* not atomic: an item belongs to one thread */
}

static void check_each_item_once(int64_t count, int64_t grain) {
    int counts[MOST] = {0}, *to = counts;
    parallel_for(count, grain, count_items, &to);
    for (int64_t i = 0; i < MOST; i++) check(counts[i] == (i < count), "an item was not computed once");
}

/* ---- several threads in one loop */

typedef struct {
    _Atomic int inside;
    int awaited;
} Meeting;

/* Waits until `awaited` threads are in the loop, or two seconds. */
static void meet(const void *loop, int64_t first, int64_t end) {
    Meeting *m = *(Meeting *const *)loop;
    const double latest = seconds(CLOCK_MONOTONIC) + 2;
    for (; first < end; first++) m->inside++;
    while (m->inside < m->awaited && seconds(CLOCK_MONOTONIC) < latest) usleep(100);
}

static void check_threads_meet(int threads, const char *what) {
    Meeting meeting = {0, threads}, *to = &meeting;
    const double began = seconds(CLOCK_MONOTONIC);
    set_threads(threads);
    parallel_for(threads, 1, meet, &to);
    check(meeting.inside == threads && seconds(CLOCK_MONOTONIC) - began < 1, what);
}

static void meet_rounding_up(const void *loop, int64_t first, int64_t end) {
    const volatile float one = 1, little = 1e-10f;
    check(one + little > 1, "a thread rounds unlike the caller");
    meet(loop, first, end);
}

static void check_rounding(void) {
    Meeting meeting = {0, 3}, *to = &meeting;
    fesetround(FE_UPWARD);
    parallel_for(3, 1, meet_rounding_up, &to);
    fesetround(FE_TONEAREST);
}

/* ---- loops within loops, and several callers */

static void nest(const void *loop, int64_t first, int64_t end) {
    (void)loop;
    for (; first < end; first++) check_each_item_once(20, 1);
}

static void *call(void *barrier) {
    pthread_barrier_wait(barrier);
    for (int i = 0; i < ROUNDS; i++) check_each_item_once(i % 50, 1 + i % 3);
    return 0;
}

static void check_callers(void) {
    pthread_t threads[CALLERS];
    pthread_barrier_t barrier;
    pthread_barrier_init(&barrier, 0, CALLERS);
    for (int i = 0; i < CALLERS; i++) pthread_create(threads + i, 0, call, &barrier);
    for (int i = 0; i < CALLERS; i++) pthread_join(threads[i], 0);
}

static void check_idle(void) {
    check_each_item_once(MOST, 1);
    const double began = seconds(CLOCK_PROCESS_CPUTIME_ID);
    usleep(300000);
    check(seconds(CLOCK_PROCESS_CPUTIME_ID) - began < 0.03, "threads without a loop take processor time");
}

static _Atomic int entered, may_end;

static void stay(const void *loop, int64_t first, int64_t end) {
    (void)loop;
    for (entered += (int)(end - first); !may_end;) usleep(100); /* in a child for good */
}

static void *call_stay(void *unused) {
    parallel_for(30, 1, stay, 0);
    return unused;
}

__attribute__((unused)) static void check_fork(void) {
    int status;
    const pid_t child = fork();
    if (!child) {
        alarm(5);
        check_threads_meet(64, "a forked process has no threads of its own");
        check_each_item_once(MOST, 3);
        exit(0); /* with the threads' end */
    }
    waitpid(child, &status, 0);
    check(WIFEXITED(status) && !WEXITSTATUS(status), "a forked process failed");
}

/* In the midst of another thread's loop. */
__attribute__((unused)) static void check_fork_within_a_loop(void) {
    pthread_t caller;
    set_threads(3);
    pthread_create(&caller, 0, call_stay, 0);
    while (entered < 3) usleep(100);
    check_fork();
    may_end = 1;
    pthread_join(caller, 0);
}

int main(void) {
    for (int threads = 1; threads < 6; threads++) {
        set_threads(threads);
        for (int64_t count = 0; count < 40; count++) check_each_item_once(count, 1 + count % 4);
    }
    for (int i = 0; i < ROUNDS; i++) check_each_item_once(MOST, 7);
    check_threads_meet(3, "three threads do not share a loop of three items");
    check_rounding();
    parallel_for(50, 1, nest, 0);
    check_callers();
    check_idle();
    check_threads_meet(3, "threads that slept do not come back");
#ifndef NO_FORK
    check_fork();
    check_fork_within_a_loop();
    check_threads_meet(3, "threads are lost behind a fork");
#endif
    set_threads(1 << 20);
    check_each_item_once(3, 1);
    set_threads(0);
    check_each_item_once(3, 1);
    return 0;
}
