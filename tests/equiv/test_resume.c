/* Stop and resume, on the same and on other layouts; damaged checkpoints are named and skipped. */
#include "support/sample.h"
#include "support/scratch.h"
#include "support/trained.h"
#include "train/run/saver.h"
#include "train/exec/state.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"

#define MODEL                                                                                               \
    "model.layers=2 model.hidden=32 model.heads=4 model.vocab=61 data.seq=12 train.global_batch=8 train.steps=20 run.threads=1 "

static void resume_is_exact(void **state)
{
    (void)state;
    static const char *const bases[] = {MODEL "parallel.ranks=2 ", MODEL "parallel.ranks=2 train.precision=bf16 ",
                                        MODEL "parallel.ranks=2 train.optimizer=sgd train.momentum=0.9 model.tied=true ",
                                        MODEL "parallel.ranks=2 model.dropout=0.2 ",
                                        MODEL "parallel.ranks=4 parallel.zero=3 ",
                                        MODEL "parallel.ranks=3 train.global_batch=24 parallel.zero=2 train.precision=bf16 ",
                                        MODEL "parallel.ranks=4 parallel.zero=2 train.optimizer=muon "};
    for (size_t b = 0; b < sizeof bases / sizeof *bases; b++) {
        double whole[20], part[20];
        qd_random_tokens random = {.seed = 11}, other = {.seed = 11};
        qd_team *team = trained_team(bases[b], &random);
        trained_steps(team, 20, whole);
        qd_team_destroy(team);

        team = trained_team(bases[b], &random);
        trained_steps(team, 7, part);
        ok(qd_team_call(team, trained_save, NULL));
        qd_team_destroy(team);

        team = trained_team(bases[b], &random);
        ok(qd_team_call(team, trained_load, NULL));
        trained_steps(team, 13, part + 7);
        qd_team_destroy(team);
        for (int s = 0; s < 20; s++)
            if (whole[s] != part[s])
                fail_msg("%s: step %d: %.17g uninterrupted, %.17g resumed", bases[b], s + 1, whole[s], part[s]);

        static const char *const layouts[] = {"parallel.ranks=1 ", "parallel.ranks=4 train.micro_batch=1 ", "parallel.ranks=8 ",
                                              "parallel.ranks=2 parallel.zero=1 ", "parallel.ranks=4 parallel.zero=3 parallel.dp_shard=2 "};
        bool exact = strstr(bases[b], "bf16") == NULL;
        for (size_t l = 0; l < sizeof layouts / sizeof *layouts; l++) {
            char words[512];
            snprintf(words, sizeof words, "%s%s", bases[b], layouts[l]);
            if (!sample_has(l, b, 3))
                continue;
            team = trained_team(words, &other);
            ok(qd_team_call(team, trained_load, NULL));
            trained_steps(team, 13, part + 7);
            qd_team_destroy(team);
            for (int s = 7; s < 20; s++)
                if (!(fabs(whole[s] - part[s]) <= (exact ? 1e-5 : 1e-2) * whole[s]))
                    fail_msg("%s: step %d: %.9g against %.9g", words, s + 1, part[s], whole[s]);
        }
    }
}

/* Saved on 4 ranks under ZeRO 3, resumed on 1, 2, 4 and 8 under other stages. */
static void any_stage_reads_any(void **state)
{
    (void)state;
    static const struct {
        const char *words;
        bool exact;
    } others[] = {{"parallel.ranks=4 parallel.zero=3 ", true},  {"parallel.ranks=4 parallel.zero=1 ", false},
                  {"parallel.ranks=1 ", false},                  {"parallel.ranks=2 parallel.zero=2 ", false},
                  {"parallel.ranks=8 parallel.zero=1 ", false}, {"parallel.ranks=8 parallel.zero=3 parallel.dp_shard=4 ", false},
                  {"parallel.ranks=8 parallel.zero=0 ", false}};
    double whole[27], part[27];
    qd_random_tokens random = {.seed = 11};
    qd_team *team = trained_team(MODEL "parallel.ranks=4 parallel.zero=3", &random);
    trained_steps(team, 7, whole);
    ok(qd_team_call(team, trained_save, NULL));
    trained_steps(team, 20, whole + 7);
    qd_team_destroy(team);
    for (size_t o = 0; o < sizeof others / sizeof *others; o++) {
        char words[512];
        snprintf(words, sizeof words, MODEL "%s", others[o].words);
        team = trained_team(words, &random);
        ok(qd_team_call(team, trained_load, NULL));
        trained_steps(team, 20, part + 7);
        qd_team_destroy(team);
        for (int s = 7; s < 27; s++)
            if (others[o].exact ? whole[s] != part[s] : !(fabs(whole[s] - part[s]) <= 1e-5 * whole[s]))
                fail_msg("%s: step %d: %.17g against %.17g", words, s + 1, part[s], whole[s]);
    }
}

/* Memory per rank while a checkpoint is saved. */
static qd_saver *savers[4];

static qd_status begin(qd_trainer *trainer, qd_comm *world, void *argument)
{
    int rank = qd_comm_rank(world);
    (void)argument;
    if (!savers[rank])
        QD_TRY(qd_saver_create(trainer, world, scratch_folder(), 0, true, &savers[rank]));
    return qd_saver_begin(savers[rank], rank == 0 ? "a: 1\n" : NULL);
}

static qd_status finish(qd_trainer *trainer, qd_comm *world, void *argument)
{
    int rank = qd_comm_rank(world);
    qd_save_report report;
    (void)argument;
    /* The planned figure equals what is allocated. */
    if (qd_saver_snapshot(savers[rank]) != qd_pieces_bytes(qd_trainer_program(trainer)))
        return QD_FAIL(QD_DIFFERENT, "the copy takes %lld bytes", (long long)qd_saver_snapshot(savers[rank]));
    QD_TRY(qd_saver_poll(savers[rank], true, &report));
    if (report.state != QD_SAVE_DONE || report.step != 5)
        return QD_FAIL(QD_DIFFERENT, "state %d of step %lld: %s", report.state, (long long)report.step, report.message);
    QD_TRY(qd_saver_poll(savers[rank], false, &report));
    qd_saver_destroy(savers[rank]);
    savers[rank] = NULL;
    return report.state == QD_SAVE_IDLE ? QD_OK : QD_FAIL(QD_DIFFERENT, "a save is reported twice");
}

/* A checkpoint holds the step at which the save began, however far training went while it was
 * written. */
static void written_while_training(void **state)
{
    (void)state;
    double whole[20], part[20];
    qd_random_tokens random = {.seed = 11};
    qd_team *team = trained_team(MODEL "parallel.ranks=4", &random);
    trained_steps(team, 5, whole);
    ok(qd_team_call(team, begin, NULL));
    trained_steps(team, 15, whole + 5);
    ok(qd_team_call(team, finish, NULL));
    qd_team_destroy(team);
    team = trained_team(MODEL "parallel.ranks=4", &random);
    ok(qd_team_call(team, trained_load, NULL));
    trained_steps(team, 15, part + 5);
    qd_team_destroy(team);
    assert_memory_equal(whole + 5, part + 5, 15 * sizeof *part);
}

/* Flips a bit of the newest checkpoint's file: it is named, and the previous checkpoint is used. */
static void damage_falls_back(void **state)
{
    (void)state;
    static const char *const files[] = {"manifest.json", "manifest.xxh3", "model-00000.safetensors", "optimizer-00000.safetensors"};
    qd_random_tokens random = {.seed = 11};
    qd_team *team = trained_team(MODEL "parallel.ranks=1", &random);
    trained_steps(team, 2, NULL);
    ok(qd_team_call(team, trained_save, NULL));
    trained_steps(team, 2, NULL);
    for (size_t f = 0; f < sizeof files / sizeof *files; f++) {
        for (int where = 0; where < 12; where++) {
            ok(qd_team_call(team, trained_save, NULL)); /* step 4 again */
            char path[256];
            snprintf(path, sizeof path, "%s/step-000000000004/%s", scratch_folder(), files[f]);
            FILE *file = fopen(path, "r+b");
            assert_non_null(file);
            fseek(file, 0, SEEK_END);
            long size = ftell(file), at = (size - 1) * where / 11;
            if (where % 4 == 3) {
                assert_int_equal(ftruncate(fileno(file), at), 0);
            } else {
                fseek(file, at, SEEK_SET);
                int byte = fgetc(file);
                fseek(file, at, SEEK_SET);
                fputc(byte ^ (1 << where % 8), file);
            }
            fclose(file);
            qd_checkpoint *checkpoint;
            char *why;
            ok(qd_store_open(scratch_folder(), INT64_MAX, true, &checkpoint, &why));
            assert_int_equal(qd_checkpoint_meta(checkpoint)->step, 2);
            if (!why || !strstr(why, "step-000000000004"))
                fail_msg("%s, damage %d: said '%s'", files[f], where, why ? why : "");
            qd_checkpoint_close(checkpoint);
            free(why);
        }
    }
    qd_team_destroy(team);
}

static void old_ones_are_pruned(void **state)
{
    (void)state;
    qd_random_tokens random = {.seed = 11};
    qd_team *team = trained_team(MODEL "parallel.ranks=1", &random);
    for (int i = 0; i < 5; i++) {
        trained_steps(team, 1, NULL);
        ok(qd_team_call(team, trained_save, NULL));
    }
    struct stat info;
    for (int step = 1; step <= 5; step++) {
        char path[256];
        snprintf(path, sizeof path, "%s/step-%012d", scratch_folder(), step);
        assert_int_equal(stat(path, &info) == 0, step > 2);
    }
    qd_team_destroy(team);
}

static void another_model_is_refused(void **state)
{
    (void)state;
    qd_random_tokens random = {.seed = 11};
    qd_team *team = trained_team(MODEL "parallel.ranks=1", &random);
    trained_steps(team, 1, NULL);
    ok(qd_team_call(team, trained_save, NULL));
    qd_team_destroy(team);
    team = trained_team(MODEL "parallel.ranks=1 model.hidden=64", &random);
    assert_int_equal(qd_team_call(team, trained_load, NULL), QD_USAGE);
    assert_non_null(strstr(qd_error_message(), "61 x 32, the model's is 61 x 64"));
    qd_team_destroy(team);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(resume_is_exact, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(any_stage_reads_any, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(written_while_training, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(damage_falls_back, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(old_ones_are_pruned, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(another_model_is_refused, scratch_setup, scratch_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
