#ifndef QD_CKPT_HUGGINGFACE_IMPL_H
#define QD_CKPT_HUGGINGFACE_IMPL_H

#include "base/json.h"
#include "ckpt/huggingface.h"

#define QD_HF_FILE "model.safetensors"
#define QD_HF_INDEX "model.safetensors.index.json"

/* What config.json says. */
typedef struct qd_hf_config {
    qd_model model;
    int64_t positions;
    bool attention_bias, mlp_bias; /* Llama: biases of q, k, v and the output; of the MLP */
} qd_hf_config;

qd_status qd_hf_config_read(const char *path, qd_strbuf *notes, qd_hf_config *config);

/* Where the names of an architecture's tensors begin; folders of models without a head leave it out. */
const char *qd_hf_prefix(qd_arch arch);
#endif
