/* Simulates a training step on a cluster with the planning library:
 *
 *     cc simulate.c $(pkg-config --cflags --libs quadrille-plan) -o simulate
 *     ./simulate h100 parallel.ranks=64 parallel.zero=1
 */
#include <quadrille/config.h>
#include <quadrille/sim.h>
#include <stdio.h>

static qd_status simulate(int count, char *const *words, qd_options **options, qd_simulation **simulation)
{
    static const char defaults[] = "model: {preset: llama3.1-8b}\ndata: {seq: 8192}\n"
                                   "train: {global_batch: 128, micro_batch: 1, precision: bf16}\n";
    const qd_option_table tables[] = {qd_config_table(), qd_cluster_table()};
    qd_status status = qd_options_create(tables, 2, options);
    if (status == QD_OK)
        status = qd_options_load_text(*options, "defaults", defaults, sizeof defaults - 1);
    for (int i = 1; i < count && status == QD_OK; i++)
        status = qd_options_assign(*options, words[i]);
    if (status == QD_OK)
        status = qd_cluster_load(*options, words[0]);
    return status == QD_OK ? qd_simulate(*options, simulation) : status;
}

int main(int argc, char **argv)
{
    char *cluster[] = {"h100"};
    qd_options *options = NULL;
    qd_simulation *simulation = NULL;
    qd_status status = argc > 1 ? simulate(argc - 1, argv + 1, &options, &simulation) : simulate(1, cluster, &options, &simulation);
    if (status == QD_OK) {
        const qd_sim_report *r = qd_simulation_report(simulation);
        printf("%s on %d x %s: %.3f s per step, %.1f of %.1f GiB%s\n", r->model, r->gpus, r->cluster, r->step_seconds,
               (double)r->memory_bytes * 0x1p-30, (double)r->memory_limit * 0x1p-30, r->fits ? "" : ", which does not fit");
    } else {
        fprintf(stderr, "simulate: %s\n", qd_error_message());
    }
    qd_simulation_destroy(simulation);
    qd_options_destroy(options);
    return status == QD_OK ? 0 : 1;
}
