/* fp8 training: what must change no bit, layouts against one rank, resuming, and programs that the
 * proof refuses. QUADRILLE_DEVICE=cuda runs the random layouts on a GPU.
 * ctest: timeout 300
 * ctest: processors 2 */
#include "spec/config/fit.h"
#include "spec/proof/proof.h"
#include "support/sample.h"
#include "support/scratch.h"
#include "support/trained.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#define FP8 "train.precision=fp8 train.global_batch=8 train.lr=1e-3 train.schedule=constant train.steps=50 run.threads=1 "
#define LLAMA "model.layers=3 model.hidden=64 model.heads=4 model.kv_heads=4 model.ffn=128 model.vocab=101 data.seq=32 "
#define GPT2 "model.arch=gpt2 model.layers=3 model.hidden=64 model.heads=4 model.vocab=67 data.seq=32 "
#define OLMO2 "model.arch=olmo2 model.layers=3 model.hidden=64 model.heads=4 model.ffn=128 model.vocab=67 data.seq=32 "
#define MOE                                                                                                                            \
    "model.layers=3 model.hidden=64 model.heads=4 model.kv_heads=4 model.ffn=128 model.vocab=67 data.seq=32 model.experts=4 "          \
    "model.experts_per_token=2 model.expert_ffn=48 model.shared_experts=1 model.shared_gate=true model.first_dense=1 "
#define LATENT                                                                                                                         \
    "model.arch=deepseek model.layers=2 model.hidden=64 model.heads=4 model.ffn=128 model.vocab=67 data.seq=32 model.q_lora_rank=32 "  \
    "model.kv_lora_rank=32 model.qk_nope_head_dim=16 model.qk_rope_head_dim=16 model.v_head_dim=16 "

static void same_bits(void **state)
{
    (void)state;
    static const char *const one[] = {"train.recompute=selective",
                                      "train.recompute=full",
                                      "parallel.split_backward=true",
                                      "parallel.split_backward=true train.recompute=full",
                                      "run.threads=3"};
    static const char *const swiglu[] = {"train.swiglu=again", "train.swiglu=again train.recompute=selective parallel.split_backward=true"};
    static const char *const two[] = {"parallel.zero=1", "parallel.zero=2 train.grad_sync=per_step",
                                      "parallel.zero=3 parallel.prefetch=1 train.grad_sync=per_step", "parallel.overlap=false",
                                      "parallel.bucket_mb=0.01", "train.offload=optimizer"};
    TRAINED_COMPARE(LLAMA FP8 "train.micro_batch=4 ", one, 4, 2, .seed = 1, .documents = 3);
    TRAINED_COMPARE(LLAMA FP8, swiglu, 4, 2, .seed = 1);
    TRAINED_COMPARE(GPT2 FP8 "model.dropout=0.1 fp8.grad=e4m3 ", one, 4, 2, .seed = 2);
    TRAINED_COMPARE(LLAMA FP8 "parallel.ranks=2 train.micro_batch=2 ", two, 4, 2, .seed = 3);
    static const char *const recipes[] = {"train.recompute=full parallel.split_backward=true", "run.threads=3"};
    TRAINED_COMPARE(GPT2 FP8 "train.micro_batch=4 fp8.recipe=row ", recipes, 3, 2, .seed = 4);
    TRAINED_COMPARE(LLAMA FP8 "train.micro_batch=4 fp8.recipe=block fp8.grad=e4m3 ", recipes, 3, 2, .seed = 4);
}

/* The largest relative difference of losses. */
static double apart(const trained *a, const trained *b)
{
    double most = 0.0;
    for (int s = 0; s < a->steps; s++)
        most = fmax(most, fabs(a->losses[s] / b->losses[s] - 1.0));
    return most;
}

static void prove(const char *words)
{
    const qd_config config = layout_config(words);
    const qd_program **programs;
    qd_arena *arena;
    trained_ok(qd_arena_create(&arena));
    trained_ok(qd_config_build_all(&config, arena, &programs));
    trained_ok(qd_check_programs(&programs[0]->ledger->mesh, programs));
    trained_ok(qd_prove_programs(&programs[0]->ledger->mesh, programs, NULL));
    qd_arena_destroy(arena);
}

/* Scales are those of a rank's own part of a tensor, and powers of two, so they hardly matter. What
 * differs is the rounding of bf16 sums, which also moves values across the midpoints of fp8: over
 * eight steps losses differ by up to 4.5e-4 (in bf16 by up to 9e-5). */
static void layouts(void **state)
{
    (void)state;
    static const struct {
        const char *model;
        const char *layouts[6];
    } cases[] = {
        {LLAMA, {"parallel.ranks=2", "parallel.ranks=2 parallel.tp=2", "parallel.ranks=4 parallel.tp=4 parallel.sp=false",
                 "parallel.ranks=2 parallel.cp=2", "parallel.ranks=3 parallel.pp=3",
                 "parallel.ranks=4 parallel.tp=2 parallel.zero=3 train.micro_batch=2 train.recompute=full"}},
        {GPT2, {"parallel.ranks=2 parallel.tp=2", "parallel.ranks=2 parallel.pp=2 train.micro_batch=2 parallel.schedule=zb_h1"}},
        {OLMO2, {"parallel.ranks=2 parallel.tp=2", "parallel.ranks=2 parallel.tp=2 parallel.sp=false train.recompute=selective"}},
        {MOE, {"parallel.ranks=2 parallel.ep=2", "parallel.ranks=2 parallel.tp=2"}},
        {LATENT, {"parallel.ranks=2 parallel.tp=2"}},
        {LLAMA "fp8.recipe=row ", {"parallel.ranks=2 parallel.tp=2", "parallel.ranks=2 parallel.cp=2 parallel.zero=3"}},
        {LLAMA "fp8.recipe=block ", {"parallel.ranks=2 parallel.tp=2", "parallel.ranks=2 parallel.zero=3"}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char words[1024];
        snprintf(words, sizeof words, "%s" FP8, cases[i].model);
        int steps = sample_count(8, 3);
        prove(words);
        trained one = trained_run(words, steps, (qd_random_tokens){.seed = 5});
        for (int k = 0; k < 6 && cases[i].layouts[k]; k++) {
            snprintf(words, sizeof words, "%s" FP8 "%s", cases[i].model, cases[i].layouts[k]);
            prove(words);
            trained many = trained_run(words, steps, (qd_random_tokens){.seed = 5});
            if (!(apart(&many, &one) < 1e-3))
                fail_msg("%s: the losses are %.2g apart", words, apart(&many, &one));
            free(many.weights);
        }
        free(one.weights);
    }
}

static int pick(uint32_t *state, int count)
{
    *state = *state * 1664525u + 1013904223u;
    return (int)(*state >> 16) % count;
}

/* Random layouts of 1 to 8 ranks against one rank, for all recipes. QUADRILLE_LAYOUTS sets their
 * number. On a GPU, sums are in another order as well. */
static void random_layouts(void **state)
{
    (void)state;
    static const char *const recipes[] = {"fp8.recipe=tensor ", "fp8.recipe=row ", "fp8.recipe=block ", "fp8.recipe=tensor fp8.grad=e4m3 "};
    static const char *const recompute[] = {"none", "selective", "full"};
    const char *wanted = getenv("QUADRILLE_LAYOUTS");
    const int count = wanted ? atoi(wanted) : sample_count(30, 4), steps = 3;
    const double most = getenv("QUADRILLE_DEVICE") ? 5e-3 : 1e-3;
    double seen = 0.0;
    uint32_t seed = 26;
    trained one[4] = {{.steps = 0}};
    char words[1024];
    for (int i = 0; i < count; i++) {
        const int recipe = i % 4, tp = 1 << pick(&seed, 3), cp = 1 << pick(&seed, 2), pp = 1 + 2 * pick(&seed, 2);
        const int dp = tp * cp * pp > 4 ? 1 : 1 << pick(&seed, 2), zero = pick(&seed, 4), micro = 1 << pick(&seed, 3);
        if (one[recipe].steps == 0) {
            snprintf(words, sizeof words, LLAMA FP8 "%s", recipes[recipe]);
            one[recipe] = trained_run(words, steps, (qd_random_tokens){.seed = 6});
        }
        snprintf(words, sizeof words, LLAMA FP8 "%sparallel.ranks=%d parallel.tp=%d parallel.cp=%d parallel.pp=%d parallel.zero=%d "
                 "train.micro_batch=%d train.recompute=%s parallel.sp=%s", recipes[recipe], tp * cp * pp * dp, tp, cp, pp, zero,
                 8 / dp < micro ? 8 / dp : micro, recompute[pick(&seed, 3)], tp > 1 && pick(&seed, 2) ? "true" : "false");
        prove(words);
        trained many = trained_run(words, steps, (qd_random_tokens){.seed = 6});
        if (!(apart(&many, &one[recipe]) < most))
            fail_msg("%s: the losses are %.2g apart", words, apart(&many, &one[recipe]));
        seen = fmax(seen, apart(&many, &one[recipe]));
        free(many.weights);
    }
    printf("%d layouts, losses at most %.2g apart\n", count, seen);
    for (int i = 0; i < 4; i++)
        free(one[i].weights);
}

/* The backward pass keeps fp8 copies where GEMMs alone read a value. */
static void takes_less_memory(void **state)
{
    (void)state;
    static const char *const models[] = {LLAMA, GPT2, LLAMA "train.swiglu=again ", LLAMA "parallel.split_backward=true ",
                                         LLAMA "fp8.recipe=block "};
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        char words[512];
        int64_t bytes[2];
        for (int fp8 = 0; fp8 < 2; fp8++) {
            snprintf(words, sizeof words, "%s" FP8 "%s", models[i], fp8 ? "" : "train.precision=bf16 fp8.recipe=tensor");
            qd_config config = layout_config(words);
            bytes[fp8] = trained_needs(&config).dynamic;
        }
        assert_true(bytes[1] < bytes[0]);
    }
}

static void kept_layers(void **state)
{
    (void)state;
    qd_arena *arena;
    qd_program *program = trained_program(LLAMA FP8 "fp8.keep=attn,mlp.down", &arena);
    int fp8 = 0, casts = 0;
    const qd_module_class *c = qd_program_class(program, 1);
    for (int i = 0; i < c->op_count; i++) {
        casts += c->ops[i].kind == QD_OP_CAST;
        fp8 += c->ops[i].kind == QD_OP_LINEAR && c->slots[c->ops[i].slot[QD_LINEAR_X]].dtype == QD_F8E4M3;
    }
    assert_int_equal(fp8, 1); /* gate and up */
    assert_int_equal(casts, 4); /* x, the weight in two forms at two times, dy */
    qd_arena_destroy(arena);
}

static void resumes(void **state)
{
    (void)state;
    static const char *const again[] = {"", "", ""};
    static const char *const recipes[] = {"fp8.recipe=tensor ", "fp8.recipe=row ", "fp8.recipe=block "};
    for (int r = 0; r < 3; r++) {
        char base[512];
        double losses[9];
        snprintf(base, sizeof base, LLAMA FP8 "train.deterministic=true %s", recipes[r]);
        trained straight = trained_run(base, 9, (qd_random_tokens){.seed = 7});
        trained_onward(base, again, 3, 3, (qd_random_tokens){.seed = 7}, losses);
        for (int s = 0; s < 9; s++)
            assert_true(losses[s] == straight.losses[s]);
        free(straight.weights);
    }
}

/* Actions that find scales of weights or cast them, and the bytes that these take. */
typedef struct casts_made {
    int actions;
    int64_t bytes;
} casts_made;

static casts_made casts_of(const char *words)
{
    qd_arena *arena;
    const qd_program *p = trained_program(words, &arena);
    casts_made found = {0, 0};
    for (int i = 0; i < p->action_count; i++)
        found.actions += p->actions[i].kind == QD_ACTION_CAST_WEIGHTS;
    for (int i = 0; i < p->buffer_count; i++)
        found.bytes += p->buffers[i].kind == QD_BUFFER_CAST ? p->buffers[i].bytes : 0;
    qd_arena_destroy(arena);
    return found;
}

/* Copies that all micro-batches read are those that each would make. */
static void weights_cast_once(void **state)
{
    (void)state;
    static const char *const once[] = {"fp8.weights=auto", "fp8.weights=step train.recompute=selective"};
    static const char *const cases[] = {
        LLAMA FP8 "train.micro_batch=2 ",
        GPT2 FP8 "train.micro_batch=4 train.recompute=full model.dropout=0.1 ",
        OLMO2 FP8 "train.micro_batch=2 fp8.recipe=row train.offload=optimizer ",
        LLAMA FP8 "train.micro_batch=2 fp8.recipe=block parallel.ranks=2 parallel.tp=2 ",
        LATENT FP8 "train.micro_batch=4 train.optimizer=muon train.qk_clip=0.1 ",
        LLAMA FP8 "train.micro_batch=2 lora.rank=4 parallel.split_backward=true ",
        MOE FP8 "train.micro_batch=2 parallel.ranks=2 parallel.ep=2 ",
        LLAMA FP8 "train.micro_batch=2 parallel.ranks=2 parallel.zero=1 ",
        LLAMA FP8 "train.micro_batch=1 parallel.ranks=2 parallel.zero=2 parallel.overlap=false ",
        LLAMA FP8 "train.micro_batch=1 parallel.ranks=2 parallel.zero=3 parallel.reshard_after_forward=false ",
        LLAMA FP8 "train.micro_batch=2 parallel.ranks=3 parallel.pp=3 parallel.schedule=zb_h1 model.tied=true ",
        LLAMA FP8 "train.micro_batch=2 parallel.ranks=2 parallel.pp=2 parallel.schedule=dualpipe_v model.layers=4 ",
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char words[1024];
        snprintf(words, sizeof words, "%s fp8.weights=use ", cases[i]);
        prove(words);
        prove(cases[i]);
        assert_true(casts_of(cases[i]).bytes > 10 * casts_of(words).bytes);
        TRAINED_COMPARE(words, once, 3, 2, .seed = 8);
    }
    static const char *const one[] = {"train.recompute=full", "fp8.weights=step", "fp8.weights=step train.recompute=full"};
    assert_int_equal(casts_of(LLAMA FP8 "train.micro_batch=8").actions, 0); /* each use finds the scale, too */
    TRAINED_COMPARE(LLAMA FP8 "train.micro_batch=8 ", one, 3, 2, .seed = 8);
}

/* Once per block and step, with the bytes of both copies; only scales where copies would stay that
 * ZeRO 3 frees. */
static void where_weights_are_cast_once(void **state)
{
    (void)state;
    static const struct {
        const char *words;
        int actions;
        enum { SCALES, COPIES } made;
    } cases[] = {
        {"train.micro_batch=1", 3, COPIES},
        {"train.micro_batch=1 train.recompute=full", 3, COPIES},
        {"train.micro_batch=8", 0, SCALES},
        {"train.micro_batch=8 train.recompute=full", 3, SCALES},
        {"train.micro_batch=8 fp8.weights=step", 3, COPIES},
        {"train.micro_batch=1 fp8.weights=use", 3, SCALES},
        {"train.micro_batch=1 fp8.weights=use fp8.recipe=block", 0, SCALES},
        {"train.micro_batch=1 parallel.ranks=2 parallel.zero=2", 3, COPIES},
        {"train.micro_batch=1 parallel.ranks=2 parallel.zero=3", 3, SCALES},
        {"train.micro_batch=1 parallel.ranks=2 parallel.zero=3 parallel.reshard_after_forward=false", 3, COPIES},
        {"train.micro_batch=1 parallel.ranks=3 parallel.pp=3", 1, COPIES}, /* on rank 0 */
    };
    const int64_t weights = 4 * 64 * 64 + 3 * 64 * 128, scales = 4 * 64; /* of four GEMMs, aligned */
    const int64_t bytes[] = {[SCALES] = scales, [COPIES] = 2 * (weights + scales)};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char words[1024];
        snprintf(words, sizeof words, LLAMA FP8 "%s", cases[i].words);
        casts_made found = casts_of(words);
        if (found.actions != cases[i].actions || found.bytes != cases[i].actions * bytes[cases[i].made])
            fail_msg("%s: %d actions, %lld bytes", words, found.actions, (long long)found.bytes);
        qd_config config = layout_config(words), use = config;
        use.strategy.fp8.weights = QD_FP8_WEIGHTS_USE;
        assert_true(trained_needs(&config).persistent <= trained_needs(&use).persistent); /* less scratch */
        assert_true(trained_needs(&config).dynamic - trained_needs(&use).dynamic <= found.bytes);
    }
    qd_config large = layout_config(LLAMA FP8 "train.micro_batch=1"), use = large;
    use.strategy.fp8.weights = QD_FP8_WEIGHTS_USE;
    const trained_bytes needs = trained_needs(&use);
    qd_strbuf text = {0};
    trained_ok(qd_fit_explain(&large, 0, needs.persistent + needs.dynamic, false, &text));
    assert_non_null(strstr(text.data, "fp8.weights=use needs"));
    qd_strbuf_free(&text);
    /* One micro-batch has no copies; smaller ones fit only without. */
    large = layout_config(LLAMA FP8 "train.micro_batch=8");
    use = layout_config(LLAMA FP8 "train.micro_batch=1 train.recompute=full fp8.weights=use");
    const trained_bytes least = trained_needs(&use);
    trained_ok(qd_fit_explain(&large, 0, least.persistent + least.dynamic, false, &text));
    assert_non_null(strstr(text.data, "train.micro_batch=1 train.recompute=full fp8.weights=use needs"));
    qd_strbuf_free(&text);
    qd_arena *arena;
    qd_program *program;
    qd_config refused = layout_config(LLAMA FP8 "parallel.ranks=2 parallel.zero=3 fp8.weights=step");
    trained_ok(qd_arena_create(&arena));
    assert_int_equal(qd_config_build(&refused, 0, arena, &program), QD_USAGE);
    assert_non_null(strstr(qd_error_message(), "set parallel.reshard_after_forward=false, or fp8.weights=auto"));
    qd_error_clear();
    qd_arena_destroy(arena);
}

/* Changes an op of a block of a sound program; the proof must refuse it. */
static void refused_programs(void **state)
{
    (void)state;
    qd_arena *arena;
    for (int change = 0; change < 7; change++) {
        qd_program *program = trained_program(LLAMA FP8, &arena);
        const qd_program *programs[] = {program};
        qd_module_class *c = (qd_module_class *)(uintptr_t)qd_program_class(program, 1);
        trained_ok(qd_prove_programs(&program->ledger->mesh, programs, NULL));
        int gemm = -1, dw = -1, casts[2], found = 0;
        for (int i = 0; i < c->op_count; i++) {
            gemm = gemm < 0 && c->ops[i].kind == QD_OP_LINEAR ? i : gemm;
            dw = dw < 0 && c->ops[i].kind == QD_OP_LINEAR_DW ? i : dw;
            if (c->ops[i].kind == QD_OP_CAST && found < 2)
                casts[found++] = i;
        }
        qd_op *op = &c->ops[gemm];
        switch (change) {
        case 0: op->slot[QD_LINEAR_X] = c->ops[casts[0]].slot[QD_CAST_X]; break;          /* one operand is not in fp8 */
        case 1: c->slots[op->slot[QD_LINEAR_WEIGHT]].transposed = true; break;
        case 2: c->ops[casts[1]].slot[QD_CAST_AMAX] = c->ops[casts[0]].slot[QD_CAST_AMAX]; break; /* another tensor's scale */
        case 3: c->slots[c->ops[dw].slot[QD_LINEAR_DW_X]].dtype = c->slots[c->ops[dw].slot[QD_LINEAR_DW_DY]].dtype = QD_F8E5M2; break;
        case 4: c->ops[dw].slot[QD_LINEAR_DW_X] = c->ops[dw].slot[QD_LINEAR_DW_DY]; break;
        case 5: c->slots[op->slot[QD_LINEAR_X]].dtype = QD_F8E5M2; break; /* fewer bits than it should have */
        case 6: c->slots[c->ops[dw].slot[QD_LINEAR_DW_DY]].dtype = QD_F8E4M3; break; /* a smaller range */
        }
        if (qd_prove_programs(&program->ledger->mesh, programs, NULL) == QD_OK)
            fail_msg("change %d is not refused", change);
        qd_error_clear();
        qd_arena_destroy(arena);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_bits),   cmocka_unit_test(layouts),
        cmocka_unit_test(random_layouts),
        cmocka_unit_test(weights_cast_once), cmocka_unit_test(where_weights_are_cast_once),
        cmocka_unit_test(kept_layers), cmocka_unit_test(takes_less_memory),
        cmocka_unit_test(refused_programs), cmocka_unit_test_setup_teardown(resumes, scratch_setup, scratch_teardown)};
    const struct CMUnitTest on_gpu[] = {cmocka_unit_test(random_layouts)};
    if (getenv("QUADRILLE_DEVICE"))
        return cmocka_run_group_tests(on_gpu, NULL, NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
