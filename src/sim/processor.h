/* A machine whose ranks are threads or processes on the same cores, as `quadrille bench machine`
 * measures it. Unlike accelerators, ranks there take turns where they outnumber the cores, and what
 * communicates takes a core from what computes. */
#ifndef QD_SIM_PROCESSOR_H
#define QD_SIM_PROCESSOR_H

#include "spec/ops/ops.h"

#include <quadrille/options.h>

/* (m, n) over k takes 2 m n k (1 + half_m / m + half_n / n + half_k / k) / flops: packing either
 * operand and writing the result take time that the other dimensions share out. */
typedef struct qd_product_rate {
    double flops, half_m, half_n, half_k;
} qd_product_rate;

/* y = x Wᵀ, dx = dy W, dW += dyᵀ x: operands lie differently in memory. */
typedef enum qd_product_kind { QD_PRODUCT_FORWARD, QD_PRODUCT_INPUTS, QD_PRODUCT_WEIGHTS, QD_PRODUCT_KINDS } qd_product_kind;

/* One rank's part in a collective: seconds, and bytes that it moves per second. */
typedef struct qd_exchange_rate {
    double latency, bandwidth;
} qd_exchange_rate;

/* Per core, with a rank of one thread on each. */
typedef struct qd_processor {
    int cores;                    /* 0: the cluster is none of these */
    int threads;                  /* of a rank; set for a configuration */
    int ranks;                    /* of the machine, likewise */
    qd_product_rate product[QD_PRODUCT_KINDS];
    double attention[2];          /* FLOPs per second, forward and backward */
    double part[2];               /* the same: keys of a part of it at which it takes twice as long per FLOP */
    double stream, update;        /* bytes per second of kernels between products, and of the optimizer */
    double together[3];           /* products, attention, streams: what all cores reach on one rank's work, over the sum of their rates */
    qd_exchange_rate sum, gather, scatter, send;
    /* seconds by which a product takes longer when ranks meet after it: with a core to each rank,
     * with several ranks to a core */
    double meeting, meeting_crowd;
    double late
        [3]; /* how much longer a step takes than its computing: of one rank, of a rank per core, which wait for the slowest; products of
                                     more ranks than cores, which take turns */
} qd_processor;

/* From the keys processor.*; cores 0: there are none. QD_USAGE names the key that is missing or is
 * not as it should be. */
qd_status qd_processor_resolve(const qd_options *options, qd_processor *processor);

/* For a run of so many ranks; threads 0: shared out. */
void qd_processor_set(qd_processor *p, int ranks, int threads);

/* Seconds of one op that does not communicate. */
double qd_processor_product(const qd_processor *p, qd_product_kind kind, double m, double n, double k);
double qd_processor_stream(const qd_processor *p, double bytes);
qd_product_kind qd_processor_kind(qd_op_kind kind); /* of a linear layer's op */
/* keys: of the part that its rows meet; 0: it is not cut. */
double qd_processor_attention(const qd_processor *p, double flops, bool backward, double keys);
/* The head's products in chunks of rows, and its passes over the logits. */
double qd_processor_head(const qd_processor *p, const qd_module_class *class_, const qd_op *op);
/* Products over experts; rows are shared out evenly. */
double qd_processor_experts(const qd_processor *p, const qd_module_class *class_, const qd_op *op);

/* A core's time for one rank's part in a collective of n ranks; bytes as qd_network_seconds() has
 * them. */
double qd_processor_exchange(const qd_processor *p, qd_coll_kind kind, double bytes, int n);
/* What it costs ranks to meet inside a block: one waits for the other, sleeps, and finds its cache
 * cold. */
double qd_processor_meeting(const qd_processor *p);
#endif
