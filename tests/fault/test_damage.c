/* A checkpoint of two ranks, damaged in every way: each damage is detected, file and tensor are
 * named, and the previous checkpoint is used.
 * ctest: wrap open read pread opendir readdir
 * ctest: timeout 200 */
#define _GNU_SOURCE
#include "ckpt/checkpoint.h"
#include "support/layout.h"
#include "support/scratch.h"
#include "train/exec/state.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"

#define MODEL                                                                                                                              \
    "model.layers=1 model.hidden=4 model.heads=1 model.ffn=6 model.vocab=7 data.seq=8 train.global_batch=6 run.threads=1 "                 \
    "train.optimizer=sgd train.momentum=0.9 "
enum { STEP = 2, MOST_FILES = 16, FLIPS = 1000, EVERY = 61 };

static char root[512], folder[600];

static qd_status save(qd_trainer *trainer, qd_comm *world, void *argument)
{
    (void)argument;
    return qd_state_save(trainer, world, root, "a: 1\n", 2);
}

static qd_status load_open(qd_trainer *trainer, qd_comm *world, void *checkpoint)
{
    (void)world;
    return qd_state_load(trainer, checkpoint, false);
}

typedef struct victim {
    char name[64], path[700];
    unsigned char *bytes;
    size_t size, header; /* header: bytes before the tensors; of other files: all */
} victim;

static int find_files(victim *files)
{
    int count = 0;
    DIR *dir = opendir(folder);
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
        victim *v = &files[count];
        if (entry->d_name[0] == '.')
            continue;
        snprintf(v->name, sizeof v->name, "%.60s", entry->d_name);
        snprintf(v->path, sizeof v->path, "%s/%s", folder, v->name);
        v->bytes = scratch_read(v->path, &v->size);
        v->header = v->size;
        if (strstr(v->name, ".safetensors"))
            v->header = 8 + (size_t)v->bytes[0] + ((size_t)v->bytes[1] << 8);
        count++;
    }
    closedir(dir);
    return count;
}

static int make(void **state)
{
    int failed = scratch_setup(state);
    qd_team *team;
    qd_step_output out;
    qd_config config = layout_config(MODEL "parallel.ranks=2");
    qd_random_tokens random = {.seed = 3, .vocab = config.model.vocab};
    qd_batch_source source = qd_random_source(&random);
    snprintf(root, sizeof root, "%s/checkpoints", (const char *)*state);
    snprintf(folder, sizeof folder, "%s/step-%012d", root, STEP);
    ok(qd_team_create(&config, &source, &team));
    for (int i = 0; i < STEP; i++) {
        ok(qd_team_step(team, &out));
        ok(qd_team_call(team, save, NULL));
    }
    qd_team_destroy(team);
    return failed;
}

/* The newest checkpoint is refused with the file's name, and with a tensor's where tensors are
 * affected. */
static void noticed(const victim *v, bool tensor, const char *what, size_t at)
{
    qd_checkpoint *checkpoint = NULL;
    qd_status status = qd_store_open_step(root, STEP, &checkpoint);
    if (status == QD_OK)
        status = qd_checkpoint_verify(checkpoint);
    qd_checkpoint_close(checkpoint);
    if (status != QD_CORRUPT || !strstr(qd_error_message(), v->name) || (tensor && !strstr(qd_error_message(), "weight")))
        fail_msg("%s: %s %zu: status %d, %s", v->name, what, at, status, status == QD_OK ? "" : qd_error_message());
}

static void falls_back(void)
{
    qd_checkpoint *checkpoint;
    char *why;
    ok(qd_store_open(root, INT64_MAX, true, &checkpoint, &why));
    assert_int_equal(qd_checkpoint_meta(checkpoint)->step, STEP - 1);
    assert_non_null(strstr(why, "step-000000000002"));
    qd_checkpoint_close(checkpoint);
    free(why);
}

static void flip(const victim *v, int fd, size_t byte, int bit)
{
    unsigned char changed = v->bytes[byte] ^ (unsigned char)(1 << bit);
    assert_int_equal(pwrite(fd, &changed, 1, (off_t)byte), 1);
    noticed(v, strstr(v->name, ".safetensors") != NULL, "bit", byte * 8 + (size_t)bit);
}

static void mend(const victim *v, int fd, size_t byte)
{
    assert_int_equal(pwrite(fd, v->bytes + byte, 1, (off_t)byte), 1);
}

static void every_header_bit(void **state)
{
    (void)state;
    victim files[MOST_FILES];
    int count = find_files(files);
    size_t bits = 0;
    assert_int_equal(count, 2 + 2 * 2);
    for (int f = 0; f < count; f++) {
        int fd = open(files[f].path, O_RDWR);
        assert_true(fd >= 0);
        for (size_t bit = 0; bit < files[f].header * 8; bit++) {
            flip(&files[f], fd, bit / 8, (int)(bit % 8));
            if (bit % (EVERY * 64) == 0)
                falls_back();
            mend(&files[f], fd, bit / 8);
        }
        bits += files[f].header * 8;
        close(fd);
        free(files[f].bytes);
    }
    print_message("%zu bits\n", bits);
}

static void random_payload_bits(void **state)
{
    (void)state;
    victim files[MOST_FILES];
    int count = find_files(files);
    srand(7);
    for (int i = 0; i < FLIPS; i++) {
        const victim *v = &files[rand() % count];
        if (v->header == v->size) {
            i--;
            continue;
        }
        size_t byte = v->header + (size_t)rand() % (v->size - v->header);
        int fd = open(v->path, O_RDWR);
        flip(v, fd, byte, rand() % 8);
        if (i % EVERY == 0)
            falls_back();
        mend(v, fd, byte);
        close(fd);
    }
    for (int f = 0; f < count; f++)
        free(files[f].bytes);
}

static void every_truncation(void **state)
{
    (void)state;
    victim files[MOST_FILES];
    int count = find_files(files);
    size_t lengths = 0;
    for (int f = 0; f < count; f++) {
        const victim *v = &files[f];
        lengths += v->size;
        for (size_t length = v->size; length-- > 0;) {
            assert_int_equal(truncate(v->path, (off_t)length), 0);
            noticed(v, strstr(v->name, ".safetensors") != NULL, "cut at", length);
            if (length % (EVERY * 8) == 0)
                falls_back();
        }
        assert_int_equal(unlink(v->path), 0);
        noticed(v, strstr(v->name, ".safetensors") != NULL, "missing", 0);
        int fd = open(v->path, O_RDWR | O_CREAT, 0644);
        assert_int_equal(write(fd, v->bytes, v->size), v->size);
        assert_int_equal(write(fd, "x", 1), 1);
        noticed(v, strstr(v->name, ".safetensors") != NULL, "longer", 0);
        assert_int_equal(ftruncate(fd, (off_t)v->size), 0);
        close(fd);
    }
    print_message("%zu lengths\n", lengths);
    qd_checkpoint *checkpoint;
    ok(qd_store_open(root, INT64_MAX, true, &checkpoint, NULL));
    assert_int_equal(qd_checkpoint_meta(checkpoint)->step, STEP);
    qd_checkpoint_close(checkpoint);
    for (int f = 0; f < count; f++)
        free(files[f].bytes);
}

static _Atomic(const char *) unreadable; /* name of the file whose opening or reading fails; NULL: none */
static atomic_int fail_open, fail_read_after = -1; /* reads that still succeed; -1: none fails */

int __real_open(const char *path, int flags, ...);
ssize_t __real_read(int fd, void *data, size_t count);
ssize_t __real_pread(int fd, void *data, size_t count, off_t offset);
int __wrap_open(const char *path, int flags, ...);
ssize_t __wrap_read(int fd, void *data, size_t count);
ssize_t __wrap_pread(int fd, void *data, size_t count, off_t offset);

int __wrap_open(const char *path, int flags, ...)
{
    va_list more;
    va_start(more, flags);
    mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0;
    va_end(more);
    const char *name = atomic_load(&unreadable);
    if (name && atomic_load(&fail_open) && strstr(path, folder) && strstr(path, name)) {
        errno = EIO;
        return -1;
    }
    return __real_open(path, flags, mode);
}

/* Whether the descriptor belongs to that file and it is time to fail. */
static bool refused(int fd)
{
    char link[64], path[512];
    const char *name = atomic_load(&unreadable);
    if (!name || atomic_load(&fail_read_after) < 0)
        return false;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length > 0 ? length : 0] = '\0';
    if (!strstr(path, folder) || !strstr(path, name) || atomic_fetch_sub(&fail_read_after, 1) > 0)
        return false;
    atomic_store(&fail_read_after, 0);
    errno = EIO;
    return true;
}

ssize_t __wrap_read(int fd, void *data, size_t count)
{
    return refused(fd) ? -1 : __real_read(fd, data, count);
}

ssize_t __wrap_pread(int fd, void *data, size_t count, off_t offset)
{
    return refused(fd) ? -1 : __real_pread(fd, data, count, offset);
}

static atomic_int fail_opendir, fail_readdir; /* the error; 0: none */

DIR *__real_opendir(const char *path);
struct dirent *__real_readdir(DIR *dir);
DIR *__wrap_opendir(const char *path);
struct dirent *__wrap_readdir(DIR *dir);

DIR *__wrap_opendir(const char *path)
{
    errno = atomic_load(&fail_opendir);
    return errno ? NULL : __real_opendir(path);
}

struct dirent *__wrap_readdir(DIR *dir)
{
    const int error = atomic_load(&fail_readdir);
    if (error == 0)
        return __real_readdir(dir);
    errno = error;
    return NULL;
}

/* The folder of checkpoints, not a file in it: what could not be listed may hold the newest
 * checkpoint. Without this, a supervised run would start anew and replace them. */
static void folders_that_cannot_be_read(void **state)
{
    (void)state;
    qd_checkpoint *checkpoint;
    static const int errors[] = {EIO, EMFILE, ENOMEM, ESTALE};
    for (size_t i = 0; i < 2 * sizeof errors / sizeof *errors; i++) {
        const int error = errors[i / 2];
        atomic_store(i % 2 ? &fail_readdir : &fail_opendir, error);
        assert_true(qd_store_holds(root));
        assert_int_equal(qd_store_open(root, INT64_MAX, true, &checkpoint, NULL), error == ENOMEM ? QD_NO_MEMORY : QD_IO);
        assert_non_null(strstr(qd_error_message(), root));
        assert_non_null(strstr(qd_error_message(), error == ENOMEM ? "no memory" : "cannot be listed"));
        assert_null(checkpoint);
        atomic_store(&fail_readdir, 0);
        atomic_store(&fail_opendir, 0);
    }
    char missing[600];
    snprintf(missing, sizeof missing, "%s-missing", root);
    assert_false(qd_store_holds(missing));
    assert_int_equal(qd_store_open(missing, INT64_MAX, true, &checkpoint, NULL), QD_USAGE);
}

/* An unreadable sector, or a file that cannot be opened: damage, with the file's name, and the
 * previous checkpoint is used. */
static void sectors_that_cannot_be_read(void **state)
{
    (void)state;
    victim files[MOST_FILES];
    int count = find_files(files);
    for (int f = 0; f < count; f++) {
        const victim *v = &files[f];
        bool tensor = strstr(v->name, ".safetensors") != NULL;
        atomic_store(&unreadable, v->name);
        atomic_store(&fail_open, 1);
        noticed(v, tensor, "EIO of open", 0);
        falls_back();
        atomic_store(&fail_open, 0);
        for (int n = 0; n < (tensor ? 4 : 1); n++) { /* length of the header, header, tensors */
            atomic_store(&fail_read_after, n);
            noticed(v, tensor, "EIO of read", (size_t)n);
            assert_non_null(strstr(qd_error_message(), "Input/output error"));
            atomic_store(&fail_read_after, n);
            falls_back();
        }
        atomic_store(&fail_read_after, -1);
        atomic_store(&unreadable, NULL);
    }
    for (int f = 0; f < count; f++)
        free(files[f].bytes);
}

/* Something else under the name of a file. Nothing blocks: opening a pipe would, for ever. */
static void what_is_no_file(void **state)
{
    (void)state;
    victim files[MOST_FILES];
    int count = find_files(files);
    char kept[720];
    for (int f = 0; f < count; f++) {
        const victim *v = &files[f];
        bool tensor = strstr(v->name, ".safetensors") != NULL;
        snprintf(kept, sizeof kept, "%s.kept", v->path);
        assert_int_equal(rename(v->path, kept), 0);
        for (int kind = 0; kind < 3; kind++) {
            assert_int_equal(kind == 0 ? mkdir(v->path, 0755) : kind == 1 ? symlink(v->name, v->path) : mkfifo(v->path, 0644), 0);
            alarm(20);
            noticed(v, tensor, "folder, link to itself, pipe:", (size_t)kind);
            falls_back();
            alarm(0);
            assert_int_equal(remove(v->path), 0);
        }
        assert_int_equal(rename(kept, v->path), 0);
    }
    for (int f = 0; f < count; f++)
        free(files[f].bytes);
}

/* A file that is truncated after it was opened: no bus error. */
static void cut_off_while_it_is_read(void **state)
{
    (void)state;
    victim files[MOST_FILES];
    int count = find_files(files);
    for (int f = 0; f < count; f++) {
        const victim *v = &files[f];
        qd_checkpoint *checkpoint;
        if (!strstr(v->name, ".safetensors"))
            continue;
        ok(qd_store_open_step(root, STEP, &checkpoint));
        ok(qd_checkpoint_verify(checkpoint)); /* all files are open */
        assert_int_equal(truncate(v->path, (off_t)v->header), 0);
        qd_config config = layout_config(MODEL "parallel.ranks=1");
        qd_random_tokens random = {.seed = 3, .vocab = config.model.vocab};
        qd_batch_source source = qd_random_source(&random);
        qd_team *team;
        ok(qd_team_create(&config, &source, &team));
        qd_status status = qd_team_call(team, load_open, checkpoint);
        if (status != QD_CORRUPT || !strstr(qd_error_message(), v->name))
            fail_msg("%s: status %d, %s", v->name, status, qd_error_message());
        qd_team_destroy(team);
        qd_checkpoint_close(checkpoint);
        int fd = open(v->path, O_WRONLY | O_TRUNC);
        assert_int_equal(write(fd, v->bytes, v->size), v->size);
        close(fd);
    }
    for (int f = 0; f < count; f++)
        free(files[f].bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(every_header_bit, make, scratch_teardown),
        cmocka_unit_test_setup_teardown(random_payload_bits, make, scratch_teardown),
        cmocka_unit_test_setup_teardown(every_truncation, make, scratch_teardown),
        cmocka_unit_test_setup_teardown(sectors_that_cannot_be_read, make, scratch_teardown),
        cmocka_unit_test_setup_teardown(folders_that_cannot_be_read, make, scratch_teardown),
        cmocka_unit_test_setup_teardown(what_is_no_file, make, scratch_teardown),
        cmocka_unit_test_setup_teardown(cut_off_while_it_is_read, make, scratch_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
