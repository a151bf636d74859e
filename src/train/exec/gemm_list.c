/* Collects the GEMMs of all ranks' programs on rank 0, encoded as integers. */
#include "train/exec/gemm_list.h"

#include "nn/nn.h"

#include <stdlib.h>
#include <string.h>

/* A GEMM as integers, to be sent to rank 0. */
enum { M, N, K, LDA, LDB, LDC, TRAITS, KEY, TIMES = KEY, FIELDS }; /* KEY: number of fields that identify a GEMM */
/* TRAITS; four numbers follow */
enum { TRANS_A = 1, TRANS_B = 2, ACCUMULATE = 4, BIAS = 8, RESIDUAL = 16, AUX = 32, BIAS_GRAD = 64, FAST = 128 };
enum { A_DTYPE = 8, B_DTYPE = 16, C_DTYPE = 24, GELU = 32, NUMBER = 0xff };
typedef struct record {
    int64_t field[FIELDS];
} record;

typedef struct records {
    record *items;
    int64_t count, capacity;
} records;

static record record_of(const qd_matmul_args *a)
{
    int64_t traits = (a->trans_a ? TRANS_A : 0) | (a->trans_b ? TRANS_B : 0) | (a->accumulate ? ACCUMULATE : 0) | (a->bias ? BIAS : 0) |
                     (a->residual ? RESIDUAL : 0) | (a->aux ? AUX : 0) | (a->bias_grad ? BIAS_GRAD : 0) | (a->fast ? FAST : 0);
    traits |= (int64_t)a->a_dtype << A_DTYPE | (int64_t)a->b_dtype << B_DTYPE | (int64_t)a->c_dtype << C_DTYPE | (int64_t)a->gelu << GELU;
    return (record){{[M] = a->m, [N] = a->n, [K] = a->k, [LDA] = a->lda, [LDB] = a->ldb, [LDC] = a->ldc, [TRAITS] = traits, [TIMES] = 1}};
}

static qd_matmul_args gemm_of(const record *r)
{
    static char here[1]; /* any address that is not NULL */
    const int64_t *f = r->field, traits = f[TRAITS];
    return (qd_matmul_args){.m = f[M],
                            .n = f[N],
                            .k = f[K],
                            .lda = f[LDA],
                            .ldb = f[LDB],
                            .ldc = f[LDC],
                            .trans_a = traits & TRANS_A,
                            .trans_b = traits & TRANS_B,
                            .accumulate = traits & ACCUMULATE,
                            .bias = traits & BIAS ? here : NULL,
                            .residual = traits & RESIDUAL ? here : NULL,
                            .aux = traits & AUX ? here : NULL,
                            .bias_grad = traits & BIAS_GRAD ? here : NULL,
                            .fast = traits & FAST,
                            .a_dtype = (qd_dtype)(traits >> A_DTYPE & NUMBER),
                            .b_dtype = (qd_dtype)(traits >> B_DTYPE & NUMBER),
                            .c_dtype = (qd_dtype)(traits >> C_DTYPE & NUMBER),
                            .gelu = (qd_matmul_gelu)(traits >> GELU & NUMBER)};
}

/* another: of another rank. Ranks run concurrently, so counts are not added: the larger one is
 * kept. */
static qd_status add_record(records *list, const record *r, bool another)
{
    for (int64_t i = 0; i < list->count; i++) {
        int64_t *times = &list->items[i].field[TIMES], more = r->field[TIMES];
        if (memcmp(&list->items[i], r, KEY * sizeof r->field[0]) != 0)
            continue;
        *times = !another ? *times + more : more > *times ? more : *times;
        return QD_OK;
    }
    if (list->count == list->capacity) {
        int64_t capacity = list->capacity ? 2 * list->capacity : 32;
        record *items = realloc(list->items, (size_t)capacity * sizeof *items);
        if (!items)
            return QD_FAIL(QD_NO_MEMORY, "no memory for the list of GEMMs");
        list->items = items;
        list->capacity = capacity;
    }
    list->items[list->count++] = *r;
    return QD_OK;
}

static qd_status add_gemm(void *context, const qd_matmul_args *gemm)
{
    record r = record_of(gemm);
    return add_record(context, &r, false);
}

/* Rank 0 adds the records of the others. All send as many records as the longest list has; records
 * with m = 0 are padding. */
static qd_status gather_records(records *list, qd_comm *world)
{
    int64_t most = list->count, ranks = qd_comm_size(world);
    QD_TRY(qd_comm_all_reduce(world, &most, &most, 1, QD_I64, QD_MAX, NULL));
    bool root = qd_comm_rank(world) == 0;
    record *own = calloc((size_t)most + 1, sizeof *own), *all = root ? calloc((size_t)(ranks * most) + 1, sizeof *all) : NULL;
    qd_status status = QD_OK;
    if (!own || (root && !all))
        status = QD_FAIL(QD_NO_MEMORY, "no memory for the GEMMs of %lld ranks", (long long)ranks);
    if (status == QD_OK) {
        if (list->count > 0)
            memcpy(own, list->items, (size_t)list->count * sizeof *own);
        status = qd_comm_gather(world, own, all, ranks * most * FIELDS, QD_I64, 0, NULL);
    }
    for (int64_t i = 0; i < ranks * most && root && status == QD_OK; i++)
        if (all[i].field[M] > 0)
            status = add_record(list, &all[i], true);
    free(own);
    free(all);
    return status;
}

qd_status qd_products_collect(const qd_program *program, qd_comm *world, qd_products *gemms)
{
    records list = {0};
    *gemms = (qd_products){0};
    qd_status status = qd_nn_products(program, add_gemm, &list);
    if (status == QD_OK && qd_comm_size(world) > 1)
        status = gather_records(&list, world);
    if (status == QD_OK && qd_comm_rank(world) == 0 && list.count > 0) {
        gemms->items = calloc((size_t)list.count, sizeof *gemms->items);
        gemms->times = calloc((size_t)list.count, sizeof *gemms->times);
        if (!gemms->items || !gemms->times)
            status = QD_FAIL(QD_NO_MEMORY, "no memory for the list of GEMMs");
        for (int64_t i = 0; i < list.count && status == QD_OK; i++) {
            gemms->times[gemms->count] = list.items[i].field[TIMES];
            gemms->items[gemms->count++] = gemm_of(&list.items[i]);
        }
    }
    free(list.items);
    return status;
}

void qd_products_free(qd_products *gemms)
{
    free(gemms->items);
    free(gemms->times);
    *gemms = (qd_products){0};
}
