/* The state of a run in a folder: manifest.json, manifest.xxh3 and safetensors files.
 *
 * The manifest lists logical tensors with their global shape, and the pieces of each: file, box of
 * the tensor, and XXH3 of the bytes. A reader requests a box of a logical tensor and does not need
 * to know the layout of the run that wrote it. A folder appears under its final name only when all
 * of it is on disk. */
#ifndef QD_CKPT_CHECKPOINT_H
#define QD_CKPT_CHECKPOINT_H

#include "spec/layout/pieces.h"

typedef struct qd_ckpt_meta {
    int64_t step;        /* steps completed */
    int64_t next_sample; /* index of the first sample of the run that has not been trained on */
    uint64_t seed;       /* with the two above: the state of all random numbers and of the sampler */
    const char *config;  /* the run's complete configuration as YAML */
    const char *run;     /* identity of the run, 16 hexadecimal digits; "": written by a version without it. Set by commits */
    /* Adapters: the folder with the frozen values, and its fingerprint; "": the checkpoint has all
     * values */
    const char *base, *base_hash;
    int tensors;         /* when writing: expected number, qd_pieces_tensors; 0: the values of all parameters */
} qd_ckpt_meta;

typedef struct qd_checkpoint qd_checkpoint;

/* QD_IO if there is no such folder, QD_CORRUPT with file and reason if the manifest is damaged.
 * Files are opened when one of their tensors is first read. */
qd_status qd_checkpoint_open(const char *folder, qd_checkpoint **checkpoint);
void qd_checkpoint_close(qd_checkpoint *checkpoint); /* NULL is legal */
const qd_ckpt_meta *qd_checkpoint_meta(const qd_checkpoint *checkpoint);
/* Whether it contains optimizer state of this kind. */
bool qd_checkpoint_has(const qd_checkpoint *checkpoint, qd_ckpt_kind kind);
bool qd_checkpoint_adapts(const qd_checkpoint *checkpoint); /* has adapters (LoRA), with or without the frozen values */
bool qd_checkpoint_holds(const qd_checkpoint *checkpoint, const char *name); /* values of this tensor */
/* XXH3 of the manifest: ranks compare it to make sure they read the same checkpoint. */
uint64_t qd_checkpoint_hash(const qd_checkpoint *checkpoint);
const char *qd_checkpoint_folder(const qd_checkpoint *checkpoint);

/* Copies a box of a logical tensor. Pieces that intersect it are verified before their first use:
 * checksum, and that all values are finite. QD_USAGE if there is no such tensor or its shape
 * differs, QD_CORRUPT with file and tensor if it is damaged. */
qd_status qd_checkpoint_read(qd_checkpoint *checkpoint, const qd_param *param, qd_ckpt_kind kind, const qd_atom *box,
                             float *out);
/* Opens the base of an adapter checkpoint, so that reads include frozen values; nothing for others.
 * `ledger` must outlive the checkpoint. QD_USAGE if the base is missing or has changed. */
qd_status qd_checkpoint_attach(qd_checkpoint *checkpoint, const qd_ledger *ledger);
/* base.c: identifies the weights of a Hugging Face folder, a run folder or a checkpoint. *folder is
 * the absolute path of the weights, which the caller frees: of a run folder that of its newest
 * checkpoint, because the run may write others. */
#define QD_CKPT_BASE_TEXT 17
qd_status qd_ckpt_base_fingerprint(const char *path, char text[QD_CKPT_BASE_TEXT], char **folder);
/* Adapters: uses the base at `path` if it has the weights that the checkpoint names, for a base
 * that was moved. QD_USAGE if `path` has other weights and the named base is not below it. */
qd_status qd_checkpoint_move_base(qd_checkpoint *checkpoint, const char *path);
/* Verifies all bytes of all files. */
qd_status qd_checkpoint_verify(qd_checkpoint *checkpoint);

/* The store: the checkpoints of a run as <root>/step-000000000100/ …, the links `latest` and
 * `best`, and run-id, the identity of the run.
 *
 * A folder's name, the step in its manifest and the identity of the run must agree: a checkpoint
 * that was renamed, or copied from another run, counts as damaged. */

/* Provides the fp32 values of a piece. */
typedef qd_status (*qd_ckpt_fetch)(void *context, const qd_state_piece *piece, float *out);

/* Writes a checkpoint of `parts` ranks. One process prepares, then each rank writes its part, from
 * any thread, then one process commits. All values must be finite: QD_NOT_FINITE names the tensor
 * and the element. Until the commit the folder is named step-….part. If any of these fails, one
 * process abandons. */
qd_status qd_store_prepare(const char *root, int64_t step);
qd_status qd_store_write(const char *root, int64_t step, int part, const qd_ledger *ledger, const qd_state_pieces *pieces,
                         qd_ckpt_fetch fetch, void *context);
/* keep: number of checkpoints to keep, 0: all. best: step of one that is kept in addition and that
 * the link `best` names; -1: none. QD_SYSTEM if the parts do not cover the tensors of
 * the ledger. Failing to remove an old checkpoint is not an error: *left (free it) is NULL or names
 * it with the reason, and the next commit tries again. */
qd_status qd_store_commit(const char *root, const qd_ledger *ledger, const qd_ckpt_meta *meta, int parts, int keep, int64_t best,
                          char **left);
void qd_store_abandon(const char *root, int64_t step);

/* All of the above, for one process that has all pieces. */
qd_status qd_store_save(const char *root, const qd_ledger *ledger, const qd_ckpt_meta *meta, const qd_state_pieces *pieces, int keep,
                        qd_ckpt_fetch fetch, void *context);

/* Opens the newest intact checkpoint of a step below `below` (INT64_MAX: any) and, with `verify`,
 * verifies all of it. Damaged ones are skipped, and *passed_over (may be NULL; free it) says why.
 * QD_USAGE if there is none. */
qd_status qd_store_open(const char *root, int64_t below, bool verify, qd_checkpoint **checkpoint, char **passed_over);
/* Lets the link `latest` name the checkpoint of `step`: a killed run may have left it behind, or it
 * may name a damaged one. */
void qd_store_repair_latest(const char *root, int64_t step);
/* The step that the link `best` names, if its checkpoint exists; -1: none. */
int64_t qd_store_best(const char *root);
/* Whether there is any checkpoint, intact or not; true if the folder cannot be read. */
bool qd_store_holds(const char *root);
/* The checkpoint of one step. */
qd_status qd_store_open_step(const char *root, int64_t step, qd_checkpoint **checkpoint);
/* Removes all checkpoints; a missing root is fine. */
qd_status qd_store_clear(const char *root);
#endif
