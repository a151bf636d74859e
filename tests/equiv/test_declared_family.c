/* Families that are not registered train under every kind of layout as on one rank, from their
 * declarations alone. The first is the worked example of docs/adding-a-model.md; the page must show
 * the file that is built.
 * ctest: timeout 200 */
#include "spec/proof/proof.h"
#include "support/models/expert_models.h"
#include "support/outcome.h"
#include "support/models/parallel_family.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#define LLAMA "model.layers=2 model.hidden=48 model.heads=8 model.kv_heads=4 model.ffn=80 model.vocab=101 data.seq=16 "
#define GPT2 "model.arch=gpt2 model.layers=2 model.hidden=32 model.heads=4 model.vocab=67 data.seq=17 model.dropout=0.1 "

/* Attention and MLP each with a norm of its own: two norms read the layer's input. */
static void two_norms(qd_layer *b, int which)
{
    (void)which;
    qd_val x = qd_input(b);
    qd_val attention = qd_attention_gqa(b, qd_norm(b, x, "attn_norm", "attn_normed"));
    qd_val mlp = qd_mlp(b, qd_norm(b, x, "mlp_norm", "mlp_normed"));
    x = qd_residual(b, x, attention, "attn_dropped", "residual");
    qd_output(b, qd_residual(b, x, mlp, "mlp_dropped", "out"));
}

/* Declared in the other order: the MLP is computed before the value that it is added to. Every
 * other layer has experts, and norms its branches' results instead of its input, so no norm reads
 * the input. */
static int alternating(const qd_model *m, int layer)
{
    return qd_model_has_experts(m, layer) && layer % 2 == 0;
}

static void mlp_first(qd_layer *b, int experts)
{
    qd_val x = qd_input(b), attention, mlp;
    if (experts) {
        mlp = qd_norm(b, qd_mlp_experts(b, x), "mlp_norm", "mlp_normed");
        attention = qd_norm(b, qd_attention_gqa(b, x), "attn_norm", "attn_normed");
    } else {
        qd_val normed = qd_norm(b, x, "norm", "normed");
        mlp = qd_mlp(b, normed);
        attention = qd_attention_gqa(b, normed);
    }
    x = qd_residual(b, x, attention, "attn_dropped", "residual");
    qd_output(b, qd_residual(b, x, mlp, "mlp_dropped", "out"));
}

static qd_family like_example(void (*layer)(qd_layer *b, int which))
{
    qd_family family = parallel_family;
    family.layer = layer;
    return family;
}

static const char *const layouts[] = {
    "parallel.ranks=2 parallel.tp=2 parallel.sp=false ",
    "parallel.ranks=4 parallel.tp=4 train.micro_batch=1 parallel.tp_overlap=3 ",
    "parallel.ranks=4 parallel.tp=2 parallel.zero=3 train.micro_batch=2 train.recompute=full ",
    "parallel.ranks=2 parallel.tp=2 parallel.overlap=false parallel.split_backward=true train.recompute=selective ",
    "parallel.ranks=2 parallel.cp=2 ",
    "parallel.ranks=2 parallel.cp=2 parallel.cp_mode=gather train.recompute=full ",
    "parallel.ranks=4 parallel.cp=2 parallel.tp=2 parallel.cp_mode=ulysses parallel.tp_overlap=2 ",
    "parallel.ranks=2 parallel.pp=2 parallel.schedule=zb_h1 train.micro_batch=2 ",
    "parallel.ranks=4 parallel.pp=2 parallel.tp=2 parallel.schedule=zb_h1 parallel.zero=2 train.micro_batch=2 train.recompute=selective ",
    "parallel.ranks=4 parallel.zero=3 parallel.split_backward=true train.micro_batch=1 ",
    "parallel.ranks=2 parallel.zero=1 train.recompute=selective ",
    "train.recompute=full parallel.split_backward=true train.micro_batch=4 ",
};
static const char *const with_experts[] = {
    "parallel.ranks=2 parallel.ep=2 ",
    "parallel.ranks=4 parallel.ep=2 parallel.tp=2 train.recompute=full ",
    "parallel.ranks=4 parallel.pp=2 parallel.ep=2 parallel.schedule=zb_h1 train.micro_batch=2 ",
    "parallel.ranks=2 parallel.cp=2 parallel.etp=2 parallel.expert_rows=1 parallel.split_backward=true ",
};
enum { LAYOUTS = sizeof layouts / sizeof *layouts };

static void layouts_train_alike(void **state)
{
    (void)state;
    outcome_family = &parallel_family;
    outcome_compare_all(RUN LLAMA, (qd_random_tokens){.seed = 1, .documents = 3}, layouts, LAYOUTS);
    outcome_compare_all(RUN GPT2, (qd_random_tokens){.seed = 2, .ignored = 5}, layouts, LAYOUTS);
}

/* Ops of a layer that write the gradient of its input: one norm's gradient op adds the other's. */
static int writers_of_grad_in(const qd_family *family)
{
    qd_config config = layout_config(RUN GPT2);
    config.family = family;
    qd_arena *arena;
    qd_program *program;
    int count = 0;
    trained_ok(qd_arena_create(&arena));
    trained_ok(qd_config_build(&config, 0, arena, &program));
    const qd_module_class *c = qd_program_class(program, 1);
    for (int i = 0; i < c->op_count; i++)
        for (int j = 0; j < QD_OP_SLOTS; j++)
            count += c->ops[i].slot[j] >= 0 && c->slots[c->ops[i].slot[j]].kind == QD_SLOT_GRAD_IN;
    qd_arena_destroy(arena);
    return count;
}

static void two_norms_of_one_input(void **state)
{
    (void)state;
    qd_family family = like_example(two_norms);
    outcome_family = &family;
    assert_int_equal(writers_of_grad_in(&family), 1);
    outcome_compare_all(RUN GPT2, (qd_random_tokens){.seed = 3}, layouts, LAYOUTS);
}

static void declared_in_another_order(void **state)
{
    (void)state;
    qd_family family = like_example(mlp_first);
    family.variants = 2;
    family.variant = alternating;
    outcome_family = &family;
    outcome_compare_all(RUN MIXTRAL "model.shared_experts=1 model.balance=sequence ", (qd_random_tokens){.seed = 4}, with_experts,
                        sizeof with_experts / sizeof *with_experts);
    outcome_compare_all(RUN LLAMA, (qd_random_tokens){.seed = 5}, layouts, 2);
}

/* bf16 rounds in different places in different layouts; the losses stay close. */
static void bf16(void **state)
{
    (void)state;
    outcome_family = &parallel_family;
    outcome one = outcome_run(RUN LLAMA, (qd_random_tokens){.seed = 6});
    outcome many = outcome_run(RUN LLAMA "train.precision=bf16 parallel.ranks=4 parallel.tp=2 parallel.pp=2 train.micro_batch=4 ",
                               (qd_random_tokens){.seed = 6});
    for (int s = 0; s < OUTCOME_STEPS; s++)
        if (!(fabs(many.losses[s] - one.losses[s]) <= 5e-3 * one.losses[s]))
            fail_msg("step %d: %.9g in bf16, %.9g in fp32", s + 1, many.losses[s], one.losses[s]);
    outcome_free(&one);
    outcome_free(&many);
}

static double train(const char *words, const qd_family *family, const char *lists, double *norm)
{
    qd_config config = layout_config(words);
    config.family = family;
    config.strategy.traits = qd_device_traits_find(lists);
    qd_random_tokens random = {.seed = 7, .vocab = config.model.vocab};
    qd_batch_source source = qd_random_source(&random);
    trained_first first = trained_step(&config, &source);
    free(first.gradients);
    free(first.weights);
    *norm = first.out.grad_norm;
    return first.out.loss;
}

/* Accelerator lists executed on the CPU train like the CPU's own; fusion does not depend on the
 * family. */
static void accelerator_lists(void **state)
{
    (void)state;
    qd_family families[] = {parallel_family, like_example(two_norms), like_example(mlp_first), like_example(mlp_first)};
    families[3].variants = 2;
    families[3].variant = alternating;
    static const char *const bases[] = {RUN GPT2, RUN GPT2, RUN LLAMA "model.out_bias=true model.mlp_bias=true ",
                                        RUN MIXTRAL "model.shared_experts=1 "};
    static const char *const extra[] = {"", "train.recompute=selective ", "parallel.ranks=2 parallel.tp=2 parallel.tp_overlap=2 "};
    for (size_t f = 0; f < sizeof families / sizeof *families; f++)
        for (size_t e = 0; e < sizeof extra / sizeof *extra; e++) {
            char words[1024];
            double norms[2];
            snprintf(words, sizeof words, "%s%s", bases[f], extra[e]);
            double own = train(words, &families[f], "cpu", &norms[0]), other = train(words, &families[f], "cuda", &norms[1]);
            if (!(fabs(own - other) <= 1e-5 * own && fabs(norms[0] - norms[1]) <= 1e-4 * norms[0]))
                fail_msg("family %zu, %s: loss %.9g and %.9g, norm %.9g and %.9g", f, words, own, other, norms[0], norms[1]);
        }
}

/* The checker and the proof of gradients do not depend on the family either. */
static void prove(const char *base, const char *layout, const qd_family *family, const char *lists)
{
    char words[1024];
    snprintf(words, sizeof words, "%s%s", base, layout);
    qd_config config = layout_config(words);
    config.family = family;
    config.strategy.traits = qd_device_traits_find(lists);
    qd_arena *arena;
    const qd_program **programs;
    trained_ok(qd_arena_create(&arena));
    trained_ok(qd_config_build_all(&config, arena, &programs));
    const qd_mesh *mesh = &programs[0]->ledger->mesh;
    if (qd_check_programs(mesh, programs) != QD_OK || qd_prove_programs(mesh, programs, NULL) != QD_OK)
        fail_msg("%s, lists of %s: %s", words, lists, qd_error_message());
    qd_arena_destroy(arena);
}

static void programs_are_proved(void **state)
{
    (void)state;
    qd_family families[] = {parallel_family, like_example(two_norms), like_example(mlp_first)}, alternate = like_example(mlp_first);
    alternate.variants = 2;
    alternate.variant = alternating;
    for (int device = 0; device < 2; device++) {
        for (size_t f = 0; f < sizeof families / sizeof *families; f++)
            for (size_t i = 0; i < LAYOUTS; i++)
                prove(RUN GPT2 "train.precision=bf16 ", layouts[i], &families[f], device ? "cuda" : "cpu");
        for (size_t i = 0; i < sizeof with_experts / sizeof *with_experts; i++)
            prove(RUN MIXTRAL "model.shared_experts=1 ", with_experts[i], &alternate, device ? "cuda" : "cpu");
    }
}

/* Masks are numbered by module and site: with one dropout too many a layer would use the masks of
 * the next. */
static void too_many_dropouts(qd_layer *b, int which)
{
    (void)which;
    qd_val x = qd_input(b);
    for (int i = 0; i < 4; i++)
        x = qd_residual(b, x, qd_mlp(b, x), "dropped", "sum");
    qd_output(b, x);
}

static void too_many_dropouts_are_refused(void **state)
{
    (void)state;
    qd_family family = like_example(too_many_dropouts);
    qd_config config = layout_config(RUN GPT2);
    config.family = &family;
    qd_arena *arena;
    qd_program *program;
    trained_ok(qd_arena_create(&arena));
    assert_int_equal(qd_config_build(&config, 0, arena, &program), QD_USAGE);
    assert_non_null(strstr(qd_error_message(), "more than 3 dropouts"));
    qd_arena_destroy(arena);
}

static char *read_text(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (!file)
        fail_msg("%s cannot be opened", path);
    fseek(file, 0, SEEK_END);
    long size = ftell(file);
    rewind(file);
    char *text = calloc((size_t)size + 1, 1);
    assert_int_equal(fread(text, 1, (size_t)size, file), size);
    fclose(file);
    return text;
}

static void page_shows_the_file(void **state)
{
    (void)state;
    char *page = read_text(QD_TEST_SOURCE_DIR "/docs/adding-a-model.md"),
         *source = read_text(QD_TEST_SOURCE_DIR "/tests/support/models/parallel_family.c");
    size_t length = strlen(source) + 16;
    char *block = malloc(length);
    snprintf(block, length, "```c\n%s```\n", source);
    if (!strstr(page, block))
        fail_msg("docs/adding-a-model.md does not match tests/support/models/parallel_family.c");
    for (int kind = 0; kind < QD_DECL_KIND_COUNT; kind++) { /* and the whole vocabulary */
        static const char *const names[] = {
#define NAME(kind) "`" #kind "`",
            QD_DECL_TABLE(NAME)
#undef NAME
        };
        if (!strstr(page, names[kind]))
            fail_msg("docs/adding-a-model.md does not mention %s", names[kind]);
    }
    free(block);
    free(source);
    free(page);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(page_shows_the_file),    cmocka_unit_test(layouts_train_alike),
        cmocka_unit_test(two_norms_of_one_input), cmocka_unit_test(declared_in_another_order),
        cmocka_unit_test(bf16),                   cmocka_unit_test(accelerator_lists),
        cmocka_unit_test(programs_are_proved),   cmocka_unit_test(too_many_dropouts_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
