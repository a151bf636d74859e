/* Internals of `quadrille bench`: the table entry of a benchmark. */
#ifndef CLI_BENCH_H
#define CLI_BENCH_H

#include "cli.h"

typedef struct bench_part {
    const char *name;
    const char *options; /* the options of bench that it accepts, each between blanks */
    const char *keys;    /* the configuration keys that it accepts, as options; "": none; NULL: all of them, and a CONFIG */
    qd_status (*run)(cli_call *call); /* words[0] is the name */
} bench_part;

extern const bench_part bench_collectives, bench_collectives_rank, bench_kernels, bench_step, bench_simulator, bench_plans, bench_machine,
    bench_pipeline;

/* The path of this program, for starting it again. Static. */
qd_status bench_program(const char **path);
#endif
