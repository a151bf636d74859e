/* A seeded sample of all layouts of up to eight ranks: degrees of every axis, ZeRO stages, schedules, sequence
 * parallelism, recompute, when gradients are summed, how experts are laid out. Each against one rank within 1e-5, and
 * to the bit against the others with the same degrees of dp, cp, tp and ep. QUADRILLE_LAYOUTS=3000 test_layout_sample
 * takes more, QUADRILLE_SEED=2 others, QUADRILLE_DEVICE=cuda runs them on a GPU (to rounding). ctest: timeout 900
 * ctest: processors 2 */
#include "support/outcome.h"
#include "support/sample.h"

#include "base/rng.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#define RUN "train.optimizer=sgd train.lr=0.3 train.clip=0.8 train.schedule=constant train.steps=50 train.global_batch=8 run.threads=1 "

/* Five blocks on up to four stages, a vocabulary and a sequence that nothing divides; packed documents; dropout. */
static const struct {
    const char *words;
    int heads, experts;
    qd_random_tokens random;
} models[] = {
    {"model.layers=5 model.hidden=32 model.heads=4 model.kv_heads=2 model.ffn=56 model.vocab=1009 data.seq=15 ",
     4,
     0,
     {.seed = 1, .documents = 3}},
    {"model.arch=gpt2 model.layers=5 model.hidden=32 model.heads=4 model.vocab=67 data.seq=12 model.dropout=0.1 ",
     4,
     0,
     {.seed = 2, .ignored = 5}},
    {"model.layers=5 model.hidden=32 model.heads=4 model.kv_heads=4 model.ffn=48 model.vocab=67 data.seq=13 model.experts=8 "
     "model.experts_per_token=2 "
     "model.expert_ffn=24 model.shared_experts=1 model.first_dense=1 model.aux_loss=0.05 model.router_bias_rate=0.001 ",
     4,
     8,
     {.seed = 3}},
    /* Muon; what it leaves to AdamW has an eps that keeps rounding from being magnified. */
    {"model.layers=5 model.hidden=32 model.heads=4 model.kv_heads=4 model.ffn=48 model.vocab=67 data.seq=13 model.experts=8 "
     "model.experts_per_token=2 "
     "model.expert_ffn=24 train.optimizer=muon train.lr=2e-3 train.eps=1e-3 ",
     4,
     8,
     {.seed = 4}},
};
enum { MODELS = sizeof models / sizeof *models, KINDS = 256 };

static uint64_t seed, drawn;

static int draw(int below)
{
    return (int)qd_rng_below(qd_rng_key(seed, "layouts"), drawn++, (uint64_t)below);
}

static const char *choose(const char *const *list, int count)
{
    return list[draw(count)];
}
#define CHOOSE(...) choose((const char *const[]){__VA_ARGS__}, sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *))

/* A layout; `kind` gets what decides the bits. */
static void draw_layout(int *model, char *words, size_t size, char *kind, size_t kind_size)
{
    static const int degrees[] = {1, 2, 4};
    int tp, pp, dp, cp;
    do {
        tp = degrees[draw(3)];
        pp = degrees[draw(3)];
        dp = degrees[draw(3)];
        cp = degrees[draw(3)];
    } while (tp * pp * dp * cp > 8 || tp * pp * dp * cp == 1);
    *model = draw(MODELS);
    /* Experts fold the same ranks in their own way, and want the rows of sp. */
    int experts = models[*model].experts, ep = experts ? degrees[draw(3)] : 1, etp = experts ? degrees[draw(2)] : 1;
    if (tp * cp * dp % (ep * etp) != 0)
        ep = etp = 1;
    const char *sp = tp > 1 && !experts ? CHOOSE("parallel.sp=true ", "parallel.sp=false ") : "";
    const char *sync = CHOOSE("train.grad_sync=per_step ", "train.grad_sync=per_microbatch ");
    const char *micro = CHOOSE("train.micro_batch=1 ", "train.micro_batch=2 ");
    const char *schedule = pp == 1   ? ""
                           : pp == 2 ? CHOOSE("parallel.schedule=1f1b ", "parallel.schedule=gpipe ", "parallel.schedule=zb_h1 ",
                                              "parallel.schedule=interleaved ", "parallel.schedule=zb_v ",
                                              dp <= 2 ? "parallel.schedule=dualpipe_v " : "parallel.schedule=1f1b ")
                                     : CHOOSE("parallel.schedule=1f1b ", "parallel.schedule=gpipe ", "parallel.schedule=zb_h1 ");
    if (strstr(schedule, "dualpipe")) { /* wants four micro-batches on two ranks */
        micro = "train.micro_batch=1 ";
        schedule = dp > 2 ? "parallel.schedule=zb_v " : schedule;
    }
    /* Ulysses hands out heads: each rank of tp must have one for each of cp. */
    const char *mode = cp == 1 ? ""
                       : cp * tp <= models[*model].heads
                           ? CHOOSE("parallel.cp_mode=ring ", "parallel.cp_mode=gather ", "parallel.cp_mode=ulysses ")
                           : CHOOSE("parallel.cp_mode=ring ", "parallel.cp_mode=gather ");
    /* Half of the layouts with experts send rows once per node, of which the experts lie on two or four. */
    char nodes[64] = "";
    if (ep > 1 && strstr(sync, "microbatch"))
        snprintf(nodes, sizeof nodes, "parallel.dispatch=node parallel.nodes=%d ",
                 tp * pp * dp * cp / (etp * (ep == 4 && cp == 1 ? 2 : 1)));
    snprintf(kind, kind_size, "%d dp %d cp %d tp %d ep %d etp %d %s%s%s%s%s", *model, dp, cp, tp, ep, etp, mode, sp,
             dp * cp > 1 ? sync : "", micro, nodes[0] ? "by node" : "");
    int zero = draw(4);
    const char *again = CHOOSE("", "train.recompute=selective ", "train.recompute=full ", "train.recompute=full train.recompute_layers=2 ");
    const char *overlap = CHOOSE("", "parallel.bucket_mb=0.01 ", "parallel.overlap=false ");
    const char *split = CHOOSE("", "parallel.split_backward=true "), *pieces = tp > 1 ? CHOOSE("", "parallel.tp_overlap=3 ") : "";
    /* Groups of two keep parameters between the passes, where they have all experts. */
    const char *kept =
        zero == 3 && overlap[0] == '\0' && dp * cp % 2 == 0 && 2 * tp % (ep * etp) == 0 ? "parallel.reshard_after_forward=2 " : "";
    snprintf(
        words, size,
        RUN
        "%sparallel.ranks=%d parallel.tp=%d parallel.pp=%d parallel.dp=%d parallel.cp=%d parallel.ep=%d parallel.etp=%d parallel.zero=%d "
        "%s%s%s%s%s%s%s%s%s%s%s",
        models[*model].words, tp * pp * dp * cp, tp, pp, dp, cp, ep, etp, zero, mode, sp, sync, micro, nodes, schedule, again, overlap,
        split, pieces, kept);
}

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
    seed = (uint64_t)number("QUADRILLE_SEED", 1);
    trained_ok(qd_arena_create(&arena));
    for (int m = 0; m < MODELS; m++) {
        char words[1024];
        qd_program *program;
        snprintf(words, sizeof words, RUN "%s", models[m].words);
        qd_config config = layout_config(words);
        trained_ok(qd_config_build(&config, 0, arena, &program));
        ledgers[m] = program->ledger;
        one[m] = outcome_run(words, models[m].random);
    }
    for (int64_t l = 0; l < count; l++) {
        char words[1200], kind[128];
        int model, k = 0;
        draw_layout(&model, words, sizeof words, kind, sizeof kind);
        if (getenv("QUADRILLE_SHOW"))
            print_message("%s\n", words);
        outcome many = outcome_run(words, models[model].random);
        outcome_compare(words, ledgers[model], &many, &one[model]);
        while (k < known && strcmp(kinds[k], kind) != 0)
            k++;
        if (k < known) {
            if (on_cpu) /* products of GPUs are chosen by the alignment of their addresses too, which differs between layouts */
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

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(layouts_agree)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
