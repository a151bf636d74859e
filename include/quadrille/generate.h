/* Text from a trained model. */
#ifndef QUADRILLE_GENERATE_H
#define QUADRILLE_GENERATE_H

#include <quadrille/export.h>
#include <quadrille/sized.h>
#include <quadrille/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum qd_generate_end {
    QD_GENERATE_TOKENS,   /* as many as were asked for */
    QD_GENERATE_DOCUMENT, /* the model ended the document */
    QD_GENERATE_STOPPED   /* on_text said so */
} qd_generate_end;

typedef struct qd_generate_report {
    size_t size;
    int64_t step;           /* of the checkpoint */
    int64_t context;        /* tokens the model sees at once */
    int64_t prompt_tokens;
    bool prompt_cut;        /* it was longer than the context: only its end was read */
    char start[64];         /* with an empty prompt: the token it starts from, as text; else "" */
    int64_t tokens;         /* generated */
    int64_t slides;         /* how often the context was full and went on from its last half */
    qd_generate_end end;
    char warning[1024];     /* "", or which damaged checkpoints were skipped and which one is used */
    double prompt_seconds, seconds; /* to read the prompt, and to generate */
} qd_generate_report;
QD_SIZED_DEFAULT(qd_generate_report)

typedef struct qd_generate_options {
    size_t size;
    const char *model; /* a run folder (its newest sound checkpoint counts) or a checkpoint */
    const char *prompt;
    size_t prompt_length;
    int64_t tokens;     /* at most */
    double temperature; /* 0: always the likeliest token */
    int top_k;          /* only the k likeliest; 0: all */
    double top_p;       /* only the likeliest that together reach this share; 1: all */
    uint64_t seed;      /* equal seeds, equal text */
    int64_t context;    /* 0: the longest the model was trained for */
    const char *device; /* "cpu" or "cuda"; NULL: cpu */
    int threads;        /* 0: all cores */
    /* May be NULL. Before the first token: what is known by then. */
    void (*on_start)(void *context, const qd_generate_report *report);
    /* May be NULL. Text as it comes, in whole UTF-8 characters; false stops. */
    bool (*on_text)(void *context, const char *text, size_t length);
    void *callback_context;
} qd_generate_options;

/* 200 tokens, temperature 0.8, the rest 0 or all. */
QD_API void qd_generate_options_init(qd_generate_options *options, size_t size);
QD_SIZED_DEFAULT_BY_INIT(qd_generate_options)

/* An empty prompt starts from the token that ends documents, if the tokenizer has one, else from a
 * line end. When the context is full, its last half is read anew and the text goes on. Not
 * collective. */
QD_API qd_status qd_generate(const qd_generate_options *options, qd_generate_report *report);

#ifdef __cplusplus
}
#endif
#endif
