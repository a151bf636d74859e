/* Finds what would keep a run from starting on this machine, before anything is read, printed or
 * allocated. */
#include "train/run/run_machine.h"

#include "base/text/strbuf.h"
#include "base/text/text.h"
#include "device/info.h"
#include "spec/config/fit.h"

#include <quadrille/machine.h>

#include <stdio.h>
#include <string.h>

/* Memory that all ranks of a run need together. Pipeline stages differ; the ranks of one stage
 * hardly do. */
static int64_t all_ranks(const qd_check_report *plan)
{
    int64_t sum = 0, beside = plan->host_bytes + plan->snapshot_bytes;
    if (plan->pipeline <= 1 || plan->stage_count != plan->pipeline || plan->world % plan->pipeline != 0)
        sum = plan->memory_bytes < INT64_MAX / plan->world / 2 ? plan->memory_bytes * plan->world : INT64_MAX / 2;
    else
        for (int i = 0; i < plan->stage_count; i++)
            sum += plan->stages[i].memory_bytes * (plan->world / plan->pipeline);
    return beside < INT64_MAX / plan->world / 2 ? sum + beside * plan->world : INT64_MAX;
}

static qd_status check_memory(const qd_config *c, const qd_check_report *plan, int local_ranks, qd_machine_warning warning)
{
    int64_t swap, there = qd_machine_free_memory(&swap);
    int64_t wanted = (int64_t)((double)all_ranks(plan) / plan->world * local_ranks);
    char wanted_text[32], there_text[32];
    if (there <= 0 || wanted <= there)
        return QD_OK;
    qd_text_bytes(wanted, wanted_text, sizeof wanted_text);
    qd_text_bytes(there, there_text, sizeof there_text);
    snprintf(warning, sizeof(qd_machine_warning), "the ranks take up to %s of memory together, and %s are free on this machine",
             wanted_text, there_text);
    if (!c->memory_check || wanted <= there + swap)
        return QD_OK;
    qd_strbuf text = {0};
    char copy[128] = "", copy_text[32];
    if (plan->snapshot_bytes > 0 && wanted - plan->snapshot_bytes * local_ranks <= there + swap) {
        qd_text_bytes(plan->snapshot_bytes, copy_text, sizeof copy_text);
        snprintf(copy, sizeof copy, "; run.async_save=false makes it fit: no copy of %s for checkpoints", copy_text);
    }
    int fullest = plan->pipeline > 1 ? plan->memory_stage * (plan->world / plan->pipeline) : 0;
    QD_TRY(qd_fit_explain(c, fullest, (there + swap) / local_ranks - plan->snapshot_bytes, true, &text));
    qd_status status = QD_FAIL(QD_NO_MEMORY, "%s: per rank, %s%s (run.memory_check=false starts it anyway)", warning,
                               text.data ? text.data : "", copy);
    qd_strbuf_free(&text);
    return status;
}

qd_status qd_run_machine_check(const qd_config *c, const qd_check_report *plan, int local_ranks, qd_machine_warning warning)
{
    warning[0] = '\0';
    QD_TRY(qd_device_exists(c->device, c->gpu, c->kernels));
    return strcmp(c->device, "cpu") == 0 ? check_memory(c, plan, local_ranks, warning) : QD_OK;
}
