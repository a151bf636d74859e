/* Hugging Face model folders: config.json, model.safetensors or several files with
 * model.safetensors.index.json.
 *
 * Our logical tensors and theirs differ in names, in GPT-2's matrices, which lie transposed with q,
 * k and v in one, and in which biases go together. Rotary embeddings agree: both rotate the pairs
 * (i, i + head_dim / 2). */
#ifndef QD_CKPT_HUGGINGFACE_H
#define QD_CKPT_HUGGINGFACE_H

#include "ckpt/checkpoint.h"

#include <quadrille/strbuf.h>

#define QD_HF_CONFIG "config.json"
#define QD_HF_TOKENIZER "tokenizer.json"

/* One of their tensors as made of ours. */
typedef struct qd_hf_tensor {
    char name[96];
    int dims;
    int64_t shape[QD_PARAM_DIMS];
    bool transposed; /* theirs is (in, out), ours are (out, in) */
    int params[3], param_count; /* ours, one after another along their outputs; none: zeros */
} qd_hf_tensor;

/* The tensors of a model in the order of the ledger, and those zeros that their biases need beside
 * ours. Allocated in `arena`. */
qd_status qd_hf_tensors(const qd_ledger *ledger, qd_arena *arena, qd_hf_tensor **tensors, int *count);

/* ---- import ---- */

typedef struct qd_hf_source qd_hf_source;

/* Reads config.json and the headers of all files. What the user should know goes into `notes`, a
 * line each. QD_UNSUPPORTED names what their model has and ours has not. Blocks and experts that
 * config.json counts are there when it returns: what is built from its sizes is no larger than the
 * files. */
qd_status qd_hf_open(const char *folder, qd_strbuf *notes, qd_hf_source **source);
void qd_hf_close(qd_hf_source *source); /* NULL is legal */
const qd_model *qd_hf_model(const qd_hf_source *source);
int64_t qd_hf_positions(const qd_hf_source *source); /* max_position_embeddings */

/* Every tensor of the ledger is there in its shape, and no other: QD_USAGE names those that are
 * missing or unknown. Before the first fetch. */
qd_status qd_hf_check(qd_hf_source *source, const qd_ledger *ledger, qd_arena *arena);
/* qd_ckpt_fetch over a source, of whole rows: memory for nothing but `out`. */
qd_status qd_hf_fetch(void *source, const qd_state_piece *piece, float *out);

/* ---- export ---- */

typedef struct qd_hf_export {
    qd_dtype dtype;       /* fp32, bf16 or fp16 */
    int64_t shard_bytes;  /* a file ends before it grows beyond this; 0: one file */
    int64_t positions;    /* max_position_embeddings where the model sets no limit */
    int32_t begin_token, end_token; /* of documents; -1: none */
} qd_hf_export;

/* QD_UNSUPPORTED when transformers has no such model. Settings of the training that it cannot hold
 * go into `notes`, a line each. */
qd_status qd_hf_config_text(const qd_model *model, const qd_hf_export *options, qd_strbuf *notes, qd_strbuf *text);
/* Writes the tensors of a checkpoint into a folder, one at a time, and the index where there are
 * several files. *bytes: of all tensors; *files: how many. QD_UNSUPPORTED names a tensor that is
 * not zero and that transformers' model does not have. */
qd_status qd_hf_write(const char *folder, const qd_ledger *ledger, qd_checkpoint *checkpoint, const qd_hf_export *options,
                      int64_t *bytes, int *files);
#endif
