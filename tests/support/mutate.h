/* Mutations of finished step programs, for tests of what reads them: one op or action of every
 * rank's program is removed, duplicated, or gets another group, operand, factor or flag. */
#ifndef QD_TESTS_SUPPORT_MUTATE_H
#define QD_TESTS_SUPPORT_MUTATE_H

#include "support/layout.h"

typedef enum edit {
    OP_DROP,       /* the op is removed */
    OP_TWICE,      /* it runs twice */
    OP_GROUP,      /* it communicates over the axis `to` */
    OP_REDUCE,     /* sum becomes maximum, or vice versa */
    OP_SLOT,       /* operand `number` (QD_LINEAR_X, …) becomes the slot named `to`; "-": none */
    OP_SCALE,      /* its scale is multiplied by `number` */
    OP_CAP,        /* its soft-cap is multiplied by `number` */
    OP_TOKENS,     /* its load_tokens are multiplied by `number` */
    OP_OVERWRITES, /* the flag is inverted */
    OP_FIRST,      /* its window begins `number` rows, or tokens, later; OP_TO: the window it writes */
    OP_TO,
    OP_ROWS,  /* it has `number` rows (k) fewer */
    OP_WINDOW, /* attention: its window is `number` */
    OP_AHEAD, /* embedding, loss: of tokens `number` further on; attention: of the prediction module `number` later */
    OP_ROUND, /* context: its round is `number` more */
    OP_EARLY, /* what it starts ends `number` ops later: readers do not wait */
    ACTION_DROP,
    ACTION_TWICE,
    ACTION_GROUP,
    ACTION_OVERWRITE,
    ACTION_SQUARES,
    ACTION_BATCH, /* its micro-batch is `number` more */
    ACTION_COUNT, /* its count is multiplied by `number`; 0: halved */
    ACTION_PARTS, /* its parts are multiplied by `number` */
    ACTION_SWAP,  /* it is swapped with the next action of its kind */
    ACTION_WAITS, /* it waits for no action of another stream */
    NORM_REPEAT,  /* the parameter's rule in the norm: repeat, or holders, becomes `number` */
    NORM_HOLDERS,
    PLACE_TP, /* the parameter's placement on tp becomes Replicate (number 0) or Shard of dimension number - 1 */
    FROZEN,   /* the parameter is frozen (number 1), or trained (0) */
} edit;

typedef struct mutation {
    edit how;
    const char *what;  /* name of the op or action; NORM, PLACE: of the parameter */
    const char *where; /* ops: their module; actions: part of their description (group, buffer, module); NULL: any */
    const char *param; /* actions: a parameter whose elements they touch; NULL: any */
    int nth;           /* among those that match, from 0; -1: the last */
    double number;
    const char *to;
} mutation;

/* Changes all programs with a match and returns their number. The programs must not share
 * arrays. */
void mutate_drop_action(qd_program *program, int action, qd_arena *arena); /* on a copy: shared arrays are copied first */
int mutate(qd_program **programs, int count, const mutation *m, qd_arena *arena);
#endif
