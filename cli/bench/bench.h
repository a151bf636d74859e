/* Inside `quadrille bench`. */
#ifndef CLI_BENCH_H
#define CLI_BENCH_H

#include "cli.h"

typedef struct bench_part {
    const char *name;
    const char *options; /* of bench's own, those that it takes, between blanks */
    const char *keys;    /* of the configuration: the only one that it takes, or "" for none; NULL: all of them, and a CONFIG */
    qd_status (*run)(cli_call *call); /* words[0] is the name */
} bench_part;

extern const bench_part bench_collectives, bench_collectives_rank, bench_kernels, bench_step, bench_simulator, bench_plans, bench_machine,
    bench_pipeline;

/* The program's own file, for starting it again. */
qd_status bench_program(const char **path);
#endif
