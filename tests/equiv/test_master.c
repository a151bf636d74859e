/* Split master weights (train.master=split): bit-identical in every layout and, except for ties, to
 * whole masters; 14 bytes per parameter; checkpoints in both directions.
 * ctest: timeout 300 */
#include "support/scratch.h"
#include "support/trained.h"
#include "base/half.h"
#include "spec/config/fit.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))
#define LLAMA "model.layers=2 model.hidden=48 model.heads=4 model.kv_heads=2 model.vocab=101 data.seq=16 "
#define GPT2 "model.arch=gpt2 model.layers=2 model.hidden=32 model.heads=4 model.vocab=67 data.seq=17 "
#define RUN "train.lr=1e-3 train.schedule=constant train.steps=50 run.threads=1 train.clip=0.5 train.precision=bf16 "
#define SPLIT "train.master=split "

static const char *const stages[] = {
    "parallel.zero=1 ",
    "parallel.zero=2 ",
    "parallel.zero=3 ",
    "parallel.zero=1 parallel.overlap=false ",
    "parallel.zero=3 parallel.bucket_mb=0.001 train.recompute=full ",
};

static void stages_give_the_same_bits(void **state)
{
    (void)state;
    TRAINED_COMPARE(LLAMA RUN SPLIT "parallel.ranks=2 train.global_batch=4 ", stages, 6, 3, .seed = 1);
    TRAINED_COMPARE(GPT2 RUN SPLIT "parallel.ranks=4 train.global_batch=8 train.micro_batch=1 train.grad_sync=per_step model.dropout=0.1 ",
                    stages, 4, 2, .seed = 2);
    TRAINED_COMPARE(GPT2 RUN SPLIT "parallel.ranks=3 train.global_batch=6 train.grad_dtype=fp32 train.optimizer=sgd train.momentum=0.9 ",
                    stages, 4, 2, .seed = 3);
    TRAINED_COMPARE(GPT2 RUN SPLIT "parallel.ranks=2 train.global_batch=4 train.optimizer=sgd ", stages, 4, 2, .seed = 4);
    static const char *const replicas[] = {"parallel.zero=1 parallel.dp_shard=2 ", "parallel.zero=3 parallel.dp_shard=2 "};
    TRAINED_COMPARE(LLAMA RUN SPLIT "parallel.ranks=4 train.global_batch=4 train.grad_dtype=fp32 ", replicas, 4, 2, .seed = 5);
}

/* With the other axes. The tied embedding of the last stage is a copy without a remainder; router
 * biases have their own update rule. */
static const char *const meshes[] = {
    LLAMA RUN "parallel.ranks=4 parallel.pp=2 train.global_batch=8 train.micro_batch=2 train.grad_sync=per_step model.tied=true ",
    LLAMA RUN "parallel.ranks=4 parallel.tp=2 train.global_batch=4 model.tied=true ",
    LLAMA RUN "parallel.ranks=4 parallel.cp=2 train.global_batch=4 ",
    LLAMA RUN "parallel.ranks=2 parallel.ep=2 train.global_batch=4 model.experts=4 model.router=sigmoid model.router_bias_rate=0.001 "
              "train.grad_dtype=fp32 ",
};

static void axes_give_the_same_bits(void **state)
{
    (void)state;
    static const char *const plain[] = {"parallel.zero=1", "parallel.zero=2 parallel.overlap=false", "parallel.zero=3"};
    for (size_t i = 0; i < COUNT(meshes); i++) {
        char base[512];
        snprintf(base, sizeof base, "%s" SPLIT, meshes[i]);
        TRAINED_COMPARE(base, plain, 4, 2, .seed = 10 + i);
    }
}

/* Every weight is what it would be with whole masters; the masters differ by one unit in the last
 * place where there was a tie, or by what followed from it. */
static void weights_are_those_of_whole_masters(void **state)
{
    (void)state;
    enum { STEPS = 8 };
    for (size_t i = 0; i < COUNT(meshes); i++) {
        char words[512];
        snprintf(words, sizeof words, "%s" SPLIT, meshes[i]);
        trained whole = trained_run(meshes[i], STEPS, (qd_random_tokens){.seed = 20}),
                parts = trained_run(words, STEPS, (qd_random_tokens){.seed = 20});
        assert_int_equal(whole.count, parts.count);
        for (int s = 0; s < STEPS; s++)
            assert_true(whole.losses[s] == parts.losses[s] && whole.norms[s] == parts.norms[s]);
        for (int64_t k = 0; k < whole.count; k++) {
            float a = whole.weights[k], b = parts.weights[k];
            if (qd_f32_to_bf16(a) != qd_f32_to_bf16(b) || fabsf(a - b) > fabsf(a) * 0x1p-21f)
                fail_msg("%s: weight %lld is %a with whole masters and %a with split ones", meshes[i], (long long)k, (double)a, (double)b);
        }
        free(whole.weights);
        free(parts.weights);
    }
}

static qd_status state_bytes(qd_trainer *trainer, qd_comm *world, void *argument)
{
    const qd_program *p = qd_trainer_program(trainer);
    if (qd_comm_rank(world) == 0)
        *(int64_t *)argument = p->buffers[p->persistent[QD_BUFFER_MASTER]].bytes;
    return QD_OK;
}

static qd_team *start(const char *words, qd_random_tokens *random)
{
    qd_config config = layout_config(words);
    *random = (qd_random_tokens){.seed = 11, .vocab = config.model.vocab};
    qd_batch_source source = qd_random_source(random);
    qd_team *team;
    trained_ok(qd_team_create(&config, &source, &team));
    return team;
}

/* Allocated memory is what is planned (trained_count checks it), and half of what whole masters
 * take. */
static void memory_is_as_planned(void **state)
{
    (void)state;
    static const char *const layouts[] = {"parallel.ranks=1 ", "parallel.ranks=2 parallel.zero=1 ", "parallel.ranks=4 parallel.zero=3 "};
    for (size_t i = 0; i < COUNT(layouts); i++) {
        int64_t bytes[2];
        for (int split = 0; split < 2; split++) {
            char words[512];
            qd_random_tokens random;
            qd_step_output out;
            trained_counts counts = {0};
            snprintf(words, sizeof words, LLAMA RUN "train.global_batch=4 %s%s", layouts[i], split ? SPLIT : "");
            qd_team *team = start(words, &random);
            trained_ok(qd_team_step(team, &out));
            trained_ok(qd_team_call(team, trained_count, &counts));
            trained_ok(qd_team_call(team, state_bytes, &bytes[split]));
            qd_team_destroy(team);
        }
        assert_int_equal(bytes[0], 2 * bytes[1]);
    }
}

/* Trains a little on one layout and loads its checkpoint on another: the values are bit-identical
 * or, where whole masters are split, what the two parts can represent. */
static void checkpoints_fit_either(void **state)
{
    static const char *const layouts[] = {"parallel.ranks=1 ", "parallel.ranks=2 parallel.zero=1 ", "parallel.ranks=4 parallel.zero=3 ",
                                          "parallel.ranks=2 parallel.pp=2 ", "parallel.ranks=2 parallel.tp=2 "};
    static const bool split[][2] = {{true, false}, {true, true}, {false, true}};
    for (size_t i = 0; i < COUNT(layouts); i++)
        for (size_t k = 0; k < COUNT(split); k++) {
            float *values[2][3];
            int64_t count = 0, more;
            for (int side = 0; side < 2; side++) {
                char words[512];
                qd_random_tokens random;
                qd_step_output out;
                snprintf(words, sizeof words, LLAMA RUN "model.tied=true train.global_batch=4 %s%s",
                         layouts[(i + (size_t)side * k) % COUNT(layouts)], split[k][side] ? SPLIT : "");
                qd_team *team = start(words, &random);
                for (int s = 0; s < 3 && side == 0; s++)
                    trained_ok(qd_team_step(team, &out));
                trained_ok(qd_team_call(team, side == 0 ? trained_save : trained_load, NULL));
                for (int kind = 0; kind < 3; kind++)
                    trained_read(team, (qd_tensor_kind[]){QD_TENSOR_VALUE, QD_TENSOR_MOMENT1, QD_TENSOR_MOMENT2}[kind], &values[side][kind],
                                 kind ? &more : &count);
                trained_ok(qd_team_step(team, &out)); /* training continues from there */
                assert_true(isfinite(out.loss));
                qd_team_destroy(team);
            }
            for (int64_t e = 0; e < count && !split[k][0]; e++) {
                uint16_t half = qd_f32_to_bf16(values[0][0][e]);
                values[0][0][e] = qd_f32_join(half, qd_f32_rest(values[0][0][e], half));
            }
            for (int kind = 0; kind < 3; kind++) {
                assert_memory_equal(values[0][kind], values[1][kind], (size_t)(kind ? more : count) * sizeof(float));
                free(values[0][kind]);
                free(values[1][kind]);
            }
            assert_int_equal(scratch_teardown(state) | scratch_setup(state), 0); /* the next one starts without checkpoints */
        }
}

/* A skipped step leaves both parts unchanged, and values that are not finite, or round to such, are
 * kept. */
static void skipped_steps_touch_nothing(void **state)
{
    (void)state;
    const float largest = qd_f32_from_bits(0x7f7fffff);
    float odd[48], back[48], *before, *after;
    qd_random_tokens random;
    qd_step_output out;
    int64_t count;
    qd_team *team = start(LLAMA RUN SPLIT "train.global_batch=4 parallel.ranks=2 parallel.zero=1 train.on_nonfinite=skip ", &random);
    trained_ok(qd_team_step(team, &out));
    for (int i = 0; i < 48; i++)
        odd[i] = i == 7 ? NAN : i == 8 ? INFINITY : i == 9 ? -largest : i == 10 ? -0.0f : 1.0f + (float)i * 0x1p-20f;
    trained_ok(qd_team_write(team, "block.1.mlp_norm.weight", odd, 48));
    trained_read(team, QD_TENSOR_VALUE, &before, &count);
    trained_ok(qd_team_step(team, &out));
    assert_true(out.skipped);
    trained_read(team, QD_TENSOR_VALUE, &after, &count);
    trained_ok(qd_team_read(team, "block.1.mlp_norm.weight", QD_TENSOR_VALUE, back, 48));
    assert_memory_equal(before, after, (size_t)count * sizeof *after);
    for (int i = 0; i < 48; i++)
        assert_true(isnan(odd[i]) ? isnan(back[i]) : qd_f32_bits(odd[i]) == qd_f32_bits(back[i]));
    free(before);
    free(after);
    qd_team_destroy(team);
}

/* If a run does not fit, the message says so, and suggests state in host memory only together with
 * whole masters. */
static void advice_names_it(void **state)
{
    (void)state;
    qd_config config = layout_config(LLAMA RUN "train.global_batch=1 train.recompute=full train.swiglu=again train.offload_chunk_mb=0.01"),
              split = config;
    split.strategy.split_master = true;
    qd_strbuf text = {0};
    trained_bytes bytes = trained_needs(&split);
    int64_t limit = bytes.persistent + bytes.dynamic;
    trained_ok(qd_fit_explain(&config, 0, limit, false, &text));
    assert_non_null(strstr(text.data, "; train.master=split needs"));
    qd_strbuf_free(&text);
    trained_ok(qd_fit_explain(&split, 0, limit - 1, false, &text));
    assert_null(strstr(text.data, "train.master=split needs"));
    if (!strstr(text.data, "train.offload=optimizer train.master=fp32 needs"))
        fail_msg("%s", text.data);
    qd_strbuf_free(&text);
}

/* An argument picks tests by name, with * for any letters. */
int main(int argc, char **argv)
{
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stages_give_the_same_bits),
        cmocka_unit_test(axes_give_the_same_bits),
        cmocka_unit_test(weights_are_those_of_whole_masters),
        cmocka_unit_test(memory_is_as_planned),
        cmocka_unit_test_setup_teardown(checkpoints_fit_either, scratch_setup, scratch_teardown),
        cmocka_unit_test(skipped_steps_touch_nothing),
        cmocka_unit_test(advice_names_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
