/* qd_generate(): opens a model and continues the prompt. */
#include "app/generate.h"

#include "base/sized.h"
#include "train/generate/continue_text.h"

#include <stdio.h>
#include <string.h>

void qd_generate_options_init(qd_generate_options *options, size_t size)
{
    const qd_generate_options own = {.prompt = "", .tokens = 200, .temperature = 0.8, .top_p = 1.0};
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
    g->run.config = qd_generation_config(&g->run.config, context, 1);
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

qd_status qd_generate_from(const qd_model_source *model, const qd_generate_options *o, qd_generate_report *report)
{
    qd_model_generator g = {.generator = NULL};
    qd_model_text text = {0};
    qd_status status = QD_OK;
    *report = qd_generate_report_default();
    QD_TRY_DONE(qd_generate_options_check(o));
    QD_TRY_DONE(qd_model_generator_open(model, o->context, o->device, o->threads, &g));
    QD_TRY_DONE(qd_model_text_open(&g.run.config, &text));
    report->step = g.run.step;
    snprintf(report->warning, sizeof report->warning, "%s", g.run.warning);
    QD_TRY_DONE(qd_continue_text(g.generator, &text, o, report));
done:
    qd_model_text_close(&text);
    qd_model_generator_close(&g);
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
