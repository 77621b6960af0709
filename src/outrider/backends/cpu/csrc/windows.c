/* system.h on Windows.  Its own functions are used, not winpthreads: a library needs no other file then, and
 * may come from any compiler. */
#ifdef _WIN32
#include "system.h"
#include <malloc.h>
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

_Static_assert(sizeof(Lock) == sizeof(SRWLOCK) && sizeof(Condition) == sizeof(CONDITION_VARIABLE),
               "system.h declares these as one word, zero at first");

void lock_acquire(Lock *lock) { AcquireSRWLockExclusive((SRWLOCK *)lock); }
void lock_release(Lock *lock) { ReleaseSRWLockExclusive((SRWLOCK *)lock); }
void condition_wait(Condition *condition, Lock *lock) {
    SleepConditionVariableSRW((CONDITION_VARIABLE *)condition, (SRWLOCK *)lock, INFINITE, 0);
}
void condition_signal(Condition *condition) { WakeConditionVariable((CONDITION_VARIABLE *)condition); }
void condition_broadcast(Condition *condition) { WakeAllConditionVariable((CONDITION_VARIABLE *)condition); }

/* ---- threads */

typedef struct {
    ThreadBody *body;
    void *argument;
} Start;

static DWORD WINAPI run(void *given) {
    const Start start = *(Start *)given;
    free(given);
    start.body(start.argument);
    return 0;
}

/* Keeps the library loaded until the process ends: threads run its code, and call it when they end. */
static int stay_loaded(void) {
    HMODULE self;
    const DWORD flags = GET_MODULE_HANDLE_EX_FLAG_PIN | GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS;
    return GetModuleHandleExW(flags, (LPCWSTR)(uintptr_t)stay_loaded, &self);
}

int start_thread(ThreadBody *body, void *argument) {
    if (!stay_loaded()) return 0;
    Start *start = malloc(sizeof *start);
    if (!start) return 0;
    *start = (Start){body, argument};
    HANDLE thread = CreateThread(0, 0, run, start, 0, 0);
    if (thread)
        CloseHandle(thread); /* it runs on */
    else
        free(start);
    return thread != 0;
}

static INIT_ONCE once = INIT_ONCE_STATIC_INIT;
static DWORD place; /* of the value in every thread */
static void (*end_value)(void *);

static void WINAPI end_thread(void *value) {
    if (value) end_value(value);
}

static BOOL WINAPI find_place(INIT_ONCE *self, void *end, void **unused) {
    (void)self, (void)end, (void)unused;
    place = FlsAlloc(end_thread);
    if (place == FLS_OUT_OF_INDEXES || !stay_loaded()) abort(); /* the process has used up its places */
    return 1;
}

void *thread_value(void) {
    InitOnceExecuteOnce(&once, find_place, 0, 0);
    return FlsGetValue(place);
}

void set_thread_value(void *value, void (*end)(void *)) {
    end_value = end;
    if (!FlsSetValue(place, value)) abort();
}

/* ---- clock and memory */

int64_t nanoseconds(void) {
    LARGE_INTEGER count, frequency;
    QueryPerformanceCounter(&count);
    QueryPerformanceFrequency(&frequency);
    const int64_t each = frequency.QuadPart, seconds = count.QuadPart / each;
    return seconds * 1000000000 + count.QuadPart % each * 1000000000 / each;
}

void *allocate_aligned(size_t bytes) { return _aligned_malloc(bytes, CACHE_LINE); }
void free_aligned(void *data) { _aligned_free(data); }
#endif
