/* The placement ledger: how every logical parameter and every port between modules is placed on
 * each axis of the mesh. Initial values, storage, gradient reductions, the gradient norm,
 * checkpoint slices, memory and traffic are all derived from this table. */
#ifndef QD_SPEC_LAYOUT_LEDGER_H
#define QD_SPEC_LAYOUT_LEDGER_H

#include "model/family.h"
#include "spec/layout/mesh.h"

typedef enum qd_place_kind { QD_REPLICATE, QD_SHARD, QD_PARTIAL } qd_place_kind;
typedef struct qd_place {
    uint8_t kind; /* qd_place_kind */
    int8_t dim;   /* QD_SHARD: the dimension that is sharded */
    /* QD_SHARD: number of neighbours along the axis that hold the same shard (0: one). QD_PARTIAL:
     * number of neighbours to sum over (0: the whole axis). */
    int16_t repeat;
} qd_place;

#define QD_PARAM_DIMS 2
typedef struct qd_param {
    const char *name; /* logical name: "block.3.attn.q.weight" */
    int ndim;
    int64_t shape[QD_PARAM_DIMS]; /* global, unpadded */
    qd_init init;
    double init_std;
    bool adapter; /* a factor of an adapter */
    int ahead;    /* k: of prediction module k, counted from 1: part of the head, with the matrices of a block; 0: of no such module */
    bool frozen; /* it is not trained: no gradient, no optimizer state */
    bool counts; /* router biases: the gradient counts the tokens that chose each expert; not part of the norm, has its own update rule */
    int expert;  /* index of the expert it belongs to, -1: none */
    int8_t expert_dim; /* of an expert's matrix: the dimension that etp shards */
    uint8_t family;    /* 0: held, reduced and sharded along the data axes; 1: along those of the experts (edp) */
    bool decay;  /* weight decay applies: to matrices and tables, not to norms and biases */
    int module;  /* index in the ledger's modules */
    /* Parameters of one module with the same number are adjacent in memory, so that one GEMM can
     * read them as one matrix (q, k, v; gate, up). */
    int fuse;
    int tied_to; /* -1, or the parameter whose values it shares; a tied parameter has its own gradient but no values */
    qd_place value[QD_AXIS_COUNT];
    qd_place gradient[QD_AXIS_COUNT]; /* as the backward pass produces it, before any reduction */
} qd_param;

typedef enum qd_module_kind { QD_MODULE_EMBED, QD_MODULE_LAYER, QD_MODULE_HEAD } qd_module_kind;
typedef struct qd_module {
    const char *name; /* "embed", "block.3", "head" */
    qd_module_kind kind;
    int decl;  /* index in the ledger's decls; modules with the same declaration share their op lists */
    int layer; /* index of a block, else -1 */
    int param_begin, param_count;
    int stage, stage_rank; /* pipeline stage, and the pp coordinate of the ranks that hold it */
} qd_module;

/* The activations between module i and module i + 1: (tokens, hidden). */
typedef struct qd_port {
    qd_place place[QD_AXIS_COUNT]; /* dimension 0: tokens, 1: features */
} qd_port;

typedef struct qd_ledger {
    qd_model model;
    qd_mesh mesh;
    int module_count, param_count, decl_count;
    qd_module *modules; /* embed, blocks, head */
    qd_layer *decls;    /* declarations of the modules; one that no module uses is left empty (model NULL) */
    qd_param *params;   /* in module order */
    qd_port *ports;     /* module_count - 1 */
} qd_ledger;

/* Everything is allocated in `arena`. family: NULL to use the registered family of the model; it
 * must outlive the ledger. QD_USAGE, with the reason, when the model cannot be placed on the
 * mesh. */
qd_status qd_ledger_create(const qd_model *model, const qd_family *family, const qd_mesh *mesh, qd_arena *arena, qd_ledger **ledger);

/* The part of a parameter that a rank holds: the box [begin, begin + length) of the logical tensor.
 * Empty when its module is on other ranks. */
typedef struct qd_atom {
    int64_t begin[QD_PARAM_DIMS], length[QD_PARAM_DIMS];
} qd_atom;
qd_atom qd_ledger_atom(const qd_ledger *ledger, int param, int rank);

int64_t qd_atom_count(const qd_atom *atom, int ndim);

/* Whether this rank writes its box to checkpoints: true for exactly one of the ranks along tp that
 * hold the same box. */
bool qd_ledger_counts(const qd_ledger *ledger, int param, int rank);

/* The ranks that replicate, or under ZeRO shard, the same parameters of a family as this one. */
#define QD_FAMILY_COUNT 2
qd_group qd_ledger_data_group(const qd_ledger *ledger, int family);

/* The neighbouring ranks of tp over which the gradient of a parameter is summed before any other
 * reduction. Size 1: none. */
qd_group qd_ledger_tensor_group(const qd_ledger *ledger, int param);

/* Positions of a sequence that a rank holds: all, or its share under cp. */
int64_t qd_ledger_rows(const qd_ledger *ledger, int rank, int64_t seq);

/* The rows of a port that a rank holds, out of a micro-batch with `rows` rows: all, or a slice
 * under sp. */
void qd_ledger_port_rows(const qd_ledger *ledger, int rank, int64_t rows, int64_t *first, int64_t *count);

/* Axes over which the gradient of a parameter is a partial sum that still has to be reduced. */
unsigned qd_ledger_gradient_axes(const qd_ledger *ledger, int param);

/* The parameter that shares the values of the token table, -1: none. The head may have one. */
int qd_ledger_tied(const qd_ledger *ledger);

/* Whether a module has attention: a block, or a head with prediction modules. */
static inline bool qd_ledger_attends(const qd_ledger *ledger, int module)
{
    const qd_module *m = &ledger->modules[module];
    return m->kind == QD_MODULE_LAYER || (m->kind == QD_MODULE_HEAD && qd_model_ahead(&ledger->model) > 0);
}

/* Number of parameter elements; tied parameters are counted once. */
int64_t qd_ledger_parameters(const qd_ledger *ledger);

/* Factor 'A' or 'B' of the adapter of a matrix; NULL: it has none. */
const qd_param *qd_ledger_adapter(const qd_ledger *ledger, const qd_param *matrix, char factor);
/* Index of the parameter with this logical name, -1 if there is none. */
int qd_ledger_find(const qd_ledger *ledger, const char *name);
#endif
