/* Gathers the memory figures of all ranks and writes memory.json. */
#include "train/run/run_memory.h"

#include "base/text/json_writer.h"
#include "base/text/strbuf.h"

#include <stdlib.h>
#include <unistd.h>

enum { ALLOCATED, HOST, STAGING, RESIDENT, PROCESS, FIGURES };

static qd_status write_file(const int64_t *all, int size, const char *path)
{
    qd_strbuf text = {0};
    qd_json_writer w = qd_json_writer_on(&text);
    bool one = size > 1;
    for (int rank = 1; rank < size; rank++)
        one = one && all[rank * FIGURES + PROCESS] == all[PROCESS];
    qd_json_object_begin(&w, NULL);
    qd_json_put_bool(&w, "one_process", one); /* ranks are threads: each reports the peak of the whole process */
    qd_json_list_begin(&w, "ranks");
    for (int rank = 0; rank < size; rank++) {
        qd_json_object_begin(&w, NULL);
        qd_json_put_int(&w, "rank", rank);
        qd_json_put_int(&w, "allocated_bytes", all[rank * FIGURES + ALLOCATED]);
        qd_json_put_int(&w, "host_bytes", all[rank * FIGURES + HOST]); /* offloaded optimizer state */
        qd_json_put_int(&w, "staging_bytes", all[rank * FIGURES + STAGING]);
        qd_json_put_int(&w, "resident_peak_bytes", all[rank * FIGURES + RESIDENT]);
        qd_json_end(&w);
    }
    qd_json_end(&w);
    qd_json_end(&w);
    qd_json_newline(&w);
    qd_status status =
        text.failed ? QD_FAIL(QD_NO_MEMORY, "%s: no memory to write it", path) : qd_file_replace(path, text.data, text.length);
    qd_strbuf_free(&text);
    return status;
}

qd_status qd_run_memory_write(qd_comm *world, qd_run_memory mine, const char *path, qd_run_memory *most)
{
    int size = qd_comm_size(world);
    int64_t own[FIGURES] = {
        [ALLOCATED] = mine.allocated, [HOST] = mine.host, [STAGING] = mine.staging, [RESIDENT] = mine.resident, [PROCESS] = getpid()};
    int64_t *all = malloc((size_t)size * sizeof own);
    if (!all)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the figures of %d ranks", size);
    qd_status status = qd_comm_all_gather(world, own, all, (int64_t)size * FIGURES, QD_I64, NULL);
    *most = mine;
    for (int rank = 0; status == QD_OK && rank < size; rank++) {
        const int64_t *figures = all + rank * FIGURES;
        most->allocated = figures[ALLOCATED] > most->allocated ? figures[ALLOCATED] : most->allocated;
        most->host = figures[HOST] > most->host ? figures[HOST] : most->host;
        most->staging = figures[STAGING] > most->staging ? figures[STAGING] : most->staging;
        most->resident = figures[RESIDENT] > most->resident ? figures[RESIDENT] : most->resident;
    }
    if (status == QD_OK && path && qd_comm_rank(world) == 0)
        status = write_file(all, size, path);
    free(all);
    return status;
}
