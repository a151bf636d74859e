/* The cost model of ranks on CPU cores, from the rates that `quadrille bench machine` measures. */
#include "sim/processor.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The loss itself reads the logits for their maximum and for the sum of exponentials, and reads and
 * writes them for the gradient; the measured GEMM rates include operand traffic. */
static const double LOSS_PASSES = 4.0;

/* Reads `count` numbers of a key, separated by blanks, times `scale`. */
static qd_status numbers(const qd_options *o, const char *key, double scale, double *values, int count)
{
    const char *text = qd_options_string(o, key);
    char *end;
    for (int i = 0; i < count; i++, text = end) {
        values[i] = scale * strtod(text, &end);
        if (end == text || !(values[i] >= 0.0) || !isfinite(values[i]))
            return QD_FAIL(QD_USAGE, "%s is '%s': it must be %d numbers that are not negative; quadrille bench machine writes it", key,
                           qd_options_string(o, key), count);
    }
    return *(text + strspn(text, " ")) == '\0'
               ? QD_OK
               : QD_FAIL(QD_USAGE, "%s is '%s': it must be %d numbers", key, qd_options_string(o, key), count);
}

static qd_status product_rate(const qd_options *o, const char *key, qd_product_rate *rate)
{
    double values[4];
    QD_TRY(numbers(o, key, 1.0, values, 4));
    *rate = (qd_product_rate){values[0] * 1e9, values[1], values[2], values[3]};
    return rate->flops > 0.0 ? QD_OK : QD_FAIL(QD_USAGE, "%s: a rate of 0 GFLOP/s", key);
}

static qd_status exchange_rate(const qd_options *o, const char *key, qd_exchange_rate *rate)
{
    double values[2];
    QD_TRY(numbers(o, key, 1.0, values, 2));
    *rate = (qd_exchange_rate){values[0] * 1e-6, values[1] * 1e9};
    return rate->bandwidth > 0.0 ? QD_OK : QD_FAIL(QD_USAGE, "%s: a bandwidth of 0 GB/s", key);
}

qd_status qd_processor_resolve(const qd_options *o, qd_processor *p)
{
    double bytes[2], meeting[2];
    *p = (qd_processor){.cores = (int)qd_options_int(o, "processor.cores")};
    if (p->cores == 0)
        return QD_OK;
    QD_TRY(product_rate(o, "processor.forward", &p->product[QD_PRODUCT_FORWARD]));
    QD_TRY(product_rate(o, "processor.inputs", &p->product[QD_PRODUCT_INPUTS]));
    QD_TRY(product_rate(o, "processor.weights", &p->product[QD_PRODUCT_WEIGHTS]));
    QD_TRY(numbers(o, "processor.attention", 1e9, p->attention, 2));
    QD_TRY(numbers(o, "processor.parts", 1.0, p->part, 2));
    QD_TRY(numbers(o, "processor.bytes", 1e9, bytes, 2));
    QD_TRY(numbers(o, "processor.together", 1.0, p->together, 3));
    QD_TRY(exchange_rate(o, "processor.sum", &p->sum));
    QD_TRY(exchange_rate(o, "processor.gather", &p->gather));
    QD_TRY(exchange_rate(o, "processor.scatter", &p->scatter));
    QD_TRY(exchange_rate(o, "processor.send", &p->send));
    QD_TRY(numbers(o, "processor.meeting", 1e-6, meeting, 2));
    p->stream = bytes[0];
    p->update = bytes[1];
    p->meeting = meeting[0];
    p->meeting_crowd = meeting[1];
    QD_TRY(numbers(o, "processor.late", 1.0, p->late, 3));
    for (int i = 0; i < 3; i++)
        if (p->together[i] <= 0.0 || bytes[i % 2] <= 0.0 || p->attention[i % 2] <= 0.0)
            return QD_FAIL(QD_USAGE, "processor.attention, processor.bytes and processor.together must not be 0");
    qd_processor_set(p, 1, 0);
    return QD_OK;
}

void qd_processor_set(qd_processor *p, int ranks, int threads)
{
    int share = p->cores / (ranks > 0 ? ranks : 1);
    p->ranks = ranks;
    p->threads = threads > 0 ? threads : share > 1 ? share : 1;
}

enum { TOGETHER_PRODUCTS, TOGETHER_ATTENTION, TOGETHER_STREAMS };

/* How many single-core rates the threads of a rank reach together: measured with one and with all
 * cores, linear in between. */
static double width(const qd_processor *p, int what)
{
    double t = p->threads < p->cores ? p->threads : p->cores;
    double share = p->cores > 1 ? (t - 1.0) / (p->cores - 1.0) : 0.0;
    return t * (1.0 + (p->together[what] - 1.0) * share);
}

double qd_processor_product(const qd_processor *p, qd_product_kind kind, double m, double n, double k)
{
    const qd_product_rate *r = &p->product[kind];
    return 2.0 * m * n * k * (1.0 + r->half_m / m + r->half_n / n + r->half_k / k) / (r->flops * width(p, TOGETHER_PRODUCTS));
}

double qd_processor_stream(const qd_processor *p, double bytes)
{
    return bytes / (p->stream * width(p, TOGETHER_STREAMS));
}

double qd_processor_attention(const qd_processor *p, double flops, bool backward, double keys)
{
    return flops * (keys > 0.0 ? 1.0 + p->part[backward] / keys : 1.0) / (p->attention[backward] * width(p, TOGETHER_ATTENTION));
}

double qd_processor_head(const qd_processor *p, const qd_module_class *class_, const qd_op *op)
{
    double rows = (double)(op->chunk > 0 && op->chunk < op->m ? op->chunk : op->m), chunks = (double)op->m / rows, n = (double)op->n,
           k = (double)op->k;
    double logit = (double)qd_dtype_size(op->slot[QD_HEAD_LOSS_LOGITS] >= 0 ? class_->slots[op->slot[QD_HEAD_LOSS_LOGITS]].dtype : QD_F32);
    double seconds = qd_processor_product(p, QD_PRODUCT_FORWARD, rows, n, k) + qd_processor_stream(p, rows * n * logit * LOSS_PASSES);
    if (op->slot[QD_HEAD_LOSS_DX] >= 0)
        seconds += qd_processor_product(p, QD_PRODUCT_INPUTS, rows, k, n) + qd_processor_product(p, QD_PRODUCT_WEIGHTS, n, k, rows);
    return chunks * seconds;
}

/* Bytes of operands `first` to `last` of an op. */
static double swiglu_bytes(const qd_module_class *class_, const qd_op *op, int first, int last)
{
    double bytes = 0.0;
    for (int j = first; j <= last; j++)
        bytes += op->slot[j] >= 0 ? (double)qd_slot_bytes(&class_->slots[op->slot[j]]) : 0.0;
    return bytes;
}

_Static_assert(QD_EXPERTS_Y == QD_EXPERTS_SWIGLU_GATE_UP, "biases are added to the same operand");
double qd_expert_bias_bytes(const qd_module_class *class_, const qd_op *op)
{
    int biases = op->kind == QD_OP_EXPERTS ? QD_EXPERTS_BIASES : op->kind == QD_OP_EXPERTS_SWIGLU ? QD_EXPERTS_SWIGLU_BIASES : -1;
    return biases < 0 || op->slot[biases] < 0 ? 0.0 : 2.0 * (double)qd_slot_bytes(&class_->slots[op->slot[QD_EXPERTS_Y]]);
}

double qd_processor_experts(const qd_processor *p, const qd_module_class *class_, const qd_op *op)
{
    bool weights = op->kind == QD_OP_EXPERTS_DW;
    const qd_slot *matrices = &class_->slots[op->slot[weights ? QD_EXPERTS_DW_WEIGHT_GRAD : QD_EXPERTS_WEIGHT]];
    double n = (double)op->n, k = (double)op->k, rows = op->flops / (2.0 * n * k);
    bool inputs = op->kind == QD_OP_EXPERTS_DX || op->kind == QD_OP_EXPERTS_DX_SWIGLU;
    double count = fmax(1.0, (double)matrices->rows / (inputs ? k : n)), each = rows / count;
    if (weights)
        return count * qd_processor_product(p, QD_PRODUCT_WEIGHTS, n, k, each);
    double seconds = count * qd_processor_product(p, inputs ? QD_PRODUCT_INPUTS : QD_PRODUCT_FORWARD, each, n, k);
    /* At best SwiGLU is a pass over rows that are still cached; it is counted as a pass over
     * memory. */
    double biases = qd_expert_bias_bytes(class_, op);
    seconds += biases > 0.0 ? qd_processor_stream(p, biases) : 0.0;
    if (op->kind == QD_OP_EXPERTS_SWIGLU)
        seconds += qd_processor_stream(p, swiglu_bytes(class_, op, QD_EXPERTS_SWIGLU_GATE_UP, QD_EXPERTS_SWIGLU_Y));
    if (op->kind == QD_OP_EXPERTS_DX_SWIGLU)
        seconds += qd_processor_stream(p, swiglu_bytes(class_, op, QD_EXPERTS_DX_SWIGLU_GATE_UP, QD_EXPERTS_DX_SWIGLU_Y));
    return seconds;
}

qd_product_kind qd_processor_kind(qd_op_kind kind)
{
    return kind == QD_OP_LINEAR_DW                                     ? QD_PRODUCT_WEIGHTS
           : kind == QD_OP_LINEAR_DX || kind == QD_OP_LINEAR_DX_GELU ? QD_PRODUCT_INPUTS
                                                                      : QD_PRODUCT_FORWARD;
}

double qd_processor_exchange(const qd_processor *p, qd_coll_kind kind, double bytes, int n)
{
    double part = bytes * (n - 1.0) / n;
    switch (kind) {
    case QD_COLL_ALL_REDUCE: return p->sum.latency + 2.0 * part / p->sum.bandwidth;
    case QD_COLL_REDUCE_SCATTER: return p->scatter.latency + part / p->scatter.bandwidth;
    case QD_COLL_REDUCE: return p->scatter.latency + bytes / p->scatter.bandwidth;
    case QD_COLL_SEND:
    case QD_COLL_RECV: return p->send.latency + bytes / p->send.bandwidth;
    default: return p->gather.latency + part / p->gather.bandwidth;
    }
}

double qd_processor_meeting(const qd_processor *p)
{
    return p->ranks * p->threads <= p->cores ? p->meeting : p->meeting_crowd;
}
