/* Model families: which declaration each module of a model uses. */
#ifndef QD_MODEL_FAMILY_H
#define QD_MODEL_FAMILY_H

#include "model/declare.h"

#define QD_DECLARATIONS_MOST 10 /* per family: embedding, head and the variants of its layers */

/* Layers of the same variant have the same declaration and share one op list. */
typedef struct qd_family {
    const char *name;
    void (*defaults)(qd_model *model); /* sets what the architecture (model->arch) implies, and the values of options that are auto */
    void (*embed)(qd_layer *b);
    int variants;                                     /* number of different layers: at most QD_DECLARATIONS_MOST - 2 */
    int (*variant)(const qd_model *model, int layer); /* of a layer: 0 .. variants - 1 */
    void (*layer)(qd_layer *b, int variant);
    void (*head)(qd_layer *b);
} qd_family;

extern const qd_family qd_family_prenorm;  /* GPT-2, Llama, Yi, Qwen3, Mixtral, Qwen MoE, DeepSeek-shaped */
extern const qd_family qd_family_postnorm; /* OLMo 2 */
extern const qd_family qd_family_sandwich; /* Gemma 2 and 3 */
extern const qd_family qd_family_latent;   /* DeepSeek V2 and V3, Kimi K2 */

const qd_family *qd_family_of(const qd_model *model);

/* Declares a module of the family: embedding (0), layers of variant i (1 + i), head (1 +
 * variants). */
qd_status qd_family_declare(const qd_family *family, const qd_model *model, int declaration, qd_arena *arena, qd_layer *out);
/* QD_USAGE where no program could be derived from it, on any layout: declare_check.c. */
qd_status qd_family_check(const qd_family *family, int declaration, const qd_layer *layer);
#endif
