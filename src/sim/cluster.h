/* The capabilities of a cluster and its software, from the keys of qd_cluster_table(). SI units
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

/* In bytes, bytes per second and FLOPs per second. */
typedef struct qd_accelerator {
    char name[64];
    double peak, fp8_peak, fp4_peak; /* the last two: 0 if it has no such format */
    double product, fp8_product; /* the best rate of one large GEMM */
    double library;      /* share of it that the library's own choice of kernels reaches, without a search */
    double bandwidth;    /* of its memory */
    double host;         /* of copies to or from host memory, per direction */
    int64_t memory;
    int units;           /* multiprocessors that share the tiles of a GEMM; 0: no wave quantization */
    double attention[QD_ATTENTION_COUNT]; /* share of `product` that attention reaches forward; plain: computed from GEMMs */
    double watts;
} qd_accelerator;

typedef enum qd_network_kind { QD_NETWORK_FAT_TREE, QD_NETWORK_TORUS, QD_NETWORK_ALL_TO_ALL } qd_network_kind;
enum { QD_TORUS_DIMS = 3 };

/* The format of GEMMs in the linear layers of blocks: as the program says, or what other software
 * than ours multiplies in. */
typedef enum qd_gemms { QD_GEMMS_PROGRAM, QD_GEMMS_FP8, QD_GEMMS_MXFP8, QD_GEMMS_NVFP4, QD_GEMMS_COUNT } qd_gemms;

/* Training software, defined by features; see the table in cluster.c. */
typedef struct qd_profile {
    const char *name;
    qd_attention_kernel attention;
    double passes;       /* how often memory-bound kernels read and write what the op list counts once */
    double gap;          /* seconds between kernels */
    /* Our own program: GEMM kernels are searched for, not chosen by the library, and gradients are
     * overwritten, not zeroed. */
    bool searched;
    bool recompute_whole; /* full recompute reruns the whole forward pass, not only what the backward pass reads */
    double product_share; /* share of the best GEMM rate that is kept inside a step (other kernels between, power) */
    bool overlap;        /* collectives of the data axes overlap with computation */
    bool overlap_tp;     /* collectives of the tensor axis overlap with GEMMs, in pieces */
    int cards;           /* network cards of a node that one collective uses at most; 0: all */
    bool scalar_norm;    /* the gradient norm is one number per rank; otherwise row sums are gathered */
    double step_overhead; /* host seconds per step: data, logging, the optimizer's loop */
    double kept;         /* activations kept per byte of the op list's: fp32 copies, masks, results that our program recomputes */
    bool joined_casts;   /* activations are cast to fp8 and other formats by the kernels that produce them */
    bool fused_loss;     /* loss and gradient in one pass over the logits; GEMM traffic of the logits overlaps with their arithmetic */
    double logit_bytes;  /* kept per logit of a micro-batch, all at once; 0: in chunks, as the program does */
    double overhead_bytes; /* driver, libraries and communication buffers on each accelerator */
    double fragments;    /* memory lost to fragmentation, as a share */
} qd_profile;
const qd_profile *qd_profile_find(const char *name); /* NULL: unknown */

typedef struct qd_cluster {
    char name[64];
    qd_accelerator accelerator;
    int node_size;
    double node_bandwidth, node_latency; /* effective, per accelerator and direction; per message */
    bool nvls;                           /* the switch inside a node performs reductions */
    qd_network_kind network;
    double network_bandwidth, network_latency;
    double oversubscription;             /* between pods */
    int pod;                             /* accelerators connected at full bandwidth; 0: all */
    int dims[QD_TORUS_DIMS], dim_count;
    double slice_bandwidth;              /* between torus slices, per accelerator */
    double price_hour, power_overhead;
    const qd_profile *profile;
    qd_gemms gemms;                /* of a program in bf16 */
    qd_fp8_recipe recipe;          /* of a program in fp8 */
    bool expert_biases;            /* the software adds expert biases in separate passes */
    qd_attention_kernel attention; /* the profile's, unless the user sets another */
    qd_processor processor;        /* cores > 0: the machine trains on CPUs, and these figures replace the accelerator's */
    qd_device_traits traits; /* device traits that op lists are built for: a GPU's plus those that so far exist on CPUs only */
} qd_cluster;

/* QD_USAGE names a missing key whose figure is not public. */
qd_status qd_cluster_resolve(const qd_options *options, qd_cluster *cluster);
#endif
