/* What is chosen of an optimizer: the planner counts its state, the trainer runs it. */
#ifndef QD_BASE_OPTIM_CONFIG_H
#define QD_BASE_OPTIM_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

/* Muon: AdamW for all but the matrices of blocks. */
typedef enum qd_optim_kind { QD_OPTIM_ADAMW, QD_OPTIM_SGD, QD_OPTIM_MUON } qd_optim_kind;
/* 0.2 sqrt(max(rows, cols)); sqrt(max(1, rows / cols)) */
typedef enum qd_muon_scale { QD_MUON_MATCH_ADAMW, QD_MUON_ORIGINAL } qd_muon_scale;
typedef enum qd_lr_schedule { QD_LR_COSINE, QD_LR_LINEAR, QD_LR_CONSTANT, QD_LR_WSD } qd_lr_schedule;

/* An optimizer and its learning rate over the steps of a run. */
typedef struct qd_optim {
    qd_optim_kind kind;
    qd_lr_schedule schedule;
    double lr, min_lr, beta1, beta2, eps, momentum, weight_decay, clip; /* clip 0: none */
    int64_t steps, warmup, decay_steps;                                 /* decay_steps: the last part of WSD */
    double muon_momentum, muon_lr;                                      /* muon_lr 0: lr; else the schedule is scaled to it */
    bool muon_nesterov;
    int muon_steps;
    qd_muon_scale muon_scale;
    double qk_clip; /* largest attention score of a head that its weights may give; 0: any */
} qd_optim;
#endif
