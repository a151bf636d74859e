/* Declarations that no program can be derived from are refused before anything is built, naming the
 * family and what is wrong; those that do not fit a layout name the key and values that work. */
#include "support/layout.h"
#include "support/models/parallel_family.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"

#define MODEL "model.layers=2 model.hidden=48 model.heads=8 model.kv_heads=4 model.ffn=80 model.vocab=101 data.seq=16 "
#define TP "parallel.ranks=4 parallel.tp=4 "

static qd_val linear(qd_layer *b, qd_val x, const char *name, int64_t out, qd_split split)
{
    return qd_linear(b, x, &(qd_linear_part){name, out, split}, 1, b->model->mlp_bias, 0.02, name);
}

static qd_val normed(qd_layer *b, qd_val x)
{
    return qd_norm(b, x, "norm", "normed");
}

/* ---- layers ---- */

static void same_names(qd_layer *b, int which)
{
    (void)which;
    qd_val x = qd_input(b);
    qd_output(b, qd_residual(b, x, qd_norm(b, normed(b, x), "norm", "again"), "dropped", "out"));
}

static void no_output(qd_layer *b, int which)
{
    (void)which;
    normed(b, qd_input(b));
}

static void two_outputs(qd_layer *b, int which)
{
    (void)which;
    qd_val x = normed(b, qd_input(b));
    qd_output(b, x);
    qd_output(b, qd_norm(b, x, "other", "again"));
}

static void no_operand(qd_layer *b, int which)
{
    (void)which;
    qd_val x = qd_input(b);
    qd_output(b, qd_residual(b, x, normed(b, -1), "dropped", "out"));
}

static void passes_on(qd_layer *b, int which)
{
    (void)which;
    qd_output(b, qd_input(b));
}

static void unread(qd_layer *b, int which)
{
    (void)which;
    qd_val x = qd_input(b);
    qd_mlp(b, x);
    qd_output(b, normed(b, x));
}

static void to_itself(qd_layer *b, int which)
{
    (void)which;
    qd_val x = normed(b, qd_input(b));
    qd_output(b, qd_residual(b, x, x, "dropped", "out"));
}

static void widths(qd_layer *b, int which)
{
    (void)which;
    qd_val x = qd_input(b);
    qd_output(b, qd_residual(b, x, linear(b, normed(b, x), "wide", 64, QD_SPLIT_NORM), "dropped", "out"));
}

static void two_routers(qd_layer *b, int which)
{
    (void)which;
    qd_val x = qd_input(b);
    qd_output(b, qd_residual(b, x, qd_mlp_experts(b, qd_mlp_experts(b, normed(b, x))), "dropped", "out"));
}

static void narrow(qd_layer *b, int which)
{
    (void)which;
    qd_val x = qd_input(b), inner = linear(b, normed(b, x), "in", 3, QD_SPLIT_ROWS);
    qd_output(b, qd_residual(b, x, linear(b, inner, "out", 48, QD_SPLIT_COLS), "dropped", "out"));
}

static void cut_twice(qd_layer *b, int which)
{
    (void)which;
    qd_val x = qd_input(b), inner = linear(b, normed(b, x), "in", 64, QD_SPLIT_ROWS);
    qd_output(b, qd_residual(b, x, linear(b, inner, "out", 48, QD_SPLIT_ROWS), "dropped", "out"));
}

/* Under sp its gradient is a sum over the rows of one rank. */
static void never_summed(qd_layer *b, int which)
{
    (void)which;
    qd_val x = qd_input(b);
    qd_output(b, qd_residual(b, x, linear(b, normed(b, x), "square", 48, QD_SPLIT_NONE), "dropped", "out"));
}

/* ---- ends ---- */

static void no_loss(qd_layer *b)
{
    normed(b, qd_input(b));
}

static void no_table(qd_layer *b)
{
    (void)b;
}

static void late_table(qd_layer *b)
{
    qd_weight scale = qd_declare_vector(b, "scale.weight", b->model->hidden, QD_INIT_ONE, QD_SPLIT_NORM);
    qd_val x = qd_embedding(b);
    qd_output(b, qd_declare_op(b, (qd_decl_op){QD_DECL_NORM, .x = x, .y = -1, .weight = scale}, "scaled", b->model->hidden));
}

static int beyond(const qd_model *m, int layer)
{
    (void)m;
    return layer;
}

static void refused(const qd_family *family, const char *words, const char *why)
{
    qd_config config = layout_config(words);
    qd_arena *arena;
    qd_program *program;
    config.family = family;
    ok(qd_arena_create(&arena));
    if (qd_config_build(&config, 0, arena, &program) == QD_OK)
        fail_msg("%s is not refused: %s", why, words);
    if (!strstr(qd_error_message(), why))
        fail_msg("'%s' is not in: %s", why, qd_error_message());
    qd_arena_destroy(arena);
}

static void layer_refused(void (*layer)(qd_layer *, int), const char *words, const char *why)
{
    qd_family family = parallel_family;
    family.layer = layer;
    refused(&family, words, why);
}

static void wrong_declarations(void **state)
{
    (void)state;
    qd_family family = parallel_family;
    layer_refused(same_names, MODEL, "the parallel family: its layer declares two parameters named 'norm.weight'");
    layer_refused(no_output, MODEL, "its layer calls qd_output 0 times, and must once");
    layer_refused(two_outputs, MODEL, "its layer calls qd_output 2 times, and must once");
    layer_refused(no_operand, MODEL, "'normed' is computed from a value that does not exist");
    layer_refused(passes_on, MODEL, "its layer passes its input on as it is");
    layer_refused(unread, MODEL, "nothing reads 'mlp_branch'");
    layer_refused(to_itself, MODEL, "'normed' is added to itself");
    layer_refused(widths, MODEL, "'wide' has 64 columns where 48 are needed");
    layer_refused(two_routers, MODEL "model.experts=4 model.expert_ffn=24 ", "has 2 routers");
    layer_refused(two_routers, MODEL, "set model.experts");
    family.head = no_loss;
    refused(&family, MODEL, "its head calls qd_head_loss 0 times, and must once");
    family = parallel_family;
    family.embed = no_table;
    refused(&family, MODEL, "its embedding calls qd_output 0 times");
    family.embed = late_table;
    refused(&family, MODEL, "'scale.weight' is declared before the token table");
    family = parallel_family;
    family.variant = beyond;
    refused(&family, MODEL, "layer 1 is variant 1, and there are 1");
    family.variants = QD_DECLARATIONS_MOST - 1;
    refused(&family, MODEL, "has 9 variants of layers: 1 to 8 are supported");
}

static void wrong_for_a_layout(void **state)
{
    (void)state;
    layer_refused(narrow, MODEL TP, "parallel.tp is 4, and block.0.in.weight has 3 outputs to share: take at most 3");
    layer_refused(cut_twice, MODEL TP, "linear needs 'in' in a layout that it cannot be converted to");
    layer_refused(never_summed, MODEL TP, "block.0.square.weight as a gradient to be summed over parallel.tp");
    layer_refused(never_summed, MODEL TP "model.linear_bias=true ", "to be summed over parallel.tp");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(wrong_declarations), cmocka_unit_test(wrong_for_a_layout)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
