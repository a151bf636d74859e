/* Adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors. */
#ifndef QD_CKPT_PEFT_H
#define QD_CKPT_PEFT_H

#include "ckpt/huggingface.h"

#define QD_PEFT_CONFIG "adapter_config.json"
#define QD_PEFT_TENSORS "adapter_model.safetensors"

/* Writes the adapters of a checkpoint. base: name or folder of the base model, for the reader.
 * QD_UNSUPPORTED names a layer that PEFT cannot express. */
qd_status qd_peft_write(const char *folder, const qd_ledger *ledger, qd_checkpoint *checkpoint, const char *base, int64_t *bytes);

typedef struct qd_peft_source qd_peft_source;
typedef struct qd_peft_config {
    int rank;
    double alpha, dropout;
    bool rslora;
    const char *base; /* base_model_name_or_path; NULL: none */
} qd_peft_config;

bool qd_peft_is_folder(const char *path);
/* QD_UNSUPPORTED names a setting that we do not have. */
qd_status qd_peft_open(const char *folder, qd_peft_source **source);
void qd_peft_close(qd_peft_source *source); /* NULL is legal */
const qd_peft_config *qd_peft_settings(const qd_peft_source *source);
/* Bits of lora.targets, found from the tensors; plain: the ledger of the base model. */
qd_status qd_peft_targets(const qd_peft_source *source, const qd_ledger *plain, unsigned *targets);
/* Checks that the file has the factors of all adapters of the ledger, and no others. Call before
 * the first fetch; ledger and arena must outlive the source. */
qd_status qd_peft_check(qd_peft_source *source, const qd_ledger *ledger, qd_arena *arena);
qd_status qd_peft_fetch(void *source, const qd_state_piece *piece, float *out); /* qd_ckpt_fetch */
#endif
