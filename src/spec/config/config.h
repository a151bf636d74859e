/* The resolved configuration: option values with defaults, presets and consistency checks applied,
 * as the rest of the library uses them. */
#ifndef QD_SPEC_CONFIG_CONFIG_H
#define QD_SPEC_CONFIG_CONFIG_H

#include "spec/layout/stages.h"
#include "spec/program/program.h"

#include <quadrille/config.h>

/* Training data. The strings belong to the options. */
/* Folder of a run with files of the Hugging Face folder that its model or tokenizer comes from. */
#define QD_RUN_HUGGINGFACE "huggingface"

typedef struct qd_data_config {
    const char *path, *tokenizer, *special, *chat_template, *separator, *field, *cache;
    double validation;
    bool document_mask, verify;
    bool examples; /* prompts with completions; otherwise text */
    bool pairs;    /* examples are pairs of completions, one preferred */
    int overlong;  /* qd_overlong */
} qd_data_config;

/* What happens to a step whose gradient norm or loss is far above that of the steps before. */
typedef enum qd_spike_action { QD_SPIKE_IGNORE, QD_SPIKE_SKIP, QD_SPIKE_ROLLBACK, QD_SPIKE_STOP } qd_spike_action;
typedef struct qd_spike_config {
    qd_spike_action action;
    double norm, loss; /* over, and above, the median of the last `window` steps; 0: any */
    int64_t window;
} qd_spike_config;

/* Validation while training. The string belongs to the options. */
typedef struct qd_sample_config {
    int64_t every;       /* steps between sample texts; 0: none */
    const char *prompts; /* one per line */
    int64_t tokens;
    double temperature;
} qd_sample_config;

typedef struct qd_evaluation_config {
    int64_t every;    /* steps between evaluations; 0: none by steps */
    double seconds;   /* of training between evaluations; 0: none by time */
    int64_t batches;  /* global batches of windows per evaluation; 0: all windows */
    const char *path; /* text to evaluate on; "": the held-out part of data.path */
    bool save_best;   /* write a checkpoint when the loss is the lowest so far, and keep it */
} qd_evaluation_config;

typedef struct qd_config {
    qd_model model;
    const qd_family *family;    /* not an option: declares the modules; NULL: the registered family of the model */
    int world;
    int degrees[QD_AXIS_COUNT]; /* as given: one may be -1 */
    bool sp;                    /* only with tp above 1 */
    int ep, etp;                /* expert parallelism */
    int nodes;                  /* number of machines */
    bool by_node;               /* two-level dispatch: rows are sent to a node at most once */
    qd_strategy strategy;       /* micro_batches and schedule are set once the mesh is known */
    qd_pipeline pipeline;       /* strings belong to the options */
    qd_optim optimizer;
    int64_t global_batch; /* sequences per step */
    int64_t steps;  /* with epochs: only after qd_config_set_length() */
    double epochs;  /* 0: train.steps sets the length */
    uint64_t seed;
    qd_data_config data;
    qd_evaluation_config evaluation;
    qd_sample_config samples;
    const char *run_dir, *device, *backend, *tuning, *collectives; /* strings belong to the options */
    const char *kernels; /* instruction set that the CPU's kernels are pinned to; NULL: the machine's best */
    double tuning_seconds;
    int gpu;            /* GPU that all local ranks use; -1: one each, modulo the number of GPUs */
    bool deterministic;
    bool device_comm;    /* Not an option: ranks as threads communicate as GPU ranks do, even where the host can access the memory. */
    int64_t trace_steps; /* number of steps to trace */
    bool memory_check;   /* refuse to start if ranks exceed the memory of their machine */
    bool save;           /* write checkpoints at the end, on stops and at the intervals below */
    int64_t save_every;  /* steps between checkpoints; 0: none by steps */
    double save_seconds; /* between checkpoints; 0: none by time */
    bool async_save;     /* written from a copy while training continues */
    int64_t save_overlap; /* steps after which training waits for it */
    int keep;
    bool resume;
    int64_t check_replicas; /* steps between comparisons of replicas; 0: none */
    int64_t check_gradients; /* steps between steps whose gradients are computed twice; 0: none */
    bool check_messages;    /* checksums of messages (comm/checked.h) */
    bool heal;           /* replicas that differ are repaired from the majority */
    int64_t restarts;    /* of ranks after a failure */
    const char *launcher; /* the command that starts them; "": they are local */
    bool from_checkpoint; /* run.recover: surviving ranks are started again too */
    int elastic_least, elastic_most; /* run.elastic; 0: the number of ranks is fixed */
    const char *hosts, *host_check; /* of run.launcher; "": none */
    int host_failures;
    const char *available; /* the file that says how many there are; "": that of run.dir */
    const char *weights; /* source of the initial weights; "": random */
    bool skip_nonfinite; /* skip steps with non-finite numbers; otherwise the run stops */
    qd_spike_config spikes;
    bool tensorboard, csv; /* further files with the figures of the steps */
    bool ranks_as_threads, trace;
    int threads; /* compute threads per rank; 0: divide the cores evenly */
    int64_t log_every;
    double deadline;
} qd_config;

/* Resolves the options. `world` > 0 overrides parallel.ranks (the number of processes that mpirun
 * started). QD_USAGE names the key. */
qd_status qd_config_resolve(const qd_options *options, int world, qd_config *config);
/* lora_config.c: the lora.* options, and what this layout and device cannot do with them. */
qd_status qd_lora_resolve(const qd_options *options, qd_model *model);
qd_status qd_lora_check(const qd_config *config);
/* spike_config.c: the train.on_spike and train.spike_* options. */
qd_status qd_spikes_resolve(const qd_options *options, qd_config *config);
/* fault_config.c: comparisons, restarts and elastic runs. Reads config->save and config->device. */
qd_status qd_faults_resolve(const qd_options *options, qd_config *config);
/* Of these: run.elastic and what belongs to it. */
qd_status qd_elastic_resolve(const qd_options *options, qd_config *config);
/* preference_config.c: the dpo.* options, of a run on preferences. Reads config->data and the
 * model. */
qd_status qd_preference_resolve(const qd_options *options, qd_config *config);
/* fp8_config.c: fp8.keep; refuses fp8.* without fp8, what it does not support, and names in
 * fp8.keep that no layer has. */
qd_status qd_fp8_resolve(const qd_options *options, qd_config *config);
qd_status qd_fp8_check_layers(const qd_config *config, const qd_ledger *ledger);
/* Whether train.epochs sets the length of the run and not train.steps: one of the command line
 * overrides one of a file. */
bool qd_config_by_epochs(const qd_options *options);
/* With train.epochs, sets the steps once the data is known: windows of training data. May be called
 * again with the same number. QD_USAGE if warmup or decay do not fit. */
qd_status qd_config_set_length(qd_config *config, int64_t windows);

/* Whether the run evaluates its model while it trains. */
static inline bool qd_config_validates(const qd_config *config)
{
    return config->evaluation.every > 0 || config->evaluation.seconds > 0.0;
}

/* Whether checkpoints are written from a copy of the state. Those by time alone are rare, so
 * training waits for them and no memory is reserved. */
bool qd_config_snapshot(const qd_config *config);

/* The ledger and the strategy that the programs of all ranks are built from. Allocated in
 * `arena`. */
qd_status qd_config_place(const qd_config *config, qd_arena *arena, qd_ledger **ledger, qd_strategy *strategy);
/* Mesh, ledger and the program of `rank`; sets micro_batches. Allocated in `arena`. A run that
 * validates gets the program of its evaluations too (qd_program.evaluation), one with sample texts
 * their memory (qd_program.sample_bytes). */
qd_status qd_config_build(const qd_config *config, int rank, qd_arena *arena, qd_program **program);

/* The program of every rank, (*programs)[world]; ranks with identical programs share one. */
qd_status qd_config_build_all(const qd_config *config, qd_arena *arena, const qd_program ***programs);

/* "pp 2 × dp 4, zero 1 over 4": the layout of a program's mesh. */
void qd_config_layout_text(const qd_program *program, char *text, size_t size);

/* A preset of data/models.json by name; upper case, separators and an organisation make no
 * difference (meta-llama/Llama-3-8B). QD_USAGE, with the nearest name, when there is none;
 * QD_UNSUPPORTED, with the missing feature, when this version cannot train it. */
qd_status qd_preset_find(const char *name, qd_model *model);

/* For planning and simulation only. If model.preset names a model that this version cannot train,
 * replaces it by the keys of the nearest model that it can, and writes the differences to
 * `differences` (otherwise ""). */
qd_status qd_preset_nearest(qd_options *options, char *differences, size_t size);
#endif
