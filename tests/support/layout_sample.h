/* Seeded samples of all layouts of up to eight ranks: degrees of every axis, ZeRO stages,
 * schedules, sequence parallelism, recompute, timing of gradient reduction, placement of
 * experts. */
#ifndef QD_TESTS_SUPPORT_LAYOUT_SAMPLE_H
#define QD_TESTS_SUPPORT_LAYOUT_SAMPLE_H

#include <stddef.h>
#include <stdint.h>

#define LAYOUT_SAMPLE_RUN                                                                                                                  \
    "train.optimizer=sgd train.lr=0.3 train.clip=0.8 train.schedule=constant train.steps=50 train.global_batch=8 run.threads=1 "

typedef struct layout_model {
    const char *words;
    int heads, experts; /* experts 0: none */
} layout_model;

/* One small model per combination of biases, rotary scaling and windows that a family of
 * transformers has. */
extern const layout_model layout_families[];
enum { LAYOUT_FAMILIES = 24 };

typedef struct layout_sample {
    uint64_t seed, drawn;
} layout_sample;

int layout_sample_below(layout_sample *sample, int below); /* uniform in [0, below) */
/* Draws a layout of one of the models, as words; `kind` gets the settings that affect rounding.
 * Returns the model. */
int layout_sample_draw(layout_sample *sample, const layout_model *models, int count, char *words, size_t size, char *kind,
                       size_t kind_size);
#endif
