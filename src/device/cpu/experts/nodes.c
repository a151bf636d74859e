/* Hierarchical dispatch: places of row copies per node and of relayed rows, by counting in order of
 * rows. */
#include "device/cpu/kernels_impl.h"

#include <string.h>

qd_status qd_cpu_node_plan(qd_stream *stream, const qd_node_plan_args *a)
{
    int nodes = a->nodes, k = a->per_token, each = a->experts / nodes;
    int32_t *next = a->counts + a->experts; /* number of a node's next copy; at the end the number of copies */
    (void)stream;
    memcpy(a->counts, a->count, (size_t)a->experts * sizeof *a->counts);
    memset(a->copies, 0, (size_t)nodes * sizeof *a->copies);
    for (int64_t i = 0; i < a->rows * nodes; i++)
        a->place[i] = -1;
    for (int64_t i = 0; i < a->rows * k; i++) {
        int32_t *at = &a->place[i / k * nodes + a->choice[i] / each];
        if (a->kept[i] < 0 || *at >= 0)
            continue;
        *at = 0;
        a->copies[a->choice[i] / each]++;
    }
    next[0] = 0;
    for (int b = 1; b < nodes; b++)
        next[b] = next[b - 1] + a->copies[b - 1];
    for (int64_t row = 0; row < a->rows; row++) {
        for (int b = 0; b < nodes; b++) {
            if (a->place[row * nodes + b] < 0)
                continue;
            int32_t at = a->place[row * nodes + b] = next[b]++, *list = a->chosen + (int64_t)at * 2 * k;
            a->from[at] = (int32_t)(row * nodes + b);
            for (int64_t j = 0, i = row * k; j < k; j++, i++)
                list[j] = a->kept[i] >= 0 && a->choice[i] / each == b ? a->choice[i] % each : -1;
            memcpy(list + k, a->weight + row * k, (size_t)k * sizeof *a->weight);
        }
    }
    memcpy(next, a->copies, (size_t)nodes * sizeof *a->copies);
    return QD_OK;
}

qd_status qd_cpu_node_weights(qd_stream *stream, const qd_node_weights_args *a)
{
    int nodes = a->nodes, k = a->per_token, each = a->experts / nodes;
    (void)stream;
    for (int64_t i = 0; i < a->rows * k; i++)
        a->d_weight[i] = a->kept[i] < 0 ? 0.0f : a->copies[(int64_t)a->place[i / k * nodes + a->choice[i] / each] * k + i % k];
    return QD_OK;
}

qd_status qd_cpu_relay_plan(qd_stream *stream, const qd_relay_plan_args *a)
{
    int k = a->per_token;
    int64_t relayed = a->relayed * k;
    int32_t first = 0;
    (void)stream;
    memset(a->count, 0, (size_t)a->experts * sizeof *a->count);
    for (int64_t i = 0; i < a->rows * k; i++) {
        int32_t expert = i < relayed ? a->chosen[i / k * 2 * k + i % k] : -1;
        a->place[i] = expert < 0 ? -1 : a->count[expert]++; /* its number among the expert's assignments */
    }
    for (int e = 0; e < a->experts; e++) { /* count[e] becomes the offset from such a number to a place */
        a->count[e] = first - a->taken[e];
        first += a->take[e];
    }
    for (int64_t i = 0; i < relayed; i++) {
        if (a->place[i] < 0)
            continue;
        int32_t expert = a->chosen[i / k * 2 * k + i % k], number = a->place[i] - a->taken[expert];
        a->place[i] = number >= 0 && number < a->take[expert] ? a->place[i] + a->count[expert] : -1;
        if (a->place[i] >= 0)
            a->from[a->place[i]] = (int32_t)i;
    }
    memcpy(a->count, a->take, (size_t)a->experts * sizeof *a->count);
    for (int64_t row = 0; a->weight && row < a->relayed; row++)
        memcpy(a->weight + row * k, a->chosen + (2 * row + 1) * k, (size_t)k * sizeof *a->weight);
    return QD_OK;
}

qd_status qd_cpu_relay_keep(qd_stream *stream, const qd_relay_keep_args *a)
{
    (void)stream;
    for (int64_t i = 0; i < a->n; i++)
        a->to[i] = a->place[i] >= 0 ? a->from[i] : a->to[i];
    return QD_OK;
}
