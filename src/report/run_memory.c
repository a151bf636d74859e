/* Memory of a run by kind and rank: planned, and measured where the run has reported it. */
#include "base/text/json.h"
#include "report/run_impl.h"

#include <stdio.h>
#include <stdlib.h>

/* memory.json: measurements by rank. A run that did not finish has none. */
static qd_status read_measured(qd_run_report *r, int folder, int64_t *allocated, int64_t *resident)
{
    char *text, name[4200];
    size_t length;
    qd_json *document = NULL;
    const qd_json_node *ranks;
    for (int i = 0; i < r->plan.world; i++)
        allocated[i] = resident[i] = -1;
    QD_TRY(qd_run_file_read(r, folder, "memory.json", 1 << 28, &text, &length));
    if (!text)
        return QD_OK;
    snprintf(name, sizeof name, "%.4000s/memory.json", r->path);
    qd_status status = qd_json_load_text(name, text, length, &document);
    free(text);
    if (status == QD_OK)
        status = qd_json_get_node(document, qd_json_root(document), "ranks", QD_JSON_LIST, &ranks);
    for (size_t i = 0; status == QD_OK && i < qd_json_count(ranks); i++) {
        const qd_json_node *item = qd_json_item(ranks, i);
        int64_t rank = 0;
        status = qd_json_get_int(document, item, "rank", &rank);
        if (status == QD_OK && (rank < 0 || rank >= r->plan.world))
            status = QD_FAIL(QD_USAGE, "%s: contains rank %lld, but the run has %d ranks", name, (long long)rank, r->plan.world);
        if (status == QD_OK)
            status = qd_json_get_int(document, item, "allocated_bytes", &allocated[rank]);
        if (status == QD_OK)
            status = qd_json_get_int(document, item, "resident_peak_bytes", &resident[rank]);
    }
    if (status == QD_OK)
        qd_json_as_bool(qd_json_member(qd_json_root(document), "one_process"), &r->one_process);
    qd_json_destroy(document);
    return status;
}

/* Buffer kinds that some rank has, and the loss to packing. */
static qd_status fill_kinds(qd_run_report *r, const qd_memory_report *accounts, int count, int kinds[QD_BUFFER_KIND_COUNT])
{
    const char **names = QD_ARENA_NEW(r->arena, const char *, QD_BUFFER_KIND_COUNT + 1);
    int n = 0;
    if (!names)
        return QD_NO_MEMORY;
    for (int kind = 0; kind < QD_BUFFER_KIND_COUNT; kind++)
        for (int i = 0; i < count; i++)
            if (accounts[i].at_peak[kind] > 0) {
                kinds[n] = kind;
                names[n++] = qd_buffer_kind_name((qd_buffer_kind)kind);
                break;
            }
    names[n++] = "lost to packing";
    r->memory.kinds = names;
    r->memory.kind_count = n;
    return QD_OK;
}

/* Number of ranks from `first` on that share a bar: one each up to 32 ranks, otherwise those that
 * share a program. */
static int alike(const qd_run_report *r, const qd_program *const *programs, int first)
{
    int end = first + 1;
    while (r->plan.world > 32 && end < r->plan.world && programs[end] == programs[first])
        end++;
    return end - first;
}

static qd_status fill_rank(qd_run_report *r, qd_report_memory_rank *row, const qd_memory_report *account, const int *kinds, int first,
                           int count)
{
    int64_t *planned = QD_ARENA_NEW(r->arena, int64_t, r->memory.kind_count);
    if (!planned)
        return QD_NO_MEMORY;
    for (int k = 0; k + 1 < r->memory.kind_count; k++)
        planned[k] = account->at_peak[kinds[k]];
    planned[r->memory.kind_count - 1] = account->total - account->live_peak;
    row->planned = planned;
    return qd_run_keep(&row->label, count == 1 ? qd_arena_printf(r->arena, "rank %d", first)
                                            : qd_arena_printf(r->arena, "ranks %d to %d", first, first + count - 1));
}

qd_status qd_run_memory(qd_run_report *r, int folder)
{
    int world = r->plan.world, rows = 0;
    const qd_program **programs;
    int kinds[QD_BUFFER_KIND_COUNT];
    QD_TRY(qd_config_build_all(&r->config, r->arena, &programs));
    qd_memory_report *accounts = QD_ARENA_NEW(r->arena, qd_memory_report, world);
    int64_t *allocated = QD_ARENA_NEW(r->arena, int64_t, world), *resident = QD_ARENA_NEW(r->arena, int64_t, world);
    r->memory_ranks = QD_ARENA_NEW(r->arena, qd_report_memory_rank, world);
    if (!accounts || !allocated || !resident || !r->memory_ranks)
        return QD_NO_MEMORY;
    QD_TRY(read_measured(r, folder, allocated, resident));
    for (int first = 0, count; first < world; first += count, rows++) {
        count = alike(r, programs, first);
        QD_TRY(qd_memory_account(programs[first], &accounts[rows]));
        qd_report_memory_rank *row = &r->memory_ranks[rows];
        row->allocated = row->resident = -1;
        for (int i = first; i < first + count; i++) {
            row->allocated = allocated[i] > row->allocated ? allocated[i] : row->allocated;
            row->resident = resident[i] > row->resident ? resident[i] : row->resident;
        }
    }
    QD_TRY(fill_kinds(r, accounts, rows, kinds));
    rows = 0;
    for (int first = 0, count; first < world; first += count, rows++) {
        count = alike(r, programs, first);
        QD_TRY(fill_rank(r, &r->memory_ranks[rows], &accounts[rows], kinds, first, count));
    }
    r->memory.ranks = r->memory_ranks;
    r->memory.rank_count = rows;
    r->report.memory = &r->memory;
    return QD_OK;
}

