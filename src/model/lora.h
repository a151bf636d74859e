/* LoRA: low-rank adapters next to the linear layers of a model. y = x·Wᵀ + scale · (x·Aᵀ)·Bᵀ, where
 * W is frozen and A (rank, in) and B (out, rank) are trained. Declarations add the adapters
 * (declare.c); everything else of the model is frozen. */
#ifndef QD_MODEL_LORA_H
#define QD_MODEL_LORA_H

#include <stdbool.h>

/* T(name, word as in target_modules of PEFT, last part of the logical name of the layer). */
#define QD_LORA_TARGETS(T)     \
    T(Q, "q_proj", "q")        \
    T(K, "k_proj", "k")        \
    T(V, "v_proj", "v")        \
    T(O, "o_proj", "out")      \
    T(GATE, "gate_proj", "gate") \
    T(UP, "up_proj", "up")     \
    T(DOWN, "down_proj", "down") \
    T(ROUTER, "router", "router") \
    T(SHARED_GATE, "shared_expert_gate", "shared_gate")

typedef enum qd_lora_target {
#define QD_LORA_TARGET_ENUM(name, word, part) QD_LORA_##name,
    QD_LORA_TARGETS(QD_LORA_TARGET_ENUM)
#undef QD_LORA_TARGET_ENUM
        QD_LORA_TARGET_COUNT
} qd_lora_target;
#define QD_LORA_ALL_LINEAR (1u << 31) /* every linear layer except routers and the head */
#define QD_LORA_ALL_WORD "all-linear"

typedef struct qd_lora {
    int rank; /* 0: no adapters, all parameters are trained */
    double alpha, dropout;
    bool rslora;      /* the scale is alpha / sqrt(rank) instead of alpha / rank */
    bool stored;      /* the frozen values are stored elsewhere (run.weights), not in checkpoints */
    unsigned targets; /* bits 1 << qd_lora_target, or QD_LORA_ALL_LINEAR */
} qd_lora;

double qd_lora_scale(const qd_lora *lora);
/* Whether the layer with this logical name ("attn.q", "mlp.experts.3.gate") has an adapter. */
bool qd_lora_takes(const qd_lora *lora, const char *name);
/* The bit of a word of target_modules; 0: unknown. */
unsigned qd_lora_find(const char *word);
const char *qd_lora_word(qd_lora_target target);
#endif
