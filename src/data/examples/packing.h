/* Packs examples of different lengths into windows of one length. */
#ifndef QD_DATA_EXAMPLES_PACKING_H
#define QD_DATA_EXAMPLES_PACKING_H

#include <quadrille/status.h>
#include <stdint.h>

typedef struct qd_packing {
    int64_t windows;
    int64_t *first; /* (windows + 1): window w has the examples order[first[w]] to order[first[w + 1] - 1] */
    int64_t *order; /* (count): each example once */
} qd_packing;

/* Packs `count` >= 1 examples of 1 to `room` tokens into windows of `room` tokens. No example is
 * split. Best fit, longest first: each example goes into the window with the least space that is
 * enough, so few positions stay empty. A pure function of the lengths. */
qd_status qd_packing_make(const int64_t *lengths, int64_t count, int64_t room, qd_packing *packing);
void qd_packing_free(qd_packing *packing); /* legal for {0} */
#endif
