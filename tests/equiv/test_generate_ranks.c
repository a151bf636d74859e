/* Generation over several ranks gives the tokens of one rank: a saved model under tp, pp and ep,
 * and a model that is being trained, on its own layout. */
#include "support/layout.h"
#include "support/scratch.h"
#include "app/generate.h"
#include "app/model_ranks.h"
#include "train/exec/state.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"

enum { VOCAB = 53, PROMPT = 37, TOKENS = 12 }; /* a piece of 32 and 5 single tokens */

/* Tokens and the last logits of greedy generation. */
typedef struct written {
    int32_t tokens[TOKENS];
    float logits[VOCAB];
} written;

typedef struct writing {
    qd_generator *generator;
    written *out; /* of rank 0 */
} writing;

static qd_status write_tokens(void *context)
{
    const writing *w = context;
    int32_t prompt[PROMPT];
    for (int i = 0; i < PROMPT; i++)
        prompt[i] = (i * i + 3 * i) % VOCAB;
    qd_generator_forget(w->generator, 0);
    QD_TRY(qd_generator_feed(w->generator, prompt, PROMPT));
    for (int i = 0; i < TOKENS; i++) {
        const float *logits = qd_generator_logits(w->generator);
        int32_t best = 0;
        for (int32_t t = 1; t < VOCAB; t++)
            best = logits[t] > logits[best] ? t : best;
        w->out->tokens[i] = best;
        QD_TRY(qd_generator_feed(w->generator, &best, 1));
    }
    memcpy(w->out->logits, qd_generator_logits(w->generator), sizeof w->out->logits);
    return QD_OK;
}

static void compare(const char *what, const written *one, const written *many, double tolerance)
{
    for (int i = 0; i < VOCAB; i++)
        if (!(fabs((double)one->logits[i] - (double)many->logits[i]) <= tolerance))
            fail_msg("%s: logit %d is %.9g, on one rank %.9g", what, i, (double)many->logits[i], (double)one->logits[i]);
    for (int i = 0; i < TOKENS; i++)
        if (one->tokens[i] != many->tokens[i])
            fail_msg("%s: token %d is %d, on one rank %d", what, i, many->tokens[i], one->tokens[i]);
}

static qd_status fill(void *context, int64_t first, int64_t count, int64_t seq, int32_t *tokens, int32_t *targets, int32_t *doc_start)
{
    (void)context;
    for (int64_t i = 0; i < count * seq; i++) {
        int64_t at = first * 7 + i / seq + i % seq;
        tokens[i] = (int32_t)((at * at + at) % VOCAB);
        targets[i] = (int32_t)(((at + 1) * (at + 1) + at + 1) % VOCAB);
        doc_start[i] = 0;
    }
    return QD_OK;
}

typedef struct saved {
    char folder[80];
    const char *config;
} saved;

static qd_status save(qd_trainer *trainer, qd_comm *world, void *argument)
{
    const saved *s = argument;
    return qd_state_save(trainer, world, s->folder, s->config, 0);
}

static qd_status write_beside(qd_trainer *trainer, qd_comm *world, void *argument)
{
    writing w = {.out = argument};
    (void)world;
    QD_TRY(qd_generator_create(trainer, 64, &w.generator));
    qd_status status = qd_generator_lead(w.generator, write_tokens, &w);
    qd_generator_destroy(w.generator);
    return status;
}

/* Trains three steps and saves a run folder. between: what the ranks write between steps, before
 * another step, which that must not disturb; NULL: nothing. */
static void train_and_save(const char *words, written *between)
{
    qd_options *options = layout_options(words);
    char *yaml;
    ok(qd_options_to_yaml(options, &yaml));
    qd_config config = layout_config(words);
    qd_batch_source source = {.fill = fill};
    qd_team *team;
    ok(qd_team_create(&config, &source, &team));
    for (int s = 0; s < 3; s++) {
        qd_step_output out;
        ok(qd_team_step(team, &out));
        if (between)
            ok(qd_team_call(team, write_beside, between));
    }
    saved where = {.config = yaml};
    snprintf(where.folder, sizeof where.folder, "%s/checkpoints", scratch_folder());
    ok(qd_team_call(team, save, &where));
    qd_team_destroy(team);
    qd_options_destroy(options);
    free(yaml);
}

static qd_status write_on_rank(void *context, const qd_model_source *model)
{
    qd_model_generator g;
    writing w = {.out = context};
    qd_status status = qd_model_generator_open(model, 64, NULL, 1, &g);
    w.generator = g.generator;
    if (status == QD_OK)
        status = qd_generator_lead(g.generator, write_tokens, &w);
    qd_model_generator_close(&g);
    return status;
}

static written write_with(qd_model_ranks ranks)
{
    written out;
    ok(qd_model_ranks_call(&ranks, &(qd_model_source){.path = scratch_folder()}, write_on_rank, &out));
    return out;
}

#define COMMON "model.hidden=32 model.heads=4 model.vocab=53 data.seq=64 train.global_batch=4 run.threads=1 train.lr=3e-3 "
#define GPT2 "model.arch=gpt2 model.layers=3 " COMMON
#define LLAMA "model.layers=3 model.kv_heads=2 " COMMON
#define EXPERTS "model.layers=2 model.kv_heads=2 model.experts=4 model.experts_per_token=2 model.expert_ffn=24 " COMMON
#define LATENT \
    "model.arch=deepseek model.layers=2 model.kv_lora_rank=20 model.qk_nope_head_dim=10 model.qk_rope_head_dim=6 " \
    "model.v_head_dim=12 " COMMON

/* The text grows beyond the original length; sequences in training are longer. */
#define LONGROPE \
    "model.rope_scaling=longrope model.rope_original_seq=20 model.rope_short_factor=1,1.5,2,3 model.rope_long_factor=1,4,6,9 "

static void ranks_write_the_same(void **state)
{
    (void)state;
    static const struct {
        const char *model;
        qd_model_ranks ranks[5];
    } cases[] = {
        {GPT2, {{.tp = 2}, {.pp = 2}, {.tp = 4}, {.tp = 2, .pp = 3}}},
        {LLAMA "model.tied=true model.window=9 model.full_every=2 ", {{.tp = 2}, {.pp = 2}, {.tp = 4, .pp = 2}, {.pp = 5}}},
        {LLAMA "train.precision=bf16 model.logit_softcap=5 ", {{.tp = 2}, {.pp = 2}}},
        {LLAMA LONGROPE, {{.tp = 2}, {.pp = 2}}},
        {LATENT, {{.tp = 2}, {.pp = 2}, {.tp = 4}}},
        {EXPERTS "model.shared_experts=1 ", {{.ep = 2}, {.tp = 2}, {.pp = 2, .ep = 2}, {.tp = 2, .ep = 4}, {.tp = 2, .ep = 2}}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        train_and_save(cases[i].model, NULL);
        written one = write_with((qd_model_ranks){.tp = 1});
        for (int k = 0; k < 5; k++) {
            qd_model_ranks r = cases[i].ranks[k];
            char what[300];
            if (r.tp + r.pp + r.ep == 0)
                break;
            written many = write_with(r);
            snprintf(what, sizeof what, "%s tp %d pp %d ep %d", cases[i].model, r.tp, r.pp, r.ep);
            compare(what, &one, &many, strstr(cases[i].model, "bf16") ? 0.1 : 1e-4);
        }
    }
}

static void a_layout_that_trains_writes_too(void **state)
{
    (void)state;
    static const char *const runs[] = {
        GPT2 "parallel.ranks=2 parallel.zero=3 ",
        LLAMA "parallel.ranks=4 parallel.tp=2 parallel.cp=2 parallel.zero=1 ",
        LLAMA "parallel.ranks=2 parallel.pp=2 parallel.schedule=interleaved train.micro_batch=1 model.tied=true ",
        LLAMA "parallel.ranks=2 parallel.pp=2 parallel.schedule=dualpipe_v train.micro_batch=1 ",
        LLAMA LONGROPE "parallel.ranks=2 parallel.zero=3 ",
        EXPERTS "parallel.ranks=4 parallel.tp=2 parallel.ep=4 parallel.zero=3 model.dropout=0.1 ",
        LLAMA "parallel.ranks=4 parallel.cp=4 parallel.cp_mode=ulysses parallel.zero=3 model.kv_heads=4 ",
    };
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        written one, between;
        train_and_save(runs[i], &between);
        one = write_with((qd_model_ranks){.tp = 1});
        compare(runs[i], &one, &between, 1e-4);
        train_and_save(runs[i], NULL); /* the weights are the same without */
        written without = write_with((qd_model_ranks){.tp = 1});
        assert_memory_equal(&without, &one, sizeof one);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(ranks_write_the_same, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(a_layout_that_trains_writes_too, scratch_setup, scratch_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
