/* QK-Clip (train.qk_clip): ZeRO stages, recomputation and storage of master weights give the same
 * bits, as does offloaded optimizer state; layouts give the results of one rank, a rescaled head
 * has the score of the limit, a run whose scores grow stays near it, and what it is not for is
 * refused. QUADRILLE_DEVICE=cuda runs all of it on a GPU, except the first: there ZeRO stages with
 * Muon agree to rounding only.
 * ctest: timeout 300 */
#include "support/outcome.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#define LLAMA                                                                                                     \
    "model.layers=2 model.hidden=32 model.heads=4 model.kv_heads=2 model.vocab=64 model.qkv_bias=true "             \
    "model.init_std=0.2 data.seq=16 "
#define GPT2 "model.arch=gpt2 model.layers=2 model.hidden=24 model.heads=4 model.vocab=64 model.init_std=0.2 data.seq=16 "
#define LATENT                                                                                                    \
    "model.arch=deepseek model.layers=2 model.hidden=32 model.heads=4 model.q_lora_rank=12 model.kv_lora_rank=10 " \
    "model.qk_nope_head_dim=6 model.qk_rope_head_dim=4 model.v_head_dim=8 model.vocab=64 model.init_std=0.2 data.seq=16 "
#define MTP LATENT "model.mtp_modules=2 "
#define RUN "train.lr=1e-3 train.schedule=constant train.steps=50 run.threads=1 train.global_batch=4 train.qk_clip=0.5 "
#define MUON "train.optimizer=muon "

static const char *const stages[] = {
    "parallel.zero=1", "parallel.zero=2", "parallel.zero=3", "train.recompute=full parallel.zero=1",
    "train.recompute=selective parallel.zero=3 parallel.prefetch=1", "parallel.overlap=false run.threads=2",
};

static void stages_give_the_same_bits(void **state)
{
    (void)state;
    if (getenv("QUADRILLE_DEVICE"))
        skip();
    TRAINED_COMPARE(LLAMA RUN "parallel.ranks=4 ", stages, 8, 3, .seed = 1);
    TRAINED_COMPARE(LATENT RUN MUON "parallel.ranks=3 train.global_batch=6 train.micro_batch=1 train.grad_sync=per_step ", stages, 8, 3,
                    .seed = 2);
    TRAINED_COMPARE(MTP RUN MUON "parallel.ranks=2 train.micro_batch=1 train.grad_sync=per_step ", stages, 8, 3, .seed = 5);
    TRAINED_COMPARE(GPT2 RUN "parallel.ranks=2 train.precision=bf16 ", stages, 8, 3, .seed = 3);
    TRAINED_COMPARE(LLAMA RUN "parallel.ranks=2 train.precision=bf16 train.master=split ", stages, 8, 3, .seed = 4);
}

/* Chunks of optimizer state that are smaller than a weight, or hold several. */
static const char *const places[] = {
    "train.offload=optimizer ", "train.offload=optimizer train.offload_chunk_mb=0.001 parallel.zero=2 ",
    "train.offload=optimizer train.offload_chunk_mb=0.01 parallel.overlap=false ",
};

static void offload_gives_the_same_bits(void **state)
{
    (void)state;
    TRAINED_COMPARE(LLAMA RUN "parallel.ranks=2 parallel.zero=1 train.precision=bf16 ", places, 8, 3, .seed = 8);
    TRAINED_COMPARE(LATENT RUN MUON "parallel.ranks=2 parallel.zero=1 train.precision=bf16 ", places, 8, 3, .seed = 9);
    TRAINED_COMPARE(MTP RUN MUON "parallel.ranks=2 parallel.pp=2 train.micro_batch=1 ", places, 8, 3, .seed = 10);
    TRAINED_COMPARE(GPT2 RUN "parallel.ranks=2 parallel.tp=2 train.precision=bf16 ", places, 8, 3, .seed = 11);
    trained_plan_equals_run(LATENT RUN MUON "parallel.ranks=2 train.precision=bf16 train.offload=optimizer ");
}

static const char *const layouts[] = {
    "parallel.ranks=4 parallel.tp=4 ", /* neighbours share a key head */
    "parallel.ranks=2 parallel.tp=2 parallel.sp=false train.micro_batch=1 ",
    "parallel.ranks=2 parallel.cp=2 ",
    "parallel.ranks=4 parallel.cp=2 parallel.tp=2 parallel.cp_mode=ulysses train.micro_batch=2 ",
    "parallel.ranks=2 parallel.cp=2 parallel.cp_mode=gather train.recompute=full ",
    "parallel.ranks=4 parallel.pp=2 parallel.zero=2 parallel.schedule=zb_h1 train.micro_batch=1 ",
};
enum { LAYOUTS = sizeof layouts / sizeof *layouts };

/* Gradients of key biases are close to 0: a larger epsilon keeps AdamW from turning their rounding
 * into weights. */
static void layouts_give_the_results_of_one_rank(void **state)
{
    (void)state;
    outcome_compare_all(LLAMA RUN "train.eps=1e-3 ", (qd_random_tokens){.seed = 5, .documents = 3}, layouts, LAYOUTS);
    outcome_compare_all(LATENT RUN MUON, (qd_random_tokens){.seed = 6}, layouts, LAYOUTS);
    outcome_compare_all(MTP RUN MUON, (qd_random_tokens){.seed = 7, .documents = 3}, layouts, LAYOUTS);
}

static bool limits_scores(const qd_action *a)
{
    return a->kind == QD_ACTION_MAXIMA || a->kind == QD_ACTION_CLIP;
}

static void every_action_matters(void **state)
{
    (void)state;
    size_t met = 0;
    int tried = 0;
    trained_actions_matter(LLAMA RUN "parallel.ranks=2 ", 3, limits_scores, 1, &met, &tried);
    assert_int_equal(met, 3);
    trained_actions_matter(GPT2 "model.layers=1 " RUN "parallel.ranks=2 train.precision=bf16 train.offload=optimizer ", 3,
                           limits_scores, 1, &met, &tried);
    assert_true(met >= 2);
    trained_plan_equals_run(LLAMA RUN "parallel.ranks=4 parallel.zero=2 ");
}

/* The same tokens in every step. */
static qd_status fill_alike(void *context, int64_t first, int64_t count, int64_t seq, int32_t *tokens, int32_t *targets,
                            int32_t *doc_start)
{
    (void)context;
    (void)first;
    for (int64_t i = 0; i < count * seq; i++) {
        tokens[i] = (int32_t)(i * i * 7 + i * 3) % 61;
        targets[i] = (int32_t)(i * 5 + 11) % 61;
        doc_start[i] = 0;
    }
    return QD_OK;
}

static void largest_scores(const char *words, int steps, double *scores)
{
    qd_config config = layout_config(words);
    qd_batch_source source = {.fill = fill_alike};
    qd_team *team;
    trained_ok(qd_team_create(&config, &source, &team));
    for (int i = 0; i < steps; i++) {
        qd_step_output out;
        trained_ok(qd_team_step(team, &out));
        scores[i] = out.max_score;
    }
    qd_team_destroy(team);
}

/* Without an update the second step has the scores of the rescaled weights. One layer: a second one
 * would read what the first changes. */
static void rescaled_heads_have_the_score_of_the_limit(void **state)
{
    (void)state;
    static const char *const models[] = {GPT2, LLAMA, LATENT, LLAMA "model.kv_heads=1 train.precision=bf16 ",
                                         LATENT "train.precision=bf16 train.master=split ",
                                         LLAMA "train.precision=bf16 train.offload=optimizer "};
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        char words[800];
        double scores[2];
        snprintf(words, sizeof words, "%s model.layers=1 " RUN "train.lr=0 train.weight_decay=0 parallel.ranks=2 parallel.tp=2 ",
                 models[i]);
        largest_scores(words, 2, scores);
        double tolerance = strstr(words, "bf16") ? 2e-2 : 1e-5;
        if (!(scores[0] > 0.6 && fabs(scores[1] - 0.5) <= 0.5 * tolerance))
            fail_msg("%s: largest scores %.9g, then %.9g", words, scores[0], scores[1]);
    }
}

/* A learning rate that makes scores grow: the limit itself may be passed by what one step adds. */
static void scores_that_grow_stay_at_the_limit(void **state)
{
    (void)state;
    enum { STEPS = 400 };
    double free_[STEPS], limited[STEPS], most = 0.0, highest = 0.0;
#define GROWS                                                                                                                       \
    GPT2 MUON "train.global_batch=4 train.schedule=constant train.lr=0.01 train.muon_lr=0.02 train.weight_decay=0 run.threads=1 " \
              "train.steps=400 "
    largest_scores(GROWS "train.qk_clip=1e9 ", STEPS, free_);
    largest_scores(GROWS "train.qk_clip=10 ", STEPS, limited);
    for (int i = 0; i < STEPS; i++) {
        most = fmax(most, free_[i]);
        highest = fmax(highest, limited[i]);
    }
    print_message("largest score %.1f without a limit, %.1f with a limit of 10\n", most, highest);
    assert_true(most > 30.0);
    assert_true(highest < 11.0);
}

static void what_it_is_not_for_is_refused(void **state)
{
    (void)state;
    static const struct {
        const char *words, *named;
    } cases[] = {
        {LLAMA "model.qk_norm=true ", "model.qk_norm"},       {LLAMA "model.score_softcap=20 ", "model.score_softcap"},
        {LLAMA "model.clip_qkv=4 ", "model.clip_qkv"},        {LLAMA "lora.rank=2 ", "lora.rank"},
        {LLAMA "data.format=preferences ", "data.format"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char words[800];
        snprintf(words, sizeof words, "%s" RUN, cases[i].words);
        qd_config config = layout_config(words);
        qd_arena *arena;
        qd_program *program;
        trained_ok(qd_arena_create(&arena));
        if (qd_config_build(&config, 0, arena, &program) == QD_OK)
            fail_msg("%s: not refused", words);
        if (!strstr(qd_error_message(), "train.qk_clip") || !strstr(qd_error_message(), cases[i].named))
            fail_msg("%s: %s", words, qd_error_message());
        qd_arena_destroy(arena);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stages_give_the_same_bits),
        cmocka_unit_test(offload_gives_the_same_bits),
        cmocka_unit_test(layouts_give_the_results_of_one_rank),
        cmocka_unit_test(every_action_matters),
        cmocka_unit_test(rescaled_heads_have_the_score_of_the_limit),
        cmocka_unit_test(scores_that_grow_stay_at_the_limit),
        cmocka_unit_test(what_it_is_not_for_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
