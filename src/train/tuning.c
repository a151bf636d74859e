#include "train/tuning.h"

#include "base/strbuf.h"
#include "nn/nn.h"
#include "train/cache_folder.h"
#include "train/long_work.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct products {
    qd_matmul_args *items; /* without addresses, each once */
    int count, capacity;
} products;

/* Addresses become markers: what matters is whether there is one. */
static qd_matmul_args without_addresses(const qd_matmul_args *a)
{
    static char here[1];
    qd_matmul_args plain = *a;
    plain.a = plain.b = plain.c = NULL;
    plain.bias = a->bias ? here : NULL;
    plain.residual = a->residual ? here : NULL;
    plain.aux = a->aux ? here : NULL;
    plain.bias_grad = a->bias_grad ? here : NULL;
    return plain;
}

static bool same(const qd_matmul_args *x, const qd_matmul_args *y)
{
    return x->m == y->m && x->n == y->n && x->k == y->k && x->lda == y->lda && x->ldb == y->ldb && x->ldc == y->ldc &&
           x->trans_a == y->trans_a && x->trans_b == y->trans_b && x->accumulate == y->accumulate &&
           x->a_dtype == y->a_dtype && x->b_dtype == y->b_dtype && x->c_dtype == y->c_dtype && x->gelu == y->gelu &&
           x->bias == y->bias && x->residual == y->residual && x->aux == y->aux && x->bias_grad == y->bias_grad;
}

static qd_status add_product(void *context, const qd_matmul_args *product)
{
    products *list = context;
    qd_matmul_args plain = without_addresses(product);
    for (int i = 0; i < list->count; i++)
        if (same(&list->items[i], &plain))
            return QD_OK;
    if (list->count == list->capacity) {
        int capacity = list->capacity ? 2 * list->capacity : 32;
        qd_matmul_args *items = realloc(list->items, (size_t)capacity * sizeof *items);
        if (!items)
            return QD_FAIL(QD_NO_MEMORY, "no memory for a list of products");
        list->items = items;
        list->capacity = capacity;
    }
    list->items[list->count++] = plain;
    return QD_OK;
}

typedef struct search {
    const qd_config *config;
    qd_device *device;
    const products *list;
} search;

/* Rank 0. A file that cannot be read or written costs time, not the run. */
static qd_status search_products(void *context)
{
    const search *s = context;
    enum { MOST = 4 << 20 };
    char path[PATH_MAX] = "", *text = NULL;
    size_t length;
    bool searched = false;
    if (strcmp(s->config->tuning, "none") != 0)
        qd_cache_file(s->config->tuning, "products", path, sizeof path);
    if (path[0] != '\0' && qd_file_read(path, MOST, &text, &length) == QD_OK)
        (void)qd_device_tuning_set(s->device, text);
    free(text);
    qd_error_clear();
    QD_TRY(qd_device_tune(s->device, s->list->items, s->list->count, &searched));
    if (!searched || path[0] == '\0')
        return QD_OK;
    qd_strbuf all = {0};
    qd_status status = qd_device_tuning_get(s->device, &all);
    if (status == QD_OK && all.data && qd_file_replace(path, all.data, all.length) != QD_OK)
        qd_error_clear();
    qd_strbuf_free(&all);
    return status;
}

/* Collective: everyone has rank 0's choices. */
static qd_status share_choices(qd_device *device, qd_comm *world)
{
    qd_strbuf text = {0};
    int64_t length = 0;
    if (qd_comm_rank(world) == 0) {
        QD_TRY(qd_device_tuning_get(device, &text));
        length = text.data ? (int64_t)text.length : 0;
    }
    qd_status status = qd_comm_broadcast(world, &length, 1, QD_I64, 0, NULL);
    char *copy = status == QD_OK ? calloc((size_t)length + 1, 1) : NULL;
    if (status == QD_OK && !copy)
        status = QD_FAIL(QD_NO_MEMORY, "no memory for the choice of products");
    if (status == QD_OK && qd_comm_rank(world) == 0 && length > 0)
        memcpy(copy, text.data, (size_t)length);
    if (status == QD_OK)
        status = qd_comm_broadcast(world, copy, length, QD_U8, 0, NULL);
    if (status == QD_OK && qd_comm_rank(world) != 0)
        status = qd_device_tuning_set(device, copy);
    qd_strbuf_free(&text);
    free(copy);
    return status;
}

qd_status qd_tune_products(const qd_config *config, const qd_program *program, qd_device *device, qd_comm *world)
{
    if (qd_device_get_caps(device)->host_memory)
        return QD_OK;
    products list = {0};
    qd_status status = qd_nn_products(program, add_product, &list);
    search s = {config, device, &list};
    if (status == QD_OK)
        status = qd_long_work_run(world, search_products, &s);
    if (status == QD_OK && qd_comm_size(world) > 1)
        status = share_choices(device, world);
    free(list.items);
    return status;
}
