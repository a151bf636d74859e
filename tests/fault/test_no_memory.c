/* The nth allocation of a save, of a load, or of reading a configuration fails, n = 1, 2, …: the
 * call returns, reports only that memory is short, and the earlier checkpoint is intact.
 * ctest: wrap malloc calloc realloc strdup
 * ctest: timeout 120 */
#include "base/text/yaml.h"
#include "ckpt/checkpoint.h"
#include "support/layout.h"
#include "support/scratch.h"
#include "train/exec/state.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"

#define MODEL "model.layers=1 model.hidden=8 model.heads=2 model.vocab=11 data.seq=8 train.global_batch=2 run.threads=1 parallel.ranks=1"
enum { SECONDS = 20 }; /* for one save or load of milliseconds */

static atomic_int armed, calls, fail_at, failed;
static atomic_bool only; /* only this one; else every later one too: a machine without memory stays so */

static bool refused(void)
{
    const int n = atomic_load(&armed) ? atomic_fetch_add(&calls, 1) + 1 : 0;
    if (n == 0 || (atomic_load(&only) ? n != atomic_load(&fail_at) : n < atomic_load(&fail_at)))
        return false;
    atomic_fetch_add(&failed, 1);
    return true;
}

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_realloc(void *memory, size_t bytes);
char *__real_strdup(const char *text);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_realloc(void *memory, size_t bytes);
char *__wrap_strdup(const char *text);

void *__wrap_malloc(size_t bytes)
{
    return refused() ? NULL : __real_malloc(bytes);
}

void *__wrap_calloc(size_t count, size_t bytes)
{
    return refused() ? NULL : __real_calloc(count, bytes);
}

void *__wrap_realloc(void *memory, size_t bytes)
{
    return refused() ? NULL : __real_realloc(memory, bytes);
}

char *__wrap_strdup(const char *text)
{
    return refused() ? NULL : __real_strdup(text);
}

static void arm(int n)
{
    atomic_store(&calls, 0);
    atomic_store(&failed, 0);
    atomic_store(&fail_at, n);
    atomic_store(&armed, 1);
    alarm(SECONDS);
}

static bool disarm(void)
{
    atomic_store(&armed, 0);
    alarm(0);
    return atomic_load(&failed) > 0;
}

static char root[512];

typedef struct outcome {
    qd_status status;
    char message[512];
} outcome;

/* A failure here is not a failure of the team. */
static qd_status save(qd_trainer *trainer, qd_comm *world, void *argument)
{
    outcome *o = argument;
    o->status = qd_state_save(trainer, world, root, "train: {steps: 90}\n", 2);
    snprintf(o->message, sizeof o->message, "%s", o->status == QD_OK ? "" : qd_error_message());
    qd_error_clear();
    return QD_OK;
}

/* Outside of training, so that only reading a checkpoint allocates. */
static qd_status verify(int64_t *step)
{
    qd_checkpoint *checkpoint;
    QD_TRY(qd_store_open(root, INT64_MAX, true, &checkpoint, NULL));
    *step = qd_checkpoint_meta(checkpoint)->step;
    qd_checkpoint_close(checkpoint);
    return QD_OK;
}

static void memory_was_short(int n, const char *what, qd_status status, const char *message)
{
    if (status == QD_OK || !strstr(message, "no memory"))
        fail_msg("%s, allocation %d: status %d, %s", what, n, status, message);
}

static void every_allocation_fails(void **state)
{
    snprintf(root, sizeof root, "%s/checkpoints", (const char *)*state);
    qd_config config = layout_config(MODEL);
    qd_random_tokens random = {.seed = 3, .vocab = config.model.vocab};
    qd_batch_source source = qd_random_source(&random);
    qd_team *team;
    qd_step_output out;
    outcome o;
    ok(qd_team_create(&config, &source, &team));
    ok(qd_team_step(team, &out));
    ok(qd_team_call(team, save, &o));
    ok(o.status);
    int64_t last = 1, found;
    int saves = 0, loads = 0;
    for (bool reached = true; reached; saves++) {
        ok(qd_team_step(team, &out));
        arm(saves + 1);
        qd_status called = qd_team_call(team, save, &o);
        reached = disarm();
        ok(called);
        if (reached && o.status != QD_OK)
            memory_was_short(saves + 1, "save", o.status, o.message);
        else if (o.status != QD_OK)
            fail_msg("%s", o.message);
        ok(verify(&found));
        assert_true(found == last || found == saves + 2);
        if (o.status == QD_OK)
            assert_int_equal(found, saves + 2);
        last = found;
    }
    for (bool reached = true; reached; loads++) {
        arm(loads + 1);
        qd_status status = verify(&found);
        reached = disarm();
        if (reached)
            memory_was_short(loads + 1, "load", status, qd_error_message());
        else
            ok(status);
    }
    assert_true(saves > 40 && loads > 40);
    qd_team_destroy(team);
}

static qd_status count_leaf(void *context, const qd_yaml_leaf *leaf)
{
    *(int *)context += leaf->key[0] != '\0' && leaf->text[0] != '\0';
    return QD_OK;
}

static void configurations(void **state)
{
    (void)state;
    static const char text[] = "model: {layers: 2, arch: llama}\nserve: [a, b]\n";
    for (int one = 0; one < 2; one++) {
        bool reached = true;
        int n = 1;
        atomic_store(&only, one == 1);
        for (; reached; n++) {
            int leaves = 0;
            arm(n);
            qd_status status = qd_yaml_read("run.yaml", text, sizeof text - 1, count_leaf, &leaves);
            reached = disarm();
            if (reached)
                memory_was_short(n, one ? "configuration, only this" : "configuration", status, qd_error_message());
            else
                assert_int_equal(status == QD_OK ? leaves : -1, 3);
        }
        assert_true(n > 3);
    }
    atomic_store(&only, false);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test_setup_teardown(every_allocation_fails, scratch_setup, scratch_teardown),
                                       cmocka_unit_test(configurations)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
