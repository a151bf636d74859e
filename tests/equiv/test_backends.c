/* Threads, processes and MPI give bit-identical runs, and a rank's resident memory is what was
 * planned.
 * ctest: timeout 600
 * ctest: not under address: shadow memory and red zones are resident too
 * ctest: not under thread: as above */
#include "support/layout.h"
#include "support/ranks.h"
#include "train/run/footprint.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"

/* Trains 10 steps and hashes losses, norms and weights. */
static qd_status train_with(qd_comm *world, void *arg, bool device_comm)
{
    qd_ranks_call *call = arg;
    qd_config config = layout_config(call->text);
    config.world = qd_comm_size(world);
    config.device_comm = device_comm;
    qd_random_tokens random = {.seed = 4, .vocab = config.model.vocab};
    qd_batch_source source = qd_random_source(&random);
    qd_trainer *trainer = NULL;
    float *values = NULL;
    qd_status status = QD_OK;
    uint64_t hash = 0;
    QD_TRY_DONE(qd_trainer_create(&config, world, &source, &trainer));
    for (int s = 0; s < 10; s++) {
        qd_step_output out;
        QD_TRY_DONE(qd_trainer_step(trainer, &out));
        double seen[2] = {out.loss, out.grad_norm};
        hash = XXH3_64bits_withSeed(seen, sizeof seen, hash);
    }
    const qd_ledger *l = qd_trainer_program(trainer)->ledger;
    for (int i = 0; i < l->param_count; i++) {
        int64_t n = l->params[i].shape[0] * l->params[i].shape[1];
        if (l->params[i].tied_to >= 0)
            continue;
        float *larger = realloc(values, (size_t)n * sizeof *values);
        if (!larger) {
            status = QD_FAIL(QD_NO_MEMORY, "no memory");
            goto done;
        }
        values = larger;
        QD_TRY_DONE(qd_trainer_read(trainer, l->params[i].name, QD_TENSOR_VALUE, values, n));
        hash = XXH3_64bits_withSeed(values, (size_t)n * sizeof *values, hash);
    }
    call->value = hash;
done:
    free(values);
    qd_trainer_destroy(trainer);
    return status;
}

static qd_status train(qd_comm *world, void *arg)
{
    return train_with(world, arg, false);
}

static qd_status train_on_device(qd_comm *world, void *arg)
{
    return train_with(world, arg, true);
}

static uint64_t expect_one_hash(const char *words, int size)
{
    uint64_t expected = 0;
    for (int mode = 0; mode < QD_RANKS_MODE_COUNT; mode++) {
        qd_ranks_result results[4];
        if (!qd_ranks_mode_available((qd_ranks_mode)mode))
            continue;
        ok(qd_ranks_run_ok("train", (qd_ranks_mode)mode, size, &(qd_ranks_options){.text = words}, results));
        if (mode == 0)
            expected = results[0].value;
        for (int rank = 0; rank < size; rank++)
            if (results[rank].value != expected)
                fail_msg("%s, %d ranks: rank %d as %s differs from rank 0 of threads", words, size, rank,
                         qd_ranks_mode_name((qd_ranks_mode)mode));
    }
    return expected;
}

static void backends_give_the_same_bits(void **state)
{
    (void)state;
    static const char *const stages[] = {"parallel.zero=1", "parallel.zero=2", "parallel.zero=3"};
    static const char *const runs[] = {
        "model.layers=2 model.hidden=48 model.heads=4 model.vocab=101 data.seq=20 train.global_batch=12 train.micro_batch=1 "
        "run.threads=1 parallel.bucket_mb=0.05 train.grad_sync=per_microbatch ",
        "model.arch=gpt2 model.layers=1 model.hidden=64 model.heads=4 model.vocab=300 data.seq=16 train.global_batch=12 "
        "run.threads=1 train.precision=bf16 model.dropout=0.1 parallel.bucket_mb=0.3 ",
    };
    for (size_t r = 0; r < sizeof runs / sizeof *runs; r++) {
        for (int size = 1; size <= 4; size++) {
            uint64_t plain = expect_one_hash(runs[r], size);
            for (int z = 0; z < 3 && size == 3 + (int)r; z++) { /* each run at one size only: starting ranks takes time */
                char words[512];
                snprintf(words, sizeof words, "%s%s", runs[r], stages[z]);
                if (expect_one_hash(words, size) != plain)
                    fail_msg("%s, %d ranks: not bit-identical to the run without", words, size);
            }
        }
    }
}

/* Communicators for device memory, on the CPU: the code that ranks sharing a GPU use. */
static void device_communicators_give_the_same_bits(void **state)
{
    (void)state;
#define SMALL                                                                                                                              \
    "model.layers=4 model.hidden=48 model.heads=4 model.vocab=101 data.seq=20 train.global_batch=8 train.micro_batch=1 run.threads=1 "
    static const struct {
        int ranks;
        const char *words;
    } runs[] = {
        {2, SMALL "parallel.bucket_mb=0.05 "},
        {4, SMALL "parallel.zero=3 parallel.dp_shard=2 train.precision=bf16 "},
        {4, SMALL "parallel.tp=2 parallel.pp=2 parallel.schedule=zb_h1 "},
        {4, SMALL "parallel.tp=2 parallel.tp_overlap=2 parallel.dp=2 parallel.zero=2 "},
        {4, SMALL "parallel.cp=2 parallel.pp=2 "},
        {2, SMALL "parallel.cp=2 parallel.cp_mode=gather "},
        {4, SMALL "model.experts=4 model.experts_per_token=2 model.expert_ffn=32 parallel.ep=2 parallel.pp=2 "},
        {2, SMALL "train.optimizer=muon parallel.zero=1 "},
    };
    for (size_t r = 0; r < sizeof runs / sizeof *runs; r++) {
        qd_ranks_result plain[4], device[4];
        qd_ranks_options options = {.text = runs[r].words};
        ok(qd_ranks_run_ok("train", QD_RANKS_THREADS, runs[r].ranks, &options, plain));
        ok(qd_ranks_run_ok("train_on_device", QD_RANKS_THREADS, runs[r].ranks, &options, device));
        for (int rank = 0; rank < runs[r].ranks; rank++)
            if (plain[rank].value != device[rank].value)
                fail_msg("%s: rank %d differs over communicators for device memory", runs[r].words, rank);
    }
}

enum { STAGING_MOST = 4 << 20 };

/* Resident peak above the baseline compared with the plan, item by item; the rest must be below 5
 * %. */
static qd_status measure(qd_comm *world, void *arg)
{
    qd_ranks_call *call = arg;
    qd_config config = layout_config(call->text);
    config.world = qd_comm_size(world);
    qd_random_tokens random = {.seed = 4, .vocab = config.model.vocab};
    qd_batch_source source = qd_random_source(&random);
    qd_trainer *trainer = NULL;
    qd_footprint before, after;
    qd_status status = QD_OK;
    qd_footprint_reset_peak();
    QD_TRY(qd_footprint_read(&before));
    int64_t staging, staging_before, shared_before = qd_comm_shared_bytes(world, &staging_before);
    QD_TRY_DONE(qd_trainer_create(&config, world, &source, &trainer));
    for (int s = 0; s < 3; s++) {
        qd_step_output out;
        QD_TRY_DONE(qd_trainer_step(trainer, &out));
    }
    QD_TRY_DONE(qd_footprint_read(&after));
    int64_t own = qd_comm_shared_bytes(world, &staging) - shared_before;
    staging -= staging_before;
    QD_TRY_DONE(qd_comm_barrier(world, NULL)); /* a rank that frees its memory also removes it from the other's mapping */
    const qd_program *p = qd_trainer_program(trainer);
    int64_t planned = p->persistent_bytes + p->dynamic_bytes;
    int64_t workspace = qd_device_get_caps(qd_trainer_device(trainer))->workspace_bytes;
    /* One part of the shared memory belongs to the plan, another is this rank's staging. The rest
     * is the other rank's memory that this process has mapped, which is counted there. */
    int64_t reached = qd_trainer_bound(trainer)->reached_bytes, most = (qd_comm_size(world) - 1) * (reached + STAGING_MOST);
    int64_t others = after.shared - before.shared - own, files = after.file - before.file;
    int64_t grown = after.peak - before.resident;
    int64_t rest = grown - planned - workspace - staging - others - files;
    fprintf(stderr,
            "rank %d: resident peak over baseline %.1f MiB = planned %.1f (%.1f of it shared) + workspace %.2f + "
            "staging %.2f + the other rank's %.2f + libraries' files %.2f + rest %.2f (%.1f %% of planned)\n",
            qd_comm_rank(world), (double)grown / 1048576, (double)planned / 1048576, (double)reached / 1048576, (double)workspace / 1048576,
            (double)staging / 1048576, (double)others / 1048576, (double)files / 1048576, (double)rest / 1048576,
            100.0 * (double)rest / (double)planned);
    if (qd_trainer_allocated(trainer) != planned)
        status = QD_FAIL(QD_DIFFERENT, "planned %lld bytes, allocated %lld", (long long)planned,
                         (long long)qd_trainer_allocated(trainer));
    else if (qd_comm_size(world) > 1 && reached == 0)
        status = QD_FAIL(QD_DIFFERENT, "rank %d: none of its buffers is shared", qd_comm_rank(world));
    else if (own - staging < reached || own - staging > reached + (1 << 20))
        status = QD_FAIL(QD_DIFFERENT, "rank %d: %lld bytes of shared buffers, and the plan's are %lld", qd_comm_rank(world),
                         (long long)(own - staging), (long long)reached);
    else if ((qd_comm_size(world) > 1 && staging <= 0) || staging > STAGING_MOST)
        status = QD_FAIL(QD_DIFFERENT, "rank %d: %lld bytes of staging; some, and at most %d", qd_comm_rank(world), (long long)staging,
                         STAGING_MOST);
    else if (others > most || files > 4 << 20)
        status = QD_FAIL(QD_DIFFERENT, "rank %d: %lld bytes of shared memory beyond its own and %lld of files became resident: "
                         "more than 4 MiB and the %lld of the other rank",
                         qd_comm_rank(world), (long long)others, (long long)files, (long long)most);
    else if (llabs(rest) > planned / 20)
        status = QD_FAIL(QD_DIFFERENT, "rank %d: %lld bytes are resident that no item explains, of %lld planned",
                         qd_comm_rank(world), (long long)rest, (long long)planned);
done:
    qd_trainer_destroy(trainer);
    return status;
}

static void resident_memory_is_the_plan(void **state)
{
    (void)state;
    static const char *const runs[] = {
        "model.layers=4 model.hidden=256 model.heads=4 model.vocab=4000 data.seq=128 train.global_batch=8 run.threads=1",
        "model.arch=gpt2 model.layers=3 model.hidden=256 model.heads=4 model.vocab=5000 data.seq=256 train.global_batch=8 "
        "train.micro_batch=2 run.threads=2 train.precision=bf16",
        "model.layers=4 model.hidden=256 model.heads=4 model.vocab=4000 data.seq=128 train.global_batch=8 run.threads=1 parallel.zero=3 "
        "parallel.bucket_mb=1",
    };
    for (size_t r = 0; r < sizeof runs / sizeof *runs; r++)
        for (int size = 1; size <= 2; size++) {
            qd_ranks_result results[2];
            ok(qd_ranks_run_ok("measure", QD_RANKS_PROCESSES, size, &(qd_ranks_options){.text = runs[r]}, results));
        }
}

int main(int argc, char **argv)
{
    static const qd_ranks_entry bodies[] = {{"train", train}, {"train_on_device", train_on_device}, {"measure", measure}};
    qd_ranks_main(argc, argv, bodies, 3);
    const struct CMUnitTest tests[] = {cmocka_unit_test(backends_give_the_same_bits),
                                       cmocka_unit_test(device_communicators_give_the_same_bits),
                                       cmocka_unit_test(resident_memory_is_the_plan)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
