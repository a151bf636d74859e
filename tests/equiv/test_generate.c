/* Generation with a cache against the whole forward pass, and the loss of a text both ways. */
#include "support/layout.h"
#include "train/evaluate.h"
#include "train/generate.h"
#include "train/state.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <setjmp.h>
#include <cmocka.h>

static char root[64];

static void ok(qd_status status)
{
    if (status != QD_OK)
        fail_msg("%s\n%s", qd_error_message(), qd_error_trace());
}

static int make_root(void **state)
{
    (void)state;
    snprintf(root, sizeof root, "/tmp/quadrille-generate-XXXXXX");
    return mkdtemp(root) ? 0 : -1;
}

static int remove_root(void **state)
{
    (void)state;
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", root);
    return system(command);
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

/* Trains a few steps on a text of the form 0 1 2 … that a model can learn, and saves it as a run folder. */
static qd_status fill(void *context, int64_t first, int64_t count, int64_t seq, int32_t *tokens, int32_t *targets,
                      int32_t *doc_start)
{
    const int64_t *vocab = context;
    for (int64_t i = 0; i < count; i++)
        for (int64_t t = 0; t < seq; t++) {
            tokens[i * seq + t] = (int32_t)((first + i + t) % *vocab);
            targets[i * seq + t] = (int32_t)((first + i + t + 1) % *vocab);
            doc_start[i * seq + t] = 0;
        }
    return QD_OK;
}

static void train_and_save(const char *words, int steps)
{
    qd_options *options = layout_options(words);
    char *yaml;
    ok(qd_options_to_yaml(options, &yaml));
    qd_config config = layout_config(words);
    int64_t vocab = config.model.vocab;
    qd_batch_source source = {.fill = fill, .context = &vocab};
    qd_team *team;
    ok(qd_team_create(&config, &source, &team));
    for (int s = 0; s < steps; s++) {
        qd_step_output out;
        ok(qd_team_step(team, &out));
    }
    saved where = {.config = yaml};
    snprintf(where.folder, sizeof where.folder, "%s/checkpoints", root);
    ok(qd_team_call(team, save, &where));
    qd_team_destroy(team);
    qd_options_destroy(options);
    free(yaml);
}

static double loss_of(const float *logits, int64_t vocab, int32_t target)
{
    double most = logits[0], sum = 0.0;
    for (int64_t i = 1; i < vocab; i++)
        most = logits[i] > most ? logits[i] : most;
    for (int64_t i = 0; i < vocab; i++)
        sum += exp(logits[i] - most);
    return most + log(sum) - logits[target];
}

#define GPT2 "model.arch=gpt2 model.layers=2 model.hidden=32 model.heads=4 model.vocab=53 data.seq=80 train.global_batch=4 run.threads=1 train.lr=3e-3 "
#define LLAMA "model.layers=2 model.hidden=32 model.heads=4 model.kv_heads=2 model.vocab=53 data.seq=80 train.global_batch=4 run.threads=1 train.lr=3e-3 "

static void cache_equals_forward(void **state)
{
    (void)state;
    static const char *const models[] = {GPT2, LLAMA, LLAMA "train.precision=bf16 model.tied=true "};
    for (size_t m = 0; m < sizeof models / sizeof *models; m++) {
        enum { N = 75 };
        int32_t text[N];
        train_and_save(models[m], 5);
        for (int i = 0; i < N; i++)
            text[i] = (i * i + 3 * i) % 53;
        qd_evaluation whole;
        ok(qd_evaluate_tokens(root, text, N, &(qd_evaluate_passes){.threads = 1}, &whole));
        assert_int_equal(whole.tokens, N - 1);
        double tolerance = strstr(models[m], "bf16") ? 2e-2 : 1e-5;

        qd_generator *g;
        double sum = 0.0;
        float *last = malloc(53 * sizeof *last);
        ok(qd_generator_create(root, 0, 1, &g));
        for (int i = 0; i + 1 < N; i++) {
            ok(qd_generator_feed(g, text + i, 1));
            sum += loss_of(qd_generator_logits(g), 53, text[i + 1]);
        }
        memcpy(last, qd_generator_logits(g), 53 * sizeof *last);
        qd_generator_destroy(g);
        if (!(fabs(sum / (N - 1) - whole.loss) <= tolerance * whole.loss))
            fail_msg("%s: loss %.9g with a cache, %.9g in one pass", models[m], sum / (N - 1), whole.loss);

        ok(qd_generator_create(root, 0, 2, &g)); /* 74 = 2 pieces of 32 and 10 single tokens */
        ok(qd_generator_feed(g, text, N - 1));
        for (int i = 0; i < 53; i++)
            assert_true(fabsf(last[i] - qd_generator_logits(g)[i]) < (tolerance > 1e-3 ? 0.1f : 1e-4f));
        assert_int_equal(qd_generator_room(g), 80 - (N - 1));
        assert_int_equal(qd_generator_feed(g, text, N), QD_USAGE);
        qd_generator_destroy(g);
        free(last);
    }
}

/* It learns to count; greedy continuation counts on; sampling is a function of the seed and keeps to top-k. */
static void continues_what_it_learnt(void **state)
{
    (void)state;
    train_and_save(LLAMA "train.schedule=constant train.steps=150 parallel.ranks=2", 150);
    qd_generator *g;
    const int32_t prompt[] = {10, 11, 12, 13, 14};
    ok(qd_generator_create(root, 0, 1, &g));
    ok(qd_generator_feed(g, prompt, 5));
    for (int32_t i = 0; i < 20; i++) {
        int32_t token = qd_generator_sample(g, &(qd_sampling){.temperature = 0.0});
        assert_int_equal(token, 15 + i);
        ok(qd_generator_feed(g, &token, 1));
    }
    int differ = 0;
    for (uint64_t seed = 0; seed < 50; seed++) {
        qd_sampling hot = {.temperature = 50.0, .top_p = 1.0, .seed = seed};
        int32_t a = qd_generator_sample(g, &hot), b = qd_generator_sample(g, &hot);
        assert_int_equal(a, b);
        differ += a != 35;
        hot.top_k = 1;
        assert_int_equal(qd_generator_sample(g, &hot), 35);
        hot.top_k = 0;
        hot.temperature = 1.0;
        hot.top_p = 0.3;
        assert_int_equal(qd_generator_sample(g, &hot), 35);
    }
    assert_true(differ > 30);
    qd_generator_destroy(g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(cache_equals_forward, make_root, remove_root),
        cmocka_unit_test_setup_teardown(continues_what_it_learnt, make_root, remove_root),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
