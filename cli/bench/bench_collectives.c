/* quadrille bench collectives: our collectives, compared with those of the MPI library. */
#include "bench/bench.h"
#include "progress.h"

#include <quadrille/bench.h>
#include <string.h>

/* The target that --against mpi holds local's memory to. */
#define FROM_BYTES (4 << 10) /* below, only latency counts */
#define LARGE_BYTES (1 << 20)
#define LARGE_RATIO 1.5
#define NEAR_COPY 1.1 /* times a bare copy of the same bytes, which is as fast as can be asked for */

static const char *verdict(const qd_bench_collectives_row *r)
{
    if (r->bytes > 0 && r->bytes < FROM_BYTES)
        return "";
    if (r->ratio >= (r->bytes < LARGE_BYTES ? 1.0 : LARGE_RATIO))
        return "met";
    return r->ratio < 1.0 ? "slower" : r->bare_seconds > 0 && r->local_seconds <= NEAR_COPY * r->bare_seconds ? "copy" : "missed";
}

static void put_row(qd_json_writer *w, const qd_bench_collectives_row *r, bool mpi)
{
    qd_json_object_begin(w, NULL);
    qd_json_put_string(w, "operation", qd_coll_kind_name(r->kind));
    qd_json_put_int(w, "ranks", r->ranks);
    qd_json_put_int(w, "bytes", r->bytes);
    qd_json_put_double(w, "seconds", r->local_seconds);
    qd_json_put_double(w, "bus_bytes_per_second", r->local_bandwidth);
    qd_json_put_double(w, "plain_seconds", r->plain_seconds);
    if (r->copy_seconds > 0)
        qd_json_put_double(w, "copy_seconds", r->copy_seconds);
    if (r->bare_seconds > 0)
        qd_json_put_double(w, "bare_copy_seconds", r->bare_seconds);
    if (mpi) {
        qd_json_put_double(w, "mpi_backend_seconds", r->mpi_backend_seconds);
        qd_json_put_double(w, "mpi_backend_bus_bytes_per_second", r->mpi_backend_bandwidth);
        qd_json_put_double(w, "mpi_seconds", r->mpi_seconds);
        qd_json_put_double(w, "mpi_bus_bytes_per_second", r->mpi_bandwidth);
        qd_json_put_double(w, "ratio", r->ratio);
        qd_json_put_string(w, "target", verdict(r));
    }
    qd_json_end(w);
}

static void print_time(double seconds)
{
    if (seconds > 0)
        printf(" %9.2f us", seconds * 1e6);
    else
        printf(" %12s", "");
}

static void print_legend(const char *mpi, const char *ways)
{
    cli_explain(
        "time: median of the slowest rank, in memory of qd_comm_alloc(); plain memory: in other memory. bus: bytes that each rank must "
        "move, per second. copies alone: only the operation's copies between ranks; bare copies: the same number of bytes within a rank's "
        "own memory; neither for sums and below 64 KiB");
    if (mpi[0])
        cli_explain("ratio: time of %s over ours; above 1, ours is faster. target, from 4 KiB: a ratio of 1, from 1 MiB of 1.5; copy: "
                    "less, but within 10 %% of the bare copies", mpi);
    cli_explain("ways: %s", ways[0] ? ways : "built in");
}

static void print_rows(const qd_bench_collectives_result *result, bool mpi)
{
    printf("%-15s %5s %10s %12s %10s %12s %12s %12s", "operation", "ranks", "message", "time", "bus", "plain memory",
           "copies alone", "bare copies");
    if (mpi)
        printf(" %14s %12s %10s %7s  %s", "mpi backend", "MPI", "bus", "ratio", "target");
    putchar('\n');
    for (int i = 0; i < result->count; i++) {
        const qd_bench_collectives_row *r = &result->rows[i];
        char bytes[32];
        qd_text_bytes(r->bytes, bytes, sizeof bytes);
        printf("%-15s %5d %10s %9.2f us %5.2f GB/s %9.2f us", qd_coll_kind_name(r->kind), r->ranks, bytes,
               r->local_seconds * 1e6, r->local_bandwidth * 1e-9, r->plain_seconds * 1e6);
        print_time(r->copy_seconds);
        print_time(r->bare_seconds);
        if (mpi)
            printf(" %11.2f us %9.2f us %5.2f GB/s %6.2fx  %s", r->mpi_backend_seconds * 1e6, r->mpi_seconds * 1e6,
                   r->mpi_bandwidth * 1e-9, r->ratio, verdict(r));
        putchar('\n');
    }
}

/* 2 and 4 ranks, unless the user sets a number. */
static int rank_counts(const qd_options *options, int counts[2])
{
    counts[0] = 2;
    counts[1] = 4;
    if (!qd_options_is_set(options, "parallel.ranks"))
        return 2;
    counts[0] = (int)qd_options_int(options, "parallel.ranks");
    return 1;
}

static qd_status run(cli_call *call)
{
    const qd_options *o = call->options;
    const char *program;
    bool mpi = strcmp(qd_options_string(o, "against"), "mpi") == 0, json = qd_options_bool(o, "json");
    int counts[2], runs = rank_counts(o, counts);
    if (!mpi && strcmp(qd_options_string(o, "against"), "none") != 0)
        return QD_FAIL(QD_USAGE, "bench collectives: --against is '%s': it must be none or mpi", qd_options_string(o, "against"));
    QD_TRY(bench_program(&program));
    const char *const command[] = {program, "bench", bench_collectives_rank.name, "--", NULL};
    qd_bench_collectives_config config = qd_bench_collectives_config_default();
    config.against_mpi = mpi;
    config.smallest_bytes = qd_options_int(o, "smallest");
    config.largest_bytes = qd_options_int(o, "largest");
    config.seconds = qd_options_float(o, "seconds");
    config.rank_command = command;
    config.ways = qd_options_string(o, "run.collectives");
    for (int kind = 0; kind < QD_COLL_KIND_COUNT; kind++)
        if (strcmp(qd_options_string(o, "operation"), qd_coll_kind_name((qd_coll_kind)kind)) == 0)
            config.operation = kind;
    qd_strbuf text = {0};
    qd_json_writer w = qd_json_writer_on(&text);
    qd_status status = QD_OK;
    qd_json_object_begin(&w, NULL);
    for (int i = 0; i < runs && status == QD_OK; i++) {
        qd_bench_collectives_result result = qd_bench_collectives_result_default();
        config.ranks = counts[i];
        progress_watch("measuring collectives of %d rank%s", config.ranks, config.ranks == 1 ? "" : "s");
        status = qd_bench_collectives(&config, &result);
        progress_watch_end();
        if (status != QD_OK)
            break;
        if (i == 0) {
            qd_json_put_string(&w, "mpi", mpi ? result.mpi_version : NULL);
            qd_json_put_string(&w, "ways", result.ways);
            qd_json_list_begin(&w, "rows");
            if (!json)
                print_legend(mpi ? result.mpi_version : "", result.ways);
        }
        for (int row = 0; row < result.count; row++)
            put_row(&w, &result.rows[row], mpi);
        if (!json)
            print_rows(&result, mpi);
        fflush(stdout);
        qd_bench_collectives_free(&result);
    }
    if (status == QD_OK && json) {
        qd_json_end(&w);
        qd_json_end(&w);
        status = cli_print_json(&text);
    }
    qd_strbuf_free(&text);
    return status;
}

const bench_part bench_collectives = {.name = "collectives",
                                      .options = " against smallest largest operation seconds json ",
                                      .keys = " parallel.ranks run.collectives ",
                                      .run = run};

static qd_status run_rank(cli_call *call)
{
    return qd_bench_collectives_rank(call->word_count - 1, (char *const *)(uintptr_t)(call->words + 1));
}

const bench_part bench_collectives_rank = {.name = "collectives-rank", .run = run_rank};
