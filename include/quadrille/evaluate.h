/* How well a trained model predicts a text. */
#ifndef QUADRILLE_EVALUATE_H
#define QUADRILLE_EVALUATE_H

#include <quadrille/data.h>
#include <quadrille/export.h>
#include <quadrille/sized.h>

#ifdef __cplusplus
extern "C" {
#endif

/* By default all is zero, which means what is said of 0. */
typedef struct qd_evaluate_options {
    size_t size;
    const char *model; /* a run folder (its newest sound checkpoint counts) or a checkpoint */
    const char *text;  /* text file, folder or shards; NULL: the held-out part of what the model was trained on */
    int64_t seq;       /* tokens of a window; 0: as in training */
    int64_t per_pass;  /* windows that go through the model at once; 0: as many as make about 4096 tokens */
    const char *device; /* "cpu" or "cuda"; NULL: cpu */
    int threads;       /* 0: all cores */
    bool baseline;     /* also a trigram model of the training tokens, on the same held-out tokens; not with a text */
    /* NULL, or a safetensors file to write, for comparisons with other programs: tokens (int32) and
     * logits (fp32, one row per token) of the first window. */
    const char *logits;
    /* Called after each pass with windows done and in all; false ends with QD_INTERRUPTED. May be
     * NULL. */
    bool (*progress)(void *context, int64_t done, int64_t all);
    void *context;
} qd_evaluate_options;
QD_SIZED_DEFAULT(qd_evaluate_options)

typedef struct qd_evaluate_report {
    size_t size;
    char data[512];         /* what was predicted: the text, or data.path of the run */
    int64_t step;           /* of the checkpoint */
    double loss;            /* mean, nats per token */
    double bits_per_byte;   /* 0: the tokenizer of the model is not known */
    int64_t tokens, bytes;  /* predicted; bytes of these tokens, 0: unknown */
    int64_t windows, seq;
    double seconds;         /* of the passes */
    char warning[1024];     /* "", or which damaged checkpoints were skipped and which one was used */
    double baseline_loss;   /* of the trigram model: see qd_trigram_report */
    int64_t baseline_trained, baseline_scored, baseline_trigrams; /* scored is 0 without one */
    double baseline_seconds;
} qd_evaluate_report;
QD_SIZED_DEFAULT(qd_evaluate_report)

/* The tokens are cut into windows of `seq`, each token predicted from the ones before it in its
 * window: every token but the first of a source counts once, except where the model's document mask
 * forbids it. Nothing is written. QD_USAGE: no checkpoint, no text, nothing held out, a vocabulary
 * that is not the model's. Not collective. */
QD_API qd_status qd_evaluate(const qd_evaluate_options *options, qd_evaluate_report *report);

#ifdef __cplusplus
}
#endif
#endif
