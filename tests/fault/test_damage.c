/* A checkpoint of two ranks, damaged in every way: each is noticed, file and tensor are named, and the one before is used.
 * ctest: timeout 200 */
#include "ckpt/checkpoint.h"
#include "support/layout.h"
#include "support/scratch.h"
#include "train/state.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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

/* The newest one is refused with the file's name, and with a tensor's where tensors are concerned. */
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
        close(fd);
        free(files[f].bytes);
    }
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
    for (int f = 0; f < count; f++) {
        const victim *v = &files[f];
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
    qd_checkpoint *checkpoint;
    ok(qd_store_open(root, INT64_MAX, true, &checkpoint, NULL));
    assert_int_equal(qd_checkpoint_meta(checkpoint)->step, STEP);
    qd_checkpoint_close(checkpoint);
    for (int f = 0; f < count; f++)
        free(files[f].bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(every_header_bit, make, scratch_teardown),
        cmocka_unit_test_setup_teardown(random_payload_bits, make, scratch_teardown),
        cmocka_unit_test_setup_teardown(every_truncation, make, scratch_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
