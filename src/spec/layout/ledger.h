/* The placement ledger: every logical parameter and every port between modules says, once, how it
 * is placed on each axis of the mesh. Initial values, storage, gradient reductions, the
 * multiplicity in the gradient norm, checkpoint slices, memory and traffic are all derived from
 * this table. */
#ifndef QD_SPEC_LAYOUT_LEDGER_H
#define QD_SPEC_LAYOUT_LEDGER_H

#include "model/family.h"
#include "spec/layout/mesh.h"

typedef enum qd_place_kind { QD_REPLICATE, QD_SHARD, QD_PARTIAL } qd_place_kind;
typedef struct qd_place {
    uint8_t kind; /* qd_place_kind */
    int8_t dim;   /* QD_SHARD: which dimension is cut */
    int16_t repeat; /* QD_SHARD: so many neighbours along the axis hold the same part; QD_PARTIAL: the sum is over so many
                       neighbours. 0: one; all of the axis */
} qd_place;

#define QD_PARAM_DIMS 2
typedef struct qd_param {
    const char *name; /* logical: "block.3.attn.q.weight" */
    int ndim;
    int64_t shape[QD_PARAM_DIMS]; /* global, unpadded */
    qd_init init;
    double init_std;
    bool counts; /* biases of experts: the gradient is how many tokens chose each; no part of the norm, and updated by its own rule */
    int expert;  /* that it belongs to, -1: none */
    int8_t expert_dim; /* of an expert: the dimension that etp cuts */
    uint8_t family;    /* 0: held, reduced and sharded along the data axes; 1: along the experts' own (edp) */
    bool decay;  /* weight decay applies: matrices and tables, not norms and biases */
    int module;  /* index in the ledger's modules */
    int fuse;    /* parameters of one module with the same number are adjacent in memory, so that one
                    GEMM can read them as one matrix (q, k, v; gate, up) */
    int tied_to; /* -1, or the parameter whose values this one uses; it then has a gradient of its own, no values */
    qd_place value[QD_AXIS_COUNT];
    qd_place gradient[QD_AXIS_COUNT]; /* as the backward pass leaves it, before any reduction */
} qd_param;

typedef enum qd_module_kind { QD_MODULE_EMBED, QD_MODULE_LAYER, QD_MODULE_HEAD } qd_module_kind;
typedef struct qd_module {
    const char *name; /* "embed", "block.3", "head" */
    qd_module_kind kind;
    int decl;  /* its declaration in the ledger's: modules with the same one share their lists of ops */
    int layer; /* of a block, else -1 */
    int param_begin, param_count;
    int stage, stage_rank; /* of the pipeline, and the coordinate along pp of the ranks that hold it */
} qd_module;

/* What passes from module i to module i + 1: (tokens, hidden). */
typedef struct qd_port {
    qd_place place[QD_AXIS_COUNT]; /* dimension 0: tokens, 1: features */
} qd_port;

typedef struct qd_ledger {
    qd_model model;
    qd_mesh mesh;
    int module_count, param_count, decl_count;
    qd_module *modules; /* embed, blocks, head */
    qd_layer *decls;    /* what the modules declare; not declared where no module has it (model NULL) */
    qd_param *params;   /* in module order */
    qd_port *ports;     /* module_count - 1 */
} qd_ledger;

/* Everything lives in `arena`. family: NULL for the one that the registry has for the model; it
 * outlives the ledger. QD_USAGE when the model cannot be laid out on the mesh, with the reason. */
qd_status qd_ledger_create(const qd_model *model, const qd_family *family, const qd_mesh *mesh, qd_arena *arena, qd_ledger **ledger);

/* What a rank holds of a parameter: the box [begin, begin + length) of the logical tensor; empty
 * when its module is on other ranks. */
typedef struct qd_atom {
    int64_t begin[QD_PARAM_DIMS], length[QD_PARAM_DIMS];
} qd_atom;
qd_atom qd_ledger_atom(const qd_ledger *ledger, int param, int rank);

int64_t qd_atom_count(const qd_atom *atom, int ndim);

/* Whether the rank is the one that speaks for its box among those along the model's axes (tp) that
 * hold the same, in checkpoints. */
bool qd_ledger_counts(const qd_ledger *ledger, int param, int rank);

/* The ranks that hold what this one holds of a family of parameters, sharded or not. */
#define QD_FAMILY_COUNT 2
qd_group qd_ledger_data_group(const qd_ledger *ledger, int family);

/* The ranks of tp, neighbours, over which the gradient of a parameter must be summed before any
 * other sum; size 1: none. */
qd_group qd_ledger_tensor_group(const qd_ledger *ledger, int param);

/* Positions of a sequence that a rank holds: all, or its share of them with cp. */
int64_t qd_ledger_rows(const qd_ledger *ledger, int rank, int64_t seq);

/* Rows of a port that a rank holds, of a micro-batch with `rows` rows: all, or under sp a slice. */
void qd_ledger_port_rows(const qd_ledger *ledger, int rank, int64_t rows, int64_t *first, int64_t *count);

/* Axes over which the gradient of a parameter must still be summed. */
unsigned qd_ledger_gradient_axes(const qd_ledger *ledger, int param);

/* Number of parameters (tied ones once). */
int64_t qd_ledger_parameters(const qd_ledger *ledger);

/* Index by logical name, -1 if there is none. */
int qd_ledger_find(const qd_ledger *ledger, const char *name);
#endif
