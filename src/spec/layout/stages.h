/* How a model is cut into the stages of a pipeline, and which order they work in. */
#ifndef QD_SPEC_LAYOUT_STAGES_H
#define QD_SPEC_LAYOUT_STAGES_H

#include "spec/layout/ledger.h"
#include "spec/schedule/schedule.h"

typedef struct qd_pipeline {
    qd_schedule_kind kind;
    int virtual_stages; /* per rank; 0: as many as the kind wants */
    char layers[1024];  /* blocks of each stage, "3,2,2,1"; "": shared out by cost */
    const char *file;   /* that the schedule is read from; "" or NULL: none */
} qd_pipeline;

/* Gives each module its stage and rank, and makes the schedule for the mesh's pp ranks. Blocks are
 * shared out so that the costliest stage costs least, the embedding and the head counted; a number
 * of blocks that does not divide gives uneven stages. QD_USAGE with the reason when they cannot
 * be. */
qd_status qd_pipeline_place(qd_ledger *ledger, const qd_pipeline *pipeline, int64_t seq, int micro_batches, bool training, qd_arena *arena,
                            const qd_schedule **schedule);

/* Whether a parameter shares its values with one that other ranks hold: its rank then keeps a copy
 * of them. */
bool qd_ledger_tied_apart(const qd_ledger *ledger, int param);
#endif
