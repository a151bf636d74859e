/* Memory that each rank of a run needs, by kind, before anything is started. */
#include <quadrille/check.h>
#include <quadrille/config.h>
#include <quadrille/version.h>
#include <stdio.h>

static qd_status check(int count, char *const *words, qd_check_report *report)
{
    const qd_option_table table = qd_config_table();
    qd_options *options = NULL;
    qd_status status = qd_options_create(&table, 1, &options);
    for (int i = 0; i < count && status == QD_OK; i++)
        status = qd_options_assign(options, words[i]);
    if (status == QD_OK)
        status = qd_check(options, 0, report);
    qd_options_destroy(options);
    return status;
}

int main(int argc, char **argv)
{
    qd_check_report report = qd_check_report_default();
    if (check(argc - 1, argv + 1, &report) != QD_OK) {
        fprintf(stderr, "memory: %s\n", qd_error_message());
        return 1;
    }
    printf("Quadrille %s: %s, %s\n", qd_version(), report.model, report.layout);
    for (int i = 0; i < report.line_count; i++)
        printf("%10.2f MiB  %s\n", (double)report.lines[i].bytes / (1024.0 * 1024.0), report.lines[i].name);
    printf("%10.2f MiB  per rank\n", (double)report.memory_bytes / (1024.0 * 1024.0));
    return 0;
}
