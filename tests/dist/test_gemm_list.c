/* Rank 0 tunes the GEMMs of all ranks' programs: under pp only the last stage has the head's. The
 * vocabulary is odd, and so is a rank's shard of it; rows of logits are aligned nevertheless. */
#include "base/arena.h"
#include "nn/nn.h"
#include "support/layout.h"
#include "support/ranks.h"
#include "train/exec/gemm_list.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "support/ok.h"

static const char layout[] = "model.arch=gpt2 model.layers=4 model.hidden=32 model.heads=4 model.vocab=163 data.seq=16 "
                             "train.global_batch=8 train.micro_batch=1 parallel.ranks=4 parallel.pp=2 parallel.tp=2 ";

enum { RANKS = 4, MOST = 1024 };

typedef struct list {
    qd_matmul_args items[MOST];
    int count;
} list;

static bool same(const qd_matmul_args *x, const qd_matmul_args *y)
{
    return x->m == y->m && x->n == y->n && x->k == y->k && x->lda == y->lda && x->ldb == y->ldb && x->ldc == y->ldc &&
           x->trans_a == y->trans_a && x->trans_b == y->trans_b && x->accumulate == y->accumulate && x->a_dtype == y->a_dtype &&
           x->b_dtype == y->b_dtype && x->c_dtype == y->c_dtype && x->gelu == y->gelu && !x->bias == !y->bias &&
           !x->residual == !y->residual && !x->aux == !y->aux && !x->bias_grad == !y->bias_grad;
}

static int times_in(const qd_matmul_args *items, int count, const qd_matmul_args *product)
{
    int times = 0;
    for (int i = 0; i < count; i++)
        times += same(&items[i], product);
    return times;
}

static qd_status note(void *context, const qd_matmul_args *product)
{
    list *l = context;
    if (l->count == MOST)
        return QD_FAIL(QD_DIFFERENT, "more than %d GEMMs", (int)MOST);
    l->items[l->count++] = *product;
    return QD_OK;
}

/* Every GEMM of every rank once, including some that rank 0's own program does not have. */
static qd_status check_products(const qd_config *config, qd_arena *arena, const qd_products *products)
{
    static list of[RANKS];
    int others = 0;
    for (int rank = 0; rank < RANKS; rank++) {
        qd_program *program;
        of[rank].count = 0;
        QD_TRY(qd_config_build(config, rank, arena, &program));
        QD_TRY(qd_nn_products(program, note, &of[rank]));
        for (int i = 0; i < of[rank].count; i++) {
            const qd_matmul_args *p = &of[rank].items[i];
            if (p->lda % 8 || p->ldb % 8 || p->ldc % 8)
                return QD_FAIL(QD_DIFFERENT, "a GEMM of rank %d, %lld x %lld x %lld, has row strides %lld, %lld, %lld", rank,
                               (long long)p->m, (long long)p->n, (long long)p->k, (long long)p->lda, (long long)p->ldb, (long long)p->ldc);
            int times = times_in(products->items, products->count, p);
            others += times_in(of[0].items, of[0].count, p) == 0;
            if (times != 1)
                return QD_FAIL(QD_DIFFERENT, "a GEMM of rank %d, %lld x %lld x %lld, is listed %d times", rank, (long long)p->m,
                               (long long)p->n, (long long)p->k, times);
        }
    }
    /* Each of the four blocks makes it once; ranks that do the same count once. */
    int64_t most = 0;
    for (int i = 0; i < products->count; i++)
        most = products->times[i] > most ? products->times[i] : most;
    if (most != 4)
        return QD_FAIL(QD_DIFFERENT, "a GEMM of the blocks is made %lld times, 4 expected", (long long)most);
    return others > 0 ? QD_OK : QD_FAIL(QD_DIFFERENT, "all ranks have the GEMMs of rank 0");
}

static qd_status collect(qd_comm *world, void *arg)
{
    (void)arg;
    qd_config config = layout_config(layout);
    qd_arena *arena;
    qd_program *program;
    qd_products products = {0};
    QD_TRY(qd_arena_create(&arena));
    qd_status status = qd_config_build(&config, qd_comm_rank(world), arena, &program);
    if (status == QD_OK)
        status = qd_products_collect(program, world, &products);
    if (status == QD_OK && qd_comm_rank(world) == 0)
        status = check_products(&config, arena, &products);
    else if (status == QD_OK && products.count != 0)
        status = QD_FAIL(QD_DIFFERENT, "rank %d has %d GEMMs", qd_comm_rank(world), products.count);
    qd_products_free(&products);
    qd_arena_destroy(arena);
    return status;
}

static const qd_ranks_entry bodies[] = {{"collect", collect}};

static void rank_0_has_the_gemms_of_all(void **state)
{
    (void)state;
    qd_ranks_result results[RANKS];
    ok(qd_ranks_run_ok("collect", QD_RANKS_THREADS, RANKS, &(qd_ranks_options){.text = ""}, results));
    ok(qd_ranks_run_ok("collect", QD_RANKS_PROCESSES, RANKS, &(qd_ranks_options){.text = ""}, results));
}

int main(int argc, char **argv)
{
    qd_ranks_main(argc, argv, bodies, 1);
    const struct CMUnitTest tests[] = {cmocka_unit_test(rank_0_has_the_gemms_of_all)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
