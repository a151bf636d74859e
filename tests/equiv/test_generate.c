/* Generation with a key-value cache against the whole forward pass, and the loss of a text both
 * ways.
 * ctest: wrap qd_initial_values */
#include "support/layout.h"
#include "support/sample.h"
#include "support/scratch.h"
#include "app/evaluate.h"
#include "app/generate.h"
#include "train/exec/initial.h"
#include "train/exec/state.h"
#include "train/generate/model_text.h"
#include "train/generate/sampling.h"

#include <quadrille/generate.h>

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <unistd.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"

/* Ranks are threads here, and all of them draw. */
static atomic_int drawings;

qd_status __real_qd_initial_values(const qd_program *program, uint64_t seed, int threads, qd_initial_ahead *ahead,
                                          qd_initial_sink sink, void *context);
qd_status __wrap_qd_initial_values(const qd_program *program, uint64_t seed, int threads, qd_initial_ahead *ahead,
                                          qd_initial_sink sink, void *context);
qd_status __wrap_qd_initial_values(const qd_program *program, uint64_t seed, int threads, qd_initial_ahead *ahead,
                                          qd_initial_sink sink, void *context)
{
    drawings++;
    return __real_qd_initial_values(program, seed, threads, ahead, sink, context);
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

/* Trains a few steps on a text of the form 0 1 2 …, which a model can learn, and saves a run
 * folder. */
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
    snprintf(where.folder, sizeof where.folder, "%s/checkpoints", scratch_folder());
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

static int32_t draw(const qd_model_generator *m, const qd_sampling *sampling)
{
    qd_sampler *sampler;
    ok(qd_sampler_create(qd_generator_vocab(m->generator), &sampler));
    size_t past = (size_t)qd_generator_position(m->generator);
    int32_t token = qd_sampler_draw(sampler, sampling, qd_generator_logits(m->generator), NULL, past);
    qd_sampler_destroy(sampler);
    return token;
}

#define GPT2                                                                                                                               \
    "model.arch=gpt2 model.layers=2 model.hidden=32 model.heads=4 model.vocab=53 data.seq=80 train.global_batch=4 run.threads=1 "          \
    "train.lr=3e-3 "
#define LLAMA                                                                                                                              \
    "model.layers=2 model.hidden=32 model.heads=4 model.kv_heads=2 model.vocab=53 data.seq=80 train.global_batch=4 run.threads=1 "         \
    "train.lr=3e-3 "

#define LATENT \
    LLAMA "model.arch=deepseek model.kv_heads=4 model.kv_lora_rank=20 model.qk_nope_head_dim=10 model.qk_rope_head_dim=6 " \
          "model.v_head_dim=12 "

static void cache_equals_forward(void **state)
{
    (void)state;
    static const char *const models[] = {GPT2, LLAMA, LLAMA "train.precision=bf16 model.tied=true ",
                                         /* caches of 5 + 31 and 80 rows; of 40 + 31; the window is
                                          * longer than the text */
                                         LLAMA "model.window=5 model.full_every=2 model.score_softcap=3 ", LLAMA "model.window=40 ",
                                         LLAMA "model.window=5 model.window_from=1 model.rope_local_base=40 model.rope_fraction=0.5 ",
                                         LLAMA "model.nope_every=2 model.rope_scaling=dynamic model.rope_original_seq=30 ",
                                         LLAMA "model.window=79 model.score_scale=0.6 ",
                                         LLAMA "model.window=5 model.full_every=2 model.sinks=true model.init_std=0.5 ",
                                         LATENT "model.q_lora_rank=24 model.rope_scaling=yarn model.rope_original_seq=20 "
                                                "model.rope_mscale=1 model.rope_mscale_all_dim=0.7 ",
                                         LATENT "model.rope_interleave=false train.precision=bf16 "};
    for (size_t k = 0; k < sizeof models / sizeof *models; k++) {
        enum { N = 75 };
        int32_t text[N];
        train_and_save(models[k], 5);
        for (int i = 0; i < N; i++)
            text[i] = (i * i + 3 * i) % 53;
        qd_evaluation whole;
        ok(qd_evaluate_tokens(scratch_folder(), text, N, &(qd_evaluate_passes){.threads = 1}, &whole));
        assert_int_equal(whole.tokens, N - 1);
        double tolerance = strstr(models[k], "bf16") ? 2e-2 : 1e-5;

        qd_model_generator m;
        double sum = 0.0;
        float *last = malloc(53 * sizeof *last);
        ok(qd_model_generator_open(&(qd_model_source){.path = scratch_folder()}, 0, NULL, 1, &m));
        for (int i = 0; i + 1 < N; i++) {
            ok(qd_generator_feed(m.generator, text + i, 1));
            sum += loss_of(qd_generator_logits(m.generator), 53, text[i + 1]);
        }
        memcpy(last, qd_generator_logits(m.generator), 53 * sizeof *last);
        qd_model_generator_close(&m);
        if (!(fabs(sum / (N - 1) - whole.loss) <= tolerance * whole.loss))
            fail_msg("%s: loss %.9g with a cache, %.9g in one pass", models[k], sum / (N - 1), whole.loss);

        /* 74 = 2 pieces of 32 and 10 single tokens */
        ok(qd_model_generator_open(&(qd_model_source){.path = scratch_folder()}, 0, NULL, 2, &m));
        ok(qd_generator_feed(m.generator, text, N - 1));
        for (int i = 0; i < 53; i++)
            assert_true(fabsf(last[i] - qd_generator_logits(m.generator)[i]) < (tolerance > 1e-3 ? 0.1f : 1e-4f));
        assert_int_equal(qd_generator_room(m.generator), 80 - (N - 1));
        assert_int_equal(qd_generator_feed(m.generator, text, N), QD_USAGE);
        qd_model_generator_close(&m);
        free(last);
    }
}

/* With longrope, the keys of a text that outgrows the original length are rotated anew: the logits
 * after each token are those of the text in one pass, and of another table than before. */
static void longrope_depends_on_the_length(void **state)
{
    (void)state;
    enum { ORIGINAL = 40, N = 60 };
    int32_t text[N];
    for (int i = 0; i < N; i++)
        text[i] = (i * i + 3 * i) % 53;
    train_and_save(LLAMA "model.rope_scaling=longrope model.rope_original_seq=40 model.rope_factor=2 model.init_std=0.3 "
                         "model.rope_short_factor=1,1.5,2,3 model.rope_long_factor=1,4,6,9 ", 2);
    qd_model_generator single, whole;
    ok(qd_model_generator_open(&(qd_model_source){.path = scratch_folder()}, 0, NULL, 1, &single));
    ok(qd_model_generator_open(&(qd_model_source){.path = scratch_folder()}, 0, NULL, 1, &whole));
    for (int length = 1; length <= N; length++) {
        ok(qd_generator_feed(single.generator, text + length - 1, 1));
        assert_int_equal(qd_generator_position(single.generator), length);
        qd_generator_forget(whole.generator, 0);
        ok(qd_generator_feed(whole.generator, text, length));
        for (int i = 0; i < 53; i++)
            assert_true(fabsf(qd_generator_logits(single.generator)[i] - qd_generator_logits(whole.generator)[i]) < 1e-4f);
    }
    /* The loss of the first tokens, in a text that is short and in one that is long. */
    qd_evaluation part, all;
    ok(qd_evaluate_tokens(scratch_folder(), text, ORIGINAL + 1, &(qd_evaluate_passes){.seq = ORIGINAL, .threads = 1}, &part));
    ok(qd_evaluate_tokens(scratch_folder(), text, ORIGINAL + 2, &(qd_evaluate_passes){.seq = ORIGINAL + 1, .threads = 1}, &all));
    qd_generator_forget(whole.generator, 0);
    ok(qd_generator_feed(whole.generator, text, ORIGINAL + 1));
    double last = loss_of(qd_generator_logits(whole.generator), 53, text[ORIGINAL + 1]);
    double change = all.loss * (ORIGINAL + 1) - last - part.loss * ORIGINAL;
    assert_true(fabs(change) > 1e-3); /* else the table would be the same */
    qd_model_generator_close(&whole);
    qd_model_generator_close(&single);
}

/* Steps after which the models below have learnt to count. With a sanitizer they train too few
 * steps, and their output is not checked. */
enum { LEARNT = !QD_TEST_SANITIZED, LEARNING = LEARNT ? 150 : 4 };

/* The model learns to count; greedy continuation counts; sampling is a function of the seed and
 * respects top-k. */
static void continues_what_it_learnt(void **state)
{
    (void)state;
    train_and_save(LLAMA "train.schedule=constant train.steps=150 parallel.ranks=2", LEARNING);
    qd_model_generator m;
    const int32_t prompt[] = {10, 11, 12, 13, 14};
    ok(qd_model_generator_open(&(qd_model_source){.path = scratch_folder()}, 0, NULL, 1, &m));
    ok(qd_generator_feed(m.generator, prompt, 5));
    for (int32_t i = 0; i < 20; i++) {
        int32_t token = draw(&m, &(qd_sampling){.temperature = 0.0});
        if (LEARNT)
            assert_int_equal(token, 15 + i);
        ok(qd_generator_feed(m.generator, &token, 1));
    }
    int differ = 0;
    int32_t greedy = draw(&m, &(qd_sampling){.temperature = 0.0});
    assert_true(!LEARNT || greedy == 35);
    for (uint64_t seed = 0; seed < 50; seed++) {
        qd_sampling hot = {.temperature = 50.0, .top_p = 1.0, .seed = seed};
        int32_t a = draw(&m, &hot), b = draw(&m, &hot);
        assert_int_equal(a, b);
        differ += a != greedy;
        hot.top_k = 1;
        assert_int_equal(draw(&m, &hot), greedy);
        hot.top_k = 0;
        hot.temperature = 1.0;
        hot.top_p = 0.3;
        int32_t likely = draw(&m, &hot);
        assert_true(!LEARNT || likely == greedy);
    }
    assert_true(differ > 30);
    qd_model_generator_close(&m);
}

/* The loss of a text does not depend on how many windows go through the model at once. */
static void passes_are_windows(void **state)
{
    (void)state;
    enum { N = 200 };
    int32_t text[N];
    train_and_save(LLAMA, 5);
    for (int i = 0; i < N; i++)
        text[i] = (i * i + 3 * i) % 53;
    qd_evaluation one, many;
    ok(qd_evaluate_tokens(scratch_folder(), text, N, &(qd_evaluate_passes){.seq = 11, .per_pass = 1, .threads = 1}, &one));
    for (int per_pass = 2; per_pass <= 20; per_pass += 3) {
        ok(qd_evaluate_tokens(scratch_folder(), text, N, &(qd_evaluate_passes){.seq = 11, .per_pass = per_pass, .threads = 1}, &many));
        assert_int_equal(many.tokens, one.tokens);
        assert_true(fabs(many.loss - one.loss) < 1e-6);
    }
    assert_int_equal(one.tokens, N - 1);
}

typedef struct asked {
    int64_t vocab, counted, all; /* windows below `counted` have targets; windows from `all` on must not be requested */
} asked;

static qd_status fill_asked(void *context, int64_t first, int64_t count, int64_t seq, int32_t *tokens, int32_t *targets,
                            int32_t *doc_start)
{
    asked *a = context;
    assert_true(first + count <= a->all);
    QD_TRY(fill(&a->vocab, first * 7, count, seq, tokens, targets, doc_start));
    for (int64_t i = 0; i < count * seq; i++)
        targets[i] = first + i / seq < a->counted ? targets[i] : -1;
    return QD_OK;
}

/* The last pass contains only the remaining windows, which changes no bit: the result equals that
 * of a pass padded with windows that do not count. */
static void the_last_pass_is_as_long_as_it_needs(void **state)
{
    (void)state;
    static const char *const models[] = {GPT2, LLAMA, LLAMA "train.precision=bf16 "};
    for (size_t k = 0; k < sizeof models / sizeof *models; k++) {
        train_and_save(models[k], 3);
        for (int64_t count = 1; count <= 9; count++) {
            double losses[2];
            for (int filled = 0; filled < 2; filled++) {
                asked a = {.vocab = 53, .counted = count, .all = filled ? (count + 3) / 4 * 4 : count};
                qd_model_run run;
                qd_evaluation result;
                qd_batch_source source = {.fill = fill_asked, .context = &a};
                ok(qd_model_run_open(&(qd_model_source){.path = scratch_folder()}, NULL, &run));
                ok(qd_evaluate_windows(&run, &source, a.all, &(qd_evaluate_passes){.seq = 23, .per_pass = 4, .threads = 1}, &result));
                qd_model_run_close(&run);
                assert_int_equal(result.tokens, count * 23);
                losses[filled] = result.loss;
            }
            if (count >= 4 && losses[0] != losses[1])
                fail_msg("%s: %lld windows: %.17g, filled up %.17g", models[k], (long long)count, losses[0], losses[1]);
        }
    }
}

/* Initial values are not drawn where a checkpoint replaces them. */
static void nothing_is_drawn_to_be_replaced(void **state)
{
    (void)state;
    int32_t text[100] = {0};
    qd_evaluation evaluation;
    qd_model_generator m;
    train_and_save(LLAMA, 1);
    assert_true(drawings > 0);
    drawings = 0;
    ok(qd_evaluate_tokens(scratch_folder(), text, 100, &(qd_evaluate_passes){.threads = 1}, &evaluation));
    ok(qd_model_generator_open(&(qd_model_source){.path = scratch_folder()}, 0, NULL, 1, &m));
    qd_model_generator_close(&m);
    assert_int_equal(drawings, 0);
}

static void characters_stay_whole(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        size_t whole;
    } cases[] = {
        {"abc", 3}, {"", 0}, {"\xC3", 0}, {"a\xC3", 1}, {"\xC3\xA9", 2}, {"\xE2\x82", 0}, {"\xE2\x82\xAC", 3},
        {"x\xF0\x9F\x98", 1}, {"\xF0\x9F\x98\x80", 4},
        /* bytes that can never become a character are printed at once */
        {"\x80", 1}, {"\xFF", 1}, {"\xC0", 1}, {"\xF5\x80", 2}, {"\x80\x80\x80\x80", 4}, {"\xC3\xA9\x80", 3},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_int_equal(qd_utf8_whole(cases[i].text, strlen(cases[i].text)), cases[i].whole);
}

typedef struct heard {
    char text[4096];
    size_t length;
    int calls;
    bool started;
    int stop_after; /* calls; 0: never */
} heard;

static void hear_start(void *context, const qd_generate_report *report)
{
    heard *h = context;
    assert_false(h->started);
    assert_int_equal(report->tokens, 0);
    h->started = true;
}

static bool hear(void *context, const char *text, size_t length)
{
    heard *h = context;
    assert_true(h->started);
    assert_true(length > 0 && h->length + length < sizeof h->text);
    memcpy(h->text + h->length, text, length);
    h->length += length;
    return ++h->calls != h->stop_after;
}

/* A byte sequence far beyond the context: generation continues when the window slides, and only
 * whole characters are printed. */
static void text_goes_on_beyond_the_context(void **state)
{
    (void)state;
    train_and_save("model.layers=2 model.hidden=64 model.heads=4 data.seq=256 train.global_batch=2 run.threads=1 train.lr=3e-3 "
                   "train.schedule=constant train.steps=150", LEARNING);
    heard h = {0};
    qd_generate_report report = qd_generate_report_default();
    qd_generate_options o = qd_generate_options_default();
    o.model = scratch_folder();
    o.prompt = "ABCDEFGH";
    o.prompt_length = 8;
    o.tokens = 40; /* to 'p' */
    o.context = 32;
    o.temperature = 0.0;
    o.on_start = hear_start;
    o.on_text = hear;
    o.callback_context = &h;
    ok(qd_generate(&o, &report));
    h.text[h.length] = '\0';
    if (LEARNT)
        assert_string_equal(h.text, "IJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnop");
    assert_int_equal(report.slides, 1);
    assert_int_equal(report.context, 32);
    if (LEARNT)
        assert_int_equal(h.calls, 40);

    h = (heard){.stop_after = 5};
    ok(qd_generate(&o, &report));
    assert_int_equal(report.end, QD_GENERATE_STOPPED);
    assert_true(report.tokens >= 5 && (!LEARNT || report.tokens == 5)); /* one call may follow several tokens */

    /* C2, C3, ... each need one more byte, which counting does not produce: they must not be held
     * back for ever. */
    h = (heard){0};
    o.prompt = "\xB9\xBA\xBB\xBC\xBD\xBE\xBF\xC0\xC1";
    o.prompt_length = 9;
    o.tokens = 3;
    ok(qd_generate(&o, &report));
    if (LEARNT) {
        assert_int_equal(h.length, 3);
        assert_memory_equal(h.text, "\xC2\xC3\xC4", 3);
    }

    o.top_p = 0.0;
    assert_int_equal(qd_generate(&o, &report), QD_USAGE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(cache_equals_forward, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(longrope_depends_on_the_length, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(continues_what_it_learnt, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(passes_are_windows, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(the_last_pass_is_as_long_as_it_needs, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(nothing_is_drawn_to_be_replaced, scratch_setup, scratch_teardown),
        cmocka_unit_test(characters_stay_whole),
        cmocka_unit_test_setup_teardown(text_goes_on_beyond_the_context, scratch_setup, scratch_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
