/* The table of model fields (src/model/fields.h): it covers the structs, and what is generated from
 * it loses no field: options, presets, equality, the saved configuration. */
#include "model/field_table.h"
#include "support/layout.h"
#include "train/run/run.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"

#define EACH_FIELD(f) \
    int count_of_fields; \
    const qd_model_field *f = qd_model_fields(&count_of_fields), *const end_of_fields = f + count_of_fields; \
    for (; f < end_of_fields; f++)

static size_t size_of(const qd_model_field *f)
{
    return f->kind == QD_FIELD_FLAG                                   ? sizeof(bool)
           : f->kind == QD_FIELD_INT || f->kind == QD_FIELD_ENUM ? sizeof(int)
           : f->kind == QD_FIELD_LIST                            ? sizeof(qd_number_list)
                                                                 : 8;
}

static size_t group_length(const qd_model_field *f)
{
    const char *point = strchr(f->member, '.');
    return point ? (size_t)(point - f->member) : 0;
}

static size_t aligned(size_t at, size_t to)
{
    return (at + to - 1) / to * to;
}

/* Rows are in member order with nothing but padding between them. */
static void rows_cover_the_model(void **state)
{
    (void)state;
    size_t at = sizeof((qd_model *)0)->name, group = 0;
    EACH_FIELD(f) {
        if (group_length(f) != group)
            at = aligned(at, 8);
        group = group_length(f);
        at = aligned(at, size_of(f) > 8 ? 8 : size_of(f));
        if (f->offset != at)
            fail_msg("%s is at %zu, but what the table has before it ends at %zu", f->member, f->offset, at);
        at += size_of(f);
    }
    assert_int_equal(aligned(at, 8), offsetof(qd_model, lora)); /* which is no field */
}

/* A model in which the field is relevant. */
static qd_model full(const qd_model_field *f)
{
    qd_model m = qd_model_default(QD_ARCH_LLAMA);
    m.moe.experts = 8;
    m.window = 16;
    m.rope.scaling = f->when == QD_WHEN_YARN                                      ? QD_ROPE_YARN
                     : f->when == QD_WHEN_LONGROPE || f->when == QD_WHEN_LENGTHS ? QD_ROPE_LONG
                                                                                  : QD_ROPE_LLAMA3;
    m.qk_norm = f->when == QD_WHEN_QK_NORM;
    m.moe.shared = 1;
    m.activation = f->when == QD_WHEN_CLAMPED ? QD_ACT_SWIGLU_CLAMPED : m.activation;
    m.arch = f->when == QD_WHEN_LATENT || f->when == QD_WHEN_MTP ? QD_ARCH_DEEPSEEK : m.arch;
    m.mtp_modules = f->when == QD_WHEN_MTP;
    return m;
}

/* Another value, within the limits of the option if there is one. */
static void change(const qd_model_field *f, qd_model *m)
{
    static const double numbers[] = {1.0, 1e-6, 0.1};
    if (f->kind == QD_FIELD_LIST)
        assert_true(qd_field_set_list(f, numbers, qd_field_list(f, m)->count == 3 ? 2 : 3, m));
    else if (f->kind == QD_FIELD_REAL)
        qd_field_set_real(f, qd_field_real(f, m) == f->option.least ? f->option.most : f->option.least, m);
    else if (f->kind == QD_FIELD_INT || f->kind == QD_FIELD_SIZE)
        qd_field_set_whole(f, qd_field_whole(f, m) == (int64_t)f->option.most ? (int64_t)f->option.least : (int64_t)f->option.most, m);
    else
        qd_field_set_whole(f, qd_field_whole(f, m) == 0, m);
}

static void equality_notices_every_field(void **state)
{
    (void)state;
    const qd_model dense = qd_model_default(QD_ARCH_GPT2);
    EACH_FIELD(f) {
        const qd_model experts = full(f);
        qd_model m = experts;
        assert_true(qd_model_equal(&experts, &m));
        change(f, &m);
        if (qd_model_equal(&experts, &m) || qd_model_equal(&m, &experts))
            fail_msg("models that differ in %s are equal", f->member);
        m = dense;
        change(f, &m);
        assert_int_equal(qd_model_equal(&dense, &m), f->when != QD_WHEN_ALWAYS);
    }
}

static void texts_are_read_back(void **state)
{
    (void)state;
    EACH_FIELD(f) {
        qd_model m = full(f), other = m;
        char text[QD_FIELD_TEXT];
        change(f, &m);
        qd_field_text(f, &m, text);
        assert_true(qd_field_set_text(f, text, &other));
        assert_memory_equal((char *)&m + f->offset, (char *)&other + f->offset, size_of(f));
        assert_false(qd_field_set_text(f, "neither number nor word", &other));
    }
}

static void presets_state_every_field(void **state)
{
    (void)state;
    EACH_FIELD(f) {
        qd_model m = full(f), other = m;
        const char *key = qd_field_preset(f), *point = strchr(key, '.');
        const bool list = f->kind == QD_FIELD_LIST;
        const char *quote = f->kind == QD_FIELD_ENUM ? "\"" : "", *open = list ? "[" : quote, *close = list ? "]" : quote;
        char value[QD_FIELD_TEXT], text[QD_FIELD_TEXT + 256], outer[64] = "";
        qd_json *document;
        change(f, &m);
        qd_field_text(f, &m, value);
        if (point)
            snprintf(outer, sizeof outer, "\"%.*s\": {", (int)(point - key), key);
        snprintf(text, sizeof text, "{%s\"%s\": %s%s%s%s}", outer, point ? point + 1 : key, open, value, close, point ? "}" : "");
        ok(qd_json_load_text("preset", text, strlen(text), &document));
        ok(qd_model_read(document, qd_json_root(document), &other));
        qd_json_destroy(document);
        assert_memory_equal(&m, &other, sizeof m);
    }
}

static qd_model resolved(const qd_options *options)
{
    qd_config config;
    ok(qd_config_resolve(options, 0, &config));
    return config.model;
}

/* The configuration that a run folder stores. */
static char *saved_text(const qd_options *options)
{
    qd_config config;
    qd_options *values;
    char *text;
    ok(qd_config_resolve(options, 0, &config));
    ok(qd_run_config_values(options, &config, &values));
    ok(qd_options_to_yaml(values, &text));
    qd_options_destroy(values);
    return text;
}

/* The model that a resumed run reads from it. */
static qd_model saved_and_loaded(const qd_options *options)
{
    qd_options *again = layout_options("");
    char *text = saved_text(options);
    ok(qd_options_load_text(again, "config.yaml", text, strlen(text)));
    qd_model m = resolved(again);
    free(text);
    qd_options_destroy(again);
    return m;
}

/* Finds a value that turns the model of `words` into another valid one, and follows it. */
static bool option_counts(const qd_model_field *f, const char *words)
{
    static const char *const values[] = {"true", "false", "1",      "2",       "3",     "8",     "64",       "0.5",    "1024",
                                         "gpt2", "llama3", "sigmoid", "batch", "least", "gelu_tanh", "linear", "mistral",
                                         "width", "1,2.5,3"};
    qd_options *before = layout_options(words);
    qd_model plain = resolved(before);
    bool found = false;
    for (size_t i = 0; i < sizeof values / sizeof *values && !found; i++) {
        qd_options *options = layout_options(words);
        qd_config config;
        if (!(f->kind == QD_FIELD_FLAG && strcmp(values[i], "1") == 0) /* saved as true */ &&
            qd_options_set(options, f->option.key, values[i]) == QD_OK && qd_config_resolve(options, 0, &config) == QD_OK &&
            !qd_model_equal(&plain, &config.model)) {
            char text[QD_FIELD_TEXT];
            qd_field_text(f, &config.model, text);
            assert_string_equal(text, values[i]);
            qd_model again = saved_and_loaded(options);
            if (!qd_model_equal(&config.model, &again))
                fail_msg("%s=%s is lost in the saved configuration", f->option.key, values[i]);
            found = true;
        }
        qd_options_destroy(options);
    }
    qd_options_destroy(before);
    return found;
}

static void options_go_through_the_saved_configuration(void **state)
{
    (void)state;
    static const char experts[] = "model.experts=16 model.experts_per_token=2 model.router_groups=4 model.router_top_groups=2 "
                                  "model.rope_scaling=llama3";
    EACH_FIELD(f)
        if (f->option.key && !option_counts(f, "model.qkv_bias=false") && !option_counts(f, experts) &&
            !option_counts(f, "model.rope_scaling=yarn model.window=16") && !option_counts(f, "model.qk_norm=true") &&
            !option_counts(f, "model.experts=16 model.shared_experts=2") && !option_counts(f, "model.activation=swiglu_clamped") &&
            !option_counts(f, "model.arch=deepseek") && !option_counts(f, "model.arch=deepseek model.mtp_modules=1") &&
            !option_counts(f, "model.rope_scaling=longrope model.head_dim=6 model.rope_short_factor=2,2,2 model.rope_long_factor=1,1,1"))
            fail_msg("%s changes no model", f->option.key);
}

/* Lists that do not fit the model are refused by name. */
static void lists_have_limits(void **state)
{
    (void)state;
    static const char *const rows[][2] = {
        {"model.rope_scaling=longrope", "model.rope_short_factor has 0 numbers"},
        {"model.rope_scaling=longrope model.head_dim=6 model.rope_short_factor=1,2,3", "model.rope_long_factor has 0 numbers"},
        {"model.rope_scaling=longrope model.head_dim=8 model.rope_fraction=0.75 model.rope_short_factor=1,2,3,4",
         "needs 3, one for each pair of rotated elements"},
        {"model.rope_scaling=longrope model.head_dim=2 model.rope_short_factor=1 model.rope_long_factor=1 model.rope_original_seq=1",
         "model.rope_original_seq is 1"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        qd_options *options = layout_options(rows[i][0]);
        qd_config config;
        assert_int_equal(qd_config_resolve(options, 0, &config), QD_USAGE);
        if (!strstr(qd_error_message(), rows[i][1]))
            fail_msg("%s: %s", rows[i][0], qd_error_message());
        qd_options_destroy(options);
    }
    qd_options *options = layout_options("");
    qd_config config;
    char text[2 * (QD_NUMBERS_MOST + 1)] = "1";
    for (int i = 0; i < QD_NUMBERS_MOST; i++)
        memcpy(text + 1 + 2 * i, ",1", 3);
    ok(qd_options_set(options, "model.rope_long_factor", text));
    assert_int_equal(qd_config_resolve(options, 0, &config), QD_USAGE);
    assert_non_null(strstr(qd_error_message(), "model.rope_long_factor has 129 numbers"));
    assert_int_equal(qd_options_set(options, "model.rope_long_factor", "1,,2"), QD_USAGE);
    assert_int_equal(qd_options_set(options, "model.rope_long_factor", "1,2e9"), QD_USAGE);
    assert_non_null(strstr(qd_error_message(), "from 1e-06 to 1e+06"));
    qd_options_destroy(options);
}

/* The configuration that an earlier version wrote for deepseek-tiny is read as the same model, and
 * still written, except for linear_bias, which has become two options. */
static void older_folders_are_read(void **state)
{
    (void)state;
    static const char older[] =
        "model:\n  preset: \"\"\n  arch: llama\n  layers: 4\n  hidden: 128\n  heads: 4\n  kv_heads: 4\n  head_dim: 32\n  ffn: 352\n"
        "  vocab: 256\n  max_seq: 1024\n  norm_eps: 1e-05\n  rope_base: 10000\n  rope_scaling: none\n  rope_factor: 8\n"
        "  rope_low_factor: 1\n  rope_high_factor: 4\n  rope_original_seq: 8192\n  activation: swiglu\n  qk_norm: \"false\"\n"
        "  qkv_bias: \"false\"\n  linear_bias: \"false\"\n  tied: \"false\"\n  dropout: 0\n  init_std: 0.02\n  experts: 16\n"
        "  experts_per_token: 4\n  expert_ffn: 64\n  shared_experts: 1\n  first_dense: 1\n  router: sigmoid\n"
        "  router_normalised: true\n  router_scale: 2.5\n  router_groups: 4\n  router_top_groups: 2\n  router_bias: \"true\"\n"
        "  router_bias_rate: 0.001\n  aux_loss: 0.0001\n  balance: sequence\n  z_loss: 0\n  expert_capacity: 0\n  drop: last\n";
    qd_options *preset = layout_options("model.preset=deepseek-tiny"), *then = layout_options("");
    ok(qd_options_load_text(then, "config.yaml", older, sizeof older - 1));
    qd_model now = resolved(preset), read = resolved(then);
    assert_true(qd_model_equal(&now, &read));
    char *text = saved_text(preset);
    for (const char *line = older; *line; line = strchr(line, '\n') + 1) {
        char whole[64];
        snprintf(whole, sizeof whole, "%.*s", (int)(strchr(line, '\n') + 1 - line), line);
        if (!strstr(line, "linear_bias") || strstr(line, "linear_bias") > strchr(line, '\n'))
            assert_non_null(strstr(text, whole));
    }
    free(text);
    qd_options_destroy(preset);
    qd_options_destroy(then);
}

/* model.linear_bias sets model.out_bias and model.mlp_bias, from options and from data, and is
 * saved as those two. A contradiction is refused. */
static void linear_bias_sets_both(void **state)
{
    (void)state;
    static const struct {
        const char *words;
        bool out, mlp;
    } rows[] = {
        {"", false, false},
        {"model.linear_bias=true", true, true},
        {"model.linear_bias=true model.out_bias=true", true, true},
        {"model.linear_bias=auto model.out_bias=true", true, false},
        {"model.arch=gpt2 model.linear_bias=false", false, false},
        {"model.arch=gpt2 model.mlp_bias=false", true, false},
        {"model.preset=gpt2-tiny model.linear_bias=false", false, false},
        {"model.preset=llama-tiny model.linear_bias=true", true, true},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        qd_options *options = layout_options(rows[i].words);
        qd_model m = resolved(options), again = saved_and_loaded(options);
        char *text = saved_text(options);
        assert_int_equal(m.out_bias, rows[i].out);
        assert_int_equal(m.mlp_bias, rows[i].mlp);
        assert_true(qd_model_equal(&m, &again));
        assert_null(strstr(text, "linear_bias"));
        free(text);
        qd_options_destroy(options);
    }
    static const char *const conflicts[] = {"model.linear_bias=true model.out_bias=false", "model.linear_bias=false model.mlp_bias=true"};
    for (int i = 0; i < 2; i++) {
        qd_options *options = layout_options(conflicts[i]);
        qd_config config;
        assert_int_equal(qd_config_resolve(options, 0, &config), QD_USAGE);
        assert_non_null(strstr(qd_error_message(), "model.linear_bias"));
        assert_non_null(strstr(qd_error_message(), i ? "model.mlp_bias is true" : "model.out_bias is false"));
        qd_options_destroy(options);
    }
    static const char older[] = "{\"linear_bias\": true}", both[] = "{\"linear_bias\": true, \"mlp_bias\": false}";
    qd_model m = qd_model_default(QD_ARCH_LLAMA);
    qd_json *document;
    ok(qd_json_load_text("preset", older, strlen(older), &document));
    ok(qd_model_read(document, qd_json_root(document), &m));
    qd_json_destroy(document);
    assert_true(m.out_bias && m.mlp_bias && !m.qkv_bias);
    ok(qd_json_load_text("preset", both, strlen(both), &document));
    assert_int_equal(qd_model_read(document, qd_json_root(document), &m), QD_USAGE);
    assert_non_null(strstr(qd_error_message(), "linear_bias"));
    qd_json_destroy(document);
}

/* The biases of each part are counted separately. */
static void biases_are_counted(void **state)
{
    (void)state;
    static const struct {
        const char *model, *bias;
        int64_t more;
    } rows[] = {
        {"model.ffn=352", "model.qkv_bias", 4 * (128 + 2 * 128)},
        {"model.ffn=352", "model.out_bias", 4 * 128},
        {"model.ffn=352", "model.mlp_bias", 4 * (128 + 2 * 352)},
        {"model.ffn=352 model.activation=gelu", "model.mlp_bias", 4 * (128 + 352)},
        {"model.ffn=352 model.experts=4 model.experts_per_token=2", "model.out_bias", 4 * 128},
        {"model.ffn=352 model.experts=4 model.experts_per_token=2", "model.sinks", 4 * 4},
        {"model.ffn=352 model.experts=4 model.expert_ffn=32 model.first_dense=1", "model.mlp_bias", 128 + 2 * 352 + 3 * 4 * (128 + 2 * 32)},
        {"model.ffn=352 model.experts=6 model.first_dense=1", "model.router_logit_bias", 3 * 6},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        qd_options *options = layout_options(rows[i].model);
        qd_model without = resolved(options);
        ok(qd_options_set(options, rows[i].bias, "true"));
        qd_model with = resolved(options);
        assert_int_equal(qd_model_parameters(&with) - qd_model_parameters(&without), rows[i].more);
        qd_options_destroy(options);
    }
}

/* A model that Mistral and Phi-3 of transformers cannot represent does not pass as one. */
static void mistral_is_a_plain_llama(void **state)
{
    (void)state;
    static const char *const others[] = {"model.arch=gpt2", "model.qkv_bias=true", "model.out_bias=true", "model.mlp_bias=true",
                                         "model.qk_norm=true", "model.experts=4 model.experts_per_token=2", "model.activation=gelu"};
    qd_options *preset = layout_options("model.preset=mistral-tiny");
    assert_int_equal(resolved(preset).hf_type, QD_HF_MISTRAL);
    qd_options_destroy(preset);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        char words[128];
        qd_config config;
        snprintf(words, sizeof words, "model.hf_type=%s %s", i % 2 ? "mistral" : "phi3", others[i]);
        qd_options *options = layout_options(words);
        assert_int_equal(qd_config_resolve(options, 0, &config), QD_USAGE);
        assert_non_null(strstr(qd_error_message(), "model.hf_type=derived"));
        qd_options_destroy(options);
    }
}

static void every_architecture_has_a_name(void **state)
{
    (void)state;
    qd_options *options = layout_options("");
    for (int arch = 0; arch < QD_ARCH_COUNT; arch++) {
        const char *name = qd_arch_name((qd_arch)arch);
        assert_int_equal(qd_arch_find(name), arch);
        ok(qd_options_set(options, "model.arch", name));
        assert_int_equal(resolved(options).arch, arch);
    }
    assert_int_equal(qd_arch_find("other"), QD_ARCH_COUNT);
    qd_options_destroy(options);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_cover_the_model),
        cmocka_unit_test(equality_notices_every_field),
        cmocka_unit_test(texts_are_read_back),
        cmocka_unit_test(presets_state_every_field),
        cmocka_unit_test(options_go_through_the_saved_configuration),
        cmocka_unit_test(lists_have_limits),
        cmocka_unit_test(older_folders_are_read),
        cmocka_unit_test(linear_bias_sets_both),
        cmocka_unit_test(biases_are_counted),
        cmocka_unit_test(mistral_is_a_plain_llama),
        cmocka_unit_test(every_architecture_has_a_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
