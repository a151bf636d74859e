/* Validation while training: its losses are those of `quadrille eval` on the checkpoint, on every
 * axis of the mesh; it changes no bit of the training and allocates nothing; the best checkpoint
 * stays; a resumed run continues the schedule and the best.
 * ctest: timeout 120
 * ctest: processors 2 */
#include "support/layout.h"
#include "support/sample.h"
#include "support/scratch.h"

#include <math.h>
#include <quadrille/session.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"

#define SMALL                                                                                                              \
    "model.layers=2 model.hidden=32 model.heads=4 data.seq=16 train.global_batch=8 train.schedule=constant run.threads=1 "
enum { STEPS = 6, MOST = 16 };

static const char *corpus, *other_text;

static qd_session *session_of(const char *words)
{
    char all[2048];
    qd_session *session = NULL;
    snprintf(all, sizeof all, "data.path=%s " SMALL "%s", corpus, words);
    qd_options *options = layout_options(all);
    ok(qd_session_create(options, NULL, &session));
    qd_options_destroy(options);
    return session;
}

static void refused(const char *words, const char *part)
{
    char all[2048];
    qd_session *session = NULL;
    snprintf(all, sizeof all, "data.path=%s " SMALL "%s", corpus, words);
    qd_options *options = layout_options(all);
    qd_status status = qd_session_create(options, NULL, &session);
    assert_true(status == QD_USAGE || status == QD_UNSUPPORTED);
    if (!strstr(qd_error_message(), part))
        fail_msg("\"%s\" instead of \"%s\"", qd_error_message(), part);
    qd_options_destroy(options);
}

static int run_steps(qd_session *session, int count, qd_train_step *steps)
{
    for (int i = 0; i < count; i++) {
        steps[i] = qd_train_step_default();
        ok(qd_session_step(session, &steps[i]));
    }
    return count;
}

/* Compares the tensors of two checkpoints, file by file. */
static void same_state(const char *a, const char *b, int step)
{
    const char *const folders[2] = {a, b};
    for (int part = 0; part < 2; part++) {
        char paths[2][1024];
        size_t lengths[2];
        for (int k = 0; k < 2; k++)
            snprintf(paths[k], sizeof paths[k], "%s/checkpoints/step-%012d/%s-00000.safetensors", folders[k], step,
                     part ? "optimizer" : "model");
        unsigned char *bytes[2] = {scratch_read(paths[0], &lengths[0]), scratch_read(paths[1], &lengths[1])};
        assert_int_equal(lengths[0], lengths[1]);
        assert_memory_equal(bytes[0], bytes[1], lengths[0]);
        free(bytes[0]);
        free(bytes[1]);
    }
}

static qd_evaluate_report evaluated(const char *folder, int64_t step, int64_t windows)
{
    char path[1024];
    qd_evaluate_report report = qd_evaluate_report_default();
    snprintf(path, sizeof path, "%s/checkpoints/step-%012lld", folder, (long long)step);
    qd_evaluate_options o = {.size = sizeof o, .model = path, .threads = 1, .windows = windows};
    ok(qd_evaluate(&o, &report));
    return report;
}

/* Each layout trains with and without validation. */
static void equals_eval_and_changes_nothing(void **state)
{
    static const char *const layouts[] = {
        "parallel.ranks=1",
        "parallel.ranks=1 train.micro_batch=2 train.eval_batches=2 model.dropout=0.1",
        "parallel.ranks=2 parallel.pp=2 train.micro_batch=2",
        "parallel.ranks=4 parallel.pp=2 parallel.schedule=zb_v train.micro_batch=1 model.layers=4 parallel.zero=1",
        "parallel.ranks=2 parallel.tp=2 train.recompute=full",
        "parallel.ranks=2 parallel.tp=2 parallel.tp_overlap=2 parallel.sp=false",
        "parallel.ranks=4 parallel.cp=2 parallel.zero=2 data.document_mask=true data.separator=the",
        "parallel.ranks=2 parallel.cp=2 parallel.cp_mode=ulysses",
        "parallel.ranks=2 parallel.zero=3 train.micro_batch=2 parallel.reshard_after_forward=false",
        "parallel.ranks=4 parallel.zero=3 parallel.dp_shard=2 train.precision=bf16 train.master=split",
        "parallel.ranks=2 train.optimizer=muon train.offload=optimizer",
        "model.preset=mixtral-tiny parallel.ranks=4 parallel.ep=4 model.expert_capacity=1.25 parallel.expert_rows=1",
        "model.preset=mixtral-tiny parallel.ranks=4 parallel.ep=2 parallel.etp=2 parallel.tp=2 parallel.zero=1",
    };
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        qd_train_step with[STEPS], without[STEPS];
        char words[1024], name[32], plain_name[32];
        if (!sample_has(i, 0, 5))
            continue;
        snprintf(name, sizeof name, "with-%zu", i);
        snprintf(plain_name, sizeof plain_name, "without-%zu", i);
        const char *folder = scratch_path(state, name), *plain = scratch_path(state, plain_name);
        snprintf(words, sizeof words, "data.validation=0.1 train.steps=%d train.eval_every=2 run.save_every=2 run.keep=0 %s run.dir=%s",
                 STEPS, layouts[i], folder);
        qd_session *session = session_of(words);
        const int64_t planned = qd_session_summary(session)->plan->memory_bytes;
        assert_true(qd_session_summary(session)->plan->evaluation_bytes > 0);
        run_steps(session, STEPS, with);
        qd_session_destroy(session);
        /* train.eval_batches needs train.eval_every */
        snprintf(words, sizeof words, "data.validation=0.1 train.steps=%d run.save_every=2 run.keep=0 %s train.eval_batches=0 run.dir=%s",
                 STEPS, layouts[i], plain);
        session = session_of(words);
        run_steps(session, STEPS, without);
        qd_session_destroy(session);
        for (int s = 0; s < STEPS; s++) {
            if (with[s].loss != without[s].loss || with[s].grad_norm != without[s].grad_norm)
                fail_msg("%s: step %d has loss %.17g with validation, %.17g without", layouts[i], s + 1, with[s].loss, without[s].loss);
            assert_int_equal(with[s].validation_tokens > 0, (s + 1) % 2 == 0);
            assert_true(with[s].memory_peak_bytes <= planned && with[s].memory_peak_bytes == with[0].memory_peak_bytes);
            assert_int_equal(without[s].validation_tokens, 0);
        }
        for (int step = 2; step <= STEPS; step += 2)
            same_state(folder, plain, step);
        for (int step = 2; step <= STEPS; step += 2) {
            const qd_train_step *s = &with[step - 1];
            qd_evaluate_report eval = evaluated(folder, step, strstr(layouts[i], "eval_batches") ? 16 : 0);
            bool bits = strstr(layouts[i], "ranks=1") != NULL;
            double most = bits ? 0.0 : 1e-5;
            assert_int_equal(s->validation_tokens, eval.tokens);
            if (!(fabs(s->validation_loss - eval.loss) <= most))
                fail_msg("%s: step %d: validation loss %.17g, eval %.17g", layouts[i], step, s->validation_loss, eval.loss);
        }
    }
}

/* The text becomes less likely while the model learns another one: the first evaluation is the
 * best. */
#define WORSE "data.eval_path=%s train.lr=1e-2 train.eval_every=2 run.save_every=1 run.keep=1 run.dir=%s parallel.ranks=%d train.steps=%d"

static void best_is_kept_and_survives_a_resume(void **state)
{
    qd_train_step whole[8], parts[8];
    char words[2048], path[1024], target[64] = "";
    const char *folder = scratch_path(state, "best"), *uninterrupted = scratch_path(state, "uninterrupted");
    snprintf(words, sizeof words, WORSE, other_text, uninterrupted, 2, 8);
    qd_session *session = session_of(words);
    run_steps(session, 8, whole);
    qd_session_destroy(session);

    snprintf(words, sizeof words, WORSE, other_text, folder, 2, 5);
    session = session_of(words);
    run_steps(session, 5, parts);
    assert_true(parts[1].validation_best && !parts[3].validation_best && parts[4].validation_tokens > 0); /* after the last step too */
    qd_session_destroy(session);
    qd_options *changes = layout_options("train.steps=8");
    qd_train_end end = qd_train_end_default();
    ok(qd_session_resume(folder, changes, NULL, &session));
    qd_options_destroy(changes);
    run_steps(session, 3, parts + 5);
    ok(qd_session_finish(session, &end));
    qd_session_destroy(session);
    assert_int_equal(end.best, 2);
    assert_true(end.best_loss == whole[1].validation_loss);
    for (int i = 0; i < 8; i++)
        if (i != 4) { /* the last step of the first part */
            assert_true(parts[i].loss == whole[i].loss && parts[i].validation_loss == whole[i].validation_loss);
            assert_int_equal(parts[i].validation_best, whole[i].validation_best);
        }
    snprintf(path, sizeof path, "%s/checkpoints/best", folder);
    assert_true(readlink(path, target, sizeof target - 1) > 0);
    assert_string_equal(target, "step-000000000002");
    static const struct {
        int step;
        bool kept;
    } checkpoints[] = {{1, false}, {2, true}, {4, false}, {7, false}, {8, true}};
    for (size_t i = 0; i < sizeof checkpoints / sizeof *checkpoints; i++) {
        snprintf(path, sizeof path, "%s/checkpoints/step-%012d", folder, checkpoints[i].step);
        assert_int_equal(access(path, F_OK) == 0, checkpoints[i].kept);
    }
    /* eval uses the text of the run */
    assert_true(fabs(evaluated(folder, 2, 0).loss - whole[1].validation_loss) < 1e-5);
    assert_true(evaluated(folder, 2, 0).held_out == false);
}

/* Each part resumes the one before. Only losses of the text that is evaluated now are compared,
 * also two parts after the change: the first text has the lower ones. */
static void best_is_of_the_present_text(void **state)
{
    qd_train_step steps[2];
    char words[2048];
    const char *folder = scratch_path(state, "changed");
    snprintf(words, sizeof words, WORSE, corpus, folder, 1, 2);
    qd_session *session = session_of(words);
    run_steps(session, 2, steps);
    qd_session_destroy(session);
    for (int part = 1; part < 3; part++) {
        qd_train_end end = qd_train_end_default();
        snprintf(words, sizeof words, "data.eval_path=%s train.steps=%d", other_text, 2 * part + 2);
        qd_options *changes = layout_options(words);
        ok(qd_session_resume(folder, changes, NULL, &session));
        qd_options_destroy(changes);
        run_steps(session, 2, steps);
        ok(qd_session_finish(session, &end));
        qd_session_destroy(session);
        assert_int_equal(end.best, 4);
        assert_int_equal(steps[1].validation_best, part == 1);
    }
}

static void examples_are_held_out_too(void **state)
{
    qd_train_step steps[2];
    char lines[120 * 64] = "", words[1024];
    for (int i = 0; i < 100; i++)
        snprintf(lines + strlen(lines), 64, "{\"prompt\": \"%d+1=\", \"completion\": \"%d\"}\n", i, i + 1);
    const char *folder = scratch_path(state, "examples"), *path = scratch_text(state, "sums.jsonl", lines);
    snprintf(words, sizeof words, "data.format=examples data.tokenizer=bytes data.validation=0.2 train.eval_every=1 train.steps=2 "
                                  "run.dir=%s data.path=%s", folder, path);
    qd_session *session = session_of(words);
    run_steps(session, 2, steps);
    qd_session_destroy(session);
    assert_true(steps[1].validation_loss == evaluated(folder, 2, 0).loss);
    refused("train.eval_every=1 data.format=examples data.tokenizer=bytes data.eval_path=x", "data.validation holds out some of them");
}

/* The times of steps count, also those before a resume. */
static void schedule_by_time(void **state)
{
    qd_train_step steps[4];
    char words[2048];
    const char *folder = scratch_path(state, "time");
    snprintf(words, sizeof words, "data.validation=0.1 train.eval_every=0.000001s train.steps=4 run.save_best=false run.dir=%s", folder);
    qd_session *session = session_of(words);
    run_steps(session, 4, steps);
    qd_session_destroy(session);
    for (int i = 0; i < 4; i++)
        assert_true(steps[i].validation_tokens > 0);
    snprintf(words, sizeof words, "%s/checkpoints/best", folder);
    assert_int_equal(access(words, F_OK), -1);
    session = session_of("data.validation=0.1 train.eval_every=10h train.steps=3");
    run_steps(session, 3, steps);
    qd_session_destroy(session);
    assert_int_equal(steps[1].validation_tokens, 0);
    assert_true(steps[2].validation_tokens > 0);
}

static void mistakes_are_named(void **state)
{
    (void)state;
    refused("train.eval_every=5", "data.validation=0.02 holds out");
    refused("data.validation=0.1 train.eval_every=often", "train.eval_every is 'often'");
    refused("data.validation=0.1 train.eval_every=10minutes", "such as 90s, 10min or 2h");
    refused("data.validation=0.1 train.eval_every=1.5", "train.eval_every is '1.5'");
    refused("data.validation=0.1 train.eval_every=-3", "train.eval_every is '-3'");
    refused("data.validation=0.1 train.eval_batches=3", "train.eval_batches has no effect without train.eval_every");
    refused("train.eval_every=2 data.eval_path=/nowhere/text", "data.eval_path: ");
}

static int make_texts(void **state)
{
    static const char *const words[] = {"in", "the", "beginning", "was", "a", "word", "and", "it", "went", "on\n"};
    char text[12000] = "";
    size_t used = 0;
    if (scratch_setup(state) != 0)
        return -1;
    for (unsigned i = 1; used < sizeof text - 16; i++)
        used += (size_t)snprintf(text + used, sizeof text - used, "%s%s", words[i * i * 2654435761u % 4294967291u % 10],
                                 i % 7 ? " " : "\nthe\n");
    corpus = scratch_text(state, "corpus.txt", text);
    memset(text, 'Z', 701);
    text[701] = '\0';
    other_text = scratch_text(state, "other.txt", text);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(equals_eval_and_changes_nothing, make_texts, scratch_teardown),
        cmocka_unit_test_setup_teardown(best_is_kept_and_survives_a_resume, make_texts, scratch_teardown),
        cmocka_unit_test_setup_teardown(best_is_of_the_present_text, make_texts, scratch_teardown),
        cmocka_unit_test_setup_teardown(examples_are_held_out_too, make_texts, scratch_teardown),
        cmocka_unit_test_setup_teardown(schedule_by_time, make_texts, scratch_teardown),
        cmocka_unit_test_setup_teardown(mistakes_are_named, make_texts, scratch_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
