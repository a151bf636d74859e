/* Feeds tokens to a model in pieces and fetches the logits of the last one. */
#include "train/generate/generator.h"

#include "base/error.h"
#include "train/generate/side_program.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

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
    int64_t length; /* of the sequences that the rotary table, and the keys in the cache, are for */
    int64_t least;  /* see qd_generator_expect */
    int32_t *fed;   /* (context) rank 0: the tokens in the cache, if its keys may have to be rotated anew */
    float *logits; /* (vocab) */
    float *part;   /* those of this rank's tokens; logits itself if there is one rank */
    int64_t part_count;
    qd_segment *segments; /* per rank: its part of the logits */
    qd_segment_list *lists;
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
    qd_config c;
    QD_TRY(qd_generation_config(qd_trainer_config(g->trainer), g->context, 1, &c));
    QD_TRY(qd_side_program_open(g->trainer, trained, &c, &g->single));
    g->one.interpreter = g->single.interpreter;
    g->bound = g->single.bound;
    return QD_OK;
}

static qd_status add_pieces(qd_generator *g)
{
    qd_config c;
    QD_TRY(qd_generation_config(qd_trainer_config(g->trainer), g->context, PIECE, &c));
    QD_TRY(qd_side_program_open(g->trainer, g->bound, &c, &g->pieces));
    g->piece = (stepper){g->pieces.interpreter, PIECE};
    return QD_OK;
}

/* The tokens whose logits this rank computes. Ranks of dp compute the same: the first of them
 * counts. */
static qd_segment own_tokens(const qd_program *p)
{
    const qd_mesh *mesh = &p->ledger->mesh;
    int head = p->ledger->module_count - 1;
    qd_segment own = {0, 0};
    if (p->ledger->modules[head].stage_rank != qd_mesh_group_coord(mesh, QD_AXIS_BIT(QD_AXIS_PP), p->rank) ||
        qd_mesh_group_coord(mesh, QD_AXIS_BIT(QD_AXIS_DP), p->rank) != 0)
        return own;
    const qd_module_class *class_ = qd_program_class(p, head);
    for (int i = 0; i < class_->op_count; i++)
        if (class_->ops[i].kind == QD_OP_HEAD_LOGITS)
            own = (qd_segment){class_->ops[i].first, class_->ops[i].n};
    return own;
}

static qd_status share_logits(qd_generator *g)
{
    qd_comm *world = qd_trainer_world(g->trainer);
    int size = qd_comm_size(world);
    qd_segment own = own_tokens(g->bound->program);
    g->part_count = own.count;
    g->logits = malloc((size_t)g->vocab * sizeof *g->logits);
    g->part = size == 1 ? g->logits : malloc((size_t)g->vocab * sizeof *g->part);
    g->segments = calloc((size_t)size, sizeof *g->segments);
    g->lists = calloc((size_t)size, sizeof *g->lists);
    int64_t mine[2] = {own.offset, own.count}, *all = calloc((size_t)size, sizeof mine);
    qd_status status = g->logits && g->part && g->segments && g->lists && all
                           ? qd_comm_all_gather(world, mine, all, 2 * (int64_t)size, QD_I64, NULL)
                           : QD_FAIL(QD_NO_MEMORY, "no memory for %lld logits", (long long)g->vocab);
    for (int rank = 0; rank < size && status == QD_OK; rank++) {
        g->segments[rank] = (qd_segment){all[2 * rank], all[2 * rank + 1]};
        g->lists[rank] = (qd_segment_list){&g->segments[rank], all[2 * rank + 1] > 0};
    }
    free(all);
    return status;
}

static qd_status build(qd_generator *g, int64_t context)
{
    const qd_config *c = qd_trainer_config(g->trainer);
    QD_TRY(qd_generation_context(c, &context));
    g->context = g->length = context;
    g->vocab = c->model.vocab;
    g->source = (qd_batch_source){.fill = fill, .context = g};
    QD_TRY(add_single(g));
    if (g->context >= PIECE)
        QD_TRY(add_pieces(g));
    if (qd_rope_switches(&c->model, 1, context)) {
        g->fed = malloc((size_t)context * sizeof *g->fed);
        if (!g->fed)
            return QD_FAIL(QD_NO_MEMORY, "no memory for %lld tokens", (long long)context);
    }
    return share_logits(g);
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
    if (g->part != g->logits)
        free(g->part);
    free(g->logits);
    free(g->fed);
    free(g->segments);
    free(g->lists);
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

void qd_generator_expect(qd_generator *g, int64_t length)
{
    g->least = length;
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

/* Collective: rank 0 needs the logits of all tokens. */
static qd_status fetch_logits(qd_generator *g)
{
    qd_stream *stream = qd_device_compute_stream(qd_trainer_device(g->trainer));
    qd_comm *world = qd_trainer_world(g->trainer);
    QD_TRY(qd_copy(stream, g->part, qd_bound_kind(g->bound, QD_BUFFER_LOGITS), g->part_count * (int64_t)sizeof *g->part));
    QD_TRY(qd_stream_wait(stream));
    return g->part == g->logits ? QD_OK : qd_comm_all_gather_v(world, g->part, g->logits, g->lists, QD_F32, NULL);
}

/* Sets the rotary tables for a sequence of this length. With longrope its frequencies depend on
 * it. */
static qd_status turn(qd_generator *g, int64_t length)
{
    if (!qd_rope_switches(&qd_trainer_config(g->trainer)->model, g->length, length))
        return QD_OK;
    g->length = length;
    QD_TRY(qd_side_program_turn(g->bound, length));
    return g->pieces.bound ? qd_side_program_turn(g->pieces.bound, length) : QD_OK;
}

/* Collective: the same tokens on all ranks, one piece of them or a single one. */
static qd_status run_pass(qd_generator *g, const int32_t *tokens, int64_t count)
{
    const qd_config *c = qd_trainer_config(g->trainer);
    const stepper *s = count == 1 ? &g->one : &g->piece;
    qd_step_output output;
    g->next = tokens;
    const qd_step_input input = {.step = 1, .global_batch = 1, .past = g->past, .source = &g->source, .optim = &c->optimizer};
    QD_TRY(qd_interpret(s->interpreter, &input, &output));
    g->past += count;
    return fetch_logits(g);
}

/* What rank 0 tells the others: how many tokens to feed (0: the end), how many are in the cache,
 * how many there will be after the last piece, and which. */
enum { COUNT, PAST, LENGTH, TOKENS, ORDER = TOKENS + PIECE };

/* Rank 0 announces a pass. */
static qd_status announce(qd_generator *g, const int32_t *tokens, int64_t count)
{
    qd_comm *world = qd_trainer_world(g->trainer);
    int64_t order[ORDER] = {[COUNT] = count, [PAST] = g->past, [LENGTH] = g->length};
    if (qd_comm_size(world) == 1)
        return QD_OK;
    for (int64_t i = 0; i < count; i++)
        order[TOKENS + i] = tokens[i];
    return qd_comm_broadcast(world, order, ORDER, QD_I64, 0, NULL);
}

qd_status qd_generator_feed(qd_generator *g, const int32_t *tokens, int64_t count)
{
    if (count > qd_generator_room(g))
        return QD_FAIL(QD_USAGE, "%lld tokens do not fit: %lld of the context of %lld are used", (long long)count,
                       (long long)g->past, (long long)g->context);
    if (g->fed) {
        const int64_t all = g->past + count, length = all > g->least ? all : g->least;
        memcpy(g->fed + g->past, tokens, (size_t)count * sizeof *tokens);
        tokens = g->fed + g->past;
        if (qd_rope_switches(&qd_trainer_config(g->trainer)->model, g->length, length)) {
            tokens = g->fed; /* the keys in the cache have been rotated for the other length */
            count = all;
            g->past = 0;
        }
        QD_TRY(turn(g, length));
    }
    for (int64_t done = 0; done < count;) {
        int64_t rows = g->piece.interpreter && count - done >= PIECE ? PIECE : 1;
        QD_TRY(announce(g, tokens + done, rows));
        QD_TRY(run_pass(g, tokens + done, rows));
        done += rows;
    }
    return check_finite(g);
}

/* The other ranks feed what rank 0 announces. */
static qd_status follow(qd_generator *g)
{
    int64_t order[ORDER];
    int32_t tokens[PIECE];
    for (;;) {
        QD_TRY(qd_comm_broadcast(qd_trainer_world(g->trainer), order, ORDER, QD_I64, 0, NULL));
        if (order[COUNT] == 0)
            return QD_OK;
        g->past = order[PAST];
        QD_TRY(turn(g, order[LENGTH]));
        for (int64_t i = 0; i < order[COUNT]; i++)
            tokens[i] = (int32_t)order[TOKENS + i];
        QD_TRY(run_pass(g, tokens, order[COUNT]));
    }
}

qd_status qd_generator_lead(qd_generator *g, qd_status (*work)(void *context), void *context)
{
    qd_error_record record;
    if (qd_comm_rank(qd_trainer_world(g->trainer)) != 0)
        return follow(g);
    qd_status status = work(context);
    qd_error_keep(&record);
    qd_status released = announce(g, NULL, 0);
    if (status == QD_OK)
        return released;
    qd_error_put_back(&record); /* the first failure is the one to report */
    return status;
}

const float *qd_generator_logits(const qd_generator *g)
{
    return g->logits;
}
