/* Model families: which declaration each module of a model has. */
#ifndef QD_MODEL_FAMILY_H
#define QD_MODEL_FAMILY_H

#include "model/declare.h"

#define QD_DECLARATIONS_MOST 8 /* of a family: embedding, head and the variants of its layers */

/* Layers with the same variant have the same declaration, and so share one list of ops. */
typedef struct qd_family {
    const char *name;
    void (*defaults)(qd_model *model); /* what its architecture (model->arch) implies, and has where the options say auto */
    void (*embed)(qd_layer *b);
    int variants;                                     /* different layers of the trunk: at most QD_DECLARATIONS_MOST - 2 */
    int (*variant)(const qd_model *model, int layer); /* of a layer: 0 .. variants - 1 */
    void (*layer)(qd_layer *b, int variant);
    void (*head)(qd_layer *b);
} qd_family;

extern const qd_family qd_family_prenorm; /* GPT-2, Llama, Yi, Qwen3, Mixtral, Qwen3-MoE, DeepSeek-shaped */

const qd_family *qd_family_of(const qd_model *model);

/* Declares a module of the family: embedding (0), layers of variant i (1 + i), head (1 +
 * variants). */
qd_status qd_family_declare(const qd_family *family, const qd_model *model, int declaration, qd_arena *arena, qd_layer *out);
#endif
