/* Builds configurations from words and from golden fixtures. */
#include "support/layout.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void must(qd_status status, const char *what)
{
    if (status == QD_OK)
        return;
    fprintf(stderr, "%s: %s\n", what, qd_error_message());
    exit(1);
}

qd_options *layout_options(const char *words)
{
    qd_options *options = NULL;
    qd_option_table table = qd_config_table();
    must(qd_options_create(&table, 1, &options), "options");
    char *copy = strdup(words), *rest = copy;
    for (char *word; (word = strtok_r(rest, " ", &rest)) != NULL;)
        must(qd_options_assign(options, word), word);
    free(copy);
    return options;
}

/* QUADRILLE_DEVICE=cuda runs the models of any test on a GPU that all ranks share, with
 * deterministic kernels. */
static const char *chosen_device(void)
{
    const char *device = getenv("QUADRILLE_DEVICE");
    return device ? device : "cpu";
}

qd_config layout_config(const char *words)
{
    qd_config config;
    qd_options *options = layout_options(words);
    char device[64];
    snprintf(device, sizeof device, "run.device=%s", chosen_device());
    must(qd_options_assign(options, device), device);
    must(qd_options_assign(options, "train.deterministic=true"), "train.deterministic");
    must(qd_options_assign(options, "run.gpu=0"), "run.gpu");
    must(qd_config_resolve(options, 0, &config), words);
    static const char *const no_text = "";
    config.data = (qd_data_config){.path = no_text, .tokenizer = no_text, .special = "plain", .separator = no_text, .field = no_text,
                                   .chat_template = no_text, .cache = no_text};
    config.run_dir = no_text;
    static _Thread_local char file[4096], kernels[32]; /* outlive the options; one per thread, as ranks may be threads */
    snprintf(kernels, sizeof kernels, "%s", config.kernels ? config.kernels : "");
    config.kernels = config.kernels ? kernels : NULL;
    snprintf(file, sizeof file, "%s", config.pipeline.file);
    config.pipeline.file = file;
    config.device = chosen_device();
    config.backend = "local";
    qd_options_destroy(options);
    return config;
}

static int64_t golden_int(const qd_golden *g, const char *key)
{
    int64_t value;
    must(qd_golden_config_int(g, key, &value), key);
    return value;
}

static double golden_double(const qd_golden *g, const char *key)
{
    double value;
    must(qd_golden_config_double(g, key, &value), key);
    return value;
}

static bool golden_bool(const qd_golden *g, const char *key)
{
    bool value;
    must(qd_golden_config_bool(g, key, &value), key);
    return value;
}

static bool golden_is(const qd_golden *g, const char *key, const char *expected)
{
    const char *value;
    must(qd_golden_config_string(g, key, &value), key);
    return strcmp(value, expected) == 0;
}

static void take_muon(const qd_golden *g, qd_config *c)
{
    c->optimizer.kind = c->strategy.optimizer = QD_OPTIM_MUON;
    c->optimizer.muon_momentum = golden_double(g, "optimizer.muon_momentum");
    c->optimizer.muon_lr = golden_double(g, "optimizer.muon_lr");
    c->optimizer.muon_nesterov = golden_bool(g, "optimizer.muon_nesterov");
    c->optimizer.muon_steps = c->strategy.muon_steps = (int)golden_int(g, "optimizer.muon_steps");
    c->optimizer.muon_scale = golden_is(g, "optimizer.muon_scale", "original") ? QD_MUON_ORIGINAL : QD_MUON_MATCH_ADAMW;
}

qd_config golden_layout(const qd_golden *g, const char *words)
{
    qd_config c = layout_config(words);
    must(qd_golden_model(g, &c.model), words);
    c.strategy.seq = golden_int(g, "seq");
    c.global_batch = golden_int(g, "batch");
    c.steps = c.optimizer.steps = golden_int(g, "steps");
    c.optimizer.schedule = QD_LR_CONSTANT;
    c.optimizer.lr = golden_double(g, "optimizer.lr");
    c.optimizer.beta1 = golden_double(g, "optimizer.beta1");
    c.optimizer.beta2 = golden_double(g, "optimizer.beta2");
    c.optimizer.eps = golden_double(g, "optimizer.eps");
    c.optimizer.weight_decay = golden_double(g, "optimizer.weight_decay");
    c.optimizer.clip = golden_double(g, "optimizer.clip");
    if (golden_is(g, "optimizer.name", "muon"))
        take_muon(g, &c);
    if (qd_golden_lookup(g, "max_scores"))
        c.optimizer.qk_clip = golden_double(g, "optimizer.qk_clip");
    c.strategy.qk_clip = c.optimizer.qk_clip > 0.0;
    return c;
}

static qd_status fill_golden(void *context, int64_t first, int64_t count, int64_t seq, int32_t *tokens, int32_t *targets,
                             int32_t *doc_start)
{
    const qd_golden *g = context;
    const qd_golden_tensor *t;
    size_t bytes = (size_t)(count * seq) * sizeof(int32_t);
    QD_TRY(qd_golden_find(g, "tokens", QD_I32, &t));
    memcpy(tokens, (const int32_t *)t->data + first * seq, bytes);
    QD_TRY(qd_golden_find(g, "targets", QD_I32, &t));
    memcpy(targets, (const int32_t *)t->data + first * seq, bytes);
    memset(doc_start, 0, bytes);
    if (!golden_bool(g, "packed"))
        return QD_OK;
    QD_TRY(qd_golden_find(g, "doc_start", QD_I32, &t));
    memcpy(doc_start, (const int32_t *)t->data + first * seq, bytes);
    return QD_OK;
}

qd_batch_source golden_source(qd_golden *golden)
{
    return (qd_batch_source){.fill = fill_golden, .context = golden, .documents = golden_bool(golden, "packed")};
}
