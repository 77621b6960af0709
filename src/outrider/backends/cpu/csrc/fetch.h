/* Memory that is fetched ahead of its use, and where to: where weights and keys are read by rows that compute
 * about as long as they wait.
 *
 * AMD's processors fetch one stream by themselves, also beyond a page; then prefetching only takes the place
 * of loads.  Where several tiles of rows share a part of it there is no such stream, and the second cache
 * waits for more lines at once than the first one.  Measured with huge pages (docs/log.md, "Huge pages").
 * Others have not been measured with them. */
#pragma once
#include "simd.h"

enum { NOWHERE, FIRST_CACHE, SECOND_CACHE };

/* streams: whether memory is read in one stream. */
INLINE int fetches_to(int streams) {
#ifdef __x86_64__
    __builtin_cpu_init();
    if (__builtin_cpu_is("amd")) return streams ? NOWHERE : SECOND_CACHE;
#endif
    (void)streams;
    return FIRST_CACHE;
}

/* Fetches the line of a cache that a place is in. */
INLINE void fetch_line(const int to, const void *place) {
    if (to == FIRST_CACHE) __builtin_prefetch(place);
    if (to == SECOND_CACHE) __builtin_prefetch(place, 0, 2);
}
