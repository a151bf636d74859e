/* A weight or moment that is not finite is not saved: the element, its tensor and the rank are
 * named, all ranks agree, the run ends, and the earlier checkpoint stays. A checkpoint with such a
 * value, written by an earlier version, is not resumed from.
 * ctest: wrap qd_trainer_get */
#include "ckpt/checkpoint.h"
#include "support/layout.h"
#include "support/scratch.h"
#include "train/exec/state.h"

#include <math.h>
#include <quadrille/train.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"

#define MODEL "model.layers=1 model.hidden=8 model.heads=2 data.seq=8 train.global_batch=6 run.threads=1 model.tied=false "

static char root[512];

typedef struct outcome {
    qd_status status;
    char message[512];
} outcome;

static qd_status save(qd_trainer *trainer, qd_comm *world, void *argument)
{
    outcome *o = (outcome *)argument + qd_comm_rank(world);
    o->status = qd_state_save(trainer, world, root, "a: 1\n", 2);
    snprintf(o->message, sizeof o->message, "%s", o->status == QD_OK ? "" : qd_error_message());
    return QD_OK;
}

static qd_status spoil(qd_trainer *trainer, qd_comm *world, void *argument)
{
    const qd_ledger *ledger = qd_trainer_program(trainer)->ledger;
    float *values = malloc((size_t)qd_trainer_largest(trainer) * sizeof *values);
    qd_status status = QD_OK;
    assert_non_null(values);
    for (int i = 0; i < ledger->param_count && qd_comm_rank(world) == 1; i++) {
        qd_tensor_kind kind = *(const qd_tensor_kind *)argument;
        qd_holding own = qd_trainer_holding(trainer, i, kind);
        if (strcmp(ledger->params[i].name, "embed.tokens.weight") != 0 || own.count == 0)
            continue;
        status = qd_trainer_get(trainer, i, kind, values);
        values[own.count - 3] = kind == QD_TENSOR_VALUE ? NAN : INFINITY;
        if (status == QD_OK)
            status = qd_trainer_put(trainer, i, kind, values);
    }
    free(values);
    return status;
}

static void is_not_saved(void **state)
{
    snprintf(root, sizeof root, "%s/checkpoints", (const char *)*state);
    for (int moment = 0; moment < 2; moment++) {
        qd_config config = layout_config(MODEL "model.vocab=11 parallel.ranks=2 parallel.zero=3");
        qd_random_tokens random = {.seed = 3, .vocab = config.model.vocab};
        qd_batch_source source = qd_random_source(&random);
        qd_tensor_kind kind = moment ? QD_TENSOR_MOMENT2 : QD_TENSOR_VALUE;
        qd_team *team;
        qd_step_output out;
        outcome o[2];
        ok(qd_team_create(&config, &source, &team));
        ok(qd_team_step(team, &out));
        ok(qd_team_call(team, save, o));
        assert_int_equal(o[0].status, QD_OK);
        ok(qd_team_step(team, &out));
        ok(qd_team_call(team, spoil, &kind));
        ok(qd_team_call(team, save, o));
        for (int rank = 0; rank < 2; rank++) {
            assert_int_equal(o[rank].status, QD_NOT_FINITE);
            assert_string_equal(o[rank].message, moment ? "rank 1: element [10, 5] of 'embed.tokens.weight' (moment2) is inf"
                                                        : "rank 1: element [10, 5] of 'embed.tokens.weight' (value) is nan");
        }
        qd_team_destroy(team);
        qd_checkpoint *checkpoint;
        ok(qd_store_open(root, INT64_MAX, true, &checkpoint, NULL));
        assert_int_equal(qd_checkpoint_meta(checkpoint)->step, 1);
        qd_checkpoint_close(checkpoint);
    }
}

static void replace_text(char *text, const char *old, const char *new)
{
    char *at = strstr(text, old);
    assert_non_null(at);
    memcpy(at, new, strlen(new));
}

/* NaN in row 0 of the token table, which no text of letters reads, with matching checksums: as an
 * earlier version wrote it. */
static void plant(const char *folder)
{
    char path[700], old[24], new[24];
    size_t size, length;
    snprintf(path, sizeof path, "%s/model-00000.safetensors", folder);
    unsigned char *bytes = scratch_read(path, &size);
    uint64_t header = 0;
    for (int i = 0; i < 8; i++)
        header |= (uint64_t)bytes[i] << (8 * i);
    char *entry = strstr((const char *)bytes + 8, "\"embed.tokens.weight"), *place = strstr(entry, "\"data_offsets\":[");
    long long begin, end;
    assert_int_equal(sscanf(place, "\"data_offsets\":[%lld,%lld", &begin, &end), 2);
    unsigned char *data = bytes + 8 + header + begin;
    snprintf(old, sizeof old, "%016llx", (unsigned long long)XXH3_64bits(data, (size_t)(end - begin)));
    memcpy(data + 3 * sizeof(float), &(float){NAN}, sizeof(float));
    snprintf(new, sizeof new, "%016llx", (unsigned long long)XXH3_64bits(data, (size_t)(end - begin)));
    FILE *file = fopen(path, "w");
    assert_int_equal(fwrite(bytes, 1, size, file), size);
    fclose(file);
    free(bytes);
    snprintf(path, sizeof path, "%s/manifest.json", folder);
    bytes = scratch_read(path, &length);
    char *text = malloc(length + 1);
    memcpy(text, bytes, length);
    text[length] = '\0';
    replace_text(text, old, new);
    file = fopen(path, "w");
    assert_int_equal(fwrite(text, 1, length, file), length);
    fclose(file);
    snprintf(path, sizeof path, "%s/manifest.xxh3", folder);
    file = fopen(path, "w");
    fprintf(file, "%016llx", (unsigned long long)XXH3_64bits(text, length));
    fclose(file);
    free(text);
    free(bytes);
}

static _Atomic int64_t spoiled_from = INT64_MAX; /* from this step on the token table of rank 1 has a NaN */

qd_status __real_qd_trainer_get(qd_trainer *trainer, int param, qd_tensor_kind kind, float *out);
qd_status __wrap_qd_trainer_get(qd_trainer *trainer, int param, qd_tensor_kind kind, float *out);

qd_status __wrap_qd_trainer_get(qd_trainer *trainer, int param, qd_tensor_kind kind, float *out)
{
    QD_TRY(__real_qd_trainer_get(trainer, param, kind, out));
    if (qd_trainer_position(trainer).step >= spoiled_from && kind == QD_TENSOR_VALUE &&
        qd_trainer_holding(trainer, param, kind).box.begin[0] > 0)
        out[3] = NAN;
    return QD_OK;
}

static void take_note(void *context, const char *text);

static qd_status train(void **state, const char *more)
{
    char words[2048];
    snprintf(words, sizeof words,
             MODEL "model.vocab=256 parallel.ranks=2 parallel.zero=1 run.ranks_as=threads data.path=%s run.dir=%s/run run.save_every=2 %s",
             scratch_path(state, "text"), (const char *)*state, more);
    qd_options *options = layout_options(words);
    qd_status status = qd_train(options, NULL, &(qd_train_observer){.size = sizeof(qd_train_observer), .on_note = take_note});
    qd_options_destroy(options);
    return status;
}

static void ends_the_run(void **state)
{
    char folder[600], text[512];
    memset(text, 'a', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    scratch_text(state, "text", text);
    ok(train(state, "train.steps=4"));
    spoiled_from = 8;
    assert_int_equal(train(state, "train.steps=20 run.resume=true"), QD_NOT_FINITE);
    spoiled_from = INT64_MAX;
    const char *message = qd_error_message();
    assert_non_null(strstr(message, "no checkpoint is written after step 8, and the run ends"));
    assert_non_null(strstr(message, "rank 1: element ["));
    assert_non_null(strstr(message, "is nan; the last one is from step 6"));
    for (int step = 6; step <= 8; step += 2) {
        snprintf(folder, sizeof folder, "%s/run/checkpoints/step-%012d", (const char *)*state, step);
        assert_int_equal(access(folder, F_OK), step == 6 ? 0 : -1);
    }
}

static char notes[4096];

static void take_note(void *context, const char *text)
{
    (void)context;
    snprintf(notes + strlen(notes), sizeof notes - strlen(notes), "%s\n", text);
}

static void is_not_resumed_from(void **state)
{
    char folder[600], text[512];
    memset(text, 'a', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    scratch_text(state, "text", text);
    ok(train(state, "train.steps=4"));
    snprintf(folder, sizeof folder, "%s/run/checkpoints/step-000000000004", (const char *)*state);
    plant(folder);
    notes[0] = '\0';
    ok(train(state, "train.steps=6 run.resume=true"));
    assert_non_null(strstr(notes, "element [0, 3] of 'embed.tokens.weight' (value) is not finite"));
    assert_non_null(strstr(notes, "after step 2"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test_setup_teardown(is_not_saved, scratch_setup, scratch_teardown),
                                       cmocka_unit_test_setup_teardown(ends_the_run, scratch_setup, scratch_teardown),
                                       cmocka_unit_test_setup_teardown(is_not_resumed_from, scratch_setup, scratch_teardown)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
