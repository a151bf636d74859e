/* Shared by the files of the Hugging Face converter: model families, the parsed config.json,
 * names. */
#ifndef QD_CKPT_HUGGINGFACE_IMPL_H
#define QD_CKPT_HUGGINGFACE_IMPL_H

#include "ckpt/huggingface.h"
#include "ckpt/safetensors.h"
#include "model/field_table.h"

#define QD_HF_FILE "model.safetensors"
#define QD_HF_INDEX "model.safetensors.index.json"

/* A family's name of a field, where the table of model fields (model/fields.h) has a different name
 * or none. */
typedef struct qd_hf_key {
    const char *field;        /* model.<field> */
    const char *name, *other; /* NULL: the family has no such key. other: an alternative that is read too */
} qd_hf_key;

/* How config.json sets sliding windows: not at all; for all layers, by sliding_window (null: none);
 * with the switch use_sliding_window, for the layers of layer_types or from max_window_layers on;
 * with the switch, for all layers; with the switch, for the layers of layer_types or every second
 * one below max_window_layers; with the switch, for the layers of layer_types, which must be given;
 * for the layers of layer_types, or without it for those of the family's defaults (full_every). */
typedef enum qd_hf_window {
    QD_HF_WINDOW_NONE, QD_HF_WINDOW_SIZE, QD_HF_WINDOW_SWITCH, QD_HF_WINDOW_SWITCH_ALL, QD_HF_WINDOW_SWITCH_EVEN,
    QD_HF_WINDOW_SWITCH_LISTED, QD_HF_WINDOW_TYPES
} qd_hf_window;

/* A model_type of transformers: its mapping to our models, and the defaults of its configuration
 * class, which apply where config.json omits a key. */
typedef struct qd_hf_family {
    const char *kind, *class_; /* model_type, and the class with a head */
    qd_arch arch;
    bool attention_bias; /* config.json has a key for the biases of q, k, v and the output; GPT-2 has all biases, without a key */
    bool mlp_bias;       /* and one for those of the MLP */
    bool clips;          /* and one for model.clip_qkv, null: none */
    bool dense_layers;   /* and those that make some layers dense */
    bool partial;        /* and one for model.rope_fraction; angles are not scaled */
    bool stacked;        /* the matrices of experts are stacked into one tensor, and have biases, as the router has (GPT-OSS) */
    double balance_default; /* of router_aux_loss_coef; 0: 0.001 */
    qd_hf_window window;
    int64_t window_default; /* of sliding_window; 0: null */
    const qd_hf_key *keys;         /* ends with an entry without a field */
    qd_model defaults; /* of fields with a key; a width or a number of kv heads of 0 is derived from other sizes. qk_norm, sinks,
                          hf_type and qkv_bias (unless it has a key: only those, in Qwen2) are the same in all models of the
                          family. out_bias: the default of attention_bias. rope.local_base: rope_parameters has an object for
                          each type of layers; rope.scaling: that of a missing rope_parameters */
} qd_hf_family;

const qd_hf_family *qd_hf_family_by_kind(const char *kind); /* NULL: not supported */
const qd_hf_family *qd_hf_family_of(const qd_model *model);
/* The family's name of a field; name NULL: config.json has no such key. */
qd_hf_key qd_hf_key_of(const qd_hf_family *family, const qd_model_field *field);
bool qd_hf_has_key(const qd_hf_family *family, const char *field); /* model.<field> has a name of the family's own */
void qd_hf_family_kinds(char *text, size_t size); /* "gpt2, llama, …", for messages */

/* Blocks of a quantized matrix that share a scale; 0 x 0: the weights are not quantized in blocks.
 * fp4: experts may be stored as MXFP4. */
typedef struct qd_hf_blocks {
    int64_t rows, cols;
    bool fp4;
} qd_hf_blocks;

/* hf_quantized.c */

/* Reads quantization_config of config.json. QD_UNSUPPORTED names a format other than fp8 in blocks,
 * and for families with stacked experts MXFP4. */
qd_status qd_hf_quantization_read(const qd_json *document, const qd_json_node *config, const qd_hf_family *family, qd_hf_blocks *blocks);
/* The name of the tensor with the scales of a weight; false: it is too long to have one. */
bool qd_hf_scale_name(const char *weight, char *name, size_t size);
/* Whether `scale` fits the fp8 matrix `weight`: QD_USAGE or QD_UNSUPPORTED names what does not. */
qd_status qd_hf_scale_check(const char *folder, const qd_safetensors_entry *weight, const qd_safetensors_entry *scale,
                            qd_hf_blocks blocks);
/* Multiplies the box of rows [first, first + rows) and columns [left, left + cols) of a matrix,
 * read as fp32, by the scales of its blocks. */
qd_status qd_hf_scale_apply(const qd_safetensors_entry *scale, qd_hf_blocks blocks, int64_t first, int64_t left, int64_t rows,
                            int64_t cols, float *values);

/* MXFP4, of stacked experts: instead of tensor NAME (experts, in, outputs) there are NAME_blocks
 * (experts, outputs, in / 32, 16), two values of 4 bits per byte, and NAME_scales (experts,
 * outputs, in / 32), exponents of 2 with bias 127. */
#define QD_HF_FP4_BLOCKS "_blocks"
#define QD_HF_FP4_SCALES "_scales"
/* Whether both fit the tensor: QD_USAGE or QD_UNSUPPORTED names what does not. */
qd_status qd_hf_fp4_check(const char *folder, const qd_hf_tensor *tensor, const qd_safetensors_entry *blocks,
                          const qd_safetensors_entry *scales);
/* out (rows, cols): for r < rows, inputs [left, left + cols) of output `output` + r · step of an
 * expert. */
qd_status qd_hf_fp4_read(const qd_safetensors_entry *blocks, const qd_safetensors_entry *scales, int64_t expert, int64_t output,
                         int64_t step, int64_t rows, int64_t left, int64_t cols, float *out);

/* The contents of config.json. */
typedef struct qd_hf_config {
    const qd_hf_family *family;
    qd_model model;
    int64_t positions;
    int predicted; /* modules behind the last block that predict further tokens; read if the folder has their tensors */
    qd_hf_blocks blocks;
} qd_hf_config;

void qd_hf_ahead_tensor(const qd_model *model, int module, char *name, size_t size); /* a tensor of a prediction module */
qd_status qd_hf_config_read(const char *path, qd_strbuf *notes, qd_hf_config *config);

const char *qd_hf_dtype_name(qd_dtype dtype); /* of transformers; hf_companions.c */

static inline bool qd_hf_has_experts(const qd_hf_family *f)
{
    return f->defaults.moe.experts > 0;
}

/* Whether layer_types may list any layers, with the window that other keys set. */
static inline bool qd_hf_lists_windows(const qd_hf_family *f)
{
    return f->window == QD_HF_WINDOW_SWITCH || f->window >= QD_HF_WINDOW_SWITCH_EVEN;
}

/* Whether windows have a switch, use_sliding_window. */
static inline bool qd_hf_switches_windows(const qd_hf_family *f)
{
    return f->window >= QD_HF_WINDOW_SWITCH && f->window <= QD_HF_WINDOW_SWITCH_LISTED;
}

/* Number of blocks whose routers the load-balancing loss counts. */
static inline int qd_hf_expert_layers(const qd_model *m)
{
    return m->moe.experts > 0 ? m->layers - m->moe.first_dense : 0;
}

/* Prefix of an architecture's tensor names; folders of models without a head omit it. */
const char *qd_hf_prefix(qd_arch arch);
/* Their name of a tensor that every block has, and of one that every expert of a block has. */
void qd_hf_block_tensor(const qd_model *model, int layer, char *name, size_t size);
void qd_hf_expert_tensor(const qd_model *model, int layer, int expert, char *name, size_t size);
#endif
