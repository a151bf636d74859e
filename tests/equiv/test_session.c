/* Sessions: their steps are those of `quadrille train`, they evaluate and generate as their
 * checkpoints do, they resume and roll back, several exist concurrently, misuse is refused, and the
 * process is left alone.
 * ctest: timeout 240
 * ctest: processors 2
 * ctest: wrap getenv secure_getenv sigaction signal posix_spawn */
#include "support/layout.h"
#include "support/sample.h"
#include "support/scratch.h"

#include <pthread.h>
#include <quadrille/session.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"

#define SMALL                                                                                                              \
    "model.layers=2 model.hidden=32 model.heads=4 data.seq=16 train.global_batch=8 train.steps=5 run.threads=1 "           \
    "data.validation=0.2 "
enum { STEPS = 5 };

static const char *corpus;

/* ---- what the library must not do inside a session ---- */

static atomic_int watched, calls;

char *__real_getenv(const char *name);
char *__wrap_getenv(const char *name);
char *__wrap_getenv(const char *name)
{
    atomic_fetch_add(&calls, atomic_load(&watched));
    return __real_getenv(name);
}

char *__wrap_secure_getenv(const char *name);
char *__wrap_secure_getenv(const char *name)
{
    return __wrap_getenv(name);
}

int __real_sigaction(int number, const struct sigaction *action, struct sigaction *before);
int __wrap_sigaction(int number, const struct sigaction *action, struct sigaction *before);
int __wrap_sigaction(int number, const struct sigaction *action, struct sigaction *before)
{
    atomic_fetch_add(&calls, atomic_load(&watched));
    return __real_sigaction(number, action, before);
}

void (*__real_signal(int number, void (*handler)(int)))(int);
void (*__wrap_signal(int number, void (*handler)(int)))(int);
void (*__wrap_signal(int number, void (*handler)(int)))(int)
{
    atomic_fetch_add(&calls, atomic_load(&watched));
    return __real_signal(number, handler);
}

int __real_posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *files, const posix_spawnattr_t *how,
                       char *const argv[], char *const environment[]);
int __wrap_posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *files, const posix_spawnattr_t *how,
                       char *const argv[], char *const environment[]);
int __wrap_posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *files, const posix_spawnattr_t *how,
                       char *const argv[], char *const environment[])
{
    atomic_fetch_add(&calls, atomic_load(&watched));
    return __real_posix_spawn(pid, path, files, how, argv, environment);
}

/* ---- helpers ---- */

static qd_options *options_of(const char *words)
{
    char all[2048];
    snprintf(all, sizeof all, "data.path=%s %s", corpus, words);
    return layout_options(all);
}

static qd_session *session_of(const char *words)
{
    qd_options *options = options_of(words);
    qd_session *session = NULL;
    ok(qd_session_create(options, NULL, &session));
    qd_options_destroy(options);
    return session;
}

static void refused_session(const char *words, qd_status expected, const char *part)
{
    qd_options *options = options_of(words);
    qd_session *session = (qd_session *)&session;
    assert_int_equal(qd_session_create(options, NULL, &session), expected);
    assert_null(session);
    assert_non_null(strstr(qd_error_message(), part));
    qd_options_destroy(options);
}

static void says(qd_status status, qd_status expected, const char *part)
{
    if (status != expected || !strstr(qd_error_message(), part))
        fail_msg("status %d (%s) instead of %d with \"%s\"", status, qd_error_message(), expected, part);
    assert_null(strchr(qd_error_message(), '\n'));
}

static void steps(qd_session *session, int count, double *losses)
{
    for (int i = 0; i < count; i++) {
        qd_train_step step = qd_train_step_default();
        ok(qd_session_step(session, &step));
        losses[i] = step.loss;
    }
}

/* Loss and norm of each line of metrics.jsonl; returns how many there are. */
static int read_metrics(const char *folder, double (*lines)[2], int most)
{
    char path[1024], line[4096];
    snprintf(path, sizeof path, "%s/metrics.jsonl", folder);
    FILE *file = fopen(path, "r");
    int count = 0;
    assert_non_null(file);
    for (; fgets(line, sizeof line, file); count++) {
        assert_true(count < most);
        lines[count][0] = strtod(strstr(line, "\"loss\":") + 7, NULL);
        lines[count][1] = strtod(strstr(line, "\"grad_norm\":") + 12, NULL);
    }
    fclose(file);
    return count;
}

/* ---- tests ---- */

static void steps_are_those_of_train(void **state)
{
    static const char *const layouts[] = {
        "parallel.ranks=1",
        "parallel.ranks=4 parallel.zero=3",
        "parallel.ranks=4 parallel.tp=2 parallel.pp=2 train.micro_batch=2",
        "parallel.ranks=4 parallel.cp=2 parallel.zero=1",
        "parallel.ranks=8 parallel.tp=2 parallel.pp=2 parallel.cp=2",
        "model.preset=mixtral-tiny model.layers=2 parallel.ranks=4 parallel.ep=4 parallel.zero=2",
        "parallel.ranks=2 train.precision=bf16 train.optimizer=muon model.vocab=300 run.threads=2",
    };
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        char words[1024], command[3072], name[32], theirs_folder[600];
        double theirs[STEPS][2], ours[STEPS][2];
        if (!sample_has(i, 0, 4))
            continue;
        snprintf(name, sizeof name, "ours-%zu", i);
        const char *folder = scratch_path(state, name);
        snprintf(theirs_folder, sizeof theirs_folder, "%s-theirs", folder);
        snprintf(command, sizeof command, "%s train data.path=%s %s %s run.dir=%s > /dev/null", QD_TEST_PROGRAM, corpus, SMALL, layouts[i],
                 theirs_folder);
        assert_int_equal(system(command), 0);
        snprintf(words, sizeof words, SMALL "%s run.dir=%s", layouts[i], folder);
        qd_session *session = session_of(words);
        for (int step = 1; step <= STEPS; step++) {
            qd_train_step s = qd_train_step_default();
            ok(qd_session_step(session, &s));
            assert_int_equal(s.step, step);
            assert_int_equal(qd_session_steps_done(session), step);
            ours[step - 1][0] = s.loss;
            ours[step - 1][1] = s.grad_norm;
        }
        assert_string_equal(qd_session_summary(session)->ranks_as, "threads");
        qd_train_end end = qd_train_end_default();
        ok(qd_session_finish(session, &end));
        assert_int_equal(end.saved, STEPS);
        qd_session_destroy(session);
        assert_int_equal(read_metrics(theirs_folder, theirs, STEPS), STEPS);
        if (memcmp(ours, theirs, sizeof ours) != 0)
            fail_msg("%s: loss %.17g of the session, %.17g of quadrille train", layouts[i], ours[STEPS - 1][0], theirs[STEPS - 1][0]);
        assert_int_equal(read_metrics(folder, theirs, STEPS), STEPS);
        assert_memory_equal(ours, theirs, sizeof ours);
        snprintf(command, sizeof command, "%s/memory.json", folder);
        assert_int_equal(access(command, F_OK), 0);
    }
}

typedef struct written {
    char text[4096];
    size_t length;
} written;

static bool take_text(void *context, const char *text, size_t length)
{
    written *w = context;
    assert_true(w->length + length < sizeof w->text);
    memcpy(w->text + w->length, text, length);
    w->length += length;
    return true;
}

static void compare_with_checkpoint(void **state, const char *name, const char *layout)
{
    char words[1024];
    double losses[3];
    const char *folder = scratch_path(state, name);
    snprintf(words, sizeof words, SMALL "%s run.dir=%s", layout, folder);
    qd_session *session = session_of(words);
    steps(session, 3, losses);
    ok(qd_session_save(session));
    qd_evaluate_options evaluate = {.size = sizeof evaluate, .threads = 1};
    qd_evaluate_report live = qd_evaluate_report_default(), kept = qd_evaluate_report_default();
    ok(qd_session_evaluate(session, &evaluate, &live));
    written now = {0}, then = {0};
    qd_generate_options generate = qd_generate_options_default();
    qd_generate_report report = qd_generate_report_default();
    generate.prompt = "the";
    generate.prompt_length = 3;
    generate.tokens = 40;
    generate.seed = 5;
    generate.threads = 1;
    generate.on_text = take_text;
    generate.callback_context = &now;
    ok(qd_session_generate(session, &generate, &report));
    assert_int_equal(report.step, 3);
    steps(session, 1, losses); /* neither has changed anything */
    qd_session_destroy(session);
    snprintf(words, sizeof words, "%s/checkpoints/step-000000000003", folder);
    evaluate.model = generate.model = words;
    ok(qd_evaluate(&evaluate, &kept));
    generate.callback_context = &then;
    ok(qd_generate(&generate, &report));
    if (live.loss != kept.loss || live.bits_per_byte != kept.bits_per_byte || live.step != 3 || live.tokens != kept.tokens)
        fail_msg("%s: loss %.17g of the session, %.17g of its checkpoint", layout, live.loss, kept.loss);
    assert_int_equal(now.length, then.length);
    assert_memory_equal(now.text, then.text, now.length);
}

static void models_are_those_of_checkpoints(void **state)
{
    static const char *const layouts[] = {
        "parallel.ranks=1",
        "parallel.ranks=4 parallel.tp=2 parallel.zero=2 train.precision=bf16",
        "parallel.ranks=4 parallel.pp=2 parallel.zero=3 model.tied=true train.micro_batch=2",
        "model.preset=mixtral-tiny model.layers=2 parallel.ranks=4 parallel.ep=2 parallel.tp=2 model.vocab=280",
    };
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        char name[32];
        snprintf(name, sizeof name, "model-%zu", i);
        if (sample_has(i, 1, 3))
            compare_with_checkpoint(state, name, layouts[i]);
    }
}

/* Checkpoints have the adapters alone; the frozen weights are those of another run. */
static void adapters_are_those_of_checkpoints(void **state)
{
    char words[1024];
    compare_with_checkpoint(state, "base", "parallel.ranks=1");
    snprintf(words, sizeof words, "lora.rank=2 train.lr=0.02 parallel.ranks=2 parallel.zero=1 run.weights=%s/checkpoints/step-000000000003",
             scratch_path(state, "base"));
    compare_with_checkpoint(state, "adapters", words);
}

static void resumes_on_another_layout(void **state)
{
    double whole[STEPS], part[STEPS];
    char words[1024];
    const char *folder = scratch_path(state, "resumed");
    qd_session *session = session_of(SMALL "parallel.ranks=2");
    steps(session, STEPS, whole);
    says(qd_session_step(session, NULL), QD_USAGE, "all 5 steps are done");
    qd_session_destroy(session);
    snprintf(words, sizeof words, SMALL "parallel.ranks=2 parallel.dp=2 run.dir=%s", folder);
    session = session_of(words);
    steps(session, 3, part);
    ok(qd_session_save(session));
    ok(qd_session_save(session)); /* there is one already */
    qd_session_destroy(session);
    /* dp=2 is of the layout before. Four ranks have half the rows each, so that GEMMs of some
     * instruction sets sum weight gradients in another order. */
    qd_options *changes = layout_options("parallel.ranks=4 parallel.zero=1");
    ok(qd_session_resume(folder, changes, NULL, &session));
    qd_options_destroy(changes);
    assert_int_equal(qd_session_steps_done(session), 3);
    assert_int_equal(qd_session_summary(session)->plan->world, 4);
    steps(session, 2, part + 3);
    assert_memory_equal(whole, part, 3 * sizeof *whole);
    for (int i = 3; i < STEPS; i++)
        assert_true(fabs(whole[i] - part[i]) <= 1e-7 * whole[i]);
    qd_session_destroy(session);
    says(qd_session_resume(folder, NULL, NULL, &session), QD_USAGE, "raise train.steps");
    assert_null(session);
    says(qd_session_resume(scratch_path(state, "nothing"), NULL, NULL, &session), QD_USAGE, "holds no run to resume");
}

static void rolls_back(void **state)
{
    double first[STEPS], again[STEPS], lines[STEPS][2];
    char words[1024], path[1024];
    const char *folder = scratch_path(state, "rolled-back");
    snprintf(words, sizeof words, SMALL "parallel.ranks=2 parallel.zero=1 run.save_every=2 run.keep=0 run.dir=%s", folder);
    qd_session *session = session_of(words);
    steps(session, STEPS, first);
    snprintf(path, sizeof path, "%s/checkpoints/step-000000000002", folder);
    says(qd_session_load(session, scratch_path(state, "missing")), QD_USAGE, "give a run folder or a checkpoint");
    says(qd_session_load(session, NULL), QD_USAGE, "no checkpoint is named");
    for (int round = 0; round < 2; round++) {
        ok(qd_session_load(session, path));
        assert_int_equal(qd_session_steps_done(session), 2);
        assert_int_equal(read_metrics(folder, lines, STEPS), 2);
        steps(session, 3, again + 2);
        assert_memory_equal(first + 2, again + 2, 3 * sizeof *first);
        assert_int_equal(read_metrics(folder, lines, STEPS), STEPS);
    }
    qd_session_destroy(session);

    qd_session *other = session_of(SMALL "model.hidden=48 parallel.ranks=2");
    says(qd_session_load(other, path), QD_USAGE, "the model of this checkpoint is not that of the run");
    steps(other, 1, again); /* nothing was touched */
    qd_session_destroy(other);
}

typedef struct reentrant {
    qd_session *session;
    qd_status status;
    char message[256];
} reentrant;

static void call_from_note(void *context, const qd_train_step *step)
{
    reentrant *r = context;
    (void)step;
    if (!r->session)
        return;
    r->status = qd_session_step(r->session, NULL);
    snprintf(r->message, sizeof r->message, "%s", qd_error_message());
}

static void misuse_is_refused(void **state)
{
    qd_train_step step = qd_train_step_default();
    qd_evaluate_report evaluation = qd_evaluate_report_default();
    qd_generate_report generation = qd_generate_report_default();
    char words[1024];
    says(qd_session_step(NULL, &step), QD_USAGE, "there is no session");
    qd_session_destroy(NULL);
    qd_session *none = (qd_session *)&none;
    says(qd_session_create(NULL, NULL, &none), QD_USAGE, "there are no options");
    says(qd_session_resume(NULL, NULL, NULL, &none), QD_USAGE, "no run folder is named");
    static const qd_option unrelated[] = {{"other.key", QD_OPTION_INT, "1", 0, 9, NULL, "not of a run", NULL}};
    qd_option_table table = QD_OPTION_TABLE(unrelated);
    qd_options *foreign = NULL;
    ok(qd_options_create(&table, 1, &foreign));
    says(qd_session_create(foreign, NULL, &none), QD_USAGE, "create them from qd_config_table()");
    assert_null(none);
    qd_options_destroy(foreign);
    refused_session(SMALL "run.backend=mpi", QD_USAGE, "the ranks of a session are threads");
    refused_session(SMALL "parallel.ranks=3 parallel.tp=2", QD_USAGE, "");
    refused_session(SMALL "data.path=/nowhere", QD_USAGE, "/nowhere");

    qd_session *session = session_of(SMALL "data.validation=0 parallel.ranks=2");
    says(qd_session_save(session), QD_USAGE, "there is no run.dir");
    says(qd_session_evaluate(session, NULL, &evaluation), QD_USAGE, "no data was held out");
    qd_evaluate_options other = {.size = sizeof other, .model = "x"};
    says(qd_session_evaluate(session, &other, &evaluation), QD_USAGE, "a session evaluates its own");
    says(qd_session_evaluate(session, NULL, NULL), QD_USAGE, "qd_evaluate_report: there is none");
    says(qd_session_step(session, &(qd_train_step){.step = 1}), QD_USAGE, "start from qd_train_step_default()");
    qd_generate_options generate = qd_generate_options_default();
    generate.tokens = 0;
    says(qd_session_generate(session, &generate, &generation), QD_USAGE, "at least 1 token");
    /* a program that was compiled when steps had fewer figures */
    qd_train_step old = {.size = offsetof(qd_train_step, grad_norm), .grad_norm = -1.0, .tokens = -1.0};
    ok(qd_session_step(session, &old));
    assert_true(old.step == 1 && old.loss > 1.0 && old.grad_norm == -1.0 && old.tokens == -1.0);
    ok(qd_session_finish(session, NULL));
    says(qd_session_step(session, &step), QD_USAGE, "the session is finished");
    generate.tokens = 3;
    ok(qd_session_generate(session, &generate, &generation)); /* the weights are still there */
    qd_session_destroy(session);

    snprintf(words, sizeof words, SMALL "run.save=false run.dir=%s", scratch_path(state, "unsaved"));
    session = session_of(words);
    says(qd_session_save(session), QD_USAGE, "run.save is false");
    qd_session_destroy(session);
    snprintf(words, sizeof words, SMALL "run.dir=%s", scratch_path(state, "early"));
    session = session_of(words);
    says(qd_session_save(session), QD_USAGE, "no step is done yet");
    qd_session_destroy(session);

    /* tokens of an unknown tokenizer */
    snprintf(words, sizeof words, "%s tokenize %s --train 300 --output %s > /dev/null", QD_TEST_PROGRAM, corpus,
             scratch_path(state, "shards"));
    assert_int_equal(system(words), 0);
    assert_int_equal(unlink(scratch_path(state, "shards/tokenizer.json")), 0);
    snprintf(words, sizeof words, SMALL "data.path=%s model.vocab=300", scratch_path(state, "shards"));
    session = session_of(words);
    says(qd_session_generate(session, NULL, &generation), QD_USAGE, "data.tokenizer can name it");
    ok(qd_session_step(session, &step));
    qd_session_destroy(session);

    reentrant r = {0};
    qd_train_observer observer = {.size = sizeof observer, .context = &r, .on_step = call_from_note};
    qd_options *options = options_of(SMALL "parallel.ranks=2");
    ok(qd_session_create(options, &observer, &session));
    qd_options_destroy(options);
    r.session = session;
    ok(qd_session_step(session, &step));
    assert_int_equal(r.status, QD_USAGE);
    assert_non_null(strstr(r.message, "has not returned yet"));
    qd_session_destroy(session);
}

static void a_failed_session_can_only_be_destroyed(void **state)
{
    qd_evaluate_report report = qd_evaluate_report_default();
    qd_status status = QD_OK;
    char first[512];
    (void)state;
    qd_session *session =
        session_of(SMALL "train.steps=100 parallel.ranks=3 train.global_batch=9 train.optimizer=sgd train.lr=1000 train.clip=0");
    for (int i = 0; i < 100 && status == QD_OK; i++)
        status = qd_session_step(session, NULL);
    assert_int_equal(status, QD_NOT_FINITE);
    snprintf(first, sizeof first, "can only be destroyed: %.400s", qd_error_message());
    says(qd_session_step(session, NULL), QD_NOT_FINITE, first);
    says(qd_session_evaluate(session, NULL, &report), QD_NOT_FINITE, first);
    says(qd_session_save(session), QD_NOT_FINITE, first);
    says(qd_session_finish(session, NULL), QD_NOT_FINITE, first);
    qd_session_destroy(session);
}

static void can_be_destroyed_at_any_time(void **state)
{
    char words[1024], path[1024];
    const char *folder = scratch_path(state, "left");
    for (int done = 0; done < 3; done++) {
        qd_session *session = session_of(SMALL "parallel.ranks=4 parallel.pp=2 train.micro_batch=2");
        double losses[3];
        steps(session, done, losses);
        qd_session_destroy(session);
    }
    /* a checkpoint that is written alongside the steps is complete afterwards */
    snprintf(words, sizeof words, SMALL "parallel.ranks=2 run.save_every=1 run.async_save=true run.dir=%s", folder);
    qd_session *session = session_of(words);
    ok(qd_session_step(session, NULL));
    qd_session_destroy(session);
    snprintf(path, sizeof path, "%s/checkpoints/step-000000000001/manifest.json", folder);
    assert_int_equal(access(path, F_OK), 0);
    /* and the folder is free for the next one */
    ok(qd_session_resume(folder, NULL, NULL, &session));
    ok(qd_session_step(session, NULL));
    qd_session_destroy(session);
}

typedef struct companion {
    const char *words;
    double losses[STEPS];
} companion;

static void *train_companion(void *argument)
{
    companion *c = argument;
    qd_session *session = session_of(c->words);
    steps(session, STEPS, c->losses);
    qd_session_destroy(session);
    return NULL;
}

static void several_exist_concurrently(void **state)
{
    companion alone[] = {{.words = SMALL "parallel.ranks=2 parallel.tp=2"}, {.words = SMALL "parallel.ranks=3 train.global_batch=9"}};
    companion together[] = {alone[0], alone[1]};
    pthread_t threads[2];
    (void)state;
    for (int i = 0; i < 2; i++)
        train_companion(&alone[i]);
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, train_companion, &together[i]), 0);
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    /* and alternately, from one thread */
    qd_session *sessions[2] = {session_of(alone[0].words), session_of(alone[1].words)};
    for (int s = 0; s < STEPS; s++)
        for (int i = 0; i < 2; i++) {
            double loss;
            steps(sessions[i], 1, &loss);
            assert_true(loss == alone[i].losses[s]);
            assert_true(together[i].losses[s] == alone[i].losses[s]);
        }
    for (int i = 0; i < 2; i++)
        qd_session_destroy(sessions[i]);
}

static void the_process_is_left_alone(void **state)
{
    char words[1024];
    double losses[2];
    qd_evaluate_report evaluation = qd_evaluate_report_default();
    qd_generate_report generation = qd_generate_report_default();
    sigset_t before, after;
    struct stat printed;
    const char *path = scratch_path(state, "printed");
    snprintf(words, sizeof words, SMALL "model.vocab=300 parallel.ranks=2 run.trace=true run.dir=%s", scratch_path(state, "quiet"));
    qd_options *options = options_of(words);
    fflush(stdout);
    fflush(stderr);
    int out = dup(STDOUT_FILENO), err = dup(STDERR_FILENO);
    assert_non_null(freopen(path, "w", stdout));
    dup2(STDOUT_FILENO, STDERR_FILENO);
    pthread_sigmask(SIG_BLOCK, NULL, &before);
    atomic_store(&watched, 1);
    qd_session *session = NULL;
    qd_status status = qd_session_create(options, NULL, &session);
    for (int i = 0; i < 2 && status == QD_OK; i++) {
        qd_train_step step = qd_train_step_default();
        status = qd_session_step(session, &step);
        losses[i] = step.loss;
    }
    if (status == QD_OK)
        status = qd_session_evaluate(session, NULL, &evaluation);
    if (status == QD_OK)
        status = qd_session_generate(session, NULL, &generation);
    if (status == QD_OK)
        status = qd_session_save(session);
    if (status == QD_OK)
        status = qd_session_finish(session, NULL);
    qd_session_destroy(session);
    atomic_store(&watched, 0);
    pthread_sigmask(SIG_BLOCK, NULL, &after);
    fflush(stdout);
    dup2(out, STDOUT_FILENO);
    dup2(err, STDERR_FILENO);
    close(out);
    close(err);
    qd_options_destroy(options);
    ok(status);
    assert_true(losses[1] < losses[0] + 1.0);
    assert_int_equal(atomic_load(&calls), 0);
    for (int i = 1; i < NSIG; i++)
        assert_int_equal(sigismember(&before, i), sigismember(&after, i));
    assert_int_equal(stat(path, &printed), 0);
    assert_int_equal(printed.st_size, 0);
}

static int setup(void **state)
{
    static const char *const vocabulary[] = {"the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"};
    char text[24000];
    size_t length = 0;
    uint32_t random = 7;
    if (scratch_setup(state) != 0)
        return -1;
    while (length < sizeof text - 16) {
        random = random * 1664525u + 1013904223u;
        length += (size_t)snprintf(text + length, sizeof text - length, "%s ", vocabulary[(random >> 24) % 9]);
    }
    corpus = scratch_text(state, "corpus.txt", text);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_are_those_of_train),
        cmocka_unit_test(models_are_those_of_checkpoints),
        cmocka_unit_test(adapters_are_those_of_checkpoints),
        cmocka_unit_test(resumes_on_another_layout),
        cmocka_unit_test(rolls_back),
        cmocka_unit_test(misuse_is_refused),
        cmocka_unit_test(a_failed_session_can_only_be_destroyed),
        cmocka_unit_test(can_be_destroyed_at_any_time),
        cmocka_unit_test(several_exist_concurrently),
        cmocka_unit_test(the_process_is_left_alone),
    };
    return cmocka_run_group_tests(tests, setup, scratch_teardown);
}
