/* Writes starts.jsonl. It has a line per start, so it is small enough to be replaced as a whole. */
#include "train/record/starts.h"

#include "base/text/json_writer.h"
#include "base/text/strbuf.h"
#include "spec/config/config.h"
#include "train/record/lines.h"

#include <time.h>

qd_status qd_starts_note(const char *path, int64_t step, const qd_program *program)
{
    qd_strbuf text = {0};
    char layout[128];
    qd_status status = qd_lines_keep(path, step, &text);
    qd_config_layout_text(program, layout, sizeof layout);
    qd_json_writer w = qd_json_writer_on(&text);
    qd_json_object_begin(&w, NULL);
    qd_json_put_int(&w, "step", step);
    qd_json_put_int(&w, "time", (int64_t)time(NULL));
    qd_json_put_int(&w, "ranks", program->ledger->mesh.world);
    qd_json_put_string(&w, "layout", layout);
    qd_json_end(&w);
    qd_json_newline(&w);
    return qd_lines_replace(path, status, &text);
}
