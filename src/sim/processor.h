/* A machine whose ranks are threads or processes on shared cores, as `quadrille bench machine`
 * measures it. Unlike on accelerators, ranks are time-sliced if they outnumber the cores, and
 * communication takes a core from computation. */
#ifndef QD_SIM_PROCESSOR_H
#define QD_SIM_PROCESSOR_H

#include "spec/ops/ops.h"

#include <quadrille/options.h>

/* An (m, n, k) GEMM takes 2 m n k (1 + half_m / m + half_n / n + half_k / k) / flops: packing
 * either operand and writing the result take time that is amortized over the other dimensions. */
typedef struct qd_product_rate {
    double flops, half_m, half_n, half_k;
} qd_product_rate;

/* y = x Wᵀ, dx = dy W, dW += dyᵀ x: the operands are laid out differently in memory. */
typedef enum qd_product_kind { QD_PRODUCT_FORWARD, QD_PRODUCT_INPUTS, QD_PRODUCT_WEIGHTS, QD_PRODUCT_KINDS } qd_product_kind;

/* One rank's share of a collective: seconds, and bytes per second. */
typedef struct qd_exchange_rate {
    double latency, bandwidth;
} qd_exchange_rate;

/* Per core, with a rank of one thread on each. */
typedef struct qd_processor {
    int cores;                    /* 0: the cluster does not train on CPUs */
    int threads;                  /* per rank; set for a configuration */
    int ranks;                    /* on the machine, likewise */
    qd_product_rate product[QD_PRODUCT_KINDS];
    double attention[2];          /* FLOPs per second, forward and backward */
    double part[2];               /* forward, backward: number of keys at which a part of attention takes twice as long per FLOP */
    double stream, update;        /* bytes per second of memory-bound kernels, and of the optimizer */
    double together[3];           /* GEMMs, attention, streams: rate of all cores on one rank's work, relative to the sum of their rates */
    qd_exchange_rate sum, gather, scatter, send;
    /* Seconds that a GEMM takes longer when ranks synchronize after it: with one core per rank,
     * with several ranks per core. */
    double meeting, meeting_crowd;
    /* How much longer a step takes than its computation: for one rank; for one rank per core, which
     * wait for the slowest; for the GEMMs of more ranks than cores, which are time-sliced. */
    double late[3];
} qd_processor;

/* From the keys processor.*; cores 0: there are none. QD_USAGE names a key that is missing or
 * invalid. */
qd_status qd_processor_resolve(const qd_options *options, qd_processor *processor);

/* Configures it for a run of `ranks` ranks; threads 0: the cores are divided evenly. */
void qd_processor_set(qd_processor *p, int ranks, int threads);

/* Seconds of one op that does not communicate. */
double qd_processor_product(const qd_processor *p, qd_product_kind kind, double m, double n, double k);
double qd_processor_stream(const qd_processor *p, double bytes);
qd_product_kind qd_processor_kind(qd_op_kind kind); /* for the op of a linear layer */
/* keys: number of keys of the part that its rows attend to; 0: attention is not split. */
double qd_processor_attention(const qd_processor *p, double flops, bool backward, double keys);
/* The head's GEMMs in chunks of rows, and its passes over the logits. */
double qd_processor_head(const qd_processor *p, const qd_module_class *class_, const qd_op *op);
/* Bytes of a pass that adds the biases of a grouped GEMM to its rows; 0: it has none. */
double qd_expert_bias_bytes(const qd_module_class *class_, const qd_op *op);
/* Grouped GEMMs over experts; rows are distributed evenly. */
double qd_processor_experts(const qd_processor *p, const qd_module_class *class_, const qd_op *op);

/* Core time for one rank's share of a collective of n ranks; bytes as in qd_network_seconds(). */
double qd_processor_exchange(const qd_processor *p, qd_coll_kind kind, double bytes, int n);
/* The cost of synchronizing inside a block: a rank waits, sleeps, and finds its cache cold. */
double qd_processor_meeting(const qd_processor *p);
#endif
