/* The state of a run in a folder: manifest.json, manifest.xxh3 and safetensors files.
 *
 * The manifest names logical tensors with their global shape, and for each the pieces that make it up: which file, which
 * box of the tensor, and the XXH3 of the bytes. A reader asks for a box of a logical tensor; it need not know how the run
 * that wrote it was laid out. A folder appears under its name only when all of it is on the disk. */
#ifndef QD_CKPT_CHECKPOINT_H
#define QD_CKPT_CHECKPOINT_H

#include "spec/ledger.h"

typedef enum qd_ckpt_kind { QD_CKPT_VALUE, QD_CKPT_MOMENT1, QD_CKPT_MOMENT2, QD_CKPT_KIND_COUNT } qd_ckpt_kind;

typedef struct qd_ckpt_meta {
    int64_t step;        /* done */
    int64_t next_sample; /* index in the run of the first sample not yet trained on */
    uint64_t seed;
    const char *config; /* the run's configuration, YAML */
} qd_ckpt_meta;

/* ---- writing ---- */

/* Hands over a parameter's fp32 values of one kind; `out` has room for the whole tensor. */
typedef qd_status (*qd_ckpt_fetch)(void *context, int param, qd_ckpt_kind kind, float *out);

/* Writes `folder` (its parent must exist; a folder of that name is replaced). One rank that holds whole tensors calls
 * it. kinds: bits 1 << qd_ckpt_kind. A failure leaves what was there before, and nothing half-written. */
qd_status qd_checkpoint_save(const char *folder, const qd_ledger *ledger, const qd_ckpt_meta *meta, unsigned kinds,
                             qd_ckpt_fetch fetch, void *context);

/* ---- reading ---- */

typedef struct qd_checkpoint qd_checkpoint;

/* QD_IO when there is no such folder, QD_CORRUPT with file and reason when it is damaged. */
qd_status qd_checkpoint_open(const char *folder, qd_checkpoint **checkpoint);
void qd_checkpoint_close(qd_checkpoint *checkpoint); /* NULL is legal */
const qd_ckpt_meta *qd_checkpoint_meta(const qd_checkpoint *checkpoint);
/* Whether it holds optimizer state of this kind. */
bool qd_checkpoint_has(const qd_checkpoint *checkpoint, qd_ckpt_kind kind);

/* Copies a box of a logical tensor. Bytes are checked against their checksum before the first use of a piece. QD_USAGE
 * when there is no such tensor or its shape is another. */
qd_status qd_checkpoint_read(qd_checkpoint *checkpoint, const qd_param *param, qd_ckpt_kind kind, const qd_atom *box,
                             float *out);
/* Checks all bytes of all files. */
qd_status qd_checkpoint_verify(qd_checkpoint *checkpoint);

/* ---- the checkpoints of a run: <root>/step-000000000100/ … The newest sound one counts. ---- */

qd_status qd_store_save(const char *root, const qd_ledger *ledger, const qd_ckpt_meta *meta, unsigned kinds, int keep,
                        qd_ckpt_fetch fetch, void *context);
/* Opens the newest sound checkpoint; a damaged one is passed over, and *passed_over (may be NULL; free it) says why.
 * QD_USAGE when there is none. */
qd_status qd_store_open(const char *root, qd_checkpoint **checkpoint, char **passed_over);
/* The checkpoint of one step. */
qd_status qd_store_open_step(const char *root, int64_t step, qd_checkpoint **checkpoint);
/* Removes all checkpoints; a root that is not there is fine. */
qd_status qd_store_clear(const char *root);
#endif
