/* The keys of a cluster file, the software profiles, and their translation into qd_cluster. */
#include "sim/cluster.h"

#include "sim/cluster_files.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* 0 means the file must set the value: these figures are not public for every accelerator. */
static const qd_option table[] = {
    {"accelerator.preset", QD_OPTION_STRING, "", 0, 0, NULL, "reads the accelerator keys from a built-in file, for example h100", NULL},
    {"accelerator.name", QD_OPTION_STRING, "", 0, 0, NULL, "its name", NULL},
    {"accelerator.peak_tflops", QD_OPTION_FLOAT, "0", 0, 1e6, NULL, "dense bf16 TFLOP/s from the data sheet; MFU is relative to it", NULL},
    {"accelerator.fp8_tflops", QD_OPTION_FLOAT, "0", 0, 1e6, NULL, "dense fp8 TFLOP/s; 0: none", NULL},
    {"accelerator.fp4_tflops", QD_OPTION_FLOAT, "0", 0, 1e6, NULL, "dense NVFP4 TFLOP/s; 0: no formats with scales of blocks", NULL},
    {"accelerator.product_tflops", QD_OPTION_FLOAT, "0", 0, 1e6, NULL, "bf16 TFLOP/s of the best measured GEMM", NULL},
    {"accelerator.fp8_product_tflops", QD_OPTION_FLOAT, "0", 0, 1e6, NULL,
     "fp8 TFLOP/s of the best measured GEMM; 0: the share of the peak that bf16 reaches", NULL},
    {"accelerator.library_share", QD_OPTION_FLOAT, "0.95", 0.01, 1, NULL,
     "share of it that GEMMs reach when the library chooses their kernels, without a search", NULL},
    {"accelerator.memory_gib", QD_OPTION_FLOAT, "0", 0, 1e6, NULL, "memory in GiB", NULL},
    {"accelerator.reserve", QD_OPTION_FLOAT, "0.04", 0, 0.9, NULL,
     "share of the memory that plan keeps free for the driver, communicator buffers and library workspaces", NULL},
    {"accelerator.bandwidth_gbs", QD_OPTION_FLOAT, "0", 0, 1e6, NULL, "memory bandwidth in GB/s", NULL},
    {"accelerator.host_gbs", QD_OPTION_FLOAT, "25", 0.001, 1e6, NULL,
     "GB/s of copies between device and host memory, per direction; the default is PCIe 4.0 x16", NULL},
    {"accelerator.units", QD_OPTION_INT, "0", 0, 65536, NULL,
     "multiprocessors that share the tiles of a GEMM; 0: no wave quantization", NULL},
    {"accelerator.attention_flash1", QD_OPTION_FLOAT, "0.4", 0.01, 1, NULL,
     "share of the best GEMM that FlashAttention 1 reaches in the forward pass on long causal sequences", NULL},
    {"accelerator.attention_flash2", QD_OPTION_FLOAT, "0.6", 0.01, 1, NULL, "the same for FlashAttention 2", NULL},
    {"accelerator.attention_tuned", QD_OPTION_FLOAT, "0.7", 0.01, 1, NULL, "the same for the vendor's newest kernel", NULL},
    {"accelerator.watts", QD_OPTION_FLOAT, "0", 0, 1e6, NULL, "power under load in watts; 0: unknown", NULL},
    {"processor.cores", QD_OPTION_INT, "0", 0, 4096, NULL,
     "cores of a machine that trains on CPUs; quadrille bench machine writes the processor keys; 0: none", NULL},
    {"processor.forward", QD_OPTION_STRING, "", 0, 0, NULL,
     "GEMMs of the forward pass, per core: GFLOP/s, and the m, n and k at which each overhead doubles the time", NULL},
    {"processor.inputs", QD_OPTION_STRING, "", 0, 0, NULL, "the same for gradients of inputs", NULL},
    {"processor.weights", QD_OPTION_STRING, "", 0, 0, NULL, "the same for gradients of weights", NULL},
    {"processor.attention", QD_OPTION_STRING, "", 0, 0, NULL, "attention per core, forward and backward, in GFLOP/s", NULL},
    {"processor.parts", QD_OPTION_STRING, "", 0, 0, NULL,
     "number of keys at which a part of attention (cp) takes twice as long per FLOP, forward and backward", NULL},
    {"processor.bytes", QD_OPTION_STRING, "", 0, 0, NULL, "GB/s per core of memory-bound kernels, and of the optimizer", NULL},
    {"processor.together", QD_OPTION_STRING, "", 0, 0, NULL,
     "rate of all cores on the work of one rank, relative to the sum of their single-core rates: GEMMs, attention, other kernels", NULL},
    {"processor.sum", QD_OPTION_STRING, "", 0, 0, NULL, "a rank's share of an all-reduce: latency in microseconds, and GB/s", NULL},
    {"processor.gather", QD_OPTION_STRING, "", 0, 0, NULL, "the same for an all-gather", NULL},
    {"processor.scatter", QD_OPTION_STRING, "", 0, 0, NULL, "the same for a reduce-scatter", NULL},
    {"processor.send", QD_OPTION_STRING, "", 0, 0, NULL, "the same for a message", NULL},
    {"processor.meeting", QD_OPTION_STRING, "", 0, 0, NULL,
     "microseconds that a GEMM takes longer when ranks synchronize after it: with one core per rank, and with two ranks per core", NULL},
    {"processor.late", QD_OPTION_STRING, "", 0, 0, NULL,
     "how much longer a step takes than its computation, as a share: one rank, one rank per core, and two ranks per core", NULL},
    {"node.size", QD_OPTION_INT, "1", 1, 65536, NULL, "accelerators in the fastest domain", NULL},
    {"node.bandwidth_gbs", QD_OPTION_FLOAT, "0", 0, 1e6, NULL, "GB/s per accelerator and direction inside the domain", NULL},
    {"node.efficiency", QD_OPTION_FLOAT, "0.8", 0.01, 1, NULL, "share of it that collectives reach", NULL},
    {"node.latency_us", QD_OPTION_FLOAT, "3", 0, 1e6, NULL, "microseconds per message", NULL},
    {"node.nvls", QD_OPTION_BOOL, "false", 0, 0, NULL, "the switch performs reductions, so that an all-reduce costs one pass", NULL},
    {"network.kind", QD_OPTION_ENUM, "fat-tree", 0, 0, "fat-tree|torus|all-to-all", "network between the domains", NULL},
    {"network.bandwidth_gbs", QD_OPTION_FLOAT, "0", 0, 1e6, NULL, "GB/s per accelerator and direction; torus: per link", NULL},
    {"network.efficiency", QD_OPTION_FLOAT, "0.9", 0.01, 1, NULL, "share of it that collectives reach", NULL},
    {"network.latency_us", QD_OPTION_FLOAT, "8", 0, 1e6, NULL, "microseconds per message", NULL},
    {"network.oversubscription", QD_OPTION_FLOAT, "1", 1, 1000, NULL, "factor by which bandwidth between pods is lower", NULL},
    {"network.pod", QD_OPTION_INT, "0", 0, 1e7, NULL, "accelerators in a pod; 0: all", NULL},
    {"network.dims", QD_OPTION_INT_LIST, "", 1, 65536, NULL, "torus: accelerators along each dimension of a slice", NULL},
    {"network.slice_bandwidth_gbs", QD_OPTION_FLOAT, "0", 0, 1e6, NULL, "torus: GB/s per accelerator between slices", NULL},
    {"software.profile", QD_OPTION_ENUM, "native", 0, 0, "native|early|eager|modern|fused|compiled", "features of the training software",
     NULL},
    {"software.attention", QD_OPTION_ENUM, "profile", 0, 0, "profile|plain|flash1|flash2|tuned",
     "its attention kernel: the profile's, scores in memory, FlashAttention 1 or 2, the vendor's newest", NULL},
    {"software.expert_biases", QD_OPTION_BOOL, "false", 0, 0, NULL,
     "the model's experts have biases (gpt-oss), which libraries add in separate passes", NULL},
    {"software.gemms", QD_OPTION_ENUM, "program", 0, 0, "program|fp8|mxfp8|nvfp4",
     "simulation only: format in which other software multiplies in the linear layers of blocks, experts included; program: "
     "train.precision's; mxfp8, nvfp4: 32 or 16 values share a scale",
     NULL},
    {"cost.accelerator_hour", QD_OPTION_FLOAT, "0", 0, 1e6, NULL, "price of one accelerator per hour, in any currency; 0: not set",
     NULL},
    {"cost.power_overhead", QD_OPTION_FLOAT, "1.2", 1, 10, NULL, "power of the whole installation relative to that of its accelerators",
     NULL},
};

qd_option_table qd_cluster_table(void)
{
    return QD_OPTION_TABLE(table);
}

/* Six kinds of training software, distinguished by features. docs/simulator.md gives the sources of
 * the figures. */
static const qd_profile profiles[] = {
    /* Quadrille and llm.c: fused kernels, the vendor's attention. */
    {.name = "native",
     .attention = QD_ATTENTION_TUNED,
     .searched = true,
     .fused_loss = true,
     .joined_casts = true,
     .passes = 1.3,
     .gap = 1.5e-6,
     .product_share = 0.93,
     .overlap = true,
     .step_overhead = 1e-3,
     .overhead_bytes = 1.5e9,
     .kept = 1.0},
    /* Before FlashAttention (2021, 2022): scores in memory, collectives after the computation. */
    {.name = "early",
     .attention = QD_ATTENTION_PLAIN,
     .passes = 1.6,
     .gap = 3e-6,
     .product_share = 0.90,
     .overlap = false,
     .cards = 2,
     .recompute_whole = true,
     .scalar_norm = true,
     .logit_bytes = 10,
     .step_overhead = 10e-3,
     .overhead_bytes = 3e9,
     .fragments = 0.12,
     .kept = 1.1},
    /* PyTorch without a compiler (2023): FlashAttention 1, separate elementwise kernels. */
    {.name = "eager",
     .attention = QD_ATTENTION_FLASH1,
     .passes = 3.0,
     .gap = 4e-6,
     .product_share = 0.88,
     .overlap = true,
     .recompute_whole = true,
     .scalar_norm = true,
     .logit_bytes = 6,
     .step_overhead = 10e-3,
     .overhead_bytes = 1.5e9,
     .fragments = 0.02,
     .kept = 1.0},
    /* Pipelines and tensor parallelism in PyTorch (since 2023): FlashAttention 2, fused norms,
     * gradients reduced after the step. */
    {.name = "modern",
     .attention = QD_ATTENTION_FLASH2,
     .passes = 2.0,
     .gap = 4e-6,
     .product_share = 0.86,
     .overlap = false,
     .recompute_whole = true,
     .scalar_norm = true,
     .logit_bytes = 10,
     .step_overhead = 10e-3,
     .overhead_bytes = 2e9,
     .fragments = 0.05,
     .kept = 1.5},
    /* Megatron-Core with Transformer Engine: the vendor's attention, fused kernels, collectives of
     * all axes overlapped. */
    {.name = "fused",
     .attention = QD_ATTENTION_TUNED,
     .joined_casts = true,
     .passes = 1.4,
     .gap = 2e-6,
     .product_share = 0.97,
     .overlap = true,
     .overlap_tp = true,
     .recompute_whole = true,
     .scalar_norm = true,
     .step_overhead = 10e-3,
     .overhead_bytes = 3e9,
     .fragments = 0.03,
     .kept = 1.0},
    /* XLA and torch.compile: the compiler fuses; one program per step. */
    {.name = "compiled",
     .attention = QD_ATTENTION_FLASH2,
     .joined_casts = true,
     .passes = 1.8,
     .gap = 2e-6,
     .product_share = 0.88,
     .overlap = true,
     .scalar_norm = true,
     .step_overhead = 5e-3,
     .overhead_bytes = 0.5e9,
     .fragments = 0.01,
     .kept = 1.0},
};

const qd_profile *qd_profile_find(const char *name)
{
    for (size_t i = 0; i < sizeof profiles / sizeof *profiles; i++)
        if (strcmp(profiles[i].name, name) == 0)
            return &profiles[i];
    return NULL;
}

static const qd_cluster_file *find_file(const qd_cluster_file *files, const char *name)
{
    for (; files->name; files++)
        if (strcmp(files->name, name) == 0)
            return files;
    return NULL;
}

const char *const *qd_cluster_names(void)
{
    return qd_clusters_names;
}

static qd_status load_one(qd_options *options, const char *cluster)
{
    const qd_cluster_file *file = find_file(qd_clusters_files, cluster);
    struct stat info;
    if (file)
        return qd_options_load_text(options, file->name, file->text, (size_t)(file->end - file->text));
    if (stat(cluster, &info) == 0)
        return qd_options_load(options, cluster);
    if (strcmp(cluster, "this-machine") == 0)
        return QD_FAIL(
            QD_USAGE,
            "this machine has not been measured: run quadrille bench machine --write this-machine.yaml, then --cluster this-machine.yaml");
    qd_strbuf known = {0};
    for (const qd_cluster_file *f = qd_clusters_files; f->name; f++)
        qd_strbuf_printf(&known, "%s%s", f == qd_clusters_files ? "" : ", ", f->name);
    qd_status status =
        QD_FAIL(QD_USAGE, "there is no cluster '%s' and no such file; built-in clusters: %s", cluster, known.data ? known.data : "");
    qd_strbuf_free(&known);
    return status;
}

/* The cluster file names the accelerator; that file is loaded first, so that the cluster's own keys
 * override it. */
qd_status qd_cluster_load(qd_options *options, const char *cluster)
{
    qd_options *probe = NULL;
    QD_TRY(qd_options_copy(options, &probe));
    qd_status status = load_one(probe, cluster);
    if (status == QD_OK) {
        const char *preset = qd_options_string(probe, "accelerator.preset");
        const qd_cluster_file *file = find_file(qd_accelerators_files, preset);
        if (preset[0] != '\0' && !file)
            status = QD_FAIL(QD_USAGE, "%s: accelerator.preset: there is no accelerator '%s'", cluster, preset);
        else if (file)
            status = qd_options_load_text(options, file->name, file->text, (size_t)(file->end - file->text));
    }
    qd_options_destroy(probe);
    QD_TRY(status);
    return load_one(options, cluster);
}

static qd_status needed(const qd_options *o, const char *key, double scale, double *value)
{
    *value = qd_options_float(o, key) * scale;
    return *value > 0.0 ? QD_OK : QD_FAIL(QD_USAGE, "%s is unknown for this cluster (it may not be public): set %s=…", key, key);
}

static qd_status resolve_accelerator(const qd_options *o, qd_accelerator *a)
{
    double memory;
    const char *name = qd_options_string(o, "accelerator.name");
    snprintf(a->name, sizeof a->name, "%s", name[0] ? name : "accelerator");
    QD_TRY(needed(o, "accelerator.peak_tflops", 1e12, &a->peak));
    QD_TRY(needed(o, "accelerator.product_tflops", 1e12, &a->product));
    QD_TRY(needed(o, "accelerator.bandwidth_gbs", 1e9, &a->bandwidth));
    QD_TRY(needed(o, "accelerator.memory_gib", 1024.0 * 1024.0 * 1024.0, &memory));
    a->memory = (int64_t)memory;
    a->host = qd_options_float(o, "accelerator.host_gbs") * 1e9;
    a->library = qd_options_float(o, "accelerator.library_share");
    a->fp8_peak = qd_options_float(o, "accelerator.fp8_tflops") * 1e12;
    a->fp4_peak = qd_options_float(o, "accelerator.fp4_tflops") * 1e12;
    a->fp8_product = qd_options_float(o, "accelerator.fp8_product_tflops") * 1e12;
    if (a->fp8_product == 0.0)
        a->fp8_product = a->product * a->fp8_peak / a->peak;
    a->units = (int)qd_options_int(o, "accelerator.units");
    a->attention[QD_ATTENTION_FLASH1] = qd_options_float(o, "accelerator.attention_flash1");
    a->attention[QD_ATTENTION_FLASH2] = qd_options_float(o, "accelerator.attention_flash2");
    a->attention[QD_ATTENTION_TUNED] = qd_options_float(o, "accelerator.attention_tuned");
    a->watts = qd_options_float(o, "accelerator.watts");
    return QD_OK;
}

static qd_status resolve_torus(const qd_options *o, qd_cluster *c)
{
    const int64_t *dims;
    c->dim_count = qd_options_int_list(o, "network.dims", &dims);
    if (c->dim_count < 1 || c->dim_count > QD_TORUS_DIMS)
        return QD_FAIL(QD_USAGE, "network.dims needs 1 to %d numbers for a torus, for example [16, 16]", QD_TORUS_DIMS);
    if (c->node_size != 1)
        return QD_FAIL(QD_USAGE, "node.size is %d: in a torus it must be 1", c->node_size);
    for (int i = 0; i < c->dim_count; i++)
        c->dims[i] = (int)dims[i];
    return QD_OK;
}

/* Formats that the accelerator does not multiply in are refused. */
static qd_status resolve_gemms(const qd_options *o, qd_cluster *c)
{
    static const char *const names[] = {"program", "fp8", "mxfp8", "nvfp4"};
    c->gemms = (qd_gemms)qd_options_enum(o, "software.gemms");
    const char *missing = c->gemms == QD_GEMMS_PROGRAM                                    ? NULL
                          : c->accelerator.fp8_peak == 0.0                                ? "fp8 (accelerator.fp8_tflops)"
                          : c->gemms != QD_GEMMS_FP8 && c->accelerator.fp4_peak == 0.0 ? "scales of blocks (accelerator.fp4_tflops)"
                                                                                          : NULL;
    if (c->gemms != QD_GEMMS_PROGRAM && c->processor.cores > 0)
        return QD_FAIL(QD_USAGE, "software.gemms: on CPUs the measured rates are used (processor.*): remove it");
    if (missing)
        return QD_FAIL(QD_UNSUPPORTED, "software.gemms=%s: accelerator %s has no %s: use program%s", names[c->gemms], c->accelerator.name,
                       missing, c->accelerator.fp8_peak > 0.0 ? " or fp8" : "");
    return QD_OK;
}

qd_status qd_cluster_resolve(const qd_options *o, qd_cluster *c)
{
    memset(c, 0, sizeof *c);
    c->traits = *qd_device_traits_find(qd_options_int(o, "processor.cores") > 0 ? "cpu" : "cuda");
    c->traits.device = "cpu";
    QD_TRY(resolve_accelerator(o, &c->accelerator));
    QD_TRY(qd_processor_resolve(o, &c->processor));
    snprintf(c->name, sizeof c->name, "%s", c->accelerator.name);
    c->node_size = (int)qd_options_int(o, "node.size");
    c->node_latency = qd_options_float(o, "node.latency_us") * 1e-6;
    c->nvls = qd_options_bool(o, "node.nvls");
    c->network = (qd_network_kind)qd_options_enum(o, "network.kind");
    c->network_latency = qd_options_float(o, "network.latency_us") * 1e-6;
    c->oversubscription = qd_options_float(o, "network.oversubscription");
    c->pod = (int)qd_options_int(o, "network.pod");
    c->price_hour = qd_options_float(o, "cost.accelerator_hour");
    c->power_overhead = qd_options_float(o, "cost.power_overhead");
    c->profile = qd_profile_find(qd_options_string(o, "software.profile"));
    c->expert_biases = qd_options_bool(o, "software.expert_biases");
    int kernel = qd_options_enum(o, "software.attention");
    if (c->expert_biases && (c->profile->searched || c->processor.cores > 0))
        return QD_FAIL(QD_USAGE,
                       "software.expert_biases: only libraries add them in separate passes, %s does not: remove it, or set another "
                       "software.profile",
                       c->processor.cores > 0 ? "software on CPUs" : c->profile->name);
    if (kernel > 0 && c->processor.cores > 0)
        return QD_FAIL(QD_USAGE, "software.attention: on CPUs the measured rate is used (processor.attention): remove it");
    c->attention = kernel > 0 ? (qd_attention_kernel)(kernel - 1) : c->profile->attention;
    QD_TRY(resolve_gemms(o, c));
    double network_efficiency = qd_options_float(o, "network.efficiency");
    c->slice_bandwidth = qd_options_float(o, "network.slice_bandwidth_gbs") * 1e9 * network_efficiency;
    c->network_bandwidth = qd_options_float(o, "network.bandwidth_gbs") * 1e9 * network_efficiency;
    if (c->node_size > 1)
        QD_TRY(needed(o, "node.bandwidth_gbs", 1e9 * qd_options_float(o, "node.efficiency"), &c->node_bandwidth));
    if (c->network == QD_NETWORK_TORUS)
        QD_TRY(resolve_torus(o, c));
    if (c->network == QD_NETWORK_ALL_TO_ALL || c->network == QD_NETWORK_TORUS)
        QD_TRY(needed(o, "network.bandwidth_gbs", 1e9 * network_efficiency, &c->network_bandwidth));
    return QD_OK;
}
