/* The cost model of computation: GEMM tiles and waves, attention, memory-bound kernels, and the
 * overlap of a module's collectives with its ops. */
#include "sim/cost.h"

#include "base/fp8.h"
#include "spec/program/muon.h"

#include <math.h>
#include <stdlib.h>

/* Share of the memory bandwidth that a streaming kernel reaches: 4.3 of 4.8 TB/s on an H200. */
static const double STREAM_SHARE = 0.9;
/* The prologue and epilogue of a tile cost as much as this many additional terms of its sum. */
static const double TILE_FILL = 128.0;
/* A GEMM may be cut so that the last wave is full too; that costs a second pass over the cut
 * tiles. */
static const double CUT_COST = 1.06, SPLIT_COST = 1.15;
/* Attention ramps up with the sequence length, t/(t + 300) (FlashAttention 2's own table: 153
 * TFLOP/s at 1k, 201 at 16k on an A100). It is slower with small heads, and its backward pass
 * reaches less than its forward pass. */
static const double ATTENTION_RAMP = 300.0, ATTENTION_SMALL_HEAD = 0.70, ATTENTION_BACKWARD = 0.80;
/* Attention with the scores in memory, bytes per score: written, scaled and masked, softmax,
 * dropout and its mask, read again. */
static const double PLAIN_FORWARD_BYTES = 13.0, PLAIN_BACKWARD_BYTES = 18.0;
/* How often libraries pass the rows of experts through memory for each pass of ours: permuted,
 * sorted by local expert, and both again on the way back, where we read and write them once. With
 * biases it is more, because rows are cut out, weighted, added and joined again expert by expert
 * around both GEMMs (Megatron-Core's TEGroupedMLP). GROUPED_SHARE is the rate of a grouped GEMM
 * relative to one large GEMM. Calibrated. */
static const double EXPERT_PASSES = 4.0, EXPERT_BIAS_PASSES = 16.0, GROUPED_SHARE = 0.95;
/* Passes over the logits by the loss and its GEMMs: written by the forward GEMM, read and
 * overwritten by the loss, read by the GEMMs of both gradients. */
static const double HEAD_PASSES = 5.0;
/* With a fused loss only the second and third take time of their own; the GEMMs' traffic overlaps
 * with their arithmetic. */
static const double FUSED_HEAD_PASSES = 2.0;

void qd_cost_add(qd_cost *sum, const qd_cost *more)
{
    sum->product += more->product;
    sum->attention += more->attention;
    sum->memory += more->memory;
    sum->optimizer += more->optimizer;
    sum->launch += more->launch;
    for (int axis = 0; axis < QD_COST_AXES; axis++) {
        sum->exchange[axis] += more->exchange[axis];
        sum->hidden[axis] += more->hidden[axis];
    }
}

double qd_cost_stream(const qd_cluster *c, double bytes)
{
    if (c->processor.cores > 0)
        return qd_processor_stream(&c->processor, bytes);
    return bytes / (STREAM_SHARE * c->accelerator.bandwidth);
}

/* Tiles of a GEMM, and their rate relative to the best: smaller tiles read their operands more
 * often. */
static const struct {
    double m, n, rate;
} tiles[] = {{256, 128, 1.0}, {128, 256, 1.0}, {128, 128, 0.92}, {128, 64, 0.75}, {64, 64, 0.55}};

/* The rate of GEMMs inside a step, before tiles and waves. */
static double product_rate(const qd_cluster *c)
{
    return c->accelerator.product * c->profile->product_share * (c->profile->searched ? 1.0 : c->accelerator.library);
}

double qd_cost_product(const qd_cluster *c, double m, double n, double k, double bytes)
{
    return qd_cost_products(c, 1.0, m, n, k, bytes);
}

double qd_cost_products(const qd_cluster *c, double groups, double m, double n, double k, double bytes)
{
    const qd_accelerator *a = &c->accelerator;
    double rate = product_rate(c), best = INFINITY;
    if (c->processor.cores > 0)
        return groups * qd_processor_product(&c->processor, QD_PRODUCT_FORWARD, m, n, k);
    if (a->units == 0) /* a systolic array: dimensions are padded to its size */
        return fmax(2.0 * groups * m * (ceil(n / 128.0) * 128.0) * (ceil(k / 128.0) * 128.0) / rate, qd_cost_stream(c, bytes));
    for (size_t i = 0; i < sizeof tiles / sizeof *tiles; i++) {
        double count = groups * ceil(m / tiles[i].m) * ceil(n / tiles[i].n), waves = count / a->units;
        double whole = ceil(waves), cut = waves * CUT_COST;
        /* Fewer tiles than units leave some idle, unless sums are split, down to 512 terms, and
         * added in an extra pass (split-K). */
        if (waves < 1.0)
            cut = fmax(waves, 1.0 / fmax(1.0, floor(k / 512.0))) * SPLIT_COST;
        double seconds = fmin(whole, cut) * 2.0 * tiles[i].m * tiles[i].n * (k + TILE_FILL) / (rate / a->units * tiles[i].rate);
        best = fmin(best, seconds);
    }
    return fmax(best, qd_cost_stream(c, bytes));
}

static double attention(const qd_cluster *c, const qd_model *model, const qd_op *op, bool backward)
{
    const qd_accelerator *a = &c->accelerator;
    double t = (double)op->k;
    if (c->attention == QD_ATTENTION_PLAIN) {
        double scores = (double)op->m * t * (double)op->n / model->head_dim;
        /* Two GEMMs forward and four backward, over all pairs; their sums are short. */
        double rate = product_rate(c) * model->head_dim / (model->head_dim + TILE_FILL);
        double flops = (backward ? 4.0 : 2.0) * (double)op->m * t * (double)op->n * (1.0 + (double)qd_model_v_dim(model) / model->head_dim);
        return flops / rate + qd_cost_stream(c, scores * (backward ? PLAIN_BACKWARD_BYTES : PLAIN_FORWARD_BYTES));
    }
    double rate = a->product * a->attention[c->attention];
    t = qd_window_keys(op->window, op->k);
    rate *= t / (t + ATTENTION_RAMP) * (model->head_dim < 128 ? ATTENTION_SMALL_HEAD : 1.0) * (backward ? ATTENTION_BACKWARD : 1.0);
    return fmax(op->flops / rate, qd_cost_stream(c, (double)op->bytes));
}

/* Three GEMMs in chunks of rows (one without gradients), and the logits between them. */
static double head(const qd_cluster *c, const qd_module_class *class_, const qd_op *op, bool training)
{
    double m = (double)(op->chunk > 0 ? op->chunk : op->m), n = (double)op->n, k = (double)op->k, chunks = (double)op->m / m;
    double logit = (double)qd_dtype_size(op->slot[QD_HEAD_LOSS_LOGITS] >= 0 ? class_->slots[op->slot[QD_HEAD_LOSS_LOGITS]].dtype : QD_F32);
    double seconds = qd_cost_product(c, m, n, k, 0.0);
    if (training)
        seconds += qd_cost_product(c, m, k, n, 0.0) + qd_cost_product(c, n, k, m, 0.0);
    return chunks *
           (seconds + qd_cost_stream(c, m * n * logit * (c->profile->fused_loss ? FUSED_HEAD_PASSES : HEAD_PASSES) * c->profile->passes));
}

/* Formats of other software: bytes per value with its share of a scale, and bytes that casting one
 * value of an activation or gradient moves. It is read and written twice, along both dimensions,
 * because the GEMM of the weight gradient sums over the other one. One scale for all values, and
 * the outer scale of NVFP4, need the largest magnitude first. Weights are cast once per step. */
static const struct {
    double bytes, cast;
} formats[QD_GEMMS_COUNT] = {
    [QD_GEMMS_PROGRAM] = {2.0, 0.0},
    [QD_GEMMS_FP8] = {1.0, 2.0 + 2.0 + 2 * 1.0},
    [QD_GEMMS_MXFP8] = {1.0 + 1.0 / 32.0, 2.0 + 2 * (1.0 + 1.0 / 32.0)},
    [QD_GEMMS_NVFP4] = {0.5 + 1.0 / 16.0, 2.0 + 2.0 + 2 * (0.5 + 1.0 / 16.0)},
};

/* Our program in fp8, relative to scales of whole tensors: the rate of GEMMs, and that of casts,
 * which are not joined with other ops. Measured on an H200 (docs/notes/fp8.md). */
static const struct {
    double gemm, cast;
} recipes[] = {[QD_FP8_RECIPE_TENSOR] = {1.0, 1.0}, [QD_FP8_RECIPE_ROW] = {1.0, 0.35}, [QD_FP8_RECIPE_BLOCK] = {0.78, 0.52}};

/* The cluster with GEMMs at the rate of a format. No GEMM in NVFP4 has been published: its share of
 * the peak is that of fp8. */
static qd_cluster at_rate(const qd_cluster *c, qd_gemms gemms)
{
    qd_cluster faster = *c;
    const qd_accelerator *a = &c->accelerator;
    if (gemms != QD_GEMMS_PROGRAM)
        faster.accelerator.product = a->fp8_product * (gemms == QD_GEMMS_NVFP4 ? a->fp4_peak / a->fp8_peak : 1.0);
    return faster;
}

/* Seconds for casting the activation or gradient that a GEMM (m, n, k) reads; the GEMM of the
 * weight gradient reads what those of the outputs and inputs have cast. Joined with norms and
 * activations, casts write as many bytes as the bf16 result that they replace. */
static double cast(const qd_cluster *c, const qd_op *op, double rows)
{
    if (op->kind == QD_OP_LINEAR_DW || op->kind == QD_OP_EXPERTS_DW || (c->profile->joined_casts && op->phase == QD_PHASE_FORWARD))
        return 0.0;
    return qd_cost_stream(c, rows * (double)op->k * formats[c->gemms].cast * c->profile->passes);
}

/* A grouped GEMM over this rank's experts, with rows distributed evenly. */
static qd_cost experts(const qd_cluster *c, const qd_module_class *class_, const qd_op *op)
{
    const qd_cluster faster = at_rate(c, c->gemms);
    bool weights = op->kind == QD_OP_EXPERTS_DW, inputs = op->kind == QD_OP_EXPERTS_DX || op->kind == QD_OP_EXPERTS_DX_SWIGLU;
    const qd_slot *matrices = &class_->slots[op->slot[weights ? QD_EXPERTS_DW_WEIGHT_GRAD : QD_EXPERTS_WEIGHT]];
    double n = (double)op->n, k = (double)op->k, rows = op->flops / (2.0 * n * k);
    double count = fmax(1.0, (double)matrices->rows / (inputs ? k : n)), each = rows / count;
    double seconds = weights ? qd_cost_products(&faster, count, n, k, each, (double)op->bytes)
                             : qd_cost_products(&faster, count, each, n, k, (double)op->bytes);
    return (qd_cost){.product = seconds / (c->profile->searched ? 1.0 : GROUPED_SHARE), .memory = c->gemms ? cast(c, op, rows) : 0.0};
}

/* The cost rule of an op. */
typedef enum cost_rule {
    UNPRICED,
    STREAM,  /* every operand once */
    PASSES,  /* rows of experts: libraries pass over them several times */
    PRODUCT, /* a GEMM */
    GROUPED, /* a grouped GEMM */
    ATTENTION,
    ATTENTION_GRAD,
    HEAD,
    EXCHANGE, /* priced by the network; nothing on the accelerator */
    SPARE,    /* extra dispatch rounds: none at the even load that is priced */
} cost_rule;

static const cost_rule rules[QD_OP_KIND_COUNT] = {
    [QD_OP_EMBED] = STREAM,
    [QD_OP_EMBED_GRAD] = STREAM,
    [QD_OP_NORM] = STREAM,
    [QD_OP_NORM_GRAD] = STREAM,
    [QD_OP_LINEAR] = PRODUCT,
    [QD_OP_LINEAR_ADD] = PRODUCT,
    [QD_OP_LINEAR_GELU] = PRODUCT,
    [QD_OP_LINEAR_DX] = PRODUCT,
    [QD_OP_LINEAR_DX_GELU] = PRODUCT,
    [QD_OP_LINEAR_DW] = PRODUCT,
    [QD_OP_ROPE] = STREAM,
    [QD_OP_ROPE_INVERSE] = STREAM,
    [QD_OP_LATENT_QKV] = STREAM,
    [QD_OP_LATENT_QKV_GRAD] = STREAM,
    [QD_OP_ATTENTION] = ATTENTION,
    [QD_OP_ATTENTION_CACHED] = STREAM,
    [QD_OP_ATTENTION_LATENT] = STREAM,
    [QD_OP_ATTENTION_GRAD] = ATTENTION_GRAD,
    [QD_OP_ATTENTION_SINK] = STREAM,
    [QD_OP_ATTENTION_SINK_GRAD] = STREAM,
    [QD_OP_ACTIVATION] = STREAM,
    [QD_OP_ACTIVATION_GRAD] = STREAM,
    [QD_OP_ACTIVATION_GRAD_Y] = STREAM,
    [QD_OP_CLIP] = STREAM,
    [QD_OP_CLIP_GRAD] = STREAM,
    [QD_OP_ADD] = STREAM,
    [QD_OP_SCALE] = STREAM,
    [QD_OP_GATE] = STREAM,
    [QD_OP_GATE_GRAD] = STREAM,
    [QD_OP_DROPOUT] = STREAM,
    [QD_OP_BIAS_GRAD] = STREAM,
    [QD_OP_AMAX] = STREAM,
    [QD_OP_CAST] = STREAM,
    [QD_OP_ACTIVATION_AMAX] = STREAM,
    [QD_OP_ACTIVATION_CAST] = STREAM,
    [QD_OP_ACTIVATION_GRAD_AMAX] = STREAM,
    [QD_OP_ACTIVATION_GRAD_CAST] = STREAM,
    [QD_OP_ADAPT] = STREAM, /* ranks are small: memory bound */
    [QD_OP_ADAPT_DX] = STREAM,
    [QD_OP_ADAPT_DW] = STREAM,
    [QD_OP_HEAD_LOSS] = HEAD,
    [QD_OP_HEAD_LOGITS] = PRODUCT,
    [QD_OP_HEAD_NORM] = STREAM,
    [QD_OP_HEAD_NORM_GRAD] = STREAM,
    [QD_OP_QK_SQUARES] = STREAM,
    [QD_OP_QK_NORM] = STREAM,
    [QD_OP_QK_DOTS] = STREAM,
    [QD_OP_QK_NORM_GRAD] = STREAM,
    [QD_OP_ROUTE] = PASSES,
    [QD_OP_ROUTE_PLAN] = PASSES,
    [QD_OP_ROUTE_GRAD] = PASSES,
    [QD_OP_ROUTE_LOAD] = STREAM,
    [QD_OP_PERMUTE] = PASSES,
    [QD_OP_COMBINE] = PASSES,
    [QD_OP_COMBINE_GRAD] = PASSES,
    [QD_OP_EXPERTS] = GROUPED,
    [QD_OP_EXPERTS_DX] = GROUPED,
    [QD_OP_EXPERTS_DW] = GROUPED,
    [QD_OP_EXPERTS_SWIGLU] = GROUPED,
    [QD_OP_EXPERTS_DX_SWIGLU] = GROUPED,
    [QD_OP_EXPERTS_BIAS] = STREAM,
    [QD_OP_EXPERTS_BIAS_GRAD] = STREAM,
    [QD_OP_EXPERT_ACTIVATION] = STREAM,
    [QD_OP_EXPERT_ACTIVATION_GRAD] = STREAM,
    [QD_OP_DISPATCH] = EXCHANGE,
    [QD_OP_RETURN] = EXCHANGE,
    [QD_OP_EXPERT_ROUNDS] = SPARE,
    [QD_OP_EXPERT_ROUNDS_GRAD] = SPARE,
    [QD_OP_NODE_PLAN] = STREAM,
    [QD_OP_NODE_DISPATCH] = EXCHANGE,
    [QD_OP_NODE_RETURN] = EXCHANGE,
    [QD_OP_NODE_WEIGHTS] = STREAM,
    [QD_OP_NODE_RESEND] = SPARE,
    [QD_OP_RELAY_PLAN] = STREAM,
    [QD_OP_RELAY_ROUNDS] = SPARE,
    [QD_OP_RELAY_ROUNDS_GRAD] = SPARE,
    [QD_OP_LOSS_MAX] = STREAM,
    [QD_OP_LOSS_PART] = STREAM,
    [QD_OP_LOSS_GRAD] = STREAM,
    [QD_OP_LOSS_SUM] = STREAM,
    [QD_OP_LOSS_ROWS] = STREAM,
    [QD_OP_PAIR_SUMS] = STREAM,
    [QD_OP_PAIR_LOSS] = STREAM,
    [QD_OP_ALL_REDUCE] = EXCHANGE,
    [QD_OP_ALL_GATHER] = EXCHANGE,
    [QD_OP_REDUCE_SCATTER] = EXCHANGE,
    [QD_OP_ZERO] = STREAM,
    [QD_OP_COLUMNS] = STREAM,
    [QD_OP_ATTENTION_PART] = ATTENTION,
    [QD_OP_ATTENTION_DELTA] = STREAM,
    [QD_OP_ATTENTION_PART_GRAD] = ATTENTION_GRAD,
    [QD_OP_HEADS_SPLIT] = STREAM,
    [QD_OP_HEADS_JOIN] = STREAM,
    [QD_OP_ROWS_SPLIT] = STREAM,
    [QD_OP_ROWS_JOIN] = STREAM,
    [QD_OP_CONTEXT_SHIFT] = EXCHANGE,
    [QD_OP_CONTEXT_GATHER] = EXCHANGE,
    [QD_OP_CONTEXT_SCATTER] = EXCHANGE,
    [QD_OP_CONTEXT_SWAP] = EXCHANGE,
};

bool qd_op_has_cost(qd_op_kind kind)
{
    return rules[kind] != UNPRICED;
}

/* A GEMM without rows computes nothing. */
static cost_rule rule_of(const qd_op *op)
{
    return rules[op->kind] == PRODUCT && !(op->flops > 0.0) ? STREAM : rules[op->kind];
}

/* An op on a machine that trains on CPUs. */
static qd_cost processor_op(const qd_processor *p, const qd_module_class *class_, const qd_op *op)
{
    qd_cost cost = {0};
    cost_rule rule = rule_of(op);
    bool backward = rule == ATTENTION_GRAD;
    bool part = op->kind == QD_OP_ATTENTION_PART || op->kind == QD_OP_ATTENTION_PART_GRAD;
    /* The number of keys follows from a part's FLOPs: 2 m n per key forward, 5 backward. */
    if (backward || rule == ATTENTION)
        cost.attention = qd_processor_attention(p, op->flops, backward,
                                                part ? op->flops / ((backward ? 5.0 : 2.0) * (double)op->m * (double)op->n) : 0.0);
    else if (rule == GROUPED)
        cost.product = qd_processor_experts(p, class_, op);
    else if (rule == HEAD)
        cost.product = qd_processor_head(p, class_, op);
    else if (rule == PRODUCT)
        cost.product = qd_processor_product(p, qd_processor_kind(op->kind), (double)op->m, (double)op->n, (double)op->k);
    else
        cost.memory = qd_processor_stream(p, (double)op->bytes);
    return cost;
}

/* A GEMM of a linear layer. With fp8 operands it runs at their rate. */
static qd_cost product(const qd_cluster *c, const qd_module_class *class_, const qd_op *op)
{
    const double m = (double)op->m, n = (double)op->n, k = (double)op->k, bytes = (double)op->bytes;
    const bool fp8 = qd_dtype_is_fp8(class_->slots[qd_op_first(op)].dtype);
    const double saved = (m + n) * k * (formats[QD_GEMMS_PROGRAM].bytes - formats[c->gemms].bytes);
    qd_cluster faster = at_rate(c, fp8 ? QD_GEMMS_FP8 : c->gemms);
    if (fp8)
        faster.accelerator.product *= recipes[c->recipe].gemm;
    return (qd_cost){.product = qd_cost_product(&faster, m, n, k, bytes - saved), .memory = c->gemms ? cast(c, op, m) : 0.0};
}

double qd_cost_collective_load(const qd_cluster *c)
{
    /* NCCL takes multiprocessors, memory bandwidth and power from computation: 18.9 % on average on
     * A100 and H100 (arXiv:2507.03114). */
    return c->accelerator.units > 0 ? 0.19 : 0.0;
}

qd_cost qd_cost_op(const qd_cluster *c, const qd_model *model, const qd_module_class *class_, const qd_op *op)
{
    if (c->processor.cores > 0)
        return processor_op(&c->processor, class_, op);
    qd_cost cost = {.launch = c->profile->gap}, gemm = {0};
    double passes = c->profile->passes;
    switch (rule_of(op)) {
    case ATTENTION: cost.attention = attention(c, model, op, false); break;
    case ATTENTION_GRAD: cost.attention = attention(c, model, op, true); break;
    case GROUPED:
        gemm = experts(c, class_, op);
        if (!c->profile->searched && qd_expert_bias_bytes(class_, op) > 0.0) { /* libraries add biases in passes of their own */
            cost.memory = qd_cost_stream(c, qd_expert_bias_bytes(class_, op) * passes);
            cost.launch += c->profile->gap * passes;
        }
        break;
    case HEAD: cost.product = head(c, class_, op, op->slot[QD_HEAD_LOSS_DX] >= 0); break;
    case PRODUCT: gemm = product(c, class_, op); break;
    case PASSES:
        if (!c->profile->searched)
            passes *= EXPERT_PASSES + (c->expert_biases && !model->mlp_bias ? EXPERT_BIAS_PASSES : 0.0); /* ops of the model are priced */
        /* fall through */
    case STREAM:
    case EXCHANGE:
    case SPARE:
    case UNPRICED:
        cost.memory = qd_cost_stream(c, (double)op->bytes * passes) / (op->kind == QD_OP_CAST ? recipes[c->recipe].cast : 1.0);
        cost.launch *= passes; /* each pass is a kernel */
        break;
    }
    qd_cost_add(&cost, &gemm);
    return cost;
}

/* Walks over the ops of an action in order. A collective that is waited for immediately adds its
 * time; one that overlaps with the following ops delays the op that waits for it. */
typedef struct walk {
    const qd_cluster *cluster;
    const qd_span *spans;
    const qd_mesh *mesh;
    double now, link; /* when computation, and the collectives so far, end */
    int axis;         /* of the last collective */
    double load;      /* slowdown of computation that overlaps with it */
    qd_cost sum;
    qd_cost_exchange *seen; /* collectives so far */
    int count, *where;      /* per op, the number of its collective in `seen`, from 1; 0: not started */
    double *by_op;          /* seconds by kind of op; NULL: not requested */
} walk;

/* Waits for the collective number `which`, and those before it on the link. */
static void wait_for(walk *w, int which)
{
    double end = w->seen[which].end;
    if (end <= w->now)
        return;
    for (int i = which; i >= 0 && w->seen[i].end > w->now; i--)
        w->seen[i].waited = fmin(w->seen[i].waited, w->now);
    w->sum.exchange[w->axis] += end - w->now;
    w->now = end;
}

/* Rows for experts that are sharded (etp). Our program sends them to each of the etp ranks that
 * share an expert; libraries send them to one, and gather them among these, which are
 * neighbours. */
static double dispatch_seconds(const walk *w, double bytes, const qd_span *span)
{
    const qd_cluster *c = w->cluster;
    int etp = w->mesh->etp;
    if (etp < 2 || c->profile->searched)
        return qd_network_seconds(c, QD_COLL_ALL_TO_ALL, bytes, span);
    qd_span inside = {.size = etp, .local = etp, .nodes = 1, .extent = {etp, 1, 1}};
    return qd_network_seconds(c, QD_COLL_ALL_TO_ALL, bytes / etp, span) + qd_network_seconds(c, QD_COLL_ALL_GATHER, bytes, &inside);
}

/* The axis an exchange is accounted to. Groups over several axes with more than one rank each are
 * those of experts: rows, counts and loads. */
static int axis_of(const walk *w, const qd_op *op)
{
    unsigned axes = qd_mesh_spread(w->mesh, op->exchange.group.axes);
    bool rows = op->kind == QD_OP_DISPATCH || op->kind == QD_OP_RETURN || op->kind == QD_OP_NODE_DISPATCH || op->kind == QD_OP_NODE_RETURN;
    bool laid_out_apart = op->exchange.group.axes == QD_AXES_TOKENS && w->mesh->ep > 1;
    if (rows || laid_out_apart || axes == 0 || (axes & (axes - 1)) != 0)
        return QD_COST_EXPERTS;
    return __builtin_ctz(axes);
}

static void exchange(walk *w, const qd_op *op, int index)
{
    const qd_op_exchange *x = &op->exchange;
    qd_coll_kind kind = qd_op_collective(op->kind);
    double bytes = qd_network_message(kind, (double)x->count, x->dtype, x->group.size);
    bool cut = op->kind == QD_OP_DISPATCH || op->kind == QD_OP_RETURN; /* between nodes rows are sent once per expert */
    const qd_span *span = &w->spans[x->index];
    double seconds = cut ? dispatch_seconds(w, bytes, span) : qd_network_seconds(w->cluster, kind, bytes, span);
    /* Accelerators without multiprocessors to share have dedicated copy engines. */
    bool beside = x->async && w->cluster->processor.cores == 0 &&
                  (w->cluster->profile->overlap_tp || w->cluster->profile->searched || w->cluster->accelerator.units == 0);
    w->axis = axis_of(w, op);
    /* Transformer Engine moves the pieces of tp around a ring by copy engines ("ring_exchange",
     * use_ce); all other collectives are NCCL kernels. */
    w->load = w->axis == (int)QD_AXIS_TP && w->cluster->profile->overlap_tp ? 0.0 : qd_cost_collective_load(w->cluster);
    seconds += qd_processor_meeting(&w->cluster->processor);
    double begin = fmax(w->link, w->now);
    w->link = begin + seconds;
    w->seen[w->count++] = (qd_cost_exchange){.op = index, .begin = begin, .end = w->link, .waited = w->link};
    w->where[index] = w->count;
    w->sum.hidden[w->axis] += seconds;
    if (!beside)
        wait_for(w, w->count - 1);
}

/* Extra dispatch rounds for expert rows: at the even load that is planned for there are none, and
 * ranks do not synchronize for them. */
static bool is_spare(const qd_op *op)
{
    return op->exchange.uneven && op->exchange.count == 0;
}

/* An op that overlaps with a running collective takes longer, until the collective ends. */
static void slow_down(const walk *w, qd_cost *cost)
{
    double load = w->load, left = w->link - w->now, seconds = qd_cost_total(cost);
    if (load <= 0.0 || left <= 0.0 || seconds <= 0.0)
        return;
    double longer = 1.0 + fmin(seconds * load / (1.0 - load), left * load) / seconds;
    cost->product *= longer;
    cost->attention *= longer;
    cost->memory *= longer;
    cost->launch *= longer;
}

static void walk_module(walk *w, const qd_program *p, const qd_action *a)
{
    const qd_cluster *c = w->cluster;
    const qd_module_class *class_ = qd_program_class(p, a->module);
    bool whole = a->kind == QD_ACTION_RECOMPUTE && c->profile->recompute_whole;
    bool overwrites = c->profile->searched;
    unsigned phases = whole ? 1u << QD_PHASE_FORWARD : qd_action_phases(a);
    for (int i = 0; i < class_->op_count; i++) {
        if (!qd_op_runs(&class_->ops[i], phases))
            continue;
        /* Our program's first micro-batch overwrites gradients; libraries zero them, as many bytes
         * as are not read here, and add to them. */
        const qd_op run = qd_op_as_run(class_, i, a->overwrite), *op = overwrites ? &run : &class_->ops[i];
        double zeros = qd_cost_stream(c, (double)(op->bytes - run.bytes));
        w->sum.memory += zeros;
        w->now += zeros;
        if (w->by_op)
            w->by_op[op->kind] += zeros;
        if (op->after >= 0 && w->where[op->after] > 0)
            wait_for(w, w->where[op->after] - 1);
        if (is_spare(op))
            continue;
        if (qd_op_communicates(op)) {
            exchange(w, op, i);
            continue;
        }
        qd_cost cost = qd_cost_op(c, &p->ledger->model, class_, op);
        slow_down(w, &cost);
        qd_cost_add(&w->sum, &cost);
        w->now += qd_cost_total(&cost);
        if (w->by_op)
            w->by_op[op->kind] += qd_cost_total(&cost);
    }
    if (w->count > 0)
        wait_for(w, w->count - 1);
    for (int axis = 0; axis < QD_COST_AXES; axis++)
        w->sum.hidden[axis] = fmax(0.0, w->sum.hidden[axis] - w->sum.exchange[axis]);
}

/* An action costs nothing if there is no memory for the walk: callers have failed before that. */
static int module_action(const qd_cluster *c, const qd_program *p, const qd_span *spans, const qd_action *a, qd_cost_exchange *out,
                         double *by_op, qd_cost *cost)
{
    size_t ops = (size_t)qd_program_class(p, a->module)->op_count;
    qd_cluster plain;
    if (c->gemms != QD_GEMMS_PROGRAM && p->ledger->modules[a->module].layer < 0) { /* the head stays in bf16 */
        plain = *c;
        plain.gemms = QD_GEMMS_PROGRAM;
        c = &plain;
    }
    walk w = {.cluster = c, .spans = spans, .mesh = &p->ledger->mesh, .by_op = by_op};
    qd_cost_exchange *own = out ? NULL : calloc(ops + 1, sizeof *own);
    w.seen = out ? out : own;
    w.where = calloc(ops + 1, sizeof *w.where);
    if (w.seen && w.where)
        walk_module(&w, p, a);
    free(own);
    free(w.where);
    *cost = w.sum;
    return w.count;
}

int qd_cost_exchanges(const qd_cluster *c, const qd_program *p, const qd_span *spans, const qd_action *a, qd_cost_exchange *out)
{
    qd_cost cost;
    return qd_action_phases(a) == 0 ? 0 : module_action(c, p, spans, a, out, NULL, &cost);
}

void qd_cost_ops(const qd_cluster *c, const qd_program *p, const qd_span *spans, const qd_action *a, double *seconds)
{
    qd_cost cost;
    module_action(c, p, spans, a, NULL, seconds, &cost);
}

/* Elements of a module's parameters that this rank holds and an action processes: for SQUARES those
 * that GEMMs have not summed (ours do, for bf16 gradients), for UPDATE those that are not Muon's
 * matrices. */
static double held(const qd_cluster *c, const qd_program *p, const qd_action *a)
{
    const qd_module *m = &p->ledger->modules[a->module];
    bool in_products = c->profile->searched && p->strategy.grad == QD_BF16;
    double count = 0.0;
    for (int i = m->param_begin; i < m->param_begin + m->param_count; i++) {
        bool elsewhere =
            a->kind == QD_ACTION_SQUARES ? in_products && qd_program_squared(p, i) : p->matrices && qd_muon_takes(p->ledger, i);
        if (p->ledger->params[i].tied_to < 0 && !p->ledger->params[i].frozen && !elsewhere)
            count += (double)qd_program_holding(p, QD_BUFFER_PARAM, i).count;
    }
    return count;
}

/* Elements that this rank holds of a run of Muon's matrices. */
static double held_of_matrices(const qd_program *p, const qd_action *a)
{
    double count = 0.0;
    for (int i = a->param; i < a->param + a->params; i++)
        count += (double)qd_program_holding(p, QD_BUFFER_PARAM, p->matrices[i].param).count;
    return count;
}

/* The largest matrix of a round: three GEMMs and two passes per iteration. */
static double orthogonalize(const qd_cluster *c, const qd_program *p, const qd_action *a)
{
    double most = 0.0;
    for (int i = a->param; i < a->param + a->params; i++) {
        const qd_param *x = &p->ledger->params[p->matrices[i].param];
        double rows = (double)x->shape[0], cols = (double)x->shape[1], r = fmin(rows, cols), k = fmax(rows, cols);
        double step = qd_cost_product(c, r, r, k, 0.0) + qd_cost_product(c, r, r, r, 0.0) + qd_cost_product(c, r, k, r, 0.0) +
                      qd_cost_stream(c, 12.0 * (r * r + r * k));
        most = fmax(most, p->strategy.muon_steps * step + qd_cost_stream(c, 12.0 * r * k));
    }
    return most;
}

qd_cost qd_cost_action(const qd_cluster *c, const qd_program *p, const qd_span *spans, const qd_action *a)
{
    qd_cost cost = {0};
    double size = (double)qd_dtype_size(a->dtype), elements = (double)a->count;
    switch ((qd_action_kind)a->kind) {
    case QD_ACTION_CAST_WEIGHTS:
    case QD_ACTION_FORWARD:
    case QD_ACTION_RECOMPUTE:
    case QD_ACTION_BACKWARD:
    case QD_ACTION_BACKWARD_INPUT:
    case QD_ACTION_BACKWARD_WEIGHT: module_action(c, p, spans, a, NULL, NULL, &cost); return cost;
    case QD_ACTION_ZERO: cost.memory = qd_cost_stream(c, elements * size); break;
    case QD_ACTION_ADD:
    case QD_ACTION_ADD_TIED: cost.memory = qd_cost_stream(c, elements * size * (a->overwrite && c->profile->searched ? 2.0 : 3.0)); break;
    case QD_ACTION_SQUARES: cost.optimizer = qd_cost_stream(c, held(c, p, a) * (double)qd_dtype_size(p->strategy.grad)); break;
    case QD_ACTION_UPDATE:
        cost.optimizer = qd_cost_stream(c, (a->chunk >= 0 ? elements : held(c, p, a)) * qd_update_bytes(&p->strategy));
        break;
    case QD_ACTION_MOMENTUM:
        cost.optimizer = qd_cost_stream(c, held_of_matrices(p, a) * (12.0 + (double)qd_dtype_size(p->strategy.grad)));
        break;
    case QD_ACTION_ORTHOGONALIZE: cost.optimizer = orthogonalize(c, p, a); break;
    case QD_ACTION_UPDATE_MATRICES:
        cost.optimizer = qd_cost_stream(c, held_of_matrices(p, a) * (12.0 + (double)qd_dtype_size(p->strategy.param)));
        break;
    case QD_ACTION_PACK:
    case QD_ACTION_UNPACK:
        cost.memory = qd_cost_stream(
            c, 2.0 * size * (double)qd_storage_run(p->ledger, &p->storage, a->param, a->params, a->parts > 0 ? a->parts : 1, 0,
                                                      p->buffers[a->buffer].kind == QD_BUFFER_UNIT));
        break;
    case QD_ACTION_CLIP: /* few heads, if any */
    case QD_ACTION_NORM: break;
    default: return cost; /* memory, tokens, collectives */
    }
    cost.launch = c->profile->gap;
    return cost;
}
