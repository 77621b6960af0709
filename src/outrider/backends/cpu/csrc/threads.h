/* Loops that threads share. */
#pragma once
#include <stdint.h>

/* Computes the items first ... end - 1 of a loop. */
typedef void LoopBody(const void *loop, int64_t first, int64_t end);

/* Calls `body` for ranges that make up [0,count), by several threads, and returns when all are computed.
 * A thread takes up to `grain` items at a time.  The calling thread computes all of them in one call if there
 * are no more than that, within a body, and while the threads work for another caller. */
void parallel_for(int64_t count, int64_t grain, LoopBody *body, const void *loop);

/* The most threads that share a loop. */
int64_t most_threads(void);
