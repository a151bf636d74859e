/* How a model is cut into pipeline stages, and the schedule in which the stages run. */
#ifndef QD_SPEC_LAYOUT_STAGES_H
#define QD_SPEC_LAYOUT_STAGES_H

#include "spec/layout/ledger.h"
#include "spec/schedule/schedule.h"

typedef struct qd_pipeline {
    qd_schedule_kind kind;
    int virtual_stages; /* per rank; 0: the default of the schedule */
    char layers[1024];  /* number of blocks per stage, "3,2,2,1"; "": balance by cost */
    const char *file;   /* path of a schedule to read; "" or NULL: none */
    int64_t seq;        /* tokens of a sequence in the cost of a stage; 0: those of the pass */
} qd_pipeline;

/* Assigns each module its stage and rank, and creates the schedule for the pp ranks of the mesh.
 * Stages are balanced to minimize the cost of the most expensive one, embedding and head included;
 * they are uneven when the number of blocks does not divide. QD_USAGE, with the reason, when the
 * model cannot be cut. */
qd_status qd_pipeline_place(qd_ledger *ledger, const qd_pipeline *pipeline, int64_t seq, int micro_batches, bool training, qd_arena *arena,
                            const qd_schedule **schedule);

/* Whether a parameter shares its values with one that other ranks hold; its rank then keeps a copy
 * of them. */
bool qd_ledger_tied_apart(const qd_ledger *ledger, int param);
#endif
