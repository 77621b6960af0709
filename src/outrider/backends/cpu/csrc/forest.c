/* Groups, segments and kept states of the rows of a recurrent forward. */
#include "forest.h"
#include "memory.h"
#include "simd.h"

enum { ARRAYS = 9 };

typedef struct {
    Schedule schedule;
    const Forest *forest;
    int32_t *group_of; /* by row */
    int32_t *place_of; /* by row: its place in `order` */
    int32_t *roots;    /* by group: its first row */
    int32_t *last_use; /* by place: of the last row that reads the kept state after it */
} Builder;

static Builder allocate_builder(const Forest *forest) {
    const int64_t rows = forest->num_rows;
    int32_t *space = scratch_acquire(SCRATCH_FOREST, ARRAYS * rows * 4);
    Builder b = {.forest = forest};
    int32_t **const arrays[ARRAYS] = {&b.schedule.group_ends, &b.schedule.order, &b.schedule.sources,
                                      &b.schedule.kept, &b.schedule.segment_ends, &b.group_of,
                                      &b.place_of, &b.roots, &b.last_use};
    for (int i = 0; i < ARRAYS; i++) *arrays[i] = space + i * rows;
    return b;
}

static int32_t group_of_root(Builder *b, int64_t row) {
    int64_t g = 0;
    while (g < b->schedule.num_groups && b->forest->slots[b->roots[g]] != b->forest->slots[row]) g++;
    if (g == b->schedule.num_groups) {
        b->roots[g] = (int32_t)row;
        b->schedule.group_ends[g] = 0;
        b->schedule.num_groups++;
    }
    return (int32_t)g;
}

/* Sorts the rows by group. */
static void sort_rows(Builder *b) {
    Schedule *s = &b->schedule;
    for (int64_t r = 0; r < b->forest->num_rows; r++) {
        const int32_t parent = b->forest->parents[r];
        b->group_of[r] = parent < 0 ? group_of_root(b, r) : b->group_of[parent];
        s->group_ends[b->group_of[r]]++;
    }
    int32_t first = 0;
    for (int64_t g = 0; g < s->num_groups; g++) {
        const int32_t count = s->group_ends[g];
        s->group_ends[g] = first; /* counted up to the end below */
        first += count;
    }
    for (int64_t r = 0; r < b->forest->num_rows; r++) {
        const int32_t place = s->group_ends[b->group_of[r]]++;
        b->place_of[r] = place;
        s->order[place] = (int32_t)r;
    }
}

/* Finds the sources of a group's rows.  Returns the place of the last row that reads the slot. */
static int64_t find_sources(Builder *b, int64_t first, int64_t end) {
    Schedule *s = &b->schedule;
    int64_t num_kept = 0, last_of_slot = first;
    for (int64_t p = first; p < end; p++) {
        const int32_t parent = b->forest->parents[s->order[p]];
        s->kept[p] = -1;
        b->last_use[p] = (int32_t)p;
        if (parent < 0) {
            s->sources[p] = FROM_SLOT;
            last_of_slot = p;
            continue;
        }
        const int32_t before = b->place_of[parent];
        s->sources[p] = FROM_PREVIOUS;
        if (before == p - 1) continue;
        if (s->kept[before] < 0) s->kept[before] = (int32_t)num_kept++;
        s->sources[p] = s->kept[before];
        b->last_use[before] = (int32_t)p;
    }
    if (num_kept > s->most_kept) s->most_kept = num_kept;
    return last_of_slot;
}

/* Cuts a group where no kept state, nor that of the slot, is read later. */
static void cut_segments(Builder *b, int64_t first, int64_t end, int64_t last_use) {
    Schedule *s = &b->schedule;
    int64_t start = first, cut = first;
    for (int64_t p = first; p < end; p++) {
        if (b->last_use[p] > last_use) last_use = b->last_use[p];
        if (last_use <= p) cut = p + 1;
        if (cut == start || (p + 1 - start < SEGMENT && p + 1 < end)) continue;
        s->segment_ends[start] = (int32_t)cut;
        if (cut - start > s->longest) s->longest = cut - start;
        start = cut;
    }
}

Schedule forest_schedule(const Forest *forest) {
    Builder b = allocate_builder(forest);
    sort_rows(&b);
    int64_t first = 0;
    for (int64_t g = 0; g < b.schedule.num_groups; g++) {
        const int64_t end = b.schedule.group_ends[g];
        cut_segments(&b, first, end, find_sources(&b, first, end));
        first = end;
    }
    return b.schedule;
}

void forest_release(void) { scratch_release(SCRATCH_FOREST); }
