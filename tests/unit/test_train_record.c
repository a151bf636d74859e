/* Files for other programs: the bytes of TensorBoard's records, which TensorBoard itself has read,
 * and the lines of metrics.csv, also after a resume and on a full disk.
 * ctest: wrap pwrite */
#include "base/text/strbuf.h"
#include "support/scratch.h"
#include "train/record/recorder.h"
#include "train/record/tfevents.h"

#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"

#define OLD_COLUMNS "step,loss,grad_norm,lr,tokens,step_seconds,tokens_per_second,mfu,memory_peak_bytes,validation_loss"
#define NEW_COLUMNS ",mtp_loss,max_score,reward_margin,reward_chosen,reward_accuracy,validation_reward_margin,validation_reward_accuracy"
#define UNKNOWN ",,,,,,," /* cells of the new columns */

static int error; /* 0: the disk has space */

ssize_t __real_pwrite(int fd, const void *data, size_t count, off_t offset);
ssize_t __wrap_pwrite(int fd, const void *data, size_t count, off_t offset);
ssize_t __wrap_pwrite(int fd, const void *data, size_t count, off_t offset)
{
    if (error == 0)
        return __real_pwrite(fd, data, count, offset);
    errno = error;
    return -1;
}

static void checksums(void **state)
{
    (void)state;
    unsigned char zeros[32] = {0}, rising[32];
    for (int i = 0; i < 32; i++)
        rising[i] = (unsigned char)i;
    assert_int_equal(qd_crc32c("123456789", 9), 0xe3069283u); /* RFC 3720, appendix B.4 */
    assert_int_equal(qd_crc32c(zeros, 32), 0x8a9136aau);
    assert_int_equal(qd_crc32c(rising, 32), 0x46dd794eu);
}

static void hex(const qd_strbuf *bytes, char *text)
{
    for (size_t i = 0; i < bytes->length; i++)
        sprintf(text + 2 * i, "%02x", (unsigned char)bytes->data[i]);
}

/* Golden bytes: what the protobuf classes of tensorboard 2.21 write for these events. */
static void records(void **state)
{
    (void)state;
    char text[1024];
    qd_strbuf out = {0};
    qd_tf_put_version(&out, 1.5);
    hex(&out, text);
    assert_string_equal(text, "1800000000000000a37f4b2209000000000000f83f1a0d627261696e2e4576656e743a322a28646c");
    qd_strbuf_clear(&out);
    qd_tf_put_start(&out, 1.5, 301);
    hex(&out, text);
    assert_string_equal(text, "100000000000000095fbfe1809000000000000f83f10ad023a020801d17949d4");
    qd_strbuf_clear(&out);
    qd_tf_put_scalars(&out, 1.5, 300, (const qd_tf_scalar[]){{"loss/training", 3.25}, {"lr", 1e-3}}, 2);
    hex(&out, text);
    assert_string_equal(text, "2f000000000000006d5d1d5009000000000000f83f10ac022a210a140a0d6c6f73732f747261696e696e671500005040"
                        "0a090a026c72156f12833a205b2952");
    qd_strbuf_free(&out);
}

static qd_train_step step_of(int64_t number)
{
    qd_train_step s = qd_train_step_default();
    s.step = number;
    s.loss = 5.0 / (double)number;
    s.lr = 1e-3;
    s.tokens = 128;
    s.validation_tokens = number % 2 == 0 ? 10 : 0;
    s.validation_loss = 4.5;
    return s;
}

static void write_steps(const qd_config *c, int64_t after, int64_t last)
{
    qd_recorder *recorder;
    ok(qd_recorder_create(c, after, &recorder));
    for (int64_t i = after + 1; i <= last; i++) {
        qd_train_step s = step_of(i);
        assert_null(qd_recorder_write(recorder, &s));
    }
    qd_recorder_destroy(recorder);
}

static char *csv_of(void **state)
{
    size_t length;
    char *bytes = (char *)scratch_read(scratch_path(state, "metrics.csv"), &length), *text = realloc(bytes, length + 1);
    assert_non_null(text);
    text[length] = '\0';
    return text;
}

static int event_files(void **state)
{
    int count = 0;
    DIR *dir = opendir(scratch_path(state, "tensorboard"));
    assert_non_null(dir);
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;)
        count += strncmp(entry->d_name, "events.out.tfevents.", 20) == 0;
    closedir(dir);
    return count;
}

static void resumed_files_continue(void **state)
{
    qd_config c = {.run_dir = scratch_folder(), .csv = true, .tensorboard = true};
    write_steps(&c, 0, 5);
    char *whole = csv_of(state);
    assert_non_null(strstr(whole, OLD_COLUMNS NEW_COLUMNS
                           "\n1,5,0,0.001,128,0,0,,0," UNKNOWN "\n2,2.5,0,0.001,128,0,0,,0,4.5" UNKNOWN "\n"));
    write_steps(&c, 3, 5); /* from a checkpoint after step 3 */
    char *again = csv_of(state);
    assert_string_equal(whole, again);
    assert_int_equal(event_files(state), 2);
    free(whole);
    free(again);
    scratch_text(state, "tensorboard/notes", "not ours");
    ok(qd_recorder_clear(&c));
    assert_int_equal(event_files(state), 0);
    assert_int_equal(access(scratch_path(state, "metrics.csv"), F_OK), -1);
    assert_int_equal(access(scratch_path(state, "tensorboard/notes"), F_OK), 0);
}

/* A file of a version with fewer columns keeps its rows; a run may be rolled back later. */
static void new_columns_are_added(void **state)
{
    qd_config c = {.run_dir = scratch_folder(), .csv = true};
    scratch_text(state, "metrics.csv", OLD_COLUMNS "\n1,5,0,0.001,128,0,0,,0,\n2,2.5,0,0.001,128,0,0,,0,4.5\n3,1,0,0.001,128,0,0,,0,\n");
    qd_recorder *recorder;
    ok(qd_recorder_create(&c, 2, &recorder));
    qd_train_step s = step_of(5);
    s.mtp_loss = 2.5;
    s.max_score = 40;
    assert_null(qd_recorder_write(recorder, &s));
    char *csv = csv_of(state);
    assert_string_equal(csv, OLD_COLUMNS NEW_COLUMNS "\n1,5,0,0.001,128,0,0,,0," UNKNOWN "\n2,2.5,0,0.001,128,0,0,,0,4.5" UNKNOWN
                                                     "\n5,1,0,0.001,128,0,0,,0,,2.5,40,,,,,\n");
    free(csv);
    ok(qd_recorder_rewind(recorder, 1));
    qd_recorder_destroy(recorder);
    csv = csv_of(state);
    assert_string_equal(csv, OLD_COLUMNS NEW_COLUMNS "\n1,5,0,0.001,128,0,0,,0," UNKNOWN "\n");
    free(csv);
}

/* A file with other columns is not ours to extend. */
static void other_columns_are_replaced(void **state)
{
    qd_config c = {.run_dir = scratch_folder(), .csv = true};
    scratch_text(state, "metrics.csv", "step,loss,grad\n1,5,0\n");
    write_steps(&c, 2, 2);
    char *csv = csv_of(state);
    assert_string_equal(csv, OLD_COLUMNS NEW_COLUMNS "\n");
    free(csv);
}

static void full_disks_lose_steps(void **state)
{
    qd_config c = {.run_dir = scratch_folder(), .csv = true, .tensorboard = true};
    qd_recorder *recorder;
    ok(qd_recorder_create(&c, 0, &recorder));
    for (int64_t i = 1; i <= 4; i++) {
        qd_train_step s = step_of(i);
        error = i == 2 || i == 3 ? ENOSPC : 0;
        const char *warning = qd_recorder_write(recorder, &s);
        assert_int_equal(warning != NULL, i == 2);
        assert_true(!warning || strstr(warning, "metrics.csv: No space left"));
    }
    qd_recorder_destroy(recorder);
    char *csv = csv_of(state);
    assert_non_null(strstr(csv, "\n1,5,0,0.001,128,0,0,,0," UNKNOWN "\n4,1.25,0,0.001,128,0,0,,0,4.5" UNKNOWN "\n"));
    free(csv);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(checksums),
        cmocka_unit_test(records),
        cmocka_unit_test_setup_teardown(resumed_files_continue, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(new_columns_are_added, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(other_columns_are_replaced, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(full_disks_lose_steps, scratch_setup, scratch_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
