/* The resolved configuration: what the option table means. */
#ifndef QD_SPEC_CONFIG_CONFIG_H
#define QD_SPEC_CONFIG_CONFIG_H

#include "spec/layout/stages.h"
#include "spec/program/program.h"

#include <quadrille/config.h>

/* What the run trains on; texts belong to the options. */
typedef struct qd_data_config {
    const char *path, *tokenizer, *separator, *field, *cache;
    double validation;
    bool document_mask, verify;
} qd_data_config;

typedef struct qd_config {
    qd_model model;
    const qd_family *family;    /* no option: what declares the modules; NULL: the registry's choice by the model */
    int world;
    int degrees[QD_AXIS_COUNT]; /* as given: one may be -1 */
    bool sp;                    /* with tp above 1 */
    int ep, etp;                /* of experts */
    int nodes;                  /* that the ranks lie on */
    bool by_node;               /* rows go to experts once per node */
    qd_strategy strategy;       /* micro_batches and schedule are set once the mesh is known */
    qd_pipeline pipeline;       /* texts belong to the options */
    qd_optim optimizer;
    int64_t global_batch; /* sequences per step */
    int64_t steps;
    uint64_t seed;
    qd_data_config data;
    const char *run_dir, *device, *backend, *tuning; /* texts belong to the options */
    double tuning_seconds;
    int gpu;            /* which accelerator all local ranks use; -1: one each, round and round */
    bool deterministic;
    bool device_comm;    /* no option: ranks as threads exchange as ranks on GPUs do, also where the host reaches the memory */
    int64_t trace_steps; /* how many steps are traced */
    bool memory_check;   /* ranks that exceed the memory of their machine are refused */
    bool save;           /* checkpoints at the end, on stops and on the intervals below */
    int64_t save_every;  /* steps between checkpoints; 0: none by steps */
    double save_seconds; /* between checkpoints; 0: none by time */
    bool async_save;     /* written from a copy while training goes on */
    int keep;
    bool resume;
    const char *weights; /* where the first values come from; "": drawn */
    bool skip_nonfinite; /* steps with numbers that are not finite are left out; else the run stops */
    bool ranks_as_threads, trace;
    int threads; /* compute threads per rank; 0: share out the cores */
    int64_t log_every;
    double deadline;
} qd_config;

/* Reads the options. `world` > 0 overrides parallel.ranks (the world that mpirun made). QD_USAGE
 * names the key. */
qd_status qd_config_resolve(const qd_options *options, int world, qd_config *config);

/* Whether checkpoints are written from a copy of the state. Those by time alone are rare: training
 * waits for them, and no memory is set aside. */
bool qd_config_snapshot(const qd_config *config);

/* The ledger and the strategy that all ranks' programs are made from. Everything lives in
 * `arena`. */
qd_status qd_config_place(const qd_config *config, qd_arena *arena, qd_ledger **ledger, qd_strategy *strategy);
/* Mesh, ledger and the program of `rank`; fills in micro_batches. Everything lives in `arena`. */
qd_status qd_config_build(const qd_config *config, int rank, qd_arena *arena, qd_program **program);

/* The program of every rank, (*programs)[world]; ranks that do the same share one. */
qd_status qd_config_build_all(const qd_config *config, qd_arena *arena, const qd_program ***programs);

/* A preset of data/models.json by name; QD_USAGE with the nearest name when there is none,
 * QD_UNSUPPORTED with what it needs when this version cannot train it. */
qd_status qd_preset_find(const char *name, qd_model *model);

/* For looking at runs, not for running them: where model.preset names a model that cannot be
 * trained by this version, replaces it by the keys of the nearest one that can, and says in
 * `differences` (else "") what is not as in the model. */
qd_status qd_preset_nearest(qd_options *options, char *differences, size_t size);
#endif
