/* The state of a run in a folder: manifest.json, manifest.xxh3 and safetensors files.
 *
 * The manifest names logical tensors with their global shape, and for each the pieces that make it
 * up: which file, which box of the tensor, and the XXH3 of the bytes. A reader asks for a box of a
 * logical tensor; it need not know how the run that wrote it was laid out. A folder appears under
 * its name only when all of it is on the disk. */
#ifndef QD_CKPT_CHECKPOINT_H
#define QD_CKPT_CHECKPOINT_H

#include "spec/layout/pieces.h"

typedef struct qd_ckpt_meta {
    int64_t step;        /* done */
    int64_t next_sample; /* index in the run of the first sample not yet trained on */
    uint64_t seed;       /* with the two above: the state of all random numbers and of the sampler */
    const char *config;  /* the run's configuration, YAML, with everything filled in */
    const char *run;     /* identity of the run, 16 hexadecimal digits; "": written by a version that had none. Set by commits */
    int tensors;         /* writing: how many there must be, qd_pieces_tensors; 0: the values of all parameters */
} qd_ckpt_meta;

/* ---- reading ---- */

typedef struct qd_checkpoint qd_checkpoint;

/* QD_IO when there is no such folder, QD_CORRUPT with file and reason when the manifest is damaged.
 * Files are opened when a tensor of theirs is read. */
qd_status qd_checkpoint_open(const char *folder, qd_checkpoint **checkpoint);
void qd_checkpoint_close(qd_checkpoint *checkpoint); /* NULL is legal */
const qd_ckpt_meta *qd_checkpoint_meta(const qd_checkpoint *checkpoint);
/* Whether it holds optimizer state of this kind. */
bool qd_checkpoint_has(const qd_checkpoint *checkpoint, qd_ckpt_kind kind);
/* XXH3 of the manifest: ranks that must read the same checkpoint compare it. */
uint64_t qd_checkpoint_hash(const qd_checkpoint *checkpoint);
const char *qd_checkpoint_folder(const qd_checkpoint *checkpoint);

/* Copies a box of a logical tensor. Pieces that share something with it are checked before their
 * first use: checksum, and that all values are finite. QD_USAGE when there is no such tensor or its
 * shape is another, QD_CORRUPT with file and tensor when it is damaged. */
qd_status qd_checkpoint_read(qd_checkpoint *checkpoint, const qd_param *param, qd_ckpt_kind kind, const qd_atom *box,
                             float *out);
/* Checks all bytes of all files. */
qd_status qd_checkpoint_verify(qd_checkpoint *checkpoint);

/* ---- the checkpoints of a run: <root>/step-000000000100/ …, the link `latest`, and run-id, the run's identity ----
 *
 * A folder's name, the step of its manifest and the run's identity must agree: one that was
 * renamed, or copied from another run, counts as damaged. */

/* Hands over the fp32 values of a piece. */
typedef qd_status (*qd_ckpt_fetch)(void *context, const qd_state_piece *piece, float *out);

/* A checkpoint of `parts` ranks. One process prepares, then each rank writes its part, from any
 * thread, then one process commits. All values must be finite: QD_NOT_FINITE names the tensor and
 * the element. Until the commit the folder has the name step-….part. After a failure of any of
 * these, one process abandons. */
qd_status qd_store_prepare(const char *root, int64_t step);
qd_status qd_store_write(const char *root, int64_t step, int part, const qd_ledger *ledger, const qd_state_pieces *pieces,
                         qd_ckpt_fetch fetch, void *context);
/* keep: how many stay, 0: all. QD_SYSTEM when the parts do not make up the tensors of the ledger.
 * An old one that cannot be removed is no failure: *left (free it) is NULL or says which and why,
 * and the next commit tries again. */
qd_status qd_store_commit(const char *root, const qd_ledger *ledger, const qd_ckpt_meta *meta, int parts, int keep, char **left);
void qd_store_abandon(const char *root, int64_t step);

/* All of it for one process that has everything. */
qd_status qd_store_save(const char *root, const qd_ledger *ledger, const qd_ckpt_meta *meta, const qd_state_pieces *pieces, int keep,
                        qd_ckpt_fetch fetch, void *context);

/* Opens the newest sound checkpoint of a step below `below` (INT64_MAX: any) and, with `verify`,
 * checks all of it. A damaged one is passed over, and *passed_over (may be NULL; free it) says why.
 * QD_USAGE when there is none. */
qd_status qd_store_open(const char *root, int64_t below, bool verify, qd_checkpoint **checkpoint, char **passed_over);
/* Whether there is any checkpoint, sound or not. */
bool qd_store_holds(const char *root);
/* The checkpoint of one step. */
qd_status qd_store_open_step(const char *root, int64_t step, qd_checkpoint **checkpoint);
/* Removes all checkpoints; a root that is not there is fine. */
qd_status qd_store_clear(const char *root);
#endif
