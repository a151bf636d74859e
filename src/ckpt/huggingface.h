/* Hugging Face model folders: config.json, model.safetensors or several files with
 * model.safetensors.index.json.
 *
 * Our logical tensors differ from theirs in names, in GPT-2's matrices, which are stored transposed
 * with q, k and v fused, in GPT-OSS's experts, which are one tensor per kind of matrix, and in the
 * grouping of biases. Rotary embeddings agree: both rotate the
 * pairs (i, i + head_dim / 2). */
#ifndef QD_CKPT_HUGGINGFACE_H
#define QD_CKPT_HUGGINGFACE_H

#include "ckpt/checkpoint.h"

#include <quadrille/strbuf.h>

#define QD_HF_CONFIG "config.json"
#define QD_HF_TOKENIZER "tokenizer.json"
#define QD_HF_SENTENCEPIECE "tokenizer.model" /* where there is no tokenizer.json */

/* One of their tensors, composed of ours. */
typedef struct qd_hf_tensor {
    char name[96];
    int dims;
    int64_t shape[3]; /* 1 beyond dims */
    bool transposed; /* theirs is (in, out), ours are (out, in) */
    int first, param_count; /* ours, consecutive in the ledger but for adapters (qd_hf_param), and concatenated along their outputs;
                             * none: zeros */
    /* Experts that are stacked along the first dimension; 0: none. Each has param_count / experts
     * of ours, whose outputs alternate: theirs is (experts, in, outputs), of biases (experts,
     * outputs). */
    int experts;
    bool columns; /* ours are concatenated along their inputs instead (eh_proj of prediction modules) */
    bool copy;    /* repeats a tensor (the tables of prediction modules): written, but not needed in a folder */
} qd_hf_tensor;

/* The index-th of our parameters in the tensor. Adapters may be between them. */
static inline int qd_hf_param(const qd_ledger *ledger, const qd_hf_tensor *t, int index)
{
    int at = t->first;
    while (index > 0 || ledger->params[at].adapter)
        index -= !ledger->params[at++].adapter;
    return at;
}

static inline int64_t qd_hf_tensor_count(const qd_hf_tensor *t)
{
    return t->shape[0] * t->shape[1] * t->shape[2];
}

/* The tensors of a model in the order of the ledger, plus the zero biases that their model needs in
 * addition to ours. Allocated in `arena`. */
qd_status qd_hf_tensors(const qd_ledger *ledger, qd_arena *arena, qd_hf_tensor **tensors, int *count);

typedef struct qd_hf_source qd_hf_source;

/* Whether `path` is a folder with config.json, and not a checkpoint or a run folder. */
bool qd_hf_is_folder(const char *path);

/* Reads config.json and the headers of all files. Notes for the user are appended to `notes`, one
 * per line. QD_UNSUPPORTED names a feature of their model that ours lacks. The blocks and experts
 * that config.json counts have been found when it returns, so nothing built from its sizes is
 * larger than the files. */
qd_status qd_hf_open(const char *folder, qd_strbuf *notes, qd_hf_source **source);
void qd_hf_close(qd_hf_source *source); /* NULL is legal */
const qd_model *qd_hf_model(const qd_hf_source *source);
int64_t qd_hf_positions(const qd_hf_source *source); /* max_position_embeddings */

/* Checks that the files contain every tensor of the ledger with its shape, and no others: QD_USAGE
 * names the missing or unknown ones. Call before the first fetch. */
qd_status qd_hf_check(qd_hf_source *source, const qd_ledger *ledger, qd_arena *arena);
/* qd_ckpt_fetch for a source. */
qd_status qd_hf_fetch(void *source, const qd_state_piece *piece, float *out);
/* Reads a box of a parameter of the ledger, as qd_checkpoint_read() does. QD_CORRUPT names a tensor
 * with values that are not finite. */
qd_status qd_hf_read(void *source, const qd_param *param, qd_ckpt_kind kind, const qd_atom *box, float *out);

typedef struct qd_hf_export {
    qd_dtype dtype;       /* fp32, bf16 or fp16 */
    int64_t shard_bytes;  /* maximum size of a file; 0: one file */
    int64_t positions;    /* max_position_embeddings if the model sets no limit */
    int32_t begin_token, end_token; /* begin and end of documents; -1: none */
} qd_hf_export;

/* QD_UNSUPPORTED if transformers has no such model. Training settings that it cannot express are
 * appended to `notes`, one per line. */
qd_status qd_hf_config_text(const qd_model *model, const qd_hf_export *options, qd_strbuf *notes, qd_strbuf *text);
/* Writes the tensors of a checkpoint into a folder, one at a time, and the index if there are
 * several files. *bytes: size of all tensors; *files: number of files. QD_UNSUPPORTED names a
 * non-zero tensor that transformers' model does not have. */
qd_status qd_hf_write(const char *folder, const qd_ledger *ledger, qd_checkpoint *checkpoint, const qd_hf_export *options,
                      int64_t *bytes, int *files);
#endif
