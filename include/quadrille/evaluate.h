/* Evaluation: the loss of a trained model on a text. */
#ifndef QUADRILLE_EVALUATE_H
#define QUADRILLE_EVALUATE_H

#include <quadrille/data.h>
#include <quadrille/export.h>
#include <quadrille/sized.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The default of every member is zero. */
typedef struct qd_evaluate_options {
    size_t size;
    const char *model; /* a checkpoint, or a run folder: its newest valid checkpoint */
    const char *text;  /* text file, folder or shards; NULL: data.eval_path of the run, or the held-out part of its training data */
    int64_t seq;       /* tokens of a window; 0: as in training */
    int64_t per_pass;  /* windows per forward pass; 0: about 4096 tokens, or a global batch if the run validated while it trained */
    const char *device; /* "cpu" or "cuda"; NULL: cpu */
    int threads;       /* 0: all cores */
    bool baseline;     /* also score a trigram model on the same held-out tokens (qd_data_trigram()); not with a text */
    /* NULL, or a safetensors file to write, for comparisons with other programs: tokens (int32) and
     * logits (fp32, one row per token) of the first window. */
    const char *logits;
    /* May be NULL. Called after each pass with the windows done and in total; returning false ends
     * the call with QD_INTERRUPTED. */
    bool (*progress)(void *context, int64_t done, int64_t all);
    void *context;
    int64_t windows; /* windows to evaluate, evenly spaced, as with train.eval_batches; 0: all */
    /* Ranks that share the model, as threads of this process: tensor, pipeline and expert
     * parallelism. 0: 1. */
    int tp, pp, ep;
} qd_evaluate_options;
QD_SIZED_DEFAULT(qd_evaluate_options)

typedef struct qd_evaluate_report {
    size_t size;
    char data[512];         /* the text, or data.path of the run */
    int64_t step;           /* of the checkpoint */
    double loss;            /* mean, nats per token */
    double bits_per_byte;   /* 0: the tokenizer of the model is unknown */
    int64_t tokens, bytes;  /* predicted tokens, and the bytes they stand for (0: unknown) */
    int64_t windows, seq;
    double seconds;         /* of the passes */
    char warning[1024];     /* "", or which damaged checkpoints were skipped and which one was used */
    double baseline_loss;   /* of the trigram model: see qd_trigram_report */
    int64_t baseline_trained, baseline_scored, baseline_trigrams; /* baseline_scored is 0 without a baseline */
    double baseline_seconds;
    bool held_out; /* the text is the held-out part of the training data */
} qd_evaluate_report;
QD_SIZED_DEFAULT(qd_evaluate_report)

/* Computes the loss of a model. Not collective. The tokens are split into windows of `seq`; each
 * token is predicted from those before it in its window. Every token except the first of a source
 * counts once, unless the model's document mask excludes it. Writes no file except `logits`.
 * QD_USAGE: no checkpoint, no text, nothing held out, or a vocabulary that is not the model's. */
QD_API qd_status qd_evaluate(const qd_evaluate_options *options, qd_evaluate_report *report);

#ifdef __cplusplus
}
#endif
#endif
