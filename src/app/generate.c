/* qd_generate(): opens a model and continues the prompt. */
#include "app/generate.h"

#include "app/model_ranks.h"
#include "app/prompt_file.h"
#include "base/sized.h"
#include "train/generate/continue_text.h"

#include <stdio.h>
#include <string.h>

void qd_generate_options_init(qd_generate_options *options, size_t size)
{
    const qd_generate_options own = {.prompt = "", .tokens = 200, .temperature = 0.8, .top_p = 1.0, .repetition_penalty = 1.0};
    qd_sized_init(options, size, &own, sizeof own);
}

static qd_status no_samples(void *context, int64_t first, int64_t count, int64_t seq, int32_t *tokens, int32_t *targets, int32_t *doc_start)
{
    (void)context, (void)first, (void)count, (void)seq, (void)tokens, (void)targets, (void)doc_start;
    return QD_FAIL(QD_SYSTEM, "a model that generates has no samples");
}

qd_status qd_model_generator_open(const qd_model_source *model, int64_t context, const char *device, int threads, qd_model_generator *g)
{
    memset(g, 0, sizeof *g);
    QD_TRY(qd_model_run_open(model, device, &g->run));
    QD_TRY(qd_generation_context(&g->run.config, &context));
    QD_TRY(qd_generation_config(&g->run.config, context, 1, &g->run.config));
    g->run.config.threads = threads;
    QD_TRY(qd_model_run_start(&g->run, &(qd_batch_source){.fill = no_samples}));
    return qd_generator_create(g->run.trainer, context, &g->generator);
}

void qd_model_generator_close(qd_model_generator *g)
{
    qd_generator_destroy(g->generator);
    g->generator = NULL;
    qd_model_run_close(&g->run);
}

typedef struct generating {
    const qd_generate_options *options;
    qd_generate_report *report;
    qd_model_generator model;
    qd_model_text text;
} generating;

/* On rank 0. */
static qd_status write_text(void *context)
{
    generating *g = context;
    QD_TRY(qd_model_text_open(&g->model.run.config, qd_generates_ids(g->options), &g->text));
    g->report->step = g->model.run.step;
    snprintf(g->report->warning, sizeof g->report->warning, "%s", g->model.run.warning);
    return qd_continue_text(g->model.generator, &g->text, g->options, g->report);
}

static qd_status generate_on_rank(void *context, const qd_model_source *model)
{
    const generating *common = context;
    const qd_generate_options *o = common->options;
    generating g = *common;
    qd_status status = QD_OK;
    QD_TRY_DONE(qd_model_generator_open(model, o->context, o->device, o->threads, &g.model));
    QD_TRY_DONE(qd_generator_lead(g.model.generator, write_text, &g));
done:
    qd_model_text_close(&g.text);
    qd_model_generator_close(&g.model);
    return status;
}

qd_status qd_generate_from(const qd_model_source *model, const qd_generate_options *o, qd_generate_report *report)
{
    qd_generate_options options = *o;
    generating g = {.options = &options, .report = report};
    qd_prompt_file file = {0};
    *report = qd_generate_report_default();
    QD_TRY(qd_generate_options_check(o));
    qd_status status = o->prompt_file ? qd_prompt_file_read(o->prompt_file, o->prompt_kind, &file) : QD_OK;
    if (o->prompt_file) {
        options.prompts = file.prompts;
        options.prompt_count = file.count;
    }
    qd_model_source source = *model;
    source.precision = o->precision;
    if (status == QD_OK)
        status = qd_model_ranks_call(&(qd_model_ranks){o->tp, o->pp, o->ep}, &source, generate_on_rank, &g);
    qd_prompt_file_free(&file);
    report->prompt_text = NULL;
    return status;
}

qd_status qd_generate(const qd_generate_options *options, qd_generate_report *report)
{
    qd_generate_options o = qd_generate_options_default();
    qd_generate_report r;
    QD_TRY(QD_SIZED_READ(options, qd_generate_options, &o));
    QD_TRY(QD_SIZED_CHECK(report, qd_generate_report));
    if (!o.model)
        return QD_FAIL(QD_USAGE, "qd_generate: no model is named; give a run folder or a checkpoint");
    qd_status status = qd_generate_from(&(qd_model_source){.path = o.model}, &o, &r);
    QD_SIZED_WRITE(report, &r);
    return status;
}
