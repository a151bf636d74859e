/* Simulates a step described by words. */
#include "support/simulated.h"

#include <quadrille/config.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"

qd_options *simulated_options(const char *cluster, const char *words)
{
    const qd_option_table tables[] = {qd_config_table(), qd_cluster_table()};
    qd_options *o;
    char *copy = strdup(words), *rest = NULL;
    ok(qd_options_create(tables, 2, &o));
    for (char *word = strtok_r(copy, " ", &rest); word; word = strtok_r(NULL, " ", &rest))
        ok(qd_options_assign(o, word));
    free(copy);
    ok(qd_cluster_load(o, cluster));
    return o;
}

qd_sim_report simulated(const char *cluster, const char *format, ...)
{
    char words[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(words, sizeof words, format, args);
    va_end(args);
    qd_options *o = simulated_options(cluster, words);
    qd_simulation *s;
    ok(qd_simulate(o, &s));
    qd_sim_report r = *qd_simulation_report(s);
    qd_simulation_destroy(s);
    qd_options_destroy(o);
    return r;
}
