/* libFuzzer target of the trace reader: any text is a timeline that can be drawn, or one error that
 * names the file. */
#include <quadrille/report.h>

#include <assert.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    qd_report_trace *trace = NULL;
    char *text = malloc(size + 1);
    assert(text);
    memcpy(text, data, size);
    text[size] = '\0';
    qd_status status = qd_report_trace_load_text("fuzz", text, "measured", &trace);
    if (status == QD_OK) {
        qd_strbuf html = {0};
        status = qd_report_render(&(qd_report){.size = sizeof(qd_report), .measured = qd_report_trace_timeline(trace)}, &html);
        assert(status == QD_OK || status == QD_USAGE);
        qd_strbuf_free(&html);
    } else {
        assert(status == QD_USAGE && strstr(qd_error_message(), "fuzz"));
    }
    qd_report_trace_destroy(trace);
    free(text);
    return 0;
}
