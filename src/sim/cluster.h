/* What a cluster and its software can do, read from the keys of qd_cluster_table(). SI units
 * throughout. */
#ifndef QD_SIM_CLUSTER_H
#define QD_SIM_CLUSTER_H

#include "sim/processor.h"

#include <quadrille/sim.h>

typedef enum qd_attention_kernel {
    QD_ATTENTION_PLAIN,
    QD_ATTENTION_FLASH1,
    QD_ATTENTION_FLASH2,
    QD_ATTENTION_TUNED,
    QD_ATTENTION_COUNT
} qd_attention_kernel;

/* Bytes and FLOPs per second, seconds, bytes. */
typedef struct qd_accelerator {
    char name[64];
    double peak, fp8_peak;
    double product;      /* the best that one large product reaches */
    double library;      /* share of it that the library's own choice of kernels keeps, without a search */
    double bandwidth;    /* of its memory */
    double host;         /* of copies from and to the host's memory, each way */
    int64_t memory;
    int units;           /* multiprocessors that tiles of a product are dealt to; 0: not quantised */
    double attention[QD_ATTENTION_COUNT]; /* share of `product` that attention reaches forward; plain: made of products */
    double watts;
} qd_accelerator;

typedef enum qd_network_kind { QD_NETWORK_FAT_TREE, QD_NETWORK_TORUS, QD_NETWORK_ALL_TO_ALL } qd_network_kind;
enum { QD_TORUS_DIMS = 3 };

/* How the training software works; defined by features, see the table in cluster.c. */
typedef struct qd_profile {
    const char *name;
    qd_attention_kernel attention;
    double passes;       /* how often memory-bound kernels read and write what the op list counts once */
    double gap;          /* seconds between kernels */
    /* our own program: the kernel of each product is searched for, not chosen by the library, and
     * gradients are overwritten, not zeroed */
    bool searched;
    bool recompute_whole; /* full recompute runs the whole forward pass again, not only what the backward pass reads */
    double product_share; /* of what the best product reaches, kept inside a whole step (other kernels between, power) */
    bool overlap;        /* collectives of the data axes run beside computation */
    bool overlap_tp;     /* collectives of the tensor axis run beside products, in pieces */
    int cards;           /* network cards of a node that one collective uses at most; 0: all */
    bool scalar_norm;    /* the gradient norm is one number per rank; else row sums are gathered */
    double step_overhead; /* seconds per step on the host: data, logging, the optimizer's loop */
    double kept;         /* activations kept per byte of the op list's: copies in fp32, masks, results that it makes again */
    bool fused_loss;     /* loss and its gradient in one pass over the logits, which products write and read beside their arithmetic */
    double logit_bytes;  /* kept per logit of a micro-batch, all at once; 0: in chunks, as the program does */
    double overhead_bytes; /* driver, libraries and communication buffers on each accelerator */
    double fragments;    /* memory lost between allocations, as a share */
} qd_profile;
const qd_profile *qd_profile_find(const char *name); /* NULL: there is none */

typedef struct qd_cluster {
    char name[64];
    qd_accelerator accelerator;
    int node_size;
    double node_bandwidth, node_latency; /* per accelerator and direction, with the efficiency; per message */
    bool nvls;                           /* the switch inside a node adds */
    qd_network_kind network;
    double network_bandwidth, network_latency;
    double oversubscription;             /* between pods */
    int pod;                             /* accelerators that reach each other at full bandwidth; 0: all */
    int dims[QD_TORUS_DIMS], dim_count;
    double slice_bandwidth;              /* between torus slices, per accelerator */
    double price_hour, power_overhead;
    const qd_profile *profile;
    bool expert_biases;            /* the software adds biases to what experts compute, in passes of their own */
    qd_attention_kernel attention; /* the profile's, unless the user names another */
    qd_processor processor;        /* cores > 0: the machine is one of processors, and these figures stand for the accelerator's */
    qd_device_traits traits; /* what op lists are written for: a GPU's, but with all that runs on processors only so far */
} qd_cluster;

/* QD_USAGE names the key that is missing because the figure is not public. */
qd_status qd_cluster_resolve(const qd_options *options, qd_cluster *cluster);
#endif
