/* Text generation with a trained model. */
#ifndef QUADRILLE_GENERATE_H
#define QUADRILLE_GENERATE_H

#include <quadrille/export.h>
#include <quadrille/sized.h>
#include <quadrille/status.h>
#include <quadrille/tokenizer.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum qd_generate_end {
    QD_GENERATE_TOKENS,   /* the requested number of tokens was generated */
    QD_GENERATE_DOCUMENT, /* the model ended the document */
    QD_GENERATE_STOPPED,  /* on_text returned false */
    QD_GENERATE_STOP_TEXT /* the text contained one of the stop strings */
} qd_generate_end;

typedef enum qd_prompt_kind {
    QD_PROMPT_TEXT,
    QD_PROMPT_MESSAGE,  /* a message of a user; the chat template of the model is applied */
    QD_PROMPT_MESSAGES, /* JSON: a list of messages, or an object with `messages` and possibly `tools` */
    QD_PROMPT_TOKENS    /* token ids in decimal, separated by white space. The text is written so, too; no tokenizer is needed */
} qd_prompt_kind;

typedef struct qd_generate_report {
    size_t size;
    int64_t step;           /* of the checkpoint */
    int64_t context;        /* tokens the model sees at once */
    int64_t prompt_tokens;
    bool prompt_cut;        /* the prompt was longer than the context: only its end was used */
    char start[64];         /* with an empty prompt: the text of the token it starts from; else "" */
    int64_t tokens;         /* generated */
    int64_t slides;         /* how often the context was full and continued from its last half */
    qd_generate_end end;
    char warning[1024];     /* "", or which damaged checkpoints were skipped and which one is used */
    double prompt_seconds, seconds; /* time to process the prompt, and to generate */
    int64_t prompt; /* its number, from 0, if there are several */
    const char *prompt_text; /* and its text; valid during callbacks */
    size_t prompt_length;
    qd_prompt_kind prompt_kind; /* lines of a file differ in it */
} qd_generate_report;
QD_SIZED_DEFAULT(qd_generate_report)

typedef struct qd_prompt {
    qd_prompt_kind kind;
    const char *text;
    size_t length;
} qd_prompt;

typedef struct qd_generate_options {
    size_t size;
    const char *model; /* a checkpoint, or a run folder: its newest valid checkpoint */
    const char *prompt;
    size_t prompt_length;
    int64_t tokens;     /* at most */
    double temperature; /* 0: always the most likely token */
    int top_k;          /* sample from the k most likely tokens; 0: all */
    double top_p;       /* sample from the most likely tokens whose probabilities reach this sum; 1: all */
    uint64_t seed;      /* equal seeds give equal text */
    int64_t context;    /* tokens; 0: the length the model was trained with */
    const char *device; /* "cpu" or "cuda"; NULL: cpu */
    int threads;        /* 0: all cores */
    /* May be NULL. Called before the first token with what is known by then. */
    void (*on_start)(void *context, const qd_generate_report *report);
    /* May be NULL. Called with text as it is generated, in whole UTF-8 characters; returning false
     * stops. */
    bool (*on_text)(void *context, const char *text, size_t length);
    void *callback_context;
    qd_special_policy special; /* how special tokens in the prompt are encoded; QD_SPECIAL_TEXT is right for untrusted text */
    /* Ranks that share the model, as threads of this process: tensor, pipeline and expert
     * parallelism. 0: 1. */
    int tp, pp, ep;
    qd_prompt_kind prompt_kind; /* of `prompt` */
    const qd_prompt *prompts;   /* several prompts, one after another; `prompt` is not read then */
    size_t prompt_count;
    const char *prompt_file;    /* NULL, or a file of prompts: one per line, or .jsonl with `prompt` or `messages` */
    const char *system;         /* message of the system before messages of a user; NULL: none */
    /* May be NULL. Called at the end of each prompt's text; on_start at its start. */
    void (*on_end)(void *context, const qd_generate_report *report);
    double min_p; /* sample from tokens at least this likely, as a fraction of the most likely one; 0: all */
    double repetition_penalty; /* above 1: tokens of prompt and text are less likely, as in transformers; 1 or 0: none */
    const char *const *stop;   /* texts that end the generation; they are not part of the text */
    size_t stop_count;
    bool ignore_end; /* continue after the end of the document */
    const char *precision; /* "fp32" or "bf16": how weights and activations are stored; NULL: as in training */
} qd_generate_options;

/* Sets the defaults: 200 tokens, temperature 0.8, top_p 1, the rest 0. */
QD_API void qd_generate_options_init(qd_generate_options *options, size_t size);
QD_SIZED_DEFAULT_BY_INIT(qd_generate_options)

/* Generates text that continues the prompt. Not collective. An empty prompt starts from the
 * end-of-document token if the tokenizer has one, else from a line end. When the context is full,
 * its last half is processed again and generation continues from there. QD_USAGE for options out of
 * range or a model without a valid checkpoint. */
QD_API qd_status qd_generate(const qd_generate_options *options, qd_generate_report *report);

#ifdef __cplusplus
}
#endif
#endif
