/* Which keys a row of a step sees: those of its table from some key on, then those of its path.  Integers
 * only. */
#include "attention.h"

/* The first key that a row sees through the layer's window.  `end`: the keys of the row without a window.
 * window > 0: the latest `window` positions.  window < 0: the row's chunk, positions being cut into chunks
 * of -window.
 * Rows of a block draft see later keys as well and have no shift. */
static int64_t first_key(int64_t end, int64_t position, int64_t window, int64_t pinned) {
    const int64_t oldest = window < 0 ? position / -window * -window : position + 1 - window;
    if (!window || oldest <= 0) return 0;
    if (oldest < pinned) return oldest;
    const int64_t first =
        end > position + 1 ? oldest : oldest + end - position - 1; /* position to entry of the view */
    return first > pinned ? first : pinned;
}

KeyList keys_of_row(const Rows *rows, int64_t r, int64_t window) {
    const int64_t length = rows->table_lengths[r], end = length + rows->path_lengths[r],
                  position = rows->positions[r];
    const int64_t first = first_key(end, position, window, rows->pinned);
    return (KeyList){
        rows->tables[r],    rows->paths + r * rows->path_width, length, first, end - first, rows->pinned,
        position + 1 - end,
    };
}
