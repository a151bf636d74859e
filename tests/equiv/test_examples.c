/* Fine-tuning on examples: samples with several packed examples give the loss and the gradients of
 * samples with one example each, on one rank and under every axis.
 * ctest: timeout 120 */
#include "support/scratch.h"
#include "support/trained.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"

#define MODEL "model.layers=2 model.hidden=48 model.heads=8 model.kv_heads=4 model.ffn=80 model.vocab=256 data.seq=48 "
#define RUN "train.lr=1e-3 train.schedule=constant train.steps=4 run.threads=1 "
enum { EXAMPLES = 9 };

/* One step over all examples of the file. */
static trained_first one_step(const char *path, const char *words, bool unpacked)
{
    char all[800];
    qd_data_options o = qd_data_options_default();
    qd_data *data;
    o.path = path;
    o.seq = 48;
    o.examples = true;
    o.unpacked = unpacked;
    ok(qd_data_open(&o, &data));
    assert_int_equal(qd_data_windows(data), unpacked ? EXAMPLES : 4);
    snprintf(all, sizeof all, MODEL RUN "%s train.global_batch=%d", words, (int)qd_data_windows(data));
    qd_config config = layout_config(all);
    qd_batch_source source = qd_data_source(data);
    trained_first result = trained_step(&config, &source);
    qd_data_close(data);
    return result;
}

static double length_of(const trained_first *step)
{
    double squares = 0.0;
    for (int64_t k = 0; k < step->count; k++)
        squares += (double)step->gradients[k] * step->gradients[k];
    return sqrt(squares);
}

static bool near(double a, double b)
{
    return fabs(a - b) <= 1e-6 * fabs(b);
}

static void packed_equals_unpacked(void **state)
{
    static const char *const layouts[] = {
        "parallel.ranks=1",
        "parallel.ranks=2 parallel.tp=2 parallel.sp=true",
        "parallel.ranks=2 parallel.cp=2",
        "parallel.ranks=2 parallel.cp=2 parallel.cp_mode=ulysses",
        "parallel.ranks=2 parallel.pp=2 train.micro_batch=2",
        "parallel.ranks=4 parallel.tp=2 parallel.cp=2 parallel.cp_mode=gather train.recompute=full",
        "parallel.ranks=2 parallel.zero=3",
    };
    /* Completions. With the prompts they fill four samples of 48 positions, so all layouts divide
     * them. */
    static const int lengths[EXAMPLES] = {18, 8, 34, 10, 26, 12, 28, 22, 16};
    const char *path = scratch_path(state, "examples.jsonl");
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    for (int i = 0; i < EXAMPLES; i++)
        fprintf(file, "{\"prompt\": \"%d, \", \"completion\": \"%.*s\"}\n", i % 10, lengths[i],
                &"the quick brown fox jumps over the lazy dog"[i % 8]);
    fclose(file);
    trained_first one = one_step(path, "parallel.ranks=1", true);
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        trained_first packed = one_step(path, layouts[i], false);
        assert_int_equal(packed.count, one.count);
        double scale = length_of(&one) / length_of(&packed), apart = 0.0; /* stored gradients are not divided by the batch yet */
        for (int64_t k = 0; k < one.count; k++)
            apart += pow(packed.gradients[k] * scale - one.gradients[k], 2.0);
        apart = sqrt(apart) / length_of(&one);
        if (!near(packed.out.loss, one.out.loss) || !near(packed.out.grad_norm, one.out.grad_norm) || apart > 1e-5)
            fail_msg("%s: loss %.9g and norm %.9g, one example per sample %.9g and %.9g; gradients differ by %.2g of their norm",
                     layouts[i], packed.out.loss, packed.out.grad_norm, one.out.loss, one.out.grad_norm, apart);
        free(packed.gradients);
        free(packed.weights);
    }
    free(one.gradients);
    free(one.weights);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(packed_equals_unpacked)};
    return cmocka_run_group_tests(tests, scratch_setup, scratch_teardown);
}
