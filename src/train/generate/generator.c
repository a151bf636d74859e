/* Feeds tokens to a model in pieces and fetches the logits of the last one. */
#include "train/generate/generator.h"

#include "train/generate/side_program.h"

#include <math.h>
#include <stdlib.h>

/* Prompts are fed in pieces of this many tokens, the rest one by one. */
enum { PIECE = QD_GENERATION_PIECE };

/* A program that adds `rows` tokens to the sequence. */
typedef struct stepper {
    qd_interpreter *interpreter;
    int64_t rows;
} stepper;

struct qd_generator {
    qd_trainer *trainer;
    qd_side_program single, pieces; /* share weights, cache and logits; single: unused if the trainer's program feeds single tokens */
    qd_interpreter *own; /* of the trainer's program */
    const qd_bound *bound; /* of the program that feeds single tokens */
    stepper one, piece;
    qd_batch_source source;
    const int32_t *next; /* tokens about to be fed */
    int64_t base; /* index in the sequence of the first token in the cache */
    int64_t past, context, vocab;
    float *logits;
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

qd_config qd_generation_config(const qd_config *config, int64_t context, int64_t rows)
{
    qd_config c = *config;
    int cp = c.degrees[QD_AXIS_CP];
    c.evaluation = (qd_evaluation_config){.path = ""};
    c.model.dropout = 0.0;
    c.strategy.training = false;
    c.strategy.micro_batch = 1;
    c.strategy.seq = rows;
    c.strategy.context = context;
    c.degrees[QD_AXIS_CP] = 1; /* ranks of dp and cp share parameters alike */
    c.degrees[QD_AXIS_DP] *= cp;
    c.strategy.shard *= cp;
    c.global_batch = c.degrees[QD_AXIS_DP];
    return c;
}

qd_status qd_generation_context(const qd_config *c, int64_t *context)
{
    bool learned = c->model.position == QD_POSITION_LEARNED;
    int64_t longest = learned ? c->model.max_seq : qd_positions(c->strategy.seq, c->strategy.context);
    if (learned && *context > longest)
        return QD_FAIL(QD_USAGE, "a context of %lld tokens is longer than the model's %lld positions", (long long)*context,
                       (long long)longest);
    if (*context == 0)
        *context = longest;
    return QD_OK;
}

static qd_status add_single(qd_generator *g)
{
    qd_bound *trained = qd_trainer_bound(g->trainer);
    g->one.rows = 1;
    if (trained->program->strategy.context == g->context) {
        QD_TRY(qd_interpreter_create(trained, &g->own));
        g->one.interpreter = g->own;
        g->bound = trained;
        return QD_OK;
    }
    const qd_config c = qd_generation_config(qd_trainer_config(g->trainer), g->context, 1);
    QD_TRY(qd_side_program_open(g->trainer, trained, &c, &g->single));
    g->one.interpreter = g->single.interpreter;
    g->bound = g->single.bound;
    return QD_OK;
}

static qd_status add_pieces(qd_generator *g)
{
    const qd_config c = qd_generation_config(qd_trainer_config(g->trainer), g->context, PIECE);
    QD_TRY(qd_side_program_open(g->trainer, g->bound, &c, &g->pieces));
    g->piece = (stepper){g->pieces.interpreter, PIECE};
    return QD_OK;
}

static qd_status build(qd_generator *g, int64_t context)
{
    const qd_config *c = qd_trainer_config(g->trainer);
    QD_TRY(qd_generation_context(c, &context));
    g->context = context;
    g->vocab = c->model.vocab;
    g->source = (qd_batch_source){.fill = fill, .context = g};
    QD_TRY(add_single(g));
    if (g->context >= PIECE)
        QD_TRY(add_pieces(g));
    g->logits = malloc((size_t)g->vocab * sizeof *g->logits);
    return g->logits ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory for %lld logits", (long long)g->vocab);
}

qd_status qd_generator_create(qd_trainer *trainer, int64_t context, qd_generator **generator)
{
    qd_generator *g = calloc(1, sizeof *g);
    if (!g)
        return QD_FAIL(QD_NO_MEMORY, "no memory for a generator");
    g->trainer = trainer;
    qd_status status = build(g, context);
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
    qd_side_program_close(&g->pieces);
    qd_side_program_close(&g->single);
    qd_interpreter_destroy(g->own);
    free(g->logits);
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

int64_t qd_generator_context(const qd_generator *g)
{
    return g->context;
}

int64_t qd_generator_position(const qd_generator *g)
{
    return g->base + g->past;
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

static qd_status fetch_logits(qd_generator *g)
{
    qd_stream *stream = qd_device_compute_stream(qd_trainer_device(g->trainer));
    QD_TRY(qd_copy(stream, g->logits, qd_bound_kind(g->bound, QD_BUFFER_LOGITS), g->vocab * (int64_t)sizeof *g->logits));
    return qd_stream_wait(stream);
}

qd_status qd_generator_feed(qd_generator *g, const int32_t *tokens, int64_t count)
{
    const qd_config *c = qd_trainer_config(g->trainer);
    if (count > qd_generator_room(g))
        return QD_FAIL(QD_USAGE, "%lld tokens do not fit: %lld of the context of %lld are used", (long long)count,
                       (long long)g->past, (long long)g->context);
    for (int64_t done = 0; done < count;) {
        const stepper *s = g->piece.interpreter && count - done >= PIECE ? &g->piece : &g->one;
        qd_step_output output;
        g->next = tokens + done;
        const qd_step_input input = {.step = 1, .global_batch = 1, .past = g->past, .source = &g->source, .optim = &c->optimizer};
        QD_TRY(qd_interpret(s->interpreter, &input, &output));
        g->past += s->rows;
        done += s->rows;
    }
    QD_TRY(fetch_logits(g));
    return check_finite(g);
}

const float *qd_generator_logits(const qd_generator *g)
{
    return g->logits;
}
