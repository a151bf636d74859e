/* config.json of Hugging Face folders: defaults of each family as transformers 5.22 and 5.23 print
 * them, what is refused by name, the model_type that is written, and how the coefficient of the
 * load-balancing loss is converted. */
#include "base/text/json.h"
#include "ckpt/huggingface_impl.h"
#include "spec/config/config.h"
#include "support/scratch.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"

#define PAIRS "\"hidden_size\": 24, \"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"intermediate_size\": 32, "
#define FACTORS "\"short_factor\": [1, 1.25, 1.5], \"long_factor\": [2, 4.5, 9]"

static qd_status read_config(void **state, const char *kind, const char *members, qd_strbuf *notes, qd_hf_config *c)
{
    char text[1024];
    snprintf(text, sizeof text, "{\"model_type\": \"%s\"%s%s}", kind, members[0] ? ", " : "", members);
    return qd_hf_config_read(scratch_text(state, "config.json", text), notes, c);
}

static qd_model accepted(void **state, const char *kind, const char *members)
{
    qd_hf_config c;
    qd_strbuf notes = {0};
    ok(read_config(state, kind, members, &notes, &c));
    qd_strbuf_free(&notes);
    return c.model;
}

static void refused(void **state, const char *kind, const char *members, const char *part)
{
    qd_hf_config c;
    qd_strbuf notes = {0};
    qd_status status = read_config(state, kind, members, &notes, &c);
    qd_strbuf_free(&notes);
    if (status == QD_OK)
        fail_msg("%s was accepted: %s", kind, members);
    if (!strstr(qd_error_message(), part))
        fail_msg("'%s' is not in: %s", part, qd_error_message());
}

static void test_defaults(void **state)
{
    static const struct {
        const char *kind;
        int layers, heads, kv_heads, head_dim;
        int64_t hidden, ffn, vocab, positions;
        double eps, theta;
        int experts, per_token;
        int64_t expert_ffn;
    } rows[] = {
        {"gpt2", 12, 12, 12, 64, 768, 3072, 50257, 1024, 1e-5, 1e4, 0, 0, 0},
        {"llama", 32, 32, 32, 128, 4096, 11008, 32000, 2048, 1e-6, 1e4, 0, 0, 0},
        {"mistral", 32, 32, 8, 128, 4096, 14336, 32000, 131072, 1e-6, 1e4, 0, 0, 0},
        {"phi3", 32, 32, 32, 96, 3072, 8192, 32064, 4096, 1e-5, 1e4, 0, 0, 0},
        {"smollm3", 36, 16, 4, 128, 2048, 11008, 128256, 32768, 1e-6, 2e6, 0, 0, 0},
        {"mixtral", 32, 32, 8, 128, 4096, 14336, 32000, 131072, 1e-5, 1e6, 8, 2, 14336},
        {"qwen2", 32, 32, 32, 128, 4096, 22016, 151936, 32768, 1e-6, 1e4, 0, 0, 0},
        {"qwen3", 32, 32, 32, 128, 4096, 22016, 151936, 32768, 1e-6, 1e4, 0, 0, 0},
        {"qwen3_moe", 24, 32, 4, 64, 2048, 6144, 151936, 32768, 1e-6, 1e4, 128, 8, 768},
        {"qwen2_moe", 24, 16, 16, 128, 2048, 5632, 151936, 32768, 1e-6, 1e4, 60, 4, 1408},
        {"gemma2", 26, 8, 4, 256, 2304, 9216, 256000, 8192, 1e-6, 1e4, 0, 0, 0},
        {"olmoe", 16, 16, 16, 128, 2048, 2048, 50304, 4096, 1e-5, 1e4, 64, 8, 2048},
        {"olmo", 32, 32, 32, 128, 4096, 11008, 50304, 2048, 1e-5, 1e4, 0, 0, 0},
        {"olmo2", 32, 32, 32, 128, 4096, 11008, 50304, 2048, 1e-5, 1e4, 0, 0, 0},
        {"gemma3_text", 26, 8, 4, 256, 2304, 9216, 262208, 131072, 1e-6, 1e6, 0, 0, 0},
        {"olmo3", 32, 32, 32, 128, 4096, 11008, 50304, 2048, 1e-5, 5e5, 0, 0, 0},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        qd_model m = accepted(state, rows[i].kind, "");
        assert_string_equal(m.name, rows[i].kind);
        assert_int_equal(m.layers, rows[i].layers);
        assert_int_equal(m.heads, rows[i].heads);
        assert_int_equal(m.kv_heads, rows[i].kv_heads);
        assert_int_equal(m.head_dim, rows[i].head_dim);
        assert_int_equal(m.hidden, rows[i].hidden);
        assert_int_equal(m.ffn, rows[i].ffn);
        assert_int_equal(m.vocab, rows[i].vocab);
        assert_int_equal(m.max_seq, rows[i].positions);
        assert_true(m.norm_eps == rows[i].eps && m.rope.base == rows[i].theta && m.init_std == 0.02);
        bool gemma = strcmp(m.name, "gemma2") == 0, gemma3 = strcmp(m.name, "gemma3_text") == 0, olmo3 = strcmp(m.name, "olmo3") == 0;
        bool smollm3 = strcmp(m.name, "smollm3") == 0;
        assert_int_equal(m.tied, i == 0 || gemma || gemma3 || smollm3);
        assert_int_equal(m.rope.nope_every, smollm3 ? 4 : 0);
        assert_true(m.rope.local_base == (gemma3 ? 1e4 : 0.0));
        assert_int_equal(m.moe.experts, rows[i].experts);
        assert_int_equal(m.moe.per_token, rows[i].per_token);
        assert_int_equal(m.moe.ffn, rows[i].expert_ffn);
        assert_true(m.moe.aux_loss == 0.0); /* output_router_logits is false */
        assert_int_equal(m.qkv_bias, i == 0 || strncmp(m.name, "qwen2", 5) == 0);
        assert_true(m.moe.shared_gate == (strcmp(m.name, "qwen2_moe") == 0) && m.moe.shared_ffn == (m.moe.shared_gate ? 5632 : 0));
        assert_true(m.out_bias == (i == 0) && m.mlp_bias == (i == 0));
        assert_int_equal(m.window, strcmp(m.name, "mistral") == 0 || gemma || gemma3 || olmo3 ? 4096 : 0);
        assert_int_equal(m.full_every, gemma ? 2 : gemma3 ? 6 : olmo3 ? 4 : 0);
        assert_true(m.score_softcap == (gemma ? 50.0 : 0.0) && m.logit_softcap == (gemma ? 30.0 : 0.0) && m.score_scale == 0.0);
    }
    refused(state, "gemma2", "\"hidden_activation\": \"silu\"", "hidden_activation");
    refused(state, "gemma2", "\"query_pre_attn_scalar\": 0", "query_pre_attn_scalar");
    refused(state, "gemma2", "\"use_bidirectional_attention\": true", "use_bidirectional_attention");
    refused(state, "olmo2", "\"hidden_act\": \"gelu\"", "hidden_act");
    refused(state, "olmo", "\"clip_qkv\": -1", "clip_qkv");
    assert_true(accepted(state, "gemma2", "\"attn_logit_softcapping\": null, \"final_logit_softcapping\": null").logit_softcap == 0.0);
    assert_true(fabs(accepted(state, "gemma2", "\"query_pre_attn_scalar\": 144").score_scale - 1.0 / 12.0) < 1e-15);
    assert_true(accepted(state, "olmo", "\"clip_qkv\": 8").clip_qkv == 8.0);
    assert_true(accepted(state, "mixtral", "").moe.normalised);
    assert_false(accepted(state, "qwen3_moe", "").moe.normalised);
}

/* GPT-OSS: what its configuration class implies, its YaRN, and the keys of the released folders. */
static void test_gpt_oss(void **state)
{
    qd_model m = accepted(state, "gpt_oss", "");
    assert_true(m.layers == 36 && m.heads == 64 && m.kv_heads == 8 && m.head_dim == 64 && m.hidden == 2880 && m.vocab == 201088);
    assert_true(m.moe.experts == 128 && m.moe.per_token == 4 && m.moe.ffn == 2880 && m.moe.logit_bias && m.moe.normalised);
    assert_true(m.sinks && m.qkv_bias && m.out_bias && m.mlp_bias && !m.tied && m.window == 128 && m.full_every == 2);
    assert_true(m.activation == QD_ACT_SWIGLU_CLAMPED && m.swiglu_alpha == 1.702 && m.swiglu_limit == 7.0);
    assert_true(m.rope.base == 150000.0 && m.rope.scaling == QD_ROPE_YARN && m.rope.factor == 32.0 && !m.rope.truncate &&
                m.rope.original_seq == 4096 && m.rope.beta_fast == 32.0 && m.rope.beta_slow == 1.0);
    m = accepted(state, "gpt_oss", "\"attention_bias\": false, \"swiglu_limit\": 5.5, \"num_experts\": 32, \"num_hidden_layers\": 2, "
                                   "\"layer_types\": [\"full_attention\", \"full_attention\"], \"rope_theta\": 150000, "
                                   "\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 8.0, \"truncate\": false, "
                                   "\"original_max_position_embeddings\": 512}");
    assert_true(!m.qkv_bias && !m.out_bias && m.swiglu_limit == 5.5 && m.moe.experts == 32 && m.window == 0 && m.rope.factor == 8.0 &&
                m.rope.original_seq == 512 && !m.rope.truncate);
    assert_int_equal(accepted(state, "gpt_oss", "\"rope_scaling\": {\"rope_type\": \"default\"}").rope.scaling, QD_ROPE_NONE);
    refused(state, "gpt_oss", "\"hidden_act\": \"gelu\"", "hidden_act");
    refused(state, "gpt_oss", "\"swiglu_limit\": 0", "swiglu_limit");
    refused(state, "gpt_oss", "\"quantization_config\": {\"quant_method\": \"gptq\"}", "gptq");
    refused(state, "llama", "\"quantization_config\": {\"quant_method\": \"mxfp4\"}", "mxfp4");
}

/* null is a value of these keys, and alternative names count. */
static void test_other_spellings(void **state)
{
    assert_int_equal(accepted(state, "llama", "\"num_key_value_heads\": null, \"head_dim\": null").kv_heads, 32);
    assert_int_equal(accepted(state, "mixtral", "\"num_key_value_heads\": null").kv_heads, 32);
    assert_int_equal(accepted(state, "qwen3_moe", "\"head_dim\": null").head_dim, 64);
    assert_int_equal(accepted(state, "gpt2", "\"hidden_size\": 96, \"n_inner\": null").ffn, 384);
    assert_int_equal(accepted(state, "qwen3_moe", "\"num_local_experts\": 16").moe.experts, 16);
    assert_int_equal(accepted(state, "mixtral", "\"num_experts\": 16, \"num_local_experts\": 16").moe.experts, 16);
    assert_int_equal(accepted(state, "qwen3", "\"num_hidden_layers\": 1, \"layer_types\": [\"full_attention\"]").window, 0);
}

/* Windows, and the layers that have them, as transformers reads them. */
static void test_windows(void **state)
{
    static const struct {
        const char *kind, *members;
        int64_t window;
        int from, full_every;
    } rows[] = {
        {"mistral", "", 4096, 0, 0},
        {"mistral", "\"sliding_window\": null", 0, 0, 0},
        {"mistral", "\"sliding_window\": 7, \"num_hidden_layers\": 2, \"layer_types\": [\"sliding_attention\", "
                    "\"sliding_attention\"]", 7, 0, 0},
        {"mixtral", "", 0, 0, 0},
        {"qwen2", "\"sliding_window\": 512, \"max_window_layers\": 1", 0, 0, 0},
        {"qwen2", "\"use_sliding_window\": true", 4096, 28, 0},
        {"qwen2", "\"use_sliding_window\": true, \"sliding_window\": null", 0, 0, 0},
        {"qwen2", "\"use_sliding_window\": true, \"num_hidden_layers\": 28", 0, 0, 0},
        {"qwen2", "\"use_sliding_window\": true, \"num_hidden_layers\": 3, \"layer_types\": [\"full_attention\", \"full_attention\", "
                  "\"full_attention\"]", 0, 0, 0},
        {"qwen3", "\"use_sliding_window\": true, \"sliding_window\": 9, \"num_hidden_layers\": 5, \"layer_types\": [\"sliding_attention\", "
                  "\"full_attention\", \"sliding_attention\", \"full_attention\", \"sliding_attention\"]", 9, 0, 2},
        {"qwen3", "\"use_sliding_window\": true, \"num_hidden_layers\": 4, \"layer_types\": [\"full_attention\", \"sliding_attention\", "
                  "\"sliding_attention\", \"full_attention\"]", 4096, 1, 4},
        {"qwen3_moe", "\"use_sliding_window\": true, \"max_window_layers\": 5", 4096, 0, 0},
        {"qwen2_moe", "\"use_sliding_window\": true", 4096, 0, 2},
        {"qwen2_moe", "\"use_sliding_window\": true, \"num_hidden_layers\": 4, \"max_window_layers\": 3", 4096, 0, 2},
        {"qwen2_moe", "\"use_sliding_window\": true, \"num_hidden_layers\": 2, \"layer_types\": [\"full_attention\", "
                      "\"sliding_attention\"]", 4096, 1, 0},
        {"smollm3", "\"sliding_window\": 9", 0, 0, 0},
        {"smollm3", "\"use_sliding_window\": true, \"sliding_window\": 9, \"num_hidden_layers\": 2, \"layer_types\": "
                    "[\"full_attention\", \"sliding_attention\"]", 9, 1, 0},
        {"gemma3_text", "\"sliding_window\": 512, \"sliding_window_pattern\": 3", 512, 0, 3},
        {"gemma3_text", "\"sliding_window_pattern\": 1", 0, 0, 0},
        {"gemma3_text", "\"num_hidden_layers\": 5", 4096, 0, 0},
        {"olmo3", "\"sliding_window\": 9, \"num_hidden_layers\": 3, \"layer_types\": [\"sliding_attention\", \"full_attention\", "
                  "\"sliding_attention\"]", 9, 0, 2},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        qd_model m = accepted(state, rows[i].kind, rows[i].members);
        if (m.window != rows[i].window || m.window_from != rows[i].from || m.full_every != rows[i].full_every)
            fail_msg("%s, %s: window %lld from layer %d, full every %d", rows[i].kind, rows[i].members, (long long)m.window, m.window_from,
                     m.full_every);
    }
}

/* Every key that the table of model fields gives a family is read, and written back unchanged. */
static void test_keys(void **state)
{
    static const char *const kinds[] = {"gpt2",      "llama",       "mistral",   "mixtral", "qwen2", "qwen3",
                                        "qwen3_moe", "gemma3_text", "qwen2_moe", "smollm3", "olmo3",
                                        "phi3"};
    static const char *const values[] = {"2", "4", "16", "64", "192", "0.5", "true", "false"};
    int count, walked = 0;
    const qd_model_field *fields = qd_model_fields(&count);
    for (size_t kind = 0; kind < sizeof kinds / sizeof *kinds; kind++) {
        const qd_hf_family *family = qd_hf_family_by_kind(kinds[kind]);
        for (const qd_hf_key *k = family->keys; k->field; k++) { /* no field that is missing from the table */
            const qd_model_field *f = fields;
            while (f < fields + count && !(f->option.key && strcmp(qd_field_key(f), k->field) == 0))
                f++;
            assert_true(f < fields + count);
        }
        for (const qd_model_field *f = fields; f < fields + count; f++) {
            const char *key = qd_hf_key_of(family, f).name;
            bool found = !key;
            assert_true(!key || f->kind != QD_FIELD_ENUM);
            for (size_t i = 0; i < sizeof values / sizeof *values && !found; i++) {
                qd_hf_config c, again;
                qd_strbuf notes = {0}, text = {0};
                char members[128], plain[QD_FIELD_TEXT], read[QD_FIELD_TEXT], back[QD_FIELD_TEXT];
                qd_model model = accepted(state, kinds[kind], "");
                qd_field_text(f, &model, plain);
                snprintf(members, sizeof members, "\"%s\": %s", key, values[i]);
                const qd_hf_export o = {.positions = 8, .begin_token = -1, .end_token = -1};
                if (strcmp(plain, values[i]) != 0 && read_config(state, kinds[kind], members, &notes, &c) == QD_OK &&
                    qd_hf_config_text(&c.model, &o, &notes, &text) == QD_OK) {
                    qd_field_text(f, &c.model, read);
                    assert_string_equal(read, values[i]);
                    ok(qd_hf_config_read(scratch_text(state, "again.json", text.data), &notes, &again));
                    qd_field_text(f, &again.model, back);
                    assert_string_equal(back, values[i]);
                    found = true;
                    walked++;
                }
                qd_strbuf_free(&notes);
                qd_strbuf_free(&text);
            }
            if (!found)
                fail_msg("%s: no value of %s is read", kinds[kind], key);
        }
    }
    assert_in_range(walked, 50, 1000);
}

/* What is written has the type and the model that was read. */
static void test_types(void **state)
{
    static const char *const rows[][2] = {
        {"gpt2", ""},
        {"llama", ""},
        {"llama", "\"attention_bias\": true"},
        {"llama", "\"mlp_bias\": true"},
        {"llama", "\"attention_bias\": true, \"mlp_bias\": true"},
        {"llama", "\"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 2.5}"},
        {"mistral", "\"sliding_window\": null"},
        {"mistral", "\"sliding_window\": 131072"},
        {"mistral", ""},
        {"mixtral", ""},
        {"mixtral", "\"sliding_window\": 4096"},
        {"qwen2", "\"use_sliding_window\": true, \"max_window_layers\": 3"},
        {"qwen2", "\"use_sliding_window\": true, \"num_hidden_layers\": 6, \"layer_types\": [\"sliding_attention\", \"sliding_attention\", "
                  "\"full_attention\", \"sliding_attention\", \"sliding_attention\", \"full_attention\"]"},
        {"qwen3", "\"use_sliding_window\": true, \"sliding_window\": 77, \"max_window_layers\": 0"},
        {"qwen3_moe", "\"use_sliding_window\": true"},
        {"qwen2", ""},
        {"qwen2", "\"tie_word_embeddings\": true, \"head_dim\": 64, \"sliding_window\": 512"},
        {"qwen2", "\"rope_parameters\": {\"rope_type\": \"linear\", \"factor\": 4.0, \"rope_theta\": 1e6}"},
        {"qwen2", "\"max_position_embeddings\": 131072, \"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4.0, "
                  "\"original_max_position_embeddings\": 32768}"},
        {"llama", "\"rope_parameters\": {\"rope_type\": \"yarn\", \"factor\": 4.0, \"beta_fast\": 16, \"beta_slow\": 2, "
                  "\"truncate\": false, \"attention_factor\": 1.25}"},
        {"llama", "\"rope_parameters\": {\"rope_type\": \"dynamic\", \"factor\": 2.0}, \"max_position_embeddings\": 64"},
        {"qwen3", "\"attention_bias\": true"},
        {"qwen3_moe", "\"attention_bias\": true"},
        {"phi3", ""},
        {"phi3", "\"partial_rotary_factor\": 0.75, \"sliding_window\": 2047, \"num_key_value_heads\": 8"},
        {"phi3", PAIRS "\"rope_scaling\": {\"type\": \"longrope\", " FACTORS "}, \"max_position_embeddings\": 131072"},
        {"phi3", PAIRS "\"original_max_position_embeddings\": 64, \"rope_parameters\": {\"rope_type\": \"longrope\", " FACTORS
                       ", \"attention_factor\": 1.19, \"rope_theta\": 250000.0}"},
        {"llama", PAIRS "\"rope_parameters\": {\"rope_type\": \"longrope\", " FACTORS ", \"factor\": 32, "
                        "\"original_max_position_embeddings\": 64}"},
        {"smollm3", ""},
        {"smollm3", "\"no_rope_layers\": [1, 1, 0, 1, 1], \"num_hidden_layers\": 5, \"attention_bias\": true"},
        {"smollm3", "\"no_rope_layer_interval\": 2, \"num_hidden_layers\": 2, \"use_sliding_window\": true, \"sliding_window\": 9, "
                    "\"layer_types\": [\"full_attention\", \"sliding_attention\"], \"mlp_bias\": true"},
        {"qwen2_moe", ""},
        {"qwen2_moe", "\"qkv_bias\": false, \"mlp_only_layers\": [0, 1], \"norm_topk_prob\": true, \"use_sliding_window\": true"},
        {"qwen2_moe", "\"shared_expert_intermediate_size\": 1408, \"use_sliding_window\": true, \"num_hidden_layers\": 2, "
                      "\"layer_types\": [\"full_attention\", \"sliding_attention\"]"},
        {"gemma3_text", ""},
        {"gemma3_text", "\"num_hidden_layers\": 7, \"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 8.0}, \"rope_theta\": 1e5, "
                        "\"rope_local_base_freq\": 5e3, \"query_pre_attn_scalar\": 168"},
        {"gemma3_text", "\"num_hidden_layers\": 2, \"layer_types\": [\"full_attention\", \"full_attention\"], \"attention_bias\": true"},
        {"olmo3", ""},
        {"olmo3", "\"rope_parameters\": {\"full_attention\": {\"rope_type\": \"yarn\", \"factor\": 8.0, \"rope_theta\": 1e6, "
                  "\"original_max_position_embeddings\": 8192}, \"sliding_attention\": {\"rope_theta\": 1e6}}"},
        {"olmo3", "\"rope_parameters\": {\"full_attention\": {\"rope_type\": \"linear\", \"factor\": 2.0, \"rope_theta\": 1e6}, "
                  "\"sliding_attention\": {\"rope_type\": \"linear\", \"factor\": 2.0, \"rope_theta\": 1e6}}"},
        {"deepseek_v3", ""},
        {"deepseek_v3", "\"q_lora_rank\": null, \"n_group\": 4, \"topk_group\": 3, \"rope_interleave\": false, \"rope_scaling\": "
                        "{\"type\": \"yarn\", \"factor\": 40, \"mscale\": 1.0, \"mscale_all_dim\": 0.7}"},
        {"deepseek_v2", "\"num_experts_per_tok\": 6"},
        {"deepseek_v2", "\"num_experts_per_tok\": 6, \"topk_method\": \"group_limited_greedy\", \"n_group\": 8, \"topk_group\": 3, "
                        "\"q_lora_rank\": null, \"first_k_dense_replace\": 1"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        qd_hf_config again;
        qd_strbuf notes = {0}, text = {0};
        qd_model m = accepted(state, rows[i][0], rows[i][1]);
        ok(qd_hf_config_text(&m, &(qd_hf_export){.positions = 8, .begin_token = -1, .end_token = -1}, &notes, &text));
        ok(qd_hf_config_read(scratch_text(state, "again.json", text.data), &notes, &again));
        assert_string_equal(again.family->kind, rows[i][0]);
        assert_true(qd_model_equal(&m, &again.model));
        assert_int_equal(m.out_bias, i == 0 || strstr(rows[i][1], "attention_bias") != NULL);
        assert_int_equal(m.mlp_bias, i == 0 || strstr(rows[i][1], "mlp_bias") != NULL);
        qd_strbuf_free(&notes);
        qd_strbuf_free(&text);
    }
}

/* Models of our own are written as the family that computes them. */
static void test_chosen_types(void **state)
{
    (void)state;
    static const struct {
        const char *kind;
        bool qk_norm, qkv, out, mlp;
        qd_hf_type type;
    } rows[] = {
        {"llama", false, false, false, false, QD_HF_DERIVED},  {"mistral", false, false, false, false, QD_HF_MISTRAL},
        {"qwen2", false, true, false, false, QD_HF_DERIVED},   {"llama", false, true, false, true, QD_HF_DERIVED},
        {"llama", false, false, true, false, QD_HF_DERIVED},   {"llama", false, true, true, true, QD_HF_DERIVED},
        {"qwen3", true, true, false, false, QD_HF_DERIVED},    {"qwen3", true, false, false, false, QD_HF_DERIVED},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        qd_model m = qd_model_default(QD_ARCH_LLAMA);
        m.qk_norm = rows[i].qk_norm;
        m.qkv_bias = rows[i].qkv;
        m.out_bias = rows[i].out;
        m.mlp_bias = rows[i].mlp;
        m.hf_type = rows[i].type;
        assert_string_equal(qd_hf_family_of(&m)->kind, rows[i].kind);
    }
}

#define LLAMA3 "\"rope_type\": \"llama3\", \"factor\": 32.0, \"low_freq_factor\": 1.0, \"high_freq_factor\": 4.0"

static void test_rope(void **state)
{
    assert_true(accepted(state, "mixtral", "\"rope_theta\": 5e5").rope.base == 5e5);
    assert_true(accepted(state, "mixtral", "\"rope_scaling\": null, \"rope_parameters\": {}").rope.base == 1e6);
    assert_true(accepted(state, "llama", "\"rope_scaling\": {\"rope_type\": \"default\", \"rope_theta\": 7e4}").rope.base == 7e4);
    assert_true(accepted(state, "llama", "\"rope_parameters\": {\"rope_theta\": 7e4}").rope.base == 7e4);
    assert_true(accepted(state, "llama", "\"rope_theta\": 7e4, \"rope_parameters\": {\"rope_theta\": 7e4}").rope.base == 7e4);
    assert_true(accepted(state, "llama", "\"rope_theta\": 5e5, \"rope_parameters\": {\"type\": \"default\"}").rope.base == 5e5);
    qd_model m = accepted(state, "llama", "\"max_position_embeddings\": 512, \"rope_scaling\": {" LLAMA3 "}");
    assert_true(m.rope.scaling == QD_ROPE_LLAMA3 && m.rope.original_seq == 512 && m.rope.factor == 32.0);
    m = accepted(state, "llama", "\"original_max_position_embeddings\": 128, \"rope_scaling\": {" LLAMA3 "}");
    assert_int_equal(m.rope.original_seq, 128);
    m = accepted(state, "llama", "\"rope_scaling\": {" LLAMA3 ", \"original_max_position_embeddings\": 64}");
    assert_int_equal(m.rope.original_seq, 64);
    m = accepted(state, "qwen2", "\"rope_scaling\": {\"type\": \"linear\", \"factor\": 4.0}");
    assert_true(m.rope.scaling == QD_ROPE_LINEAR && m.rope.factor == 4.0 && m.rope.base == 1e4);
    m = accepted(state, "qwen2", "\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4.0, \"beta_fast\": null, "
                                 "\"attention_factor\": null}");
    assert_true(m.rope.scaling == QD_ROPE_YARN && m.rope.factor == 4.0 && m.rope.beta_fast == 32.0 && m.rope.beta_slow == 1.0);
    assert_true(m.rope.original_seq == 32768 && m.rope.attention_factor == 0.0 && m.rope.truncate);
    m = accepted(state, "llama", "\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4.0, \"mscale\": 2.0, \"mscale_all_dim\": 0.5}");
    assert_true(fabs(m.rope.attention_factor - (0.2 * log(4.0) + 1.0) / (0.05 * log(4.0) + 1.0)) < 1e-15);
    /* longrope: the factor is the ratio of the lengths if it is not given; "su" is Phi-3's older
     * name of it. */
    m = accepted(state, "phi3", PAIRS "\"max_position_embeddings\": 131072, \"rope_scaling\": {\"type\": \"su\", " FACTORS "}");
    assert_true(m.rope.scaling == QD_ROPE_LONG && m.rope.factor == 32.0 && m.rope.original_seq == 4096 && m.rope.attention_factor == 0.0);
    assert_true(m.rope.short_factor.count == 3 && m.rope.short_factor.at[2] == 1.5 && m.rope.long_factor.at[0] == 2.0);
    m = accepted(state, "phi3", PAIRS "\"original_max_position_embeddings\": 64, \"max_position_embeddings\": 32, "
                                      "\"rope_scaling\": {\"type\": \"longrope\", " FACTORS "}");
    assert_true(m.rope.factor == 1.0 && m.rope.original_seq == 64);
    m = accepted(state, "mistral", PAIRS "\"max_position_embeddings\": 96, \"rope_scaling\": {\"type\": \"longrope\", " FACTORS
                                         ", \"factor\": 5, \"attention_factor\": 1.5, \"original_max_position_embeddings\": 24}");
    assert_true(m.rope.factor == 5.0 && m.rope.original_seq == 24 && m.rope.attention_factor == 1.5);
}

/* A base for layers without windows and one for those with them; only the first may be scaled. */
static void test_rope_by_type(void **state)
{
    qd_model m = accepted(state, "gemma3_text", "\"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 8.0}");
    assert_true(m.rope.scaling == QD_ROPE_LINEAR && m.rope.factor == 8.0 && m.rope.base == 1e6 && m.rope.local_base == 1e4);
    m = accepted(state, "gemma3_text", "\"rope_theta\": 7e4, \"rope_local_base_freq\": 300");
    assert_true(m.rope.base == 7e4 && m.rope.local_base == 300.0 && m.rope.scaling == QD_ROPE_NONE);
    m = accepted(state, "gemma3_text", "\"rope_parameters\": {\"full_attention\": {\"rope_type\": \"linear\", \"factor\": 4.0, "
                                       "\"rope_theta\": 5e5}, \"sliding_attention\": {\"rope_type\": \"default\", \"rope_theta\": 2e4}}");
    assert_true(m.rope.base == 5e5 && m.rope.factor == 4.0 && m.rope.local_base == 2e4);
    m = accepted(state, "gemma3_text", "\"rope_parameters\": {\"full_attention\": null}");
    assert_true(m.rope.base == 1e6 && m.rope.local_base == 1e4);
    /* The same in all layers is one table of angles. */
    m = accepted(state, "olmo3", "\"rope_parameters\": {\"full_attention\": {\"rope_theta\": 7e4}, \"sliding_attention\": "
                                 "{\"rope_theta\": 7e4}}");
    assert_true(m.rope.base == 7e4 && m.rope.local_base == 0.0);
    m = accepted(state, "olmo3", "\"rope_theta\": 5e5, \"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 8.0, "
                                 "\"original_max_position_embeddings\": 8192, \"attention_factor\": 1.25}");
    assert_true(m.rope.scaling == QD_ROPE_YARN && m.rope.base == 5e5 && m.rope.local_base == 5e5 && m.rope.attention_factor == 1.25);
    /* Values next to the objects are ignored by transformers: they must say the same, or have no
     * effect because both objects are given. */
    m = accepted(state, "olmo3", "\"rope_parameters\": {\"rope_theta\": 500000.0, \"rope_type\": \"default\"}");
    assert_true(m.rope.base == 5e5 && m.rope.scaling == QD_ROPE_NONE && qd_rope_is_local(&m) == false);
    m = accepted(state, "olmo3", "\"rope_parameters\": {\"rope_theta\": 1e4, \"full_attention\": {\"rope_theta\": 7e4}, "
                                 "\"sliding_attention\": {\"rope_theta\": 7e4}}");
    assert_true(m.rope.base == 7e4);
    refused(state, "olmo3", "\"rope_parameters\": {\"rope_theta\": 1e4, \"rope_type\": \"default\"}", "which transformers ignores");
    refused(state, "olmo3", "\"rope_parameters\": {\"rope_type\": \"yarn\", \"factor\": 8.0, \"rope_theta\": 500000.0}",
            "which transformers ignores");
    refused(state, "olmo3", "\"rope_parameters\": {\"rope_theta\": 1e4, \"full_attention\": {\"rope_theta\": 7e4}}", "rope");
    refused(state, "olmo3", "\"rope_theta\": 1e4", "for layers without windows only");
    refused(state, "gemma3_text", "\"rope_parameters\": {\"rope_theta\": 1e4}", "'rope_parameters' has 'rope_theta'");
    refused(state, "gemma3_text", "\"rope_parameters\": {\"sliding_attention\": 5}", "sliding_attention");
    refused(state, "gemma3_text", "\"rope_parameters\": {\"sliding_attention\": {\"rope_type\": \"linear\", \"factor\": 2.0}}",
            "scales 'sliding_attention'");
    refused(state, "gemma3_text", "\"rope_parameters\": {\"full_attention\": {\"rope_type\": \"longest\"}}", "longest");
    refused(state, "gemma3_text", "\"rope_scaling\": {\"rope_type\": \"linear\"}", "factor");
    refused(state, "gemma3_text", "\"rope_parameters\": {\"sliding_attention\": {\"partial_rotary_factor\": 0.5}}",
            "partial_rotary_factor");
    refused(state, "gemma3_text", "\"sliding_window_pattern\": 0", "sliding_window_pattern");
    refused(state, "gemma3", "\"text_config\": {}", "gemma3_text");
}

/* Models that transformers cannot have are refused on export, with the option. */
/* Released configurations have keys that transformers does not read. Those of Kimi K2 and of
 * DeepSeek V3 are the presets' models, except for positions and what training sets. */
static void test_deepseek(void **state)
{
    static const struct {
        const char *kind, *preset, *members;
    } rows[] = {
        {"deepseek_v3", "deepseek-v3",
         "\"scoring_func\": \"sigmoid\", \"topk_method\": \"noaux_tc\", \"moe_layer_freq\": 1, \"ep_size\": 1, \"seq_aux\": true, "
         "\"aux_loss_alpha\": 0.001, \"num_nextn_predict_layers\": 1, \"rope_scaling\": {\"beta_fast\": 32, \"beta_slow\": 1, "
         "\"factor\": 40, \"mscale\": 1.0, \"mscale_all_dim\": 1.0, \"original_max_position_embeddings\": 4096, \"type\": \"yarn\"}"},
        {"kimi_k2", "kimi-k2",
         "\"num_attention_heads\": 64, \"num_key_value_heads\": 64, \"vocab_size\": 163840, \"n_routed_experts\": 384, \"n_group\": 1, "
         "\"topk_group\": 1, \"first_k_dense_replace\": 1, \"routed_scaling_factor\": 2.827, \"rope_theta\": 50000.0, "
         "\"rope_scaling\": {\"beta_fast\": 1.0, \"beta_slow\": 1.0, \"factor\": 32.0, \"mscale\": 1.0, \"mscale_all_dim\": 1.0, "
         "\"original_max_position_embeddings\": 4096, \"type\": \"yarn\"}"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        qd_model m = accepted(state, rows[i].kind, rows[i].members), preset;
        ok(qd_preset_find(rows[i].preset, &preset));
        assert_true(m.rope.scaling == QD_ROPE_YARN && m.rope.mscale == 1.0 && m.rope.mscale_all_dim == 1.0);
        double length = 0.1 * log(m.rope.factor) + 1.0;
        assert_float_equal(qd_model_score_scale(&m), length * length / sqrt(192.0), 1e-6);
        m.rope = preset.rope;
        m.max_seq = preset.max_seq;
        m.moe.bias_rate = preset.moe.bias_rate;
        m.moe.aux_loss = preset.moe.aux_loss;
        m.moe.balance = preset.moe.balance;
        assert_true(qd_model_equal(&m, &preset));
    }
    refused(state, "deepseek_v3", "\"scoring_func\": \"softmax\"", "only sigmoid can be imported");
    refused(state, "deepseek_v3", "\"topk_method\": \"greedy\"", "only noaux_tc can be imported");
    refused(state, "deepseek_v3", "\"attention_bias\": true", "'attention_bias' is true");
    refused(state, "deepseek_v3", "\"q_lora_rank\": 0", "or null for queries that are not compressed");
    refused(state, "deepseek_v3", "\"qk_rope_head_dim\": 63", "must be even");
    refused(state, "deepseek_v3", "\"num_key_value_heads\": 8", "every head has its own keys");
    refused(state, "deepseek_v3", "\"moe_layer_freq\": 2", "'moe_layer_freq' is not 1");
    refused(state, "deepseek_v3", "\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2, \"mscale_all_dim\": 1}", "with 'yarn' only");
    refused(state, "deepseek_v2", "", "model.experts_per_token is 0");
    refused(state, "deepseek_v2", "\"num_experts_per_tok\": 6, \"norm_topk_prob\": true", "ignores");
    refused(state, "deepseek_v2", "\"num_experts_per_tok\": 6, \"topk_method\": \"noaux_tc\"", "only greedy and group_limited_greedy");
}

static void test_export_refused(void **state)
{
    qd_strbuf notes = {0}, text = {0};
    qd_model m = qd_model_default(QD_ARCH_GEMMA3);
    m.layers = 2, m.hidden = 32, m.heads = m.kv_heads = 4, m.head_dim = 8, m.ffn = 64, m.vocab = 61, m.max_seq = 16;
    qd_hf_export o = {.positions = 8, .begin_token = -1, .end_token = -1};
    ok(qd_hf_config_text(&m, &o, &notes, &text));
    qd_model capped = m, plain = m, odd = m;
    capped.score_softcap = 5.0;
    plain.qk_norm = false;
    odd.hidden = 34;
    assert_int_not_equal(qd_hf_config_text(&capped, &o, &notes, &text), QD_OK);
    assert_non_null(strstr(qd_error_message(), "model.score_softcap"));
    assert_int_not_equal(qd_hf_config_text(&plain, &o, &notes, &text), QD_OK);
    assert_non_null(strstr(qd_error_message(), "qk_norm"));
    assert_int_not_equal(qd_hf_config_text(&odd, &o, &notes, &text), QD_OK);
    assert_non_null(strstr(qd_error_message(), "model.heads"));
    /* Phi-3 of transformers expects as many factors as hidden / heads has pairs. */
    qd_model phi = accepted(state, "phi3", PAIRS "\"rope_scaling\": {\"type\": \"longrope\", " FACTORS "}");
    ok(qd_hf_config_text(&phi, &o, &notes, &text));
    phi.hidden = 32;
    assert_int_not_equal(qd_hf_config_text(&phi, &o, &notes, &text), QD_OK);
    assert_non_null(strstr(qd_error_message(), "model.head_dim"));
    qd_strbuf_free(&notes);
    qd_strbuf_free(&text);
}

static void test_rope_refused(void **state)
{
    static const char *const rows[][2] = {
        {"\"rope_scaling\": {\"rope_type\": 1}", "rope_type"},
        {"\"rope_parameters\": 5", "rope_parameters"},
        {"\"rope_parameters\": [1]", "rope_parameters"},
        {"\"rope_scaling\": \"linear\"", "rope_scaling"},
        {"\"rope_scaling\": {\"type\": \"default\"}, \"rope_parameters\": {\"rope_theta\": 1e4}", "both set"},
        {"\"rope_theta\": 1e4, \"rope_scaling\": {\"type\": \"default\", \"rope_theta\": 1e6}", "rope_theta"},
        {"\"rope_theta\": null", "rope_theta"},
        {"\"rope_theta\": \"1e4\"", "rope_theta"},
        {"\"rope_theta\": 1e300", "rope_theta"},
        {"\"rope_scaling\": {\"factor\": 2.0}", "rope_type"},
        {"\"rope_scaling\": {\"type\": \"linear\", \"rope_type\": \"default\"}", "linear"},
        {"\"rope_scaling\": {\"type\": \"linear\"}", "factor"},
        {"\"rope_scaling\": {\"type\": \"linear\", \"factor\": 0.5}", "factor"},
        {"\"rope_scaling\": {\"type\": \"dynamic\"}", "factor"},
        {"\"rope_scaling\": {\"type\": \"longrope\", \"short_factor\": [1.0], \"long_factor\": [2.0]}", "'short_factor' has 1 numbers"},
        {"\"rope_scaling\": {\"type\": \"longrope\", \"factor\": 2.0}", "'rope_scaling' needs 'short_factor'"},
        {"\"rope_scaling\": {\"type\": \"longrope\", \"short_factor\": [1.0, 0], \"long_factor\": [2.0]}", "number 2 of 'short_factor'"},
        {"\"rope_scaling\": {\"type\": \"longrope\", \"short_factor\": 1.0}", "short_factor"},
        {"\"rope_scaling\": {\"type\": \"longrope\", \"short_factor\": [1.0], \"long_factor\": [\"2\"]}", "number 1 of 'long_factor'"},
        {"\"rope_scaling\": {\"type\": \"su\", \"factor\": 2.0}", "'su'"},
        {"\"rope_scaling\": {\"type\": \"yarn\"}", "factor"},
        {"\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 2.0, \"beta_fast\": 1, \"beta_slow\": 32}", "rope_beta_fast"},
        {"\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 2.0, \"attention_factor\": 0.0}", "attention_factor"},
        {"\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 2.0, \"truncate\": 1}", "truncate"},
        {"\"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8.0, \"low_freq_factor\": 1.0}", "high_freq_factor"},
        {"\"rope_scaling\": {" LLAMA3 ", \"original_max_position_embeddings\": \"8k\"}", "original_max_position_embeddings"},
        {"\"original_max_position_embeddings\": 64, \"rope_scaling\": {" LLAMA3 ", \"original_max_position_embeddings\": 32}",
         "original_max_position_embeddings"},
        {"\"partial_rotary_factor\": 0.5", "partial_rotary_factor"},
        {"\"rope_parameters\": {\"rope_theta\": 1e4, \"partial_rotary_factor\": 0.5}", "partial_rotary_factor"},
        {"\"rope_parameters\": {\"full_attention\": {\"rope_theta\": 1e4}}", "full_attention"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        refused(state, i % 2 ? "llama" : "qwen3", rows[i][0], rows[i][1]);
}

static void test_refused(void **state)
{
    static const char *const rows[][3] = {
        {"llama", "\"num_hidden_layers\": 1000000", "num_hidden_layers"},
        {"llama", "\"num_hidden_layers\": 2.5", "num_hidden_layers"},
        {"llama", "\"num_hidden_layers\": null", "num_hidden_layers"},
        {"llama", "\"num_hidden_layers\": 9223372036854775807", "num_hidden_layers"},
        {"llama", "\"hidden_size\": -64", "hidden_size"},
        {"llama", "\"hidden_size\": 4611686018427387904", "hidden_size"},
        {"llama", "\"intermediate_size\": 4611686018427387904", "intermediate_size"},
        {"llama", "\"max_position_embeddings\": 4611686018427387904", "max_position_embeddings"},
        {"llama", "\"max_position_embeddings\": 0", "max_position_embeddings"},
        {"gpt2", "\"n_positions\": 0", "n_positions"},
        {"llama", "\"num_attention_heads\": 0", "num_attention_heads"},
        {"llama", "\"head_dim\": 512", "head_dim"},
        {"llama", "\"rms_norm_eps\": \"1e-5\"", "rms_norm_eps"},
        {"llama", "\"rms_norm_eps\": 0", "rms_norm_eps"},
        {"llama", "\"attention_bias\": 1", "attention_bias"},
        {"llama", "\"num_hidden_layers\": 2, \"layer_types\": [\"full_attention\", \"sliding_attention\"]", "sliding_attention"},
        {"qwen3", "\"head_dim\": null", "head_dim"},
        {"qwen3", "\"num_hidden_layers\": 2, \"layer_types\": [\"full_attention\", \"sliding_attention\"]",
         "does not match 'sliding_window'"},
        {"qwen3", "\"num_hidden_layers\": 2, \"layer_types\": [\"full_attention\"]", "1 entries for 2 layers"},
        {"qwen3", "\"use_sliding_window\": true, \"num_hidden_layers\": 5, \"layer_types\": [\"full_attention\", \"sliding_attention\", "
                  "\"full_attention\", \"full_attention\", \"sliding_attention\"]", "neither all from one on nor all but every n-th"},
        {"qwen2", "\"use_sliding_window\": true, \"num_hidden_layers\": 2, \"layer_types\": [\"full_attention\", \"chunked_attention\"]",
         "chunked_attention"},
        {"mistral", "\"num_hidden_layers\": 1, \"layer_types\": [\"full_attention\"]", "does not match 'sliding_window'"},
        {"mixtral", "\"num_experts\": 4, \"num_local_experts\": 6", "num_local_experts"},
        {"mixtral", "\"num_local_experts\": 1000000", "num_local_experts"},
        {"mixtral", "\"router_jitter_noise\": 0.1", "router_jitter_noise"},
        {"qwen3_moe", "\"mlp_only_layers\": 5", "mlp_only_layers"},
        {"phi3", "\"rope_scaling\": {\"type\": \"longrope\", \"short_factor\": [1.0], \"long_factor\": [2.0]}", "must have 48"},
        {"phi3", PAIRS "\"rope_scaling\": {\"type\": \"longrope\", " FACTORS ", \"original_max_position_embeddings\": 32}",
         "'original_max_position_embeddings' is 4096, and 32 inside 'rope_scaling'"},
        {"phi3", PAIRS "\"rope_scaling\": {\"type\": \"longrope\", " FACTORS ", \"attention_factor\": 0}", "attention_factor"},
        {"phi3", PAIRS "\"rope_scaling\": {\"type\": \"longrope\", " FACTORS ", \"factor\": 0.5}", "factor"},
        {"phi3", PAIRS "\"original_max_position_embeddings\": 1, \"rope_scaling\": {\"type\": \"longrope\", " FACTORS "}",
         "rope_original_seq"},
        {"phi3", "\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2.0}", "scaled"},
        {"phi3", "\"partial_rotary_factor\": 0.01", "rope_fraction"},
        {"phi3", "\"partial_rotary_factor\": 1.5", "above 0 and at most 1 (model.rope_fraction)"},
        {"phi3", "\"partial_rotary_factor\": 1e9", "above 0 and at most 1"},
        {"phi3", "\"partial_rotary_factor\": -1", "above 0 and at most 1"},
        {"smollm3", "\"no_rope_layers\": [1, 0, 1, 1], \"num_hidden_layers\": 4", "no_rope_layers"},
        {"smollm3", "\"no_rope_layers\": [1, 1, 0], \"num_hidden_layers\": 4", "3 entries for 4 layers"},
        {"smollm3", "\"no_rope_layers\": [1, true, 0], \"num_hidden_layers\": 3", "0 or 1"},
        {"smollm3", "\"no_rope_layer_interval\": 0", "no_rope_layer_interval"},
        {"smollm3", "\"no_rope_layer_interval\": 1", "nope_every"},
        {"smollm3", "\"use_sliding_window\": true, \"sliding_window\": 9", "layer_types"},
        {"qwen2_moe", "\"mlp_only_layers\": [3]", "mlp_only_layers"},
        {"qwen2_moe", "\"decoder_sparse_step\": 2", "decoder_sparse_step"},
        {"qwen2_moe", "\"shared_expert_intermediate_size\": 0", "shared_expert_intermediate_size"},
        {"qwen2_moe", "\"use_sliding_window\": true, \"max_window_layers\": 21", "max_window_layers"},
        {"qwen3_moe", "\"mlp_only_layers\": [3]", "mlp_only_layers"},
        {"qwen3_moe", "\"moe_intermediate_size\": 4611686018427387904", "moe_intermediate_size"},
        {"gpt2", "\"n_embd\": 4611686018427387904", "n_embd"},
        {"gpt2", "\"n_embd\": 64, \"hidden_size\": 128", "hidden_size"},
        {"gpt2", "\"n_embd\": 100", "n_head"},
        {"gpt2", "\"quantization_config\": {\"bits\": 4}", "quantization_config"},
        {"mistral", "\"sliding_window\": 0", "sliding_window"},
        {"mistral", "\"sliding_window\": \"none\"", "sliding_window"},
        {"qwen2", "\"use_sliding_window\": 1", "use_sliding_window"},
        {"qwen2", "\"num_hidden_layers\": 1, \"layer_types\": [\"sliding_attention\"]", "sliding_attention"},
        {"mamba", "", "qwen3_moe"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        refused(state, rows[i][0], rows[i][1], rows[i][2]);
}

static void test_balance(void **state)
{
    qd_hf_config c;
    qd_strbuf notes = {0}, text = {0};
    ok(read_config(state, "qwen3_moe", "\"num_hidden_layers\": 10, \"mlp_only_layers\": [0, 1], \"router_aux_loss_coef\": 0.003, "
                                       "\"output_router_logits\": true", &notes, &c));
    assert_true(fabs(c.model.moe.aux_loss - 0.003 * 8 / 8) < 1e-18);
    assert_non_null(strstr(notes.data, "model.aux_loss"));
    qd_strbuf_clear(&notes);
    ok(read_config(state, "mixtral", "\"router_aux_loss_coef\": 0.02, \"output_router_logits\": true", &notes, &c));
    assert_true(fabs(c.model.moe.aux_loss - 0.02 * 2 / 32) < 1e-18);
    assert_int_equal(c.model.moe.balance, QD_BALANCE_BATCH);
    /* and back, as the same number */
    ok(qd_hf_config_text(&c.model, &(qd_hf_export){.positions = 8, .begin_token = -1, .end_token = -1}, &notes, &text));
    qd_hf_config again;
    ok(qd_hf_config_read(scratch_text(state, "again.json", text.data), &notes, &again));
    assert_non_null(strstr(text.data, "0.02"));
    assert_true(again.model.moe.aux_loss == c.model.moe.aux_loss);
    qd_strbuf_clear(&text);
    /* without: a float and not the integer 0, which transformers refuses */
    qd_strbuf_clear(&notes);
    ok(read_config(state, "mixtral", "\"router_aux_loss_coef\": 0.02", &notes, &c));
    assert_true(c.model.moe.aux_loss == 0.0);
    assert_non_null(strstr(notes.data, "output_router_logits"));
    ok(qd_hf_config_text(&c.model, &(qd_hf_export){.positions = 8, .begin_token = -1, .end_token = -1}, &notes, &text));
    const char *at = strstr(text.data, "\"router_aux_loss_coef\":");
    assert_non_null(at);
    at += strcspn(at, "0123456789");
    assert_memory_equal(at, "0.0", 3);
    assert_non_null(strstr(text.data, "1000000.0")); /* rope_theta */
    qd_strbuf_free(&notes);
    qd_strbuf_free(&text);
}

/* Every preset that can be exported has as many parameters as the model of transformers has on its
 * meta device (tools/hf_parameters.py --write). */
static void test_preset_parameters(void **state)
{
    (void)state;
    qd_json *counts;
    const char *const *names;
    int compared = 0;
    ok(qd_json_load(QD_TEST_SOURCE_DIR "/tests/golden/parameters.json", &counts));
    ok(qd_config_presets(true, &names));
    for (; *names; names++) {
        qd_model m;
        qd_strbuf notes = {0}, text = {0};
        int64_t count;
        ok(qd_preset_find(*names, &m));
        if (qd_hf_config_text(&m, &(qd_hf_export){.positions = 8, .begin_token = -1, .end_token = -1}, &notes, &text) == QD_OK) {
            if (!qd_json_as_int(qd_json_member(qd_json_root(counts), *names), &count))
                fail_msg("parameters.json lacks %s: run tools/hf_parameters.py --write %s", *names, *names);
            if (qd_model_parameters(&m) != count)
                fail_msg("%s has %lld parameters, in transformers %lld", *names, (long long)qd_model_parameters(&m), (long long)count);
            compared++;
        }
        qd_strbuf_free(&notes);
        qd_strbuf_free(&text);
    }
    assert_in_range(compared, 60, 1000);
    qd_json_destroy(counts);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_defaults, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_gpt_oss, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_other_spellings, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_windows, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_keys, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_types, scratch_setup, scratch_teardown),
        cmocka_unit_test(test_chosen_types),
        cmocka_unit_test_setup_teardown(test_rope, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_rope_by_type, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_deepseek, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_export_refused, scratch_setup, scratch_teardown),
        cmocka_unit_test(test_preset_parameters),
        cmocka_unit_test_setup_teardown(test_rope_refused, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_refused, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_balance, scratch_setup, scratch_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
