/* Dispatch by node: the lists of rows on the sending rank and on the relay.
 * ctest: processors 2 */
#include "support/ops.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

/* A number of four bytes as both kinds of test read it. */
static double bits_of(double x)
{
    float f = (float)x;
    int32_t i;
    memcpy(&i, &f, sizeof i);
    return (double)i;
}

typedef struct node_case {
    int64_t rows;
    int experts, nodes, per_token;
    double dropped; /* share of assignments that are dropped */
    int far;        /* rows choose experts of the first nodes only: others have none */
} node_case;
static const node_case node_cases[] = {
    {1, 2, 2, 1, 0, 2},       {7, 8, 4, 2, 0.3, 4},      {33, 12, 3, 5, 0, 2},    {64, 16, 16, 16, 0, 16}, {100, 6, 1, 3, 0.2, 1},
    {1023, 64, 8, 6, 0.1, 7}, {1025, 64, 2, 8, 0, 2},    {5, 4, 2, 2, 1, 2},      {2600, 512, 32, 8, 0.05, 32}, {0, 8, 2, 2, 0, 2},
    {4097, 10, 5, 2, 0.5, 5},
};
static const node_case node_speed[] = {{8192, 64, 4, 8, 0, 4}, {8192, 256, 32, 8, 0, 32}};
enum { NC, NK, NW, NN, NP, NF, NB, NA, NL, NODE_TENSORS };

static void node_describe(const void *p, char *text, size_t size)
{
    const node_case *c = p;
    snprintf(text, size, "%lld rows, %d of %d experts on %d nodes, %d with rows, %.0f%% dropped", (long long)c->rows, c->per_token,
             c->experts, c->nodes, c->far, 100 * c->dropped);
}

static int64_t most_copies(const node_case *c)
{
    return c->rows * (c->nodes < c->per_token ? c->nodes : c->per_token);
}

static int node_tensors(const void *p, ops_tensor *t)
{
    const node_case *c = p;
    t[NC] = (ops_tensor){.name = "choice", .role = OPS_IN, .dtype = QD_I32, .rows = c->rows, .cols = c->per_token};
    t[NK] = (ops_tensor){.name = "kept", .role = OPS_IN, .dtype = QD_I32, .rows = c->rows, .cols = c->per_token};
    t[NW] = (ops_tensor){.name = "weight", .role = OPS_IN, .dtype = QD_F32, .rows = c->rows, .cols = c->per_token};
    t[NN] = (ops_tensor){.name = "count", .role = OPS_IN, .dtype = QD_I32, .cols = c->experts, .scale = 1000};
    t[NP] = (ops_tensor){.name = "place", .role = OPS_OUT, .dtype = QD_I32, .rows = c->rows, .cols = c->nodes};
    /* Nothing is written after the last copy. */
    t[NF] = (ops_tensor){.name = "from", .role = OPS_INOUT, .dtype = QD_I32, .cols = c->rows * c->nodes, .scale = 9};
    t[NB] = (ops_tensor){.name = "copies", .role = OPS_OUT, .dtype = QD_I32, .cols = c->nodes};
    t[NA] = (ops_tensor){.name = "counts", .role = OPS_OUT, .dtype = QD_I32, .cols = c->experts + c->nodes};
    t[NL] = (ops_tensor){.name = "chosen", .role = OPS_INOUT, .dtype = QD_I32, .rows = most_copies(c), .cols = 2 * c->per_token,
                         .scale = 9};
    if (c->rows == 0) /* a row that must not be touched means none */
        t[NP].role = OPS_INOUT;
    return NODE_TENSORS;
}

/* The choices of a row differ. */
static void node_derive(const void *p, double *const *v)
{
    const node_case *c = p;
    int each = c->experts / c->nodes;
    for (int64_t row = 0; row < c->rows; row++) {
        int first = (int)(ops_uniform() * c->experts), open = c->far * each;
        for (int j = 0; j < c->per_token; j++) {
            v[NC][row * c->per_token + j] = (first + j * (open > c->per_token ? open / c->per_token : 1)) % open;
            v[NK][row * c->per_token + j] = ops_uniform() < c->dropped ? -1 : (double)(row * c->per_token + j);
        }
    }
}

static bool goes_to(const node_case *c, double *const *v, int64_t row, int node)
{
    for (int64_t i = row * c->per_token; i < (row + 1) * c->per_token; i++)
        if (v[NK][i] >= 0 && (int)v[NC][i] / (c->experts / c->nodes) == node)
            return true;
    return false;
}

static void node_reference(const void *p, double *const *v)
{
    const node_case *c = p;
    int64_t next = 0, k = c->per_token;
    int each = c->experts / c->nodes;
    for (int e = 0; e < c->experts; e++)
        v[NA][e] = v[NN][e];
    for (int b = 0; b < c->nodes; b++) {
        int64_t first = next;
        for (int64_t row = 0; row < c->rows; row++) {
            bool goes = goes_to(c, v, row, b);
            v[NP][row * c->nodes + b] = goes ? (double)next : -1;
            if (!goes)
                continue;
            v[NF][next] = (double)(row * c->nodes + b);
            for (int64_t j = 0; j < k; j++) {
                int choice = (int)v[NC][row * k + j];
                v[NL][next * 2 * k + j] = v[NK][row * k + j] >= 0 && choice / each == b ? choice % each : -1;
                v[NL][next * 2 * k + k + j] = bits_of(v[NW][row * k + j]);
            }
            next++;
        }
        v[NB][b] = v[NA][c->experts + b] = (double)(next - first);
    }
}

static qd_status node_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const node_case *c = p;
    return k->node_plan(stream, &(qd_node_plan_args){.choice = t[NC], .kept = t[NK], .weight = t[NW], .count = t[NN], .place = t[NP],
                                                     .from = t[NF],
                                                     .copies = t[NB], .counts = t[NA], .chosen = t[NL], .rows = c->rows,
                                                     .experts = c->experts,
                                                     .nodes = c->nodes, .per_token = c->per_token});
}

enum { WC, WK, WP, WG, WD, WEIGHT_TENSORS };

static int weights_tensors(const void *p, ops_tensor *t)
{
    const node_case *c = p;
    t[WC] = (ops_tensor){.name = "choice", .role = OPS_IN, .dtype = QD_I32, .rows = c->rows, .cols = c->per_token};
    t[WK] = (ops_tensor){.name = "kept", .role = OPS_IN, .dtype = QD_I32, .rows = c->rows, .cols = c->per_token};
    t[WP] = (ops_tensor){.name = "place", .role = OPS_IN, .dtype = QD_I32, .rows = c->rows, .cols = c->nodes};
    t[WG] = (ops_tensor){.name = "copies", .role = OPS_IN, .dtype = QD_F32, .rows = most_copies(c), .cols = c->per_token};
    t[WD] = (ops_tensor){.name = "d_weight", .role = c->rows ? OPS_OUT : OPS_INOUT, .dtype = QD_F32, .rows = c->rows, .cols = c->per_token};
    return WEIGHT_TENSORS;
}

static void weights_derive(const void *p, double *const *v)
{
    const node_case *c = p;
    int64_t next = 0;
    node_derive(p, v); /* choice and kept are the first two here as well */
    for (int b = 0; b < c->nodes; b++)
        for (int64_t row = 0; row < c->rows; row++)
            v[WP][row * c->nodes + b] = goes_to(c, v, row, b) ? (double)next++ : -1;
}

static void weights_reference(const void *p, double *const *v)
{
    const node_case *c = p;
    int64_t k = c->per_token;
    for (int64_t i = 0; i < c->rows * k; i++) {
        int64_t place = (int64_t)v[WP][i / k * c->nodes + (int)v[WC][i] / (c->experts / c->nodes)];
        v[WD][i] = v[WK][i] < 0 ? 0 : v[WG][place * k + i % k];
    }
}

static qd_status weights_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const node_case *c = p;
    return k->node_weights(stream, &(qd_node_weights_args){.choice = t[WC], .kept = t[WK], .place = t[WP], .copies = t[WG],
                                                           .d_weight = t[WD],
                                                           .rows = c->rows, .experts = c->experts, .nodes = c->nodes,
                                                           .per_token = c->per_token});
}

typedef struct relay_case {
    int64_t rows, relayed;
    int experts, per_token;
    double here;       /* share of choices that belong to this node */
    double first, part; /* of each expert's rows: the number that earlier rounds took, and that this one takes */
    bool weights;
} relay_case;
static const relay_case relay_cases[] = {
    {1, 1, 1, 1, 1, 0, 1, true},           {9, 7, 4, 3, 0.6, 0, 1, true},        {40, 40, 8, 2, 0.5, 0.3, 0.4, false},
    {16, 0, 4, 2, 0.5, 0, 1, true},        {1030, 1025, 32, 8, 0.4, 0, 1, true}, {3000, 2777, 128, 6, 0.3, 0.5, 0.5, false},
    {65, 63, 5, 16, 1, 0.1, 0.2, true},    {512, 500, 1, 4, 0.3, 0, 0.5, true},  {50, 50, 8, 2, 0, 0, 1, true},
    {2048, 2048, 512, 2, 0.9, 0, 1, true},
};
static const relay_case relay_speed[] = {{32768, 16384, 16, 8, 0.3, 0, 1, true}, {65536, 32768, 8, 8, 0.2, 0, 1, true}};
enum { RC, RT, RR, RP, RF, RN, RW, RELAY_TENSORS };

static void relay_describe(const void *p, char *text, size_t size)
{
    const relay_case *c = p;
    snprintf(text, size, "%lld of %lld rows, %d of %d experts, %.0f%% here, from %.0f%% on", (long long)c->relayed, (long long)c->rows,
             c->per_token, c->experts, 100 * c->here, 100 * c->first);
}

static int relay_tensors(const void *p, ops_tensor *t)
{
    const relay_case *c = p;
    t[RC] = (ops_tensor){.name = "chosen", .role = OPS_IN, .dtype = QD_I32, .rows = c->relayed, .cols = 2 * c->per_token};
    t[RT] = (ops_tensor){.name = "taken", .role = OPS_IN, .dtype = QD_I32, .cols = c->experts};
    t[RR] = (ops_tensor){.name = "take", .role = OPS_IN, .dtype = QD_I32, .cols = c->experts};
    t[RP] = (ops_tensor){.name = "place", .role = OPS_OUT, .dtype = QD_I32, .rows = c->rows, .cols = c->per_token};
    t[RF] = (ops_tensor){.name = "from", .role = OPS_INOUT, .dtype = QD_I32, .cols = c->rows * c->per_token, .scale = 9};
    t[RN] = (ops_tensor){.name = "count", .role = OPS_OUT, .dtype = QD_I32, .cols = c->experts};
    t[RW] = (ops_tensor){.name = "weight", .role = c->weights ? OPS_INOUT : OPS_ABSENT, .dtype = QD_F32, .rows = c->rows,
                         .cols = c->per_token};
    return RELAY_TENSORS;
}

static int relay_count(const relay_case *c, double *const *v, int expert)
{
    int count = 0;
    for (int64_t i = 0; i < c->relayed * c->per_token; i++)
        count += (int)v[RC][i / c->per_token * 2 * c->per_token + i % c->per_token] == expert;
    return count;
}

static void relay_derive(const void *p, double *const *v)
{
    const relay_case *c = p;
    int64_t k = c->per_token;
    for (int64_t i = 0; i < c->relayed * k; i++) {
        v[RC][i / k * 2 * k + i % k] = ops_uniform() < c->here ? floor(ops_uniform() * ops_uniform() * c->experts) : -1;
        v[RC][i / k * 2 * k + k + i % k] = bits_of(ops_normal());
    }
    for (int e = 0; e < c->experts; e++) {
        int count = relay_count(c, v, e);
        v[RT][e] = floor(c->first * count);
        v[RR][e] = fmin(ceil(c->part * count), count - v[RT][e]);
    }
}

static void relay_reference(const void *p, double *const *v)
{
    const relay_case *c = p;
    int64_t k = c->per_token, next = 0;
    for (int64_t i = 0; i < c->rows * k; i++)
        v[RP][i] = -1;
    for (int e = 0; e < c->experts; e++) {
        int64_t number = 0;
        v[RN][e] = v[RR][e];
        for (int64_t i = 0; i < c->relayed * k; i++) {
            if ((int)v[RC][i / k * 2 * k + i % k] != e)
                continue;
            if ((double)number >= v[RT][e] && (double)number < v[RT][e] + v[RR][e]) {
                v[RF][next] = (double)i;
                v[RP][i] = (double)next++;
            }
            number++;
        }
    }
    for (int64_t i = 0; c->weights && i < c->relayed * k; i++) {
        int32_t bits = (int32_t)v[RC][i / k * 2 * k + k + i % k];
        float weight;
        memcpy(&weight, &bits, sizeof weight);
        v[RW][i] = (double)weight;
    }
}

static qd_status relay_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const relay_case *c = p;
    return k->relay_plan(stream, &(qd_relay_plan_args){.chosen = t[RC], .taken = t[RT], .take = t[RR], .place = t[RP], .from = t[RF],
                                                       .count = t[RN],
                                                       .weight = t[RW], .rows = c->rows, .relayed = c->relayed, .experts = c->experts,
                                                       .per_token = c->per_token});
}

static const int64_t keep_cases[] = {0, 1, 255, 257, 10007};
enum { KP, KF, KT, KEEP_TENSORS };

static void keep_describe(const void *p, char *text, size_t size)
{
    snprintf(text, size, "%lld numbers", (long long)*(const int64_t *)p);
}

static int keep_tensors(const void *p, ops_tensor *t)
{
    int64_t n = *(const int64_t *)p;
    t[KP] = (ops_tensor){.name = "place", .role = OPS_IN, .dtype = QD_I32, .cols = n, .offset = -2, .scale = 4};
    t[KF] = (ops_tensor){.name = "from", .role = OPS_IN, .dtype = QD_F32, .cols = n};
    t[KT] = (ops_tensor){.name = "to", .role = OPS_INOUT, .dtype = QD_F32, .cols = n};
    return KEEP_TENSORS;
}

static void keep_reference(const void *p, double *const *v)
{
    for (int64_t i = 0; i < *(const int64_t *)p; i++)
        v[KT][i] = v[KP][i] >= 0 ? v[KF][i] : v[KT][i];
}

static qd_status keep_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    return k->relay_keep(stream, &(qd_relay_keep_args){.place = t[KP], .from = t[KF], .to = t[KT], .n = *(const int64_t *)p});
}

int main(int argc, char **argv)
{
#define CASES(list) .cases = list, .case_size = sizeof *list, .case_count = COUNT(list)
#define SPEED(list) .speed_cases = list, .speed_count = COUNT(list)
    const ops_op ops[] = {
        {.kernel = "node_plan", CASES(node_cases), SPEED(node_speed), .describe = node_describe, .tensors = node_tensors,
         .derive = node_derive,
         .reference = node_reference, .run = node_run},
        {.kernel = "node_weights", CASES(node_cases), .describe = node_describe, .tensors = weights_tensors, .derive = weights_derive,
         .reference = weights_reference, .run = weights_run},
        {.kernel = "relay_plan", CASES(relay_cases), SPEED(relay_speed), .describe = relay_describe, .tensors = relay_tensors,
         .derive = relay_derive,
         .reference = relay_reference, .run = relay_run},
        {.kernel = "relay_keep", CASES(keep_cases), .describe = keep_describe, .tensors = keep_tensors, .reference = keep_reference,
         .run = keep_run},
    };
    return ops_main(argc, argv, ops, COUNT(ops), NULL, 0);
}
