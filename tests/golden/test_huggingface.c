/* Folders written by transformers (tools/hf_fixtures.py) against the logits it computed from them,
 * after import, and after export and another import.
 * ctest: timeout 120 */
#include "base/text/json.h"
#include "ckpt/safetensors.h"
#include "ckpt/huggingface.h"
#include "support/layout.h"
#include "support/scratch.h"
#include "app/evaluate.h"
#include "app/generate.h"

#include <quadrille/convert.h>

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"

#define FIXTURES QD_TEST_SOURCE_DIR "/tests/golden/huggingface/"

static const char *const names[] = {"gpt2-tied",       "gpt2-untied-sharded", "llama-untied-scaled",
                                    "llama-tied-half", "llama-biases",        "llama-attention-bias",
                                    "mixtral",         "qwen3",               "qwen3-moe",           "qwen3-moe-mixed",
                                    "mixtral-window",
                                    "qwen3-moe-balanced", "qwen3-moe-attention-bias", "olmoe",     "olmoe-one-key",
                                    "qwen2-moe",       "qwen2-moe-windows",
                                    "gpt-oss",         "gpt-oss-odd",
                                    "deepseek-v3",     "deepseek-v3-whole-queries",
                                    "deepseek-v2",     "deepseek-v2-whole-queries",
                                    "qwen2",           "qwen2-tied",
                                    "mistral",         "mistral-window",      "qwen3-attention-bias", "llama-linear",
                                    "llama-mlp-bias",  "qwen2-yarn",          "mistral-short-window", "qwen2-windows",
                                    "qwen3-windows",   "olmo2",               "olmo2-one-key",        "olmo",
                                    "olmo-clipped",    "gemma2",              "gemma2-full",          "gemma3",
                                    "gemma3-capped",   "olmo3",               "olmo3-one-key",
                                    "smollm3",         "smollm3-windows",
                                    "phi3",            "phi3-partial", "phi3-longrope"};
enum { NAMES = sizeof names / sizeof *names, CLOSER = 19 }; /* from there on gradients agree to 1e-5 */

/* The model_type of a folder. */
static void kind_of(const char *folder, char kind[32])
{
    char path[640];
    qd_json *document;
    const char *text;
    snprintf(path, sizeof path, "%s/config.json", folder);
    ok(qd_json_load(path, &document));
    ok(qd_json_get_string(document, qd_json_root(document), "model_type", &text));
    snprintf(kind, 32, "%s", text);
    qd_json_destroy(document);
}

static const char *fixture(const char *name)
{
    static char path[512];
    snprintf(path, sizeof path, FIXTURES "%s", name);
    return path;
}

static void convert(const char *from, const char *to, qd_dtype dtype, int64_t shard_bytes, qd_convert_report *report)
{
    qd_convert_options o = {.size = sizeof o, .from = from, .to = to, .dtype = dtype, .shard_bytes = shard_bytes};
    qd_status status = qd_convert(&o, report);
    qd_strbuf_free(&report->notes);
    ok(status);
}

/* Largest difference of the logits, and of the mean loss computed from them. */
static void compare(const char *model, const char *name, double tolerance)
{
    char path[512];
    qd_safetensors *expected;
    qd_model_generator m;
    snprintf(path, sizeof path, FIXTURES "%s/expected.safetensors", name);
    ok(qd_safetensors_load(path, &expected));
    const qd_safetensors_entry *tokens = qd_safetensors_find(expected, "tokens"), *logits = qd_safetensors_find(expected, "logits");
    int64_t count = tokens->count, vocab = logits->shape[1];
    const int32_t *ids = tokens->data;
    const float *wanted = logits->data;
    double worst = 0.0, loss = 0.0;
    ok(qd_model_generator_open(&(qd_model_source){.path = model}, count, NULL, 1, &m));
    assert_int_equal(qd_generator_vocab(m.generator), vocab);
    qd_generator_expect(m.generator, count);
    for (int64_t t = 0; t < count; t++) {
        double most = -1e30, sum = 0.0;
        ok(qd_generator_feed(m.generator, ids + t, 1));
        for (int64_t v = 0; v < vocab; v++) {
            double difference = fabs((double)qd_generator_logits(m.generator)[v] - (double)wanted[t * vocab + v]);
            worst = difference > worst || isnan(difference) ? difference : worst;
            most = fmax(most, wanted[t * vocab + v]);
        }
        for (int64_t v = 0; v < vocab; v++)
            sum += exp(wanted[t * vocab + v] - most);
        if (t + 1 < count)
            loss += (most + log(sum) - wanted[t * vocab + ids[t + 1]]) / (double)(count - 1);
    }
    qd_model_generator_close(&m);
    qd_evaluation evaluation;
    ok(qd_evaluate_tokens(model, ids, count, &(qd_evaluate_passes){.seq = count, .threads = 1}, &evaluation));
    qd_safetensors_close(expected);
    if (!(worst <= tolerance) || fabs(evaluation.loss - loss) > tolerance)
        fail_msg("%s: logits differ by %g, the loss is %.7f and should be %.7f", name, worst, evaluation.loss, loss);
}

static void test_import(void **state)
{
    for (int i = 0; i < NAMES; i++) {
        qd_convert_report report = qd_convert_report_default();
        const char *run = scratch_path(state, names[i]);
        convert(fixture(names[i]), run, QD_F32, 0, &report);
        assert_true(report.imported);
        assert_int_equal(report.tokenizer, i == 3);
        compare(run, names[i], 1e-4);
    }
}

/* Exported, in one file or several, and imported again: bit-identical, and so are the logits. */
static void test_export(void **state)
{
    for (int i = 0; i < NAMES; i++) {
        qd_convert_report report = qd_convert_report_default();
        char a[64], b[64], c[64];
        snprintf(a, sizeof a, "a-%s", names[i]);
        snprintf(b, sizeof b, "b-%s", names[i]);
        snprintf(c, sizeof c, "c-%s", names[i]);
        convert(fixture(names[i]), scratch_path(state, a), QD_F32, 0, &report);
        convert(scratch_path(state, a), scratch_path(state, b), QD_F32, i % 2 ? 8000 : 0, &report);
        assert_false(report.imported);
        assert_true(i % 2 ? report.files > 1 : report.files == 1);
        char before[32], after[32];
        kind_of(fixture(names[i]), before);
        kind_of(scratch_path(state, b), after);
        assert_string_equal(before, after);
        convert(scratch_path(state, b), scratch_path(state, c), QD_F32, 0, &report);
        compare(scratch_path(state, c), names[i], 1e-4);
    }
}

/* The tensors that transformers wrote and those that we export are bit-identical, where nothing has
 * to be added. */
static void test_same_tensors(void **state)
{
    static const int whole[] = {0, 2, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23};
    for (size_t i = 0; i < sizeof whole / sizeof *whole; i++) {
        qd_convert_report report = qd_convert_report_default();
        qd_safetensors *theirs, *ours;
        char run[64], back[64], path[640];
        const char *name = names[whole[i]];
        snprintf(run, sizeof run, "run-%s", name);
        snprintf(back, sizeof back, "back-%s", name);
        convert(fixture(name), scratch_path(state, run), QD_F32, 0, &report);
        convert(scratch_path(state, run), scratch_path(state, back), QD_F32, 0, &report);
        snprintf(path, sizeof path, "%s/model.safetensors", fixture(name));
        ok(qd_safetensors_load(path, &theirs));
        snprintf(path, sizeof path, "%s/model.safetensors", scratch_path(state, back));
        ok(qd_safetensors_load(path, &ours));
        int left_out = 0; /* multi-token prediction */
        for (int t = 0; t < qd_safetensors_count(theirs); t++) {
            const qd_safetensors_entry *x = qd_safetensors_at(theirs, t), *y = qd_safetensors_find(ours, x->name);
            if (strstr(x->name, ".eh_proj.")) {
                assert_null(y);
                left_out++;
                continue;
            }
            assert_non_null(y);
            assert_int_equal(x->count, y->count);
            assert_memory_equal(x->data, y->data, (size_t)x->count * 4);
        }
        assert_int_equal(qd_safetensors_count(ours), qd_safetensors_count(theirs) - left_out);
        assert_int_equal(left_out, strcmp(name, "deepseek-v3") == 0);
        qd_safetensors_close(ours);
        qd_safetensors_close(theirs);
    }
}

typedef struct sentence {
    const int32_t *tokens;
} sentence;

static qd_status fill_sentence(void *context, int64_t first, int64_t count, int64_t seq, int32_t *tokens, int32_t *targets,
                               int32_t *doc_start)
{
    const sentence *s = context;
    (void)first;
    (void)count;
    memcpy(tokens, s->tokens, (size_t)seq * sizeof *tokens);
    memcpy(targets, s->tokens + 1, (size_t)seq * sizeof *targets);
    memset(doc_start, 0, (size_t)seq * sizeof *doc_start);
    return QD_OK;
}

/* Writes one of their tensors to our parameters, or reads it from their gradients. Experts may be
 * stacked: (experts, in, outputs), where the outputs of an expert's parameters alternate. */
static void exchange_values(qd_team *team, const qd_ledger *ledger, const qd_hf_tensor *t, bool write, float *theirs)
{
    int parts = t->experts > 0 ? t->param_count / t->experts : 1;
    int64_t first = 0; /* others: rows of several, one after the other */
    for (int i = 0; i < t->param_count; i++) {
        const qd_param *p = &ledger->params[t->first + i];
        int64_t rows = p->shape[0], cols = p->shape[1], count = rows * cols;
        float *ours = malloc((size_t)count * sizeof *ours);
        if (!write)
            ok(qd_team_read(team, p->name, QD_TENSOR_GRADIENT, ours, count));
        for (int64_t k = 0; k < count; k++) {
            int64_t at = t->experts > 0 ? (i / parts * cols + k % cols) * rows * parts + k / cols * parts + i % parts : first + k;
            *(write ? &ours[k] : &theirs[at]) = write ? theirs[at] : ours[k];
        }
        if (write)
            ok(qd_team_write(team, p->name, ours, count));
        first += count;
        free(ours);
    }
}

/* One step on the fixture's tokens, from the fixture's weights, against the loss and the gradients
 * of transformers. */
static void compare_gradients(const char *name, double loss_tolerance, double tolerance)
{
    qd_hf_source *source;
    qd_safetensors *expected, *weights;
    qd_strbuf notes = {0};
    qd_team *team;
    qd_arena *arena;
    qd_hf_tensor *tensors;
    int count, compared = 0;
    char path[512];
    ok(qd_hf_open(fixture(name), &notes, &source));
    qd_strbuf_free(&notes);
    snprintf(path, sizeof path, FIXTURES "%s/expected.safetensors", name);
    ok(qd_safetensors_load(path, &expected));
    snprintf(path, sizeof path, FIXTURES "%s/model.safetensors", name);
    ok(qd_safetensors_load(path, &weights));
    const qd_safetensors_entry *tokens = qd_safetensors_find(expected, "tokens"), *loss = qd_safetensors_find(expected, "loss");
    qd_config config = layout_config("parallel.ranks=1 train.global_batch=1 train.optimizer=sgd train.clip=0 train.steps=1");
    config.model = *qd_hf_model(source);
    config.strategy.seq = tokens->count - 1;
    sentence s = {tokens->data};
    qd_batch_source batches = {.context = &s, .fill = fill_sentence};
    ok(qd_team_create(&config, &batches, &team));
    const qd_ledger *ledger = qd_team_program(team)->ledger;
    ok(qd_arena_create(&arena));
    ok(qd_hf_tensors(ledger, arena, &tensors, &count));
    for (int t = 0; t < count; t++) {
        float *from = (float *)(uintptr_t)qd_safetensors_find(weights, tensors[t].name)->data;
        exchange_values(team, ledger, &tensors[t], true, from);
    }
    qd_step_output out;
    ok(qd_team_step(team, &out));
    if (fabs(out.loss - *(const double *)loss->data) > loss_tolerance)
        fail_msg("%s: the loss is %.7f and should be %.7f", name, out.loss, *(const double *)loss->data);
    for (int t = 0; t < count; t++) {
        char key[160];
        int64_t elements = qd_hf_tensor_count(&tensors[t]);
        snprintf(key, sizeof key, "grad.%s", tensors[t].name);
        if (ledger->params[tensors[t].first].counts)
            continue; /* a bias without a gradient */
        const qd_safetensors_entry *wanted = qd_safetensors_find(expected, key);
        assert_non_null(wanted);
        assert_int_equal(wanted->count, elements);
        float *gradient = malloc((size_t)elements * sizeof *gradient);
        exchange_values(team, ledger, &tensors[t], false, gradient);
        double error = qd_relative_error(gradient, wanted->data, elements, 1e-3);
        if (!(error <= tolerance))
            fail_msg("%s: the gradient of %s differs by %g", name, tensors[t].name, error);
        free(gradient);
        compared++;
    }
    assert_true(compared > 10);
    qd_arena_destroy(arena);
    qd_team_destroy(team);
    qd_safetensors_close(weights);
    qd_safetensors_close(expected);
    qd_hf_close(source);
}

static void test_gradients(void **state)
{
    (void)state;
    for (int i = 6; i < NAMES; i++)
        compare_gradients(names[i], i < CLOSER ? 1e-4 : 1e-6, i < CLOSER ? 1e-4 : 1e-5);
}

/* Rounded once: logits change by as much as 8 or 11 bits allow, and do change. */
static void test_narrow(void **state)
{
    const struct {
        qd_dtype dtype;
        double tolerance;
    } types[] = {{QD_BF16, 0.3}, {QD_F16, 0.03}};
    qd_convert_report report = qd_convert_report_default();
    convert(fixture(names[2]), scratch_path(state, "wide"), QD_F32, 0, &report);
    for (int i = 0; i < 2; i++) {
        char narrow[32], back[32];
        snprintf(narrow, sizeof narrow, "narrow-%d", i);
        snprintf(back, sizeof back, "wide-%d", i);
        convert(scratch_path(state, "wide"), scratch_path(state, narrow), types[i].dtype, 0, &report);
        assert_int_equal(report.bytes, 2 * report.parameters);
        convert(scratch_path(state, narrow), scratch_path(state, back), QD_F32, 0, &report);
        compare(scratch_path(state, back), names[2], types[i].tolerance);
    }
}

/* Copies a fixture with a change to one file. */
static const char *changed(void **state, const char *to, const char *name, const char *file, const char *find, const char *put)
{
    static const char *const files[] = {"config.json", "model.safetensors"};
    char path[512], target[128];
    for (int i = 0; i < 2; i++) {
        size_t length;
        snprintf(path, sizeof path, FIXTURES "%s/%s", name, files[i]);
        unsigned char *bytes = scratch_read(path, &length);
        assert_int_equal(strlen(find), strlen(put));
        bool found = strcmp(files[i], file) != 0;
        for (size_t at = 0; !found && at + strlen(find) <= length; at++)
            if (memcmp(bytes + at, find, strlen(find)) == 0) {
                memcpy(bytes + at, put, strlen(put));
                found = true;
            }
        assert_true(found);
        snprintf(target, sizeof target, "%s/%s", to, files[i]);
        scratch_write(state, target, bytes, length);
        free(bytes);
    }
    return scratch_path(state, to);
}

static void refused(void **state, const char *from, const char *part)
{
    qd_convert_report report = qd_convert_report_default();
    const char *to = scratch_path(state, "refused");
    assert_int_not_equal(qd_convert(&(qd_convert_options){.size = sizeof(qd_convert_options), .from = from, .to = to}, &report), QD_OK);
    qd_strbuf_free(&report.notes);
    if (!strstr(qd_error_message(), part))
        fail_msg("'%s' is not in: %s", part, qd_error_message());
    assert_int_not_equal(access(to, F_OK), 0);
    assert_int_not_equal(access(scratch_path(state, "refused.part"), F_OK), 0);
}

static void test_refused(void **state)
{
    const char *weights = "model.safetensors", *config = "config.json";
    refused(state, changed(state, "unknown", names[2], weights, "0.mlp.up_proj", "0.mlp.xx_proj"), "layers.0.mlp.up_proj.weight");
    refused(state, changed(state, "more", names[0], config, "\"n_layer\": 2", "\"n_layer\": 1"), "transformer.h.1.");
    refused(state, changed(state, "fewer", names[0], config, "\"n_layer\": 2", "\"n_layer\": 3"), "transformer.h.2.");
    refused(state, changed(state, "shape", names[0], config, "\"n_embd\": 16", "\"n_embd\": 20"), "wte.weight");
    refused(state, changed(state, "kind", names[2], config, "\"model_type\": \"llama\"", "\"model_type\": \"mamba\""), "mamba");
    refused(state, changed(state, "act", names[2], config, "\"silu\"", "\"relu\""), "hidden_act");
    refused(state, changed(state, "rope", names[2], config, "\"llama3\"", "\"custom\""), "custom");
    refused(state, changed(state, "tied", names[2], config, "\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true "),
            "lm_head.weight");
    refused(state, changed(state, "cut", names[2], weights, "\"data_offsets\"", "\"data_offsetz\""), "data_offsets");
    refused(state, scratch_path(state, "nowhere"), "nowhere");
    qd_convert_report report = qd_convert_report_default();
    convert(fixture(names[0]), scratch_path(state, "taken"), QD_F32, 0, &report);
    qd_convert_options o = {.size = sizeof o, .from = fixture(names[0]), .to = scratch_path(state, "taken")};
    assert_int_equal(qd_convert(&o, &report), QD_USAGE);
    qd_strbuf_free(&report.notes);
    assert_non_null(strstr(qd_error_message(), "exists already"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_import, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_export, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_same_tensors, scratch_setup, scratch_teardown),
        cmocka_unit_test(test_gradients),
        cmocka_unit_test_setup_teardown(test_narrow, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_refused, scratch_setup, scratch_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
