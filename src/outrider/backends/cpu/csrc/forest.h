/* The order in which the rows of a recurrent forward are computed. */
#pragma once
#include "recurrent.h"

/* Where the state before a row is: in its slot, with the row before, or, from 0 on, its index among the
 * states that are kept for later children. */
enum { FROM_SLOT = -1, FROM_PREVIOUS = -2 };

/* The rows of one slot are a group.  A group is cut into segments, of about SEGMENT rows where it is a chain:
 * behind a segment only the state of its last row is read, by the row after it. */
enum { SEGMENT = 16 };

typedef struct {
    int64_t num_groups, most_kept, longest; /* most states kept in a group; rows of the longest segment */
    int32_t *group_ends; /* [num_groups]: places in `order` */
    int32_t *order;      /* [rows]: by group, then as in the forest */
    /* by place in `order`: */
    int32_t *sources;      /* FROM_SLOT, FROM_PREVIOUS or an index */
    int32_t *kept;         /* index under which the state after the row is kept, or -1 */
    int32_t *segment_ends; /* of a segment's first row: place behind its last */
} Schedule;

/* In scratch memory, until forest_release. */
Schedule forest_schedule(const Forest *forest);
void forest_release(void);
