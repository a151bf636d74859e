/* The table of ops: kind, name and operands of each. It generates the enum of kinds, one enumerator
 * per operand (QD_LINEAR_WEIGHT: its index in qd_op.slot) and the role letters. Code names operands
 * instead of counting them; naming one that the kind does not have fails to compile.
 *
 * An operand is role(NAME), or role(NAME, optional) if ops of the kind may lack it:
 *   r  read
 *   w  overwritten
 *   a  read and written: accumulated or in place
 *   g  a gradient that is accumulated, or overwritten if the op is the first to write it
 *      (qd_op.overwrites) */
#ifndef QD_SPEC_OPS_OP_TABLE_H
#define QD_SPEC_OPS_OP_TABLE_H

#define QD_OP_TABLE(OP)                                                                                                       \
    OP(EMBED, "embed", r(INPUT), r(TOKEN_TABLE), r(POSITION_TABLE, optional), w(Y))                                           \
    OP(EMBED_GRAD, "embed.grad", r(INPUT), r(DY), a(TOKEN_GRAD), a(POSITION_GRAD, optional))                                  \
    /* sum = x + add, y = norm(sum); without add, y = norm(x). amax: the largest magnitude of y, \
     * or of dx */ \
    OP(NORM, "norm", r(X), r(ADD, optional), r(GAMMA, optional), r(BETA, optional), w(SUM, optional), w(Y),             \
       w(MEAN, optional), w(RSTD), w(AMAX, optional))                                                                         \
    /* dx += add; add_sums and dx_sums are sums over rows of add and of dx, for the bias \
     * gradients of the layers on either side */ \
    OP(NORM_GRAD, "norm.grad", r(DY), r(X), r(GAMMA, optional), r(ADD, optional), r(MEAN, optional), r(RSTD), w(DX),          \
       g(GAMMA_GRAD, optional), g(BETA_GRAD, optional), g(ADD_SUMS, optional), g(DX_SUMS, optional), w(AMAX, optional))       \
    OP(LINEAR, "linear", r(X), r(WEIGHT), r(BIAS, optional), w(Y))            /* y = x·Wᵀ + b */                              \
    OP(LINEAR_ADD, "linear.add", r(X), r(WEIGHT), r(BIAS, optional), r(ADD), w(Y)) /* y = x·Wᵀ + b + add */                   \
    OP(LINEAR_GELU, "linear.gelu", r(X), r(WEIGHT), r(BIAS, optional), w(SUM), w(Y)) /* y = gelu(sum), sum = x·Wᵀ + b */      \
    OP(LINEAR_DX, "linear.dx", r(DY), r(WEIGHT), w(DX))                                                                       \
    OP(LINEAR_DX_GELU, "linear.dx.gelu", r(DY), r(WEIGHT), r(SUM), w(DX))     /* dx = dy·W · gelu'(sum) */                    \
    OP(LINEAR_DW, "linear.dw", r(DY), r(X), g(WEIGHT_GRAD), g(BIAS_GRAD, optional))                                           \
    /* fp8: the largest magnitude of x, and its codes with a scale that follows from it; yt and \
     * dxt are stored by columns. Without amax: scales of rows or blocks, found by the cast. sums: \
     * of the rows of x, the gradient of a bias */ \
    OP(AMAX, "amax", r(X), w(AMAX))                                                                                           \
    OP(CAST, "cast", r(X), r(AMAX, optional), w(Y, optional), w(YT, optional), g(SUMS, optional))                             \
    /* the same of the result of an activation, which is not stored */ \
    OP(ACTIVATION_AMAX, "activation.amax", r(X), w(AMAX))                                                                     \
    OP(ACTIVATION_CAST, "activation.cast", r(X), r(AMAX), w(Y, optional), w(YT, optional))                                    \
    /* and of the gradient of its input. yt: the result again, whose amax is that of the forward \
     * pass */ \
    OP(ACTIVATION_GRAD_AMAX, "activation.grad.amax", r(X), r(DY), w(AMAX))                                                    \
    OP(ACTIVATION_GRAD_CAST, "activation.grad.cast", r(X), r(DY), r(AMAX), r(Y_AMAX, optional), w(DX, optional),        \
       w(DXT, optional), w(YT, optional), g(SUMS, optional))                                                                  \
    /* Low-rank adapters of a linear layer, by parts (qd_op.parts): part i of x is multiplied by \
     * matrix i of the weight and added to columns of `add`. In place, y is add. count: rows per \
     * expert, with matrices of each expert */ \
    OP(ADAPT, "adapt", r(X), r(WEIGHT), r(ADD), r(COUNT, optional), w(Y))                                                     \
    OP(ADAPT_DX, "adapt.dx", r(DY), r(WEIGHT), r(COUNT, optional), w(DX))                                                     \
    OP(ADAPT_DW, "adapt.dw", r(DY), r(X), r(COUNT, optional), g(WEIGHT_GRAD))                                                 \
    OP(BIAS_GRAD, "bias.grad", r(DY), g(GRAD))                                /* the sum of the rows of dy */                 \
    /* input: the positions; in place, y is x */ \
    OP(ROPE, "rope", r(X), r(TABLE), r(INPUT, optional), w(Y))                                                                \
    OP(ROPE_INVERSE, "rope.grad", r(X), r(TABLE), r(INPUT, optional), w(Y))                                                   \
    /* Latent attention: queries, keys and values by head from q, kv (by head: key without \
     * position, value) and the rotary part that all keys share; queries and keys are rotated */ \
    OP(LATENT_QKV, "latent.qkv", r(Q), r(KV), r(K_ROPE), r(TABLE), r(INPUT, optional), w(QKV))                                \
    OP(LATENT_QKV_GRAD, "latent.qkv.grad", r(D_QKV), r(TABLE), r(INPUT, optional), w(DQ), w(DKV), w(DK_ROPE))                 \
    OP(ATTENTION, "attention", r(QKV), r(INPUT), w(O), w(LSE))                                                                \
    OP(ATTENTION_CACHED, "attention.cached", r(QKV), a(CACHE), w(O), w(LSE, optional))                                        \
    /* o and lse with one more logit per head in the denominator of the softmax */ \
    OP(ATTENTION_SINK, "attention.sink", a(O), a(LSE), r(SINK))                                                               \
    OP(ATTENTION_SINK_GRAD, "attention.sink.grad", r(LSE), r(DELTA), r(SINK), g(SINK_GRAD))                                   \
    /* Latent attention in generation. The cache holds compressed keys; queries are multiplied by \
     * the weight that would expand these (`absorbed`), and results by that of values (`mixed`) */ \
    OP(ATTENTION_LATENT, "attention.latent", a(Q), r(LATENT), a(K_ROPE), r(WEIGHT), r(TABLE), r(INPUT), a(CACHE), w(KEY),     \
       w(ABSORBED), w(MIXED), w(O))                                                                                           \
    OP(ATTENTION_GRAD, "attention.grad", r(QKV), r(INPUT), r(O), r(LSE), r(D_O), w(D_QKV), w(DELTA))                          \
    OP(ACTIVATION, "activation", r(X), w(Y))                                                                                  \
    OP(ACTIVATION_GRAD, "activation.grad", r(X), r(DY), w(DX))                                                                \
    OP(ACTIVATION_GRAD_Y, "activation.grad.y", r(X), r(DY), w(DX), w(Y))      /* also recomputes the result */                \
    OP(CLIP, "clip", r(X), w(Y))                        /* y = x between -clip_qkv and clip_qkv */                            \
    OP(CLIP_GRAD, "clip.grad", r(X), r(DY), w(DX))      /* dx = dy where x is within the limits, else 0 */                    \
    OP(ADD, "add", r(A), r(B), w(Y))                                                                                          \
    OP(GATE, "gate", r(X), r(GATE), w(Y))               /* y = each row of x times the sigmoid of its gate */                 \
    OP(GATE_GRAD, "gate.grad", r(DY), r(X), r(GATE), w(DX), w(D_GATE))                                                        \
    OP(SCALE, "scale", r(X), w(Y))                      /* y = x times `scale`; so is the gradient */                         \
    OP(DROPOUT, "dropout", r(X), w(Y))                  /* the backward pass is the same op on the gradient */                \
    /* logits and losses are buffers that the pass `place` adds; dx and weight_grad: only in \
     * training */ \
    OP(HEAD_LOSS, "head.loss", r(X), r(WEIGHT), r(INPUT), w(DX, optional), g(WEIGHT_GRAD, optional), a(LOSS),                 \
       w(LOGITS, optional), w(LOSSES, optional))                                                                              \
    OP(HEAD_LOGITS, "head.logits", r(X), r(WEIGHT), w(LOGITS))                /* of the last row */                           \
    OP(HEAD_NORM, "head.norm", r(X), r(Q_GAMMA), r(K_GAMMA), w(Y), w(RSTD))   /* x and y: queries, keys, values */            \
    OP(HEAD_NORM_GRAD, "head.norm.grad", r(DY), r(X), r(Q_GAMMA), r(K_GAMMA), r(RSTD), g(Q_GAMMA_GRAD, optional),     \
       g(K_GAMMA_GRAD, optional), w(DX))                                      /* in place, dx is dy */                        \
    /* Norms of all queries of a row together, and of all keys. sums, dots (R, 2): for queries and \
     * for keys, of this rank's columns until they are summed over tp */ \
    OP(QK_SQUARES, "qk.squares", r(X), w(SUMS))                               /* sums of x² */                                \
    OP(QK_NORM, "qk.norm", r(X), r(SUMS), r(Q_GAMMA), r(K_GAMMA), w(Y))                                                       \
    OP(QK_DOTS, "qk.dots", r(DY), r(X), r(Q_GAMMA), r(K_GAMMA), w(DOTS))      /* sums of dy·gamma·x */                        \
    OP(QK_NORM_GRAD, "qk.norm.grad", r(DY), r(X), r(SUMS), r(DOTS), r(Q_GAMMA), r(K_GAMMA),                                   \
       g(Q_GAMMA_GRAD, optional), g(K_GAMMA_GRAD, optional), w(DX))           /* in place, dx is dy */                        \
    OP(ROUTE, "route", r(LOGITS), r(BIAS, optional), w(CHOICE), w(WEIGHT), w(LOAD))                                           \
    /* place: index of each assignment in the rows sorted by expert; from: source row of each of \
     * those; count: rows per expert */ \
    OP(ROUTE_PLAN, "route.plan", r(CHOICE), r(WEIGHT), w(PLACE), w(FROM), w(COUNT))                                           \
    OP(ROUTE_GRAD, "route.grad", r(LOGITS), r(CHOICE), r(WEIGHT), r(D_WEIGHT), r(LOAD), w(D_LOGITS))                          \
    OP(ROUTE_LOAD, "route.load", r(CHOICE), a(BIAS_GRAD))                                                                     \
    OP(PERMUTE, "permute", r(X), r(FROM), r(COUNT), w(Y), r(PLACE))           /* y: rows sorted by expert, or by node */      \
    OP(COMBINE, "combine", r(ROWS), r(PLACE), r(WEIGHT, optional), r(ADD, optional), w(Y))                                    \
    OP(COMBINE_GRAD, "combine.grad", r(DY), r(ROWS), r(FROM), r(PLACE), r(COUNT), r(WEIGHT), w(D_ROWS), w(D_WEIGHT))          \
    /* grouped GEMMs over this rank's experts; count: rows per expert, or per rank and expert */ \
    OP(EXPERTS, "experts", r(X), r(WEIGHT), r(COUNT), w(Y), r(BIASES, optional))                                              \
    OP(EXPERTS_DX, "experts.dx", r(DY), r(WEIGHT), r(COUNT), w(DX))                                                           \
    OP(EXPERTS_DW, "experts.dw", r(DY), r(X), r(COUNT), g(WEIGHT_GRAD))                                                       \
    /* y = x + the bias of each row's expert, in place; of the columns from `first` on that the \
     * rank has of it */ \
    OP(EXPERTS_BIAS, "experts.bias", r(X), r(BIAS), r(COUNT), w(Y))                                                           \
    OP(EXPERTS_BIAS_GRAD, "experts.bias.grad", r(DY), r(COUNT), g(GRAD))                                                      \
    /* y = SwiGLU of gate and up */ \
    OP(EXPERTS_SWIGLU, "experts.swiglu", r(X), r(WEIGHT), r(COUNT), w(GATE_UP), w(Y), r(BIASES, optional))                    \
    /* d_active: buffer for the gradient of SwiGLU's result; y: that result, recomputed */ \
    OP(EXPERTS_DX_SWIGLU, "experts.dx.swiglu", r(DY), r(WEIGHT), r(COUNT), r(GATE_UP), w(D_ACTIVE), w(D_GATE_UP),             \
       w(Y, optional))                                                                                                        \
    OP(EXPERT_ACTIVATION, "experts.activation", r(X), r(COUNT), w(Y))                                                         \
    OP(EXPERT_ACTIVATION_GRAD, "experts.activation.grad", r(X), r(DY), r(COUNT), w(DX), w(Y, optional)) /* y: recomputed */   \
    /* table: rows per rank and expert */ \
    OP(DISPATCH, "dispatch", r(X), r(TABLE), w(Y))      /* x: rows sorted by expert, y: rows of this rank's experts */        \
    OP(RETURN, "return", r(X), r(TABLE), w(Y))          /* the reverse */                                                     \
    /* x: rows sorted by expert, y: rows returned by experts; `room`: workspace */ \
    OP(EXPERT_ROUNDS, "experts.rounds", r(X), r(TABLE), r(GATE_UP), r(DOWN), w(ROOM), a(Y), r(UP_BIAS, optional),             \
       r(DOWN_BIAS, optional))                                                                                                \
    /* from, count: of the rows sorted by expert; dy: their gradients; dx: gradients returned by \
     * experts. Without dx: weight gradients only */ \
    OP(EXPERT_ROUNDS_GRAD, "experts.rounds.grad", r(X), r(FROM), r(COUNT), r(DY), r(TABLE), r(GATE_UP), r(DOWN),              \
       a(GATE_UP_GRAD, optional), a(DOWN_GRAD, optional), a(DX, optional), w(ROOM), r(UP_BIAS, optional),                     \
       a(UP_BIAS_GRAD, optional), a(DOWN_BIAS_GRAD, optional))                                                                \
    /* A row has one copy for each node that it is sent to. copy_place, copy_from, node_count: as \
     * in ROUTE_PLAN, by node; chosen: choices and weights of each copy; counts: rows per expert \
     * and per node */ \
    OP(NODE_PLAN, "nodes.plan", r(CHOICE), r(WEIGHT), r(PLACE), r(COUNT), w(COPY_PLACE), w(COPY_FROM), w(NODE_COUNT),         \
       w(CHOSEN), w(COUNTS))                                                                                                  \
    /* table: rows per rank, expert and node; x: rows sorted by node, y: rows that this rank \
     * relays; numbers: values sent along with the rows (choices and weights, or weight \
     * gradients) */ \
    OP(NODE_DISPATCH, "nodes.dispatch", r(X), r(NUMBERS, optional), r(TABLE), w(Y), w(NUMBERS_OUT, optional))                 \
    OP(NODE_RETURN, "nodes.return", r(X), r(NUMBERS, optional), r(TABLE), w(Y), w(NUMBERS_OUT, optional)) /* the reverse */   \
    OP(NODE_WEIGHTS, "nodes.weights", r(CHOICE), r(PLACE), r(COPY_PLACE), r(COPY_D_WEIGHT), w(D_WEIGHT))                      \
    /* repeats permute and dispatch by node, if there are extra dispatch rounds */ \
    OP(NODE_RESEND, "nodes.resend", r(X), r(COPY_FROM), r(NODE_COUNT), r(TABLE), w(COPIES), w(RELAYED), w(LISTS))             \
    /* taken: rows of earlier rounds, take: rows of this round, per rank of the node and expert; \
     * the others as in ROUTE_PLAN */ \
    OP(RELAY_PLAN, "relay.plan", r(CHOSEN), r(TABLE), w(TAKEN), w(TAKE), w(PLACE), w(FROM), w(COUNT), w(WEIGHT))              \
    /* x: relayed rows, y: their sums over experts */ \
    OP(RELAY_ROUNDS, "relay.rounds", r(X), r(CHOSEN), r(TABLE), r(WEIGHT), r(GATE_UP), r(DOWN), w(LISTS), w(ROOM), a(Y),      \
       r(UP_BIAS, optional), r(DOWN_BIAS, optional))                                                                          \
    OP(RELAY_ROUNDS_GRAD, "relay.rounds.grad", r(X), r(CHOSEN), r(TABLE), r(WEIGHT), r(DY), r(GATE_UP), r(DOWN),              \
       a(GATE_UP_GRAD, optional), a(DOWN_GRAD, optional), a(D_WEIGHT, optional), a(DX, optional), w(LISTS), w(ROOM),          \
       r(UP_BIAS, optional), r(DOWN_BIAS, optional), a(UP_BIAS_GRAD, optional), a(DOWN_BIAS_GRAD, optional))                  \
    /* Loss of a window of rows over this rank's shard of the vocabulary. top: maximum of each \
     * row; sums (R, 2): sum of exponentials and logit of the target */ \
    OP(LOSS_MAX, "loss.max", r(LOGITS), w(TOP))                                                                               \
    OP(LOSS_PART, "loss.part", r(LOGITS), r(INPUT), r(TOP), w(SUMS))          /* top: reduced over tp */                      \
    /* sums: over tp; logits become gradients, multiplied by the factor of their row */ \
    OP(LOSS_GRAD, "loss.grad", a(LOGITS), r(INPUT), r(TOP), r(SUMS), w(LOSSES), r(FACTORS, optional))                         \
    OP(LOSS_SUM, "loss.sum", r(LOSSES), r(INPUT), a(LOSS))                                                                    \
    /* Preferences. scores: for each sequence of a micro-batch, the log-probability of the \
     * reference model minus that of the model; of this rank's rows until it is summed over cp. \
     * factors: the derivative of the loss of a row's pair by the row's own loss */ \
    OP(LOSS_ROWS, "loss.rows", r(LOGITS), r(INPUT), r(TOP), r(SUMS), w(LOSSES)) /* losses only */                             \
    OP(PAIR_SUMS, "pairs.sums", r(LOSSES), r(INPUT), w(SCORES))                                                               \
    OP(PAIR_LOSS, "pairs.loss", r(SCORES), r(INPUT), w(FACTORS), a(LOSS))                                                     \
    OP(ALL_REDUCE, "all_reduce", a(X))                  /* in place: sum or maximum over the group */                         \
    OP(ALL_GATHER, "all_gather", r(X), w(Y))            /* x: this rank's rows; y: rows of all ranks of the group */          \
    OP(REDUCE_SCATTER, "reduce_scatter", r(X), w(Y))    /* x: all rows; y: this rank's rows of the sum */                     \
    OP(ZERO, "zero", w(X))                              /* x = 0 */                                                           \
    OP(COLUMNS, "columns", r(X), w(Y))                  /* copies columns of x to columns of y */                             \
    OP(ATTENTION_PART, "attention.part", r(QKV), r(INPUT), r(KV), a(O), a(LSE)) /* kv of one rank; updates o and lse */       \
    OP(ATTENTION_DELTA, "attention.delta", r(O), r(D_O), w(DELTA))                                                            \
    OP(ATTENTION_PART_GRAD, "attention.part.grad", r(QKV), r(INPUT), r(KV), r(LSE), r(D_O), r(DELTA), a(DQ), a(DKV))          \
    OP(HEADS_SPLIT, "heads.split", r(X), w(Y))          /* y: x sorted by the rank that gets the heads */                     \
    OP(HEADS_JOIN, "heads.join", r(X), w(Y))            /* the reverse */                                                     \
    OP(ROWS_SPLIT, "rows.split", r(X), w(Y))            /* y: whole sequences x, sorted by the rank that gets the rows */     \
    OP(ROWS_JOIN, "rows.join", r(X), w(Y))              /* the reverse */                                                     \
    OP(CONTEXT_SHIFT, "context.shift", r(X), w(Y))      /* sends x to the rank `hop` ahead, receives y from the one behind */ \
    OP(CONTEXT_GATHER, "context.gather", r(X), w(Y))    /* x: this rank's rows, y: whole sequences */                         \
    OP(CONTEXT_SCATTER, "context.scatter", r(X), w(Y))  /* x: whole sequences, y: this rank's rows of their sum */            \
    OP(CONTEXT_SWAP, "context.swap", r(X), w(Y))        /* all-to-all: x by destination rank, y by source rank */

#define QD_OP_SLOTS 17 /* maximum number of operands of an op */

/* QD_EACH(m, c, a, b, ...) is m(c, a) m(c, b) ..., for up to QD_OP_SLOTS items. */
#define QD_EACH(m, c, ...)                                                                                                    \
    QD_EACH_PICK(__VA_ARGS__, QD_EACH_17, QD_EACH_16, QD_EACH_15, QD_EACH_14, QD_EACH_13, QD_EACH_12, QD_EACH_11,             \
                 QD_EACH_10, QD_EACH_9, QD_EACH_8, QD_EACH_7, QD_EACH_6, QD_EACH_5, QD_EACH_4, QD_EACH_3, QD_EACH_2,          \
                 QD_EACH_1, none)(m, c, __VA_ARGS__)
#define QD_EACH_PICK(a, b, c, d, e, f, g, h, i, j, k, l, n, o, p, q, r, each, ...) each
#define QD_EACH_1(m, c, a) m(c, a)
#define QD_EACH_2(m, c, a, ...) m(c, a) QD_EACH_1(m, c, __VA_ARGS__)
#define QD_EACH_3(m, c, a, ...) m(c, a) QD_EACH_2(m, c, __VA_ARGS__)
#define QD_EACH_4(m, c, a, ...) m(c, a) QD_EACH_3(m, c, __VA_ARGS__)
#define QD_EACH_5(m, c, a, ...) m(c, a) QD_EACH_4(m, c, __VA_ARGS__)
#define QD_EACH_6(m, c, a, ...) m(c, a) QD_EACH_5(m, c, __VA_ARGS__)
#define QD_EACH_7(m, c, a, ...) m(c, a) QD_EACH_6(m, c, __VA_ARGS__)
#define QD_EACH_8(m, c, a, ...) m(c, a) QD_EACH_7(m, c, __VA_ARGS__)
#define QD_EACH_9(m, c, a, ...) m(c, a) QD_EACH_8(m, c, __VA_ARGS__)
#define QD_EACH_10(m, c, a, ...) m(c, a) QD_EACH_9(m, c, __VA_ARGS__)
#define QD_EACH_11(m, c, a, ...) m(c, a) QD_EACH_10(m, c, __VA_ARGS__)
#define QD_EACH_12(m, c, a, ...) m(c, a) QD_EACH_11(m, c, __VA_ARGS__)
#define QD_EACH_13(m, c, a, ...) m(c, a) QD_EACH_12(m, c, __VA_ARGS__)
#define QD_EACH_14(m, c, a, ...) m(c, a) QD_EACH_13(m, c, __VA_ARGS__)
#define QD_EACH_15(m, c, a, ...) m(c, a) QD_EACH_14(m, c, __VA_ARGS__)
#define QD_EACH_16(m, c, a, ...) m(c, a) QD_EACH_15(m, c, __VA_ARGS__)
#define QD_EACH_17(m, c, a, ...) m(c, a) QD_EACH_16(m, c, __VA_ARGS__)

/* Parts of an operand in the table: for r(BIAS, optional) the name is BIAS, the role "r", the need
 * "o" (optional; otherwise "n"). */
#define QD_OPERAND_NAME(operand) QD_OPERAND_NAME_##operand
#define QD_OPERAND_NAME_r(...) QD_OPERAND_FIRST(__VA_ARGS__, )
#define QD_OPERAND_NAME_w(...) QD_OPERAND_FIRST(__VA_ARGS__, )
#define QD_OPERAND_NAME_a(...) QD_OPERAND_FIRST(__VA_ARGS__, )
#define QD_OPERAND_NAME_g(...) QD_OPERAND_FIRST(__VA_ARGS__, )
#define QD_OPERAND_ROLE(operand) QD_OPERAND_ROLE_##operand
#define QD_OPERAND_ROLE_r(...) "r"
#define QD_OPERAND_ROLE_w(...) "w"
#define QD_OPERAND_ROLE_a(...) "a"
#define QD_OPERAND_ROLE_g(...) "g"
#define QD_OPERAND_NEED(operand) QD_OPERAND_NEED_##operand
#define QD_OPERAND_NEED_r(...) QD_OPERAND_THIRD(__VA_ARGS__, "o", "n", )
#define QD_OPERAND_NEED_w(...) QD_OPERAND_THIRD(__VA_ARGS__, "o", "n", )
#define QD_OPERAND_NEED_a(...) QD_OPERAND_THIRD(__VA_ARGS__, "o", "n", )
#define QD_OPERAND_NEED_g(...) QD_OPERAND_THIRD(__VA_ARGS__, "o", "n", )
#define QD_OPERAND_FIRST(a, ...) a
#define QD_OPERAND_THIRD(a, b, c, ...) c
/* For QD_EACH items that are pairs in parentheses. */
#define QD_PAIR_FIRST(first, second) first
#define QD_PAIR_SECOND(first, second) second
#define QD_OPERAND_PLACE(kind, name) QD_OPERAND_PASTE(kind, name)
#define QD_OPERAND_PASTE(kind, name) QD_##kind##_##name

typedef enum qd_op_kind {
#define QD_OP_KIND(kind, name, ...) QD_OP_##kind,
    QD_OP_TABLE(QD_OP_KIND)
#undef QD_OP_KIND
    QD_OP_KIND_COUNT
} qd_op_kind;

/* Places of operands: QD_LINEAR_X is 0, QD_LINEAR_WEIGHT is 1, …, QD_LINEAR_OPERANDS is their
 * number. They share one enum, so that code that handles several kinds may choose between their
 * places. */
typedef enum qd_operand {
#define QD_OPERAND_ENTRY(kind, operand) QD_OPERAND_PLACE(kind, QD_OPERAND_NAME(operand)),
#define QD_OP_OPERANDS(kind, name, ...) QD_##kind##_BEFORE = -1, QD_EACH(QD_OPERAND_ENTRY, kind, __VA_ARGS__) QD_##kind##_OPERANDS,
    QD_OP_TABLE(QD_OP_OPERANDS)
#undef QD_OP_OPERANDS
#undef QD_OPERAND_ENTRY
} qd_operand;

#define QD_OP_FITS(kind, name, ...) _Static_assert(QD_##kind##_OPERANDS <= QD_OP_SLOTS, "QD_OP_SLOTS: " name " has more operands");
QD_OP_TABLE(QD_OP_FITS)
#undef QD_OP_FITS

/* Code that handles several kinds alike may name operands by one of them if the others have these
 * operands at the same places. The cases that several files rely on: */
#define QD_SAME_PLACE(name, kind, other) \
    _Static_assert(QD_OPERAND_PASTE(kind, name) == QD_OPERAND_PASTE(other, name), #kind " and " #other " differ in " #name)
QD_SAME_PLACE(WEIGHT, LINEAR, LINEAR_ADD);
QD_SAME_PLACE(WEIGHT, LINEAR, LINEAR_GELU);
QD_SAME_PLACE(WEIGHT, LINEAR_DX, LINEAR_DX_GELU);
QD_SAME_PLACE(WEIGHT, EXPERTS, EXPERTS_DX);
QD_SAME_PLACE(WEIGHT, EXPERTS, EXPERTS_SWIGLU);
QD_SAME_PLACE(WEIGHT, EXPERTS, EXPERTS_DX_SWIGLU);
QD_SAME_PLACE(X, DISPATCH, RETURN);
QD_SAME_PLACE(TABLE, DISPATCH, RETURN);
QD_SAME_PLACE(Y, DISPATCH, RETURN);
QD_SAME_PLACE(X, NODE_DISPATCH, NODE_RETURN);
QD_SAME_PLACE(NUMBERS, NODE_DISPATCH, NODE_RETURN);
QD_SAME_PLACE(TABLE, NODE_DISPATCH, NODE_RETURN);
QD_SAME_PLACE(Y, NODE_DISPATCH, NODE_RETURN);
QD_SAME_PLACE(NUMBERS_OUT, NODE_DISPATCH, NODE_RETURN);
#endif
