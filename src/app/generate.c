/* Generation with a KV cache: feeds tokens in pieces and samples the next token. */
#include "app/generate.h"

#include "base/rng.h"
#include "train/exec/model_run.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Prompts are fed in pieces of this many tokens, the rest one by one. */
enum { PIECE = QD_GENERATION_PIECE };

typedef struct candidate {
    float logit;
    int32_t token;
} candidate;

/* A program that adds `rows` tokens to the sequence. */
typedef struct stepper {
    qd_interpreter *interpreter;
    int64_t rows;
} stepper;

struct qd_generator {
    qd_model_run run;
    qd_side_program pieces; /* shares weights, cache and logits with the trainer's program, which feeds single tokens */
    stepper one, piece;
    qd_batch_source source;
    const int32_t *next; /* tokens about to be fed */
    int64_t base; /* index in the sequence of the first token in the cache */
    int64_t past, context, vocab;
    float *logits;
    candidate *candidates;
};

static qd_status fill(void *context, int64_t first, int64_t count, int64_t seq, int32_t *tokens, int32_t *targets,
                      int32_t *doc_start)
{
    (void)first;
    const qd_generator *g = context;
    for (int64_t i = 0; i < count * seq; i++) {
        tokens[i] = g->next[i];
        targets[i] = (int32_t)(g->past + i); /* positions */
        doc_start[i] = 0;
    }
    return QD_OK;
}

static qd_status add_piece_stepper(qd_generator *g)
{
    qd_config config = g->run.config;
    config.strategy.seq = PIECE;
    QD_TRY(qd_side_program_open(&g->run, &config, &g->pieces));
    g->piece = (stepper){g->pieces.interpreter, PIECE};
    return QD_OK;
}

static qd_status build(qd_generator *g, const qd_model_source *model, int64_t context, const char *device, int threads)
{
    QD_TRY(qd_model_run_open(model, device, &g->run));
    qd_config *c = &g->run.config;
    int64_t longest = c->model.position == QD_POSITION_LEARNED ? c->model.max_seq : c->strategy.seq;
    if (c->model.position == QD_POSITION_LEARNED && context > longest)
        return QD_FAIL(QD_USAGE, "a context of %lld tokens is longer than the model's %lld positions", (long long)context,
                       (long long)longest);
    g->context = context > 0 ? context : longest;
    g->vocab = c->model.vocab;
    c->strategy.seq = 1;
    c->strategy.context = g->context;
    c->threads = threads;
    g->source = (qd_batch_source){.fill = fill, .context = g};
    QD_TRY(qd_model_run_start(&g->run, &g->source));
    g->one.rows = 1;
    QD_TRY(qd_interpreter_create(qd_trainer_bound(g->run.trainer), &g->one.interpreter));
    if (g->context >= PIECE)
        QD_TRY(add_piece_stepper(g));
    g->logits = malloc((size_t)g->vocab * sizeof *g->logits);
    g->candidates = malloc((size_t)g->vocab * sizeof *g->candidates);
    return g->logits && g->candidates ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory for %lld logits", (long long)g->vocab);
}

qd_status qd_generator_create(const qd_model_source *model, int64_t context, const char *device, int threads, qd_generator **generator)
{
    qd_generator *g = calloc(1, sizeof *g);
    if (!g)
        return QD_FAIL(QD_NO_MEMORY, "no memory for a generator");
    qd_status status = build(g, model, context, device, threads);
    if (status != QD_OK) {
        qd_generator_destroy(g);
        return status;
    }
    *generator = g;
    return QD_OK;
}

void qd_generator_destroy(qd_generator *g)
{
    if (!g)
        return;
    qd_interpreter_destroy(g->one.interpreter);
    qd_side_program_close(&g->pieces);
    qd_model_run_close(&g->run);
    free(g->logits);
    free(g->candidates);
    free(g);
}

int64_t qd_generator_vocab(const qd_generator *g)
{
    return g->vocab;
}

int64_t qd_generator_room(const qd_generator *g)
{
    return g->context - g->past;
}

const char *qd_generator_warning(const qd_generator *g)
{
    return g->run.warning;
}

const qd_config *qd_generator_config(const qd_generator *g)
{
    return &g->run.config;
}

int64_t qd_generator_step(const qd_generator *g)
{
    return g->run.step;
}

int64_t qd_generator_context(const qd_generator *g)
{
    return g->context;
}

void qd_generator_forget(qd_generator *g, int64_t position)
{
    g->base = position;
    g->past = 0;
}

/* Non-finite logits have no order of likelihood, but would still produce text. */
static qd_status check_finite(const qd_generator *g)
{
    for (int64_t i = 0; i < g->vocab; i++)
        if (!isfinite(g->logits[i]))
            return QD_FAIL(QD_NOT_FINITE, "the logits after %lld tokens are not finite: a weight of the model may not be finite; "
                                          "try an older checkpoint", (long long)(g->base + g->past));
    return QD_OK;
}

qd_status qd_generator_feed(qd_generator *g, const int32_t *tokens, int64_t count)
{
    if (count > qd_generator_room(g))
        return QD_FAIL(QD_USAGE, "%lld tokens do not fit: %lld of the context of %lld are used", (long long)count,
                       (long long)g->past, (long long)g->context);
    for (int64_t done = 0; done < count;) {
        const stepper *s = g->piece.interpreter && count - done >= PIECE ? &g->piece : &g->one;
        qd_step_output output;
        g->next = tokens + done;
        const qd_step_input input = {.step = 1, .global_batch = 1, .past = g->past, .source = &g->source,
                                     .optim = &g->run.config.optimizer};
        QD_TRY(qd_interpret(s->interpreter, &input, &output));
        g->past += s->rows;
        done += s->rows;
    }
    qd_stream *stream = qd_device_compute_stream(qd_trainer_device(g->run.trainer));
    const void *logits = qd_bound_kind(qd_trainer_bound(g->run.trainer), QD_BUFFER_LOGITS);
    QD_TRY(qd_copy(stream, g->logits, logits, g->vocab * (int64_t)sizeof *g->logits));
    QD_TRY(qd_stream_wait(stream));
    return check_finite(g);
}

const float *qd_generator_logits(const qd_generator *g)
{
    return g->logits;
}

/* Logits are finite, so this is a total order. */
static int likelier_first(const void *a, const void *b)
{
    const candidate *x = a, *y = b;
    if (x->logit != y->logit)
        return x->logit > y->logit ? -1 : 1;
    return x->token < y->token ? -1 : 1;
}

int32_t qd_generator_sample(qd_generator *g, const qd_sampling *s)
{
    for (int64_t i = 0; i < g->vocab; i++)
        g->candidates[i] = (candidate){g->logits[i], (int32_t)i};
    qsort(g->candidates, (size_t)g->vocab, sizeof *g->candidates, likelier_first);
    if (s->temperature <= 0.0)
        return g->candidates[0].token;
    int64_t kept = s->top_k > 0 && s->top_k < g->vocab ? s->top_k : g->vocab;
    double total = 0.0, most = g->candidates[0].logit;
    for (int64_t i = 0; i < kept; i++)
        total += exp((g->candidates[i].logit - most) / s->temperature);
    /* top-p: the fewest most likely tokens whose total probability reaches it */
    double share = 0.0, limit = s->top_p < 1.0 ? s->top_p * total : total;
    int64_t within = 0;
    while (within < kept && share < limit)
        share += exp((g->candidates[within++].logit - most) / s->temperature);
    uint32_t words[4];
    qd_philox4x32(qd_rng_key(s->seed, "generate"), (uint64_t)(g->base + g->past), 0, words);
    double draw = ((double)words[0] + (double)words[1] * 0x1p-32) * 0x1p-32 * share, sum = 0.0;
    for (int64_t i = 0; i < within; i++) {
        sum += exp((g->candidates[i].logit - most) / s->temperature);
        if (draw < sum)
            return g->candidates[i].token;
    }
    return g->candidates[within > 0 ? within - 1 : 0].token;
}
