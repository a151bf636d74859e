/* libFuzzer target of pipeline schedules in files: any bytes are a schedule or one clear error; one
 * that is read is written and read back the same, and validated. */
#define _GNU_SOURCE
#include "base/arena.h"
#include "spec/schedule/schedule.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static qd_status read_text(const char *text, size_t size, qd_arena *arena, qd_schedule **schedule)
{
    FILE *file = fmemopen((void *)(uintptr_t)text, size, "r");
    assert(file);
    qd_status status = qd_schedule_read_csv(file, "fuzz", arena, schedule);
    fclose(file);
    return status;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    qd_arena *arena;
    qd_schedule *schedule, *again;
    char *text = NULL;
    size_t length = 0;
    if (size == 0)
        return 0;
    assert(qd_arena_create(&arena) == QD_OK);
    qd_status status = read_text((const char *)data, size, arena, &schedule);
    assert(status == QD_OK || status == QD_USAGE || status == QD_UNSUPPORTED);
    if (status == QD_OK) {
        status = qd_schedule_validate(schedule);
        assert(status == QD_OK || status == QD_USAGE);
        FILE *out = open_memstream(&text, &length);
        assert(out && qd_schedule_write_csv(schedule, out) == QD_OK);
        fclose(out);
        if (length > 0 && status == QD_OK) {
            assert(read_text(text, length, arena, &again) == QD_OK);
            assert(again->ranks == schedule->ranks && again->begin[again->ranks] == schedule->begin[schedule->ranks]);
            for (int i = 0; i < schedule->begin[schedule->ranks]; i++)
                assert(again->turns[i].stage == schedule->turns[i].stage && again->turns[i].microbatch == schedule->turns[i].microbatch &&
                       again->turns[i].pass == schedule->turns[i].pass);
        }
        free(text);
    }
    qd_arena_destroy(arena);
    return 0;
}
