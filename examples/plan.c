/* Which layout trains a model fastest on a cluster that is not here? Prints the best ones and
 * writes the first as a configuration for `quadrille train`:
 *
 *     cc plan.c $(pkg-config --cflags --libs quadrille-plan) -o plan
 *     ./plan h100 plan.yaml parallel.ranks=64 model.preset=llama3.1-8b
 */
#include <quadrille/config.h>
#include <quadrille/plan.h>
#include <stdio.h>

static qd_status configure(const char *cluster, int count, char *const *words, qd_options **options)
{
    static const char defaults[] = "model: {preset: llama3.1-8b}\ndata: {seq: 8192}\n"
                                   "train: {global_batch: 128, precision: bf16}\n";
    const qd_option_table tables[] = {qd_config_table(), qd_cluster_table()};
    QD_TRY(qd_options_create(tables, 2, options));
    QD_TRY(qd_options_load_text(*options, "defaults", defaults, sizeof defaults - 1));
    for (int i = 0; i < count; i++)
        QD_TRY(qd_options_assign(*options, words[i]));
    return qd_cluster_load(*options, cluster);
}

static qd_status plan(qd_options *options, const char *path)
{
    qd_plan_report *report;
    QD_TRY(qd_plan(options, &report));
    printf("%s on %d x %s: %d layouts fit\n", report->best->model, report->best->gpus, report->best->cluster, report->tried);
    for (int i = 0; i < report->count && i < 3; i++) {
        const qd_plan_choice *choice = report->choices[i];
        printf("%d. %s: %.3f s per step, MFU %.1f %%%s%s\n", i + 1, choice->layout, choice->step_seconds, 100.0 * choice->mfu,
               choice->loses[0] ? "; compared with the first it " : "", choice->loses);
    }
    qd_status status = qd_plan_apply(report->choices[0], options);
    qd_plan_report_destroy(report);
    return status == QD_OK ? qd_plan_write(options, path) : status;
}

int main(int argc, char **argv)
{
    qd_options *options = NULL;
    if (argc < 3) {
        fprintf(stderr, "usage: plan CLUSTER OUTPUT.yaml [key=value ...]\n");
        return 2;
    }
    qd_status status = configure(argv[1], argc - 3, argv + 3, &options);
    if (status == QD_OK)
        status = plan(options, argv[2]);
    if (status != QD_OK)
        fprintf(stderr, "plan: %s\n", qd_error_message());
    qd_options_destroy(options);
    return status == QD_OK ? 0 : 1;
}
