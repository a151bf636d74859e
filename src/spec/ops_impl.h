/* The lists of a class while they are written. */
#ifndef QD_SPEC_OPS_IMPL_H
#define QD_SPEC_OPS_IMPL_H

#include "spec/ops.h"

/* Grows as it is written; everything lives in `arena`. */
typedef struct qd_class_writer {
    const qd_ledger *ledger;
    const qd_model *model;
    const qd_class_config *config;
    const qd_module *module; /* any module of the class: names and shapes are the same in all */
    qd_arena *arena;
    int64_t seq, rows;             /* positions of a sequence on this rank; R */
    int64_t port_first, port_rows; /* those that this rank has between the products: all, or under sp a slice */
    qd_group tensor;               /* the ranks of tp; size 1: none */
    int tensor_coord;              /* this rank's place among them */
    qd_slot *slots;
    qd_op *ops;
    int slot_count, op_count, slot_capacity, op_capacity;
    qd_phase phase; /* of the ops that are written next */
    bool no_memory, wrong; /* the build fails as a whole */
} qd_class_writer;

/* One more slot and one more op fit; false when memory is out. */
bool qd_class_reserve(qd_class_writer *w);
int qd_class_slot(qd_class_writer *w, const char *name, qd_slot_kind kind, qd_dtype dtype, int64_t rows, int64_t cols);
int qd_class_local(qd_class_writer *w, const char *name, int64_t cols); /* (R, cols) of the activations' type */
int qd_class_port(qd_class_writer *w, const char *name, int64_t cols);  /* the same with the rows of a port */
int qd_class_local_f32(qd_class_writer *w, const char *name, int64_t rows, int64_t cols);

/* A parameter (or the `count` fused ones that start with it) and its gradient. */
typedef struct qd_class_weight {
    int value, grad; /* slots; -1 where the model has none */
    int64_t out, in;
} qd_class_weight;
qd_class_weight qd_class_weights(qd_class_writer *w, const char *suffix, int count);

qd_op *qd_class_op(qd_class_writer *w, qd_op_kind kind, const int *slots, int count);
#define QD_CLASS_OP(w, kind, ...) \
    qd_class_op((w), QD_OP_##kind, (const int[]){__VA_ARGS__}, (int)(sizeof((int[]){__VA_ARGS__}) / sizeof(int)))
void qd_op_sizes(qd_op *op, int64_t m, int64_t n, int64_t k, double flops);

qd_op *qd_op_heads(qd_op *op, int64_t m, int64_t n, int heads, int kv_heads); /* sizes of rope and attention */

void qd_class_linear(qd_class_writer *w, int x, qd_class_weight matrix, qd_class_weight bias, int y);
/* y = x·Wᵀ + b + add, where the device adds in the same pass. */
void qd_class_linear_add(qd_class_writer *w, int x, qd_class_weight matrix, qd_class_weight bias, int add, int y);
/* sum = x·Wᵀ + b, y = gelu(sum) */
void qd_class_linear_gelu(qd_class_writer *w, int x, qd_class_weight matrix, qd_class_weight bias, int sum, int y);
void qd_class_linear_input_grad(qd_class_writer *w, int dy, qd_class_weight matrix, int sum, int dx);
void qd_class_linear_weight_grad(qd_class_writer *w, int dy, int x, qd_class_weight matrix, qd_class_weight bias);
/* Backward of y = x·Wᵀ + b: dx in phase I, dW and db in phase W. With `sum` (-1: none) dx goes on through the GELU whose
 * argument that was. */
/* whether SwiGLU's result is computed again; by_itself: if nobody says how */
bool qd_class_swiglu_again(const qd_class_writer *w, bool by_itself);
void qd_class_linear_grad(qd_class_writer *w, int dy, int x, qd_class_weight matrix, qd_class_weight bias, int sum, int dx);

/* Dropout as an op of its own; without dropout the value passes through. Returns the slot of the result. */
int qd_class_dropout(qd_class_writer *w, const char *name, int x, int site);

typedef struct qd_class_norm_state {
    qd_class_weight gamma, beta;
    int mean, rstd;
} qd_class_norm_state;
qd_class_norm_state qd_class_norm_slots(qd_class_writer *w, const char *gamma, const char *beta, const char *mean, const char *rstd);
/* y = norm(x), or with `add`: sum = x + add, y = norm(sum). */
void qd_class_norm(qd_class_writer *w, int x, int add, qd_class_norm_state s, int sum, int y);
/* add_grad and dx_grad: slots of gradients of biases that are the sums over rows of add and of dx; -1: none. */
void qd_class_norm_grad(qd_class_writer *w, int dy, int x, qd_class_norm_state s, int add, int dx, int add_grad, int dx_grad);

/* Rows that go to experts once per node (spec/nodes.h), as slots. A copy is a row on its way to one node. */
typedef struct qd_class_nodes {
    int place, from, count; /* copies of each row, one per node; rows per node */
    int counts, table;      /* rows per expert and node, of this rank and of all */
    int copies, chosen;     /* rows by node, choices and weights of each */
    int relay, relay_chosen, relay_sum; /* the same of the rows that this rank relays; their results */
    int taken, relay_place, relay_from, relay_count, relay_weight;
    int sums;               /* results by node */
} qd_class_nodes;

/* Experts (moe_ops.c): what forward and backward share. rows_in and rows_out are the rows of this rank's experts, `capacity` of
 * them; sorted and back are this rank's own rows by expert, the second once for each rank of etp. Without ep they are the same. */
typedef struct qd_class_experts {
    qd_class_weight router, bias, up_w, down_w, shared_up, shared_down;
    int64_t capacity, ffn, load_rows;
    int64_t room; /* rows by expert that this rank sends at a time: its assignments, or those of rows that it relays */
    bool rounds; /* more rows than `capacity` may come, or than `room` be relayed */
    int ranks, etp, held, first; /* ranks of ep × etp, of one node if rows are relayed; experts that this rank holds, among theirs */
    qd_group group;              /* these ranks */
    int nodes;                   /* that rows go to once each (moe_nodes_ops.c); 1: dispatch is flat */
    int64_t relayed;             /* rows that a rank relays at most */
    qd_class_nodes by_node;
    int logits, choice, weight, load, place, from, count, table, sorted, rows_in, up, active, rows_out, back;
    int shared_sum, shared_active;
} qd_class_experts;
/* out = residual + experts(x), in phase F. */
void qd_write_experts(qd_class_writer *w, qd_class_experts *e, int x, int residual, int out);
/* The gradient of x, from the gradient dy of the experts' sum. */
int qd_write_experts_grad(qd_class_writer *w, const qd_class_experts *e, int dy, int x);

/* moe_nodes_ops.c, where e->nodes is above 1. Each returns the op that readers of its result wait for; -1: none. */
int qd_write_to_nodes(qd_class_writer *w, qd_class_experts *e, int x);         /* x -> relay and relay_chosen */
void qd_write_relay(qd_class_writer *w, qd_class_experts *e, int pending);     /* relay -> e->sorted */
int qd_write_from_nodes(qd_class_writer *w, qd_class_experts *e, int pending); /* e->back -> sums */
int qd_write_grad_to_nodes(qd_class_writer *w, const qd_class_experts *e, int dy, int relay_dy);
/* d_back (rows by expert, back from the experts) and x -> d_sums (gradients by node), d_weight. */
void qd_write_grad_from_nodes(qd_class_writer *w, const qd_class_experts *e, int x, int relay_dy, int relay_d_weight, int d_back,
                              int pending, int d_sums, int d_weight);

/* tensor_ops.c: what tensor parallelism puts between the products. */

/* An op that communicates, over `rows` × `cols` elements from row `first` of its first slot on. */
qd_op *qd_class_exchange(qd_class_writer *w, qd_op_kind kind, qd_group group, const int *slots, int count, int64_t first, int64_t rows,
                         int64_t cols);
/* From the rows of a port to all rows, for a product whose outputs are cut over tp: x itself, or under sp the gathered rows. */
int qd_class_enter(qd_class_writer *w, const char *name, int x, int *pending);
/* From the partial sums (R rows) of a product whose inputs are cut over tp to the rows of a port: summed in place, or under sp
 * scattered. *pending, in both: the op that the reader of the result must wait for (qd_class_await); -1: none. */
int qd_class_leave(qd_class_writer *w, const char *name, int y, int *pending);
/* The newest op waits for the asynchronous op `index`; -1: nothing. */
void qd_class_await(qd_class_writer *w, int index);
/* Backward of a product y = enter(x)·Wᵀ + b whose outputs are cut over tp. dx_all: room for the partial sums of dx. Returns dx
 * with the rows of a port. */
int qd_class_enter_grad(qd_class_writer *w, const char *name, int dy, int x, qd_class_weight matrix, qd_class_weight bias, int dx_all,
                        int *pending);
/* The bias of a product whose partial sums are added over tp: one rank adds it, all have its gradient. */
qd_class_weight qd_class_bias_once(const qd_class_writer *w, qd_class_weight bias);
/* Cuts products and the exchanges next to them into `pieces` (overlap_ops.c). */
qd_status qd_class_cut(qd_class_writer *w, int pieces);
/* Fills in until when asynchronous ops run, and refuses lists that touch their slots before. */
qd_status qd_class_settle(qd_class_writer *w);

/* attention_ops.c: attention, over the rows of all ranks of cp. */

/* What the forward pass leaves for the backward pass. */
typedef struct qd_class_attention_state {
    int qkv, o, lse; /* ulysses: of this rank's heads and all positions; else of this rank's rows */
} qd_class_attention_state;
/* o (R, q) = attention of qkv (R, q + 2 kv), with `heads` and `kv_heads` on this rank of tp. */
qd_class_attention_state qd_class_attention(qd_class_writer *w, int qkv, int input, int o, int heads, int kv_heads);
/* d_qkv (R, q + 2 kv) from d_o (R, q). */
void qd_class_attention_grad(qd_class_writer *w, qd_class_attention_state s, int input, int d_o, int d_qkv, int heads, int kv_heads);

/* The lists themselves. */
void qd_write_embed(qd_class_writer *w);
void qd_write_block(qd_class_writer *w);
void qd_write_head(qd_class_writer *w);

/* Marks or copies the ops that are run again, before places are given to local values. */
qd_status qd_recompute_apply(qd_class_writer *writer, qd_recompute mode);
#endif
