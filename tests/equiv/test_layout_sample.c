/* A seeded sample of all layouts of up to eight ranks: degrees of every axis, ZeRO stages,
 * schedules, sequence parallelism, recompute, gradient synchronization, expert placement. Each is
 * compared with one rank within 1e-5, and bit by bit with those of the same dp, cp, tp and ep. Then
 * six layouts of each family with other biases or rotary embeddings, with the proof of their
 * gradients, and one with Muon and offloaded optimizer state. QUADRILLE_LAYOUTS=3000
 * test_layout_sample draws more, QUADRILLE_FAMILY_LAYOUTS=40 more of each family (of one:
 * QUADRILLE_FAMILY=3; without the first six: QUADRILLE_FAMILY_FROM=6), QUADRILLE_SEED=2 others,
 * QUADRILLE_DEVICE=cuda runs them on a GPU (to rounding).
 * ctest: timeout 900
 * ctest: processors 2 */
#include "support/layout_sample.h"
#include "support/outcome.h"
#include "support/sample.h"

#include "spec/proof/proof.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

/* Five blocks on up to four stages, a vocabulary and a sequence length without divisors; packed
 * documents; dropout. */
static const layout_model models[] = {
    {"model.layers=5 model.hidden=32 model.heads=4 model.kv_heads=2 model.ffn=56 model.vocab=1009 data.seq=15 ",
     4,
     0},
    {"model.arch=gpt2 model.layers=5 model.hidden=32 model.heads=4 model.vocab=67 data.seq=12 model.dropout=0.1 ",
     4,
     0},
    {"model.layers=5 model.hidden=32 model.heads=4 model.kv_heads=4 model.ffn=48 model.vocab=67 data.seq=13 model.experts=8 "
     "model.experts_per_token=2 "
     "model.expert_ffn=24 model.shared_experts=1 model.first_dense=1 model.aux_loss=0.05 model.router_bias_rate=0.001 ",
     4,
     8},
    /* Muon; the parameters that it leaves to AdamW use an eps that keeps rounding from being
     * magnified. */
    {"model.layers=5 model.hidden=32 model.heads=4 model.kv_heads=4 model.ffn=48 model.vocab=67 data.seq=13 model.experts=8 "
     "model.experts_per_token=2 "
     "model.expert_ffn=24 train.optimizer=muon train.lr=2e-3 train.eps=1e-3 ",
     4,
     8},
};
static const qd_random_tokens random_tokens[] = {{.seed = 1, .documents = 3}, {.seed = 2, .ignored = 5}, {.seed = 3}, {.seed = 4}};
enum { MODELS = sizeof models / sizeof *models, KINDS = 256 };

static void same_bits(const char *words, const outcome *a, const outcome *b)
{
    for (int s = 0; s < OUTCOME_STEPS; s++)
        if (a->losses[s] != b->losses[s] || a->norms[s] != b->norms[s])
            fail_msg("%s: step %d: loss %.17g against %.17g, norm %.17g against %.17g of the same degrees", words, s + 1, a->losses[s],
                     b->losses[s], a->norms[s], b->norms[s]);
    if (memcmp(a->weights, b->weights, (size_t)a->count * sizeof(float)) != 0)
        fail_msg("%s: weights differ from those of the same degrees", words);
}

static int64_t number(const char *name, int64_t otherwise)
{
    const char *text = getenv(name);
    return text ? strtoll(text, NULL, 10) : otherwise;
}

static void layouts_agree(void **state)
{
    (void)state;
    int64_t count = number("QUADRILLE_LAYOUTS", sample_count(300, QD_TEST_SANITIZED == 2 ? 12 : 24));
    outcome one[MODELS], first[KINDS];
    char kinds[KINDS][128];
    int known = 0, repeated = 0;
    bool on_cpu = getenv("QUADRILLE_DEVICE") == NULL;
    qd_arena *arena;
    const qd_ledger *ledgers[MODELS];
    layout_sample sample = {.seed = (uint64_t)number("QUADRILLE_SEED", 1)};
    trained_ok(qd_arena_create(&arena));
    for (int m = 0; m < MODELS; m++) {
        char words[1024];
        qd_program *program;
        snprintf(words, sizeof words, LAYOUT_SAMPLE_RUN "%s", models[m].words);
        qd_config config = layout_config(words);
        trained_ok(qd_config_build(&config, 0, arena, &program));
        ledgers[m] = program->ledger;
        one[m] = outcome_run(words, random_tokens[m]);
    }
    for (int64_t l = 0; l < count; l++) {
        char words[1200], kind[128];
        int model = layout_sample_draw(&sample, models, MODELS, words, sizeof words, kind, sizeof kind), k = 0;
        if (getenv("QUADRILLE_SHOW"))
            print_message("%s\n", words);
        outcome many = outcome_run(words, random_tokens[model]);
        outcome_compare(words, ledgers[model], &many, &one[model]);
        while (k < known && strcmp(kinds[k], kind) != 0)
            k++;
        if (k < known) {
            if (on_cpu) /* GEMM algorithms on GPUs also depend on the alignment of addresses, which differs between layouts */
                same_bits(words, &many, &first[k]);
            repeated++;
        } else if (known < KINDS) {
            snprintf(kinds[known], sizeof kinds[known], "%s", kind);
            first[known++] = many;
            continue;
        }
        outcome_free(&many);
    }
    assert_true(repeated > 0 || count < 100);
    for (int k = 0; k < known; k++)
        outcome_free(&first[k]);
    for (int m = 0; m < MODELS; m++)
        outcome_free(&one[m]);
    qd_arena_destroy(arena);
}

/* The programs of all ranks agree with each other, and their gradients are proved. */
static void prove(const char *words, const qd_config *config)
{
    qd_arena *arena;
    const qd_program **programs;
    trained_ok(qd_arena_create(&arena));
    trained_ok(qd_config_build_all(config, arena, &programs));
    const qd_mesh *mesh = &programs[0]->ledger->mesh;
    if (qd_check_programs(mesh, programs) != QD_OK || qd_prove_programs(mesh, programs, NULL) != QD_OK)
        fail_msg("%s: %s", words, qd_error_message());
    qd_arena_destroy(arena);
}

static void families_agree(void **state)
{
    (void)state;
    int64_t count = number("QUADRILLE_FAMILY_LAYOUTS", sample_count(6, QD_TEST_SANITIZED == 2 ? 1 : 2));
    int64_t only = number("QUADRILLE_FAMILY", -1); /* index in layout_families; -1: all */
    int64_t from = number("QUADRILLE_FAMILY_FROM", 0); /* layouts of each family that are drawn, but not trained */
    for (int f = only < 0 ? 0 : (int)only; f < (only < 0 ? LAYOUT_FAMILIES : (int)only + 1); f++) {
        char words[1200], kind[128];
        const qd_random_tokens tokens = {.seed = (uint64_t)f + 5, .documents = f % 2 ? 3 : 0};
        layout_sample sample = {.seed = (uint64_t)(number("QUADRILLE_SEED", 1) * LAYOUT_FAMILIES + f)};
        qd_arena *arena;
        qd_program *program;
        trained_ok(qd_arena_create(&arena));
        snprintf(words, sizeof words, LAYOUT_SAMPLE_RUN "%s", layout_families[f].words);
        qd_config config = layout_config(words);
        trained_ok(qd_config_build(&config, 0, arena, &program));
        outcome one = outcome_run(words, tokens);
        for (int64_t l = 0; l < count; l++) {
            layout_sample_draw(&sample, &layout_families[f], 1, words, sizeof words, kind, sizeof kind);
            if (l < from)
                continue;
            if (getenv("QUADRILLE_SHOW"))
                print_message("%s\n", words);
            config = layout_config(words);
            prove(words, &config);
            outcome many = outcome_run(words, tokens);
            outcome_compare(words, program->ledger, &many, &one);
            outcome_free(&many);
        }
        outcome_free(&one);
        qd_arena_destroy(arena);
    }
}

/* Each family with Muon, and with optimizer state in host memory, which changes no bit. */
static void families_with_muon_and_offload(void **state)
{
    (void)state;
    static const char *const layouts[] = {"parallel.ranks=4 parallel.tp=2 parallel.zero=3 ",
                                          "parallel.ranks=4 parallel.pp=2 parallel.cp=2 parallel.zero=1 train.micro_batch=1 "};
    int64_t only = number("QUADRILLE_FAMILY", -1), step = QD_TEST_SANITIZED ? 4 : 1;
    if (only >= 0 || getenv("QUADRILLE_DEVICE"))
        return;
    for (int64_t f = 0; f < LAYOUT_FAMILIES; f += step) {
        char words[1200], offloaded[1300];
        const qd_random_tokens tokens = {.seed = (uint64_t)f + 5, .documents = f % 2 ? 3 : 0};
        qd_arena *arena;
        qd_program *program;
        trained_ok(qd_arena_create(&arena));
        snprintf(words, sizeof words, LAYOUT_SAMPLE_RUN "%strain.optimizer=muon train.lr=2e-3 train.eps=1e-3 ", layout_families[f].words);
        qd_config config = layout_config(words);
        trained_ok(qd_config_build(&config, 0, arena, &program));
        outcome one = outcome_run(words, tokens);
        snprintf(words, sizeof words, LAYOUT_SAMPLE_RUN "%strain.optimizer=muon train.lr=2e-3 train.eps=1e-3 %s", layout_families[f].words,
                 layouts[f % 2]);
        snprintf(offloaded, sizeof offloaded, "%strain.offload=optimizer train.offload_chunk_mb=0.001 ", words);
        config = layout_config(words);
        prove(words, &config);
        outcome many = outcome_run(words, tokens), moved = outcome_run(offloaded, tokens);
        outcome_compare(words, program->ledger, &many, &one);
        same_bits(offloaded, &moved, &many);
        outcome_free(&moved);
        outcome_free(&many);
        outcome_free(&one);
        qd_arena_destroy(arena);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(layouts_agree), cmocka_unit_test(families_agree),
                                       cmocka_unit_test(families_with_muon_and_offload)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
