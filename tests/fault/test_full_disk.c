/* The nth system call of a save fails, n = 1, 2, …: the save reports it, training continues, and
 * the earlier checkpoint is intact. Or the process is killed at the nth call: the checkpoint found
 * afterwards, old or new, is complete, and the resumed run is bit-identical.
 * ctest: wrap write fsync open mkdir rename renameat2 symlink unlink remove
 * ctest: timeout 200 */
#define _GNU_SOURCE
#include "support/layout.h"
#include "support/scratch.h"
#include "train/exec/state.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"

#define MODEL "model.layers=1 model.hidden=8 model.heads=2 model.vocab=11 data.seq=8 train.global_batch=6 train.steps=90 run.threads=1 "

static atomic_int armed, calls, fail_at, failed;
static atomic_bool shorten; /* a write fails as a short one, and the next fails */
static atomic_bool deadly;  /* the process is killed instead */

/* Writes to these files count. Descriptors of other files (sockets, memfd) are not affected: the
 * test has none open for writing. */
static int refused(int error)
{
    if (!atomic_load(&armed) || atomic_fetch_add(&calls, 1) + 1 < atomic_load(&fail_at) || atomic_load(&failed) > 0)
        return 0;
    if (atomic_load(&deadly))
        kill(getpid(), SIGKILL);
    atomic_fetch_add(&failed, 1);
    errno = error;
    return -1;
}

ssize_t __real_write(int fd, const void *data, size_t count);
int __real_open(const char *path, int flags, ...);
int __real_mkdir(const char *path, mode_t mode);
int __real_rename(const char *from, const char *to);
int __real_renameat2(int a, const char *from, int b, const char *to, unsigned flags);
int __real_symlink(const char *target, const char *path);
int __real_fsync(int fd);
int __real_unlink(const char *path);
int __real_remove(const char *path);
ssize_t __wrap_write(int fd, const void *data, size_t count);
int __wrap_open(const char *path, int flags, ...);
int __wrap_mkdir(const char *path, mode_t mode);
int __wrap_rename(const char *from, const char *to);
int __wrap_renameat2(int a, const char *from, int b, const char *to, unsigned flags);
int __wrap_symlink(const char *target, const char *path);
int __wrap_fsync(int fd);
int __wrap_unlink(const char *path);
int __wrap_remove(const char *path);

ssize_t __wrap_write(int fd, const void *data, size_t count)
{
    if (atomic_load(&shorten) && atomic_load(&armed) && atomic_load(&calls) + 1 == atomic_load(&fail_at) && count > 1) {
        atomic_fetch_add(&fail_at, 1);
        atomic_fetch_add(&calls, 1);
        return __real_write(fd, data, count / 2);
    }
    return refused(ENOSPC) ? -1 : __real_write(fd, data, count);
}

int __wrap_open(const char *path, int flags, ...)
{
    va_list more;
    va_start(more, flags);
    mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0;
    va_end(more);
    return flags & O_CREAT && refused(ENOSPC) ? -1 : __real_open(path, flags, mode);
}

int __wrap_mkdir(const char *path, mode_t mode)
{
    return refused(ENOSPC) ? -1 : __real_mkdir(path, mode);
}

int __wrap_rename(const char *from, const char *to)
{
    return refused(EIO) ? -1 : __real_rename(from, to);
}

int __wrap_renameat2(int a, const char *from, int b, const char *to, unsigned flags)
{
    return refused(EIO) ? -1 : __real_renameat2(a, from, b, to, flags);
}

int __wrap_symlink(const char *target, const char *path)
{
    return refused(EIO) ? -1 : __real_symlink(target, path);
}

int __wrap_fsync(int fd)
{
    (void)fd; /* waiting for a real disk would only slow this down */
    return refused(EIO) ? -1 : 0;
}

/* A file that cannot be removed is not an error; being killed while removing is tested. */
int __wrap_unlink(const char *path)
{
    return atomic_load(&deadly) && refused(EIO) ? -1 : __real_unlink(path);
}

int __wrap_remove(const char *path)
{
    return atomic_load(&deadly) && refused(EIO) ? -1 : __real_remove(path);
}

static char root[512];

typedef struct outcome {
    qd_status status[2]; /* per rank */
} outcome;

static qd_status save(qd_trainer *trainer, qd_comm *world, void *argument)
{
    outcome *o = argument;
    o->status[qd_comm_rank(world)] = qd_state_save(trainer, world, root, "train: {steps: 90}\n", 2);
    return QD_OK;
}

static qd_status load(qd_trainer *trainer, qd_comm *world, void *argument)
{
    (void)world;
    int64_t *step = argument;
    qd_checkpoint *checkpoint;
    QD_TRY(qd_store_open(root, INT64_MAX, true, &checkpoint, NULL));
    *step = qd_checkpoint_meta(checkpoint)->step;
    qd_status status = qd_state_load(trainer, checkpoint, false);
    qd_checkpoint_close(checkpoint);
    return status;
}

static void nothing_lies_aside(int n)
{
    DIR *dir = opendir(root);
    for (struct dirent *entry; dir && (entry = readdir(dir)) != NULL;)
        if (strstr(entry->d_name, ".part"))
            fail_msg("call %d failed, and %s was left", n, entry->d_name);
    closedir(dir);
}

static void every_call_fails(void **state)
{
    snprintf(root, sizeof root, "%s/checkpoints", (const char *)*state);
    qd_config config = layout_config(MODEL "parallel.ranks=2");
    qd_random_tokens random = {.seed = 3, .vocab = config.model.vocab};
    qd_batch_source source = qd_random_source(&random);
    qd_team *team, *other;
    qd_step_output out;
    outcome o = {{QD_OK, QD_OK}};
    ok(qd_team_create(&config, &source, &team));
    ok(qd_team_create(&config, &source, &other));
    ok(qd_team_step(team, &out));
    ok(qd_team_call(team, save, &o));
    ok(o.status[0]);
    int64_t last = 1, step = 1;
    int failures = 0, n = 1;
    for (bool reached = true; reached; n++) {
        ok(qd_team_step(team, &out));
        step++;
        atomic_store(&shorten, n % 3 == 0);
        atomic_store(&calls, 0);
        atomic_store(&failed, 0);
        atomic_store(&fail_at, n);
        atomic_store(&armed, 1);
        ok(qd_team_call(team, save, &o));
        atomic_store(&armed, 0);
        reached = atomic_load(&failed) > 0;
        assert_int_equal(o.status[0], o.status[1]);
        if (o.status[0] == QD_OK)
            last = step;
        else
            failures++;
        if (!reached)
            ok(o.status[0]);
        nothing_lies_aside(n);
        /* Either the earlier checkpoint, or the new one complete; a save that was reported as done
         * is found. */
        int64_t found = 0;
        ok(qd_team_call(other, load, &found));
        assert_true(found == last || (o.status[0] != QD_OK && found == step));
        last = found;
    }
    /* header, tensors and flush of two files on two ranks, their lists, the manifest and its hash,
     * the folders, the link */
    assert_true(failures > 60 && failures <= n);
    print_message("%d failed saves, %d calls\n", failures, n - 2);
    qd_team_destroy(other);
    qd_team_destroy(team);
}

enum { MOST_STEPS = 300 };

/* What the killed process, and the undisturbed one, leave behind. */
typedef struct witness {
    double losses[MOST_STEPS + 1]; /* by step */
    int64_t found;                 /* step of the checkpoint it resumed from, 0: none */
    double loss;                   /* of the step after it */
    bool ended;
    char message[512];
} witness;

static qd_status run_child(witness *w, int n)
{
    qd_config config = layout_config(MODEL "parallel.ranks=2 parallel.zero=1");
    config.optimizer.schedule = QD_LR_CONSTANT;
    qd_random_tokens random = {.seed = 3, .vocab = config.model.vocab};
    qd_batch_source source = qd_random_source(&random);
    qd_team *team;
    qd_step_output out;
    outcome o = {{QD_OK, QD_OK}};
    struct stat info;
    QD_TRY(qd_team_create(&config, &source, &team));
    for (int s = 1; n == 0 && s <= MOST_STEPS; s++) {
        QD_TRY(qd_team_step(team, &out));
        w->losses[s] = out.loss;
    }
    if (n > 0) {
        w->found = 0;
        if (stat(root, &info) == 0)
            QD_TRY(qd_team_call(team, load, &w->found));
        QD_TRY(qd_team_step(team, &out));
        w->loss = out.loss;
        atomic_store(&fail_at, n);
        atomic_store(&deadly, true);
        atomic_store(&armed, 1);
        QD_TRY(qd_team_call(team, save, &o));
        atomic_store(&armed, 0);
        if (o.status[0] != QD_OK)
            return QD_FAIL(o.status[0], "the save failed, which nothing made it do");
    }
    qd_team_destroy(team);
    w->ended = true;
    return QD_OK;
}

/* n = 0: no save; else the process is killed at the nth call of its save. Returns whether it
 * was. */
static bool in_child(witness *w, int n)
{
    w->ended = false;
    w->message[0] = '\0';
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        alarm(60);
        if (run_child(w, n) != QD_OK)
            snprintf(w->message, sizeof w->message, "%s", qd_error_message());
        _exit(0);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    if (!killed && !w->ended)
        fail_msg("killed at call %d: %s", n, w->message[0] ? w->message : "it ended in another way");
    return killed;
}

static void every_call_kills(void **state)
{
    snprintf(root, sizeof root, "%s/checkpoints", (const char *)*state);
    witness *w = mmap(NULL, sizeof *w, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(w != MAP_FAILED);
    assert_false(in_child(w, 0));
    assert_false(in_child(w, INT_MAX)); /* a complete one first, then a second */
    assert_false(in_child(w, INT_MAX));
    int64_t least = 2, most = 2;
    int n = 1;
    for (bool killed = true; killed; n++) {
        killed = in_child(w, n);
        if (w->found < least || w->found > most)
            fail_msg("call %d: found step %lld, saved were %lld to %lld", n - 1, (long long)w->found, (long long)least, (long long)most);
        if (w->loss != w->losses[w->found + 1])
            fail_msg("call %d: step %lld: loss %.17g, undisturbed %.17g", n - 1, (long long)w->found + 1, w->loss, w->losses[w->found + 1]);
        least = killed ? w->found : w->found + 1;
        most = w->found + 1;
    }
    assert_true(n > 60);
    print_message("killed at %d calls\n", n - 2);
    assert_false(in_child(w, INT_MAX));
    assert_int_equal(w->found, most);
    munmap(w, sizeof *w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test_setup_teardown(every_call_kills, scratch_setup, scratch_teardown),
                                       cmocka_unit_test_setup_teardown(every_call_fails, scratch_setup, scratch_teardown)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
