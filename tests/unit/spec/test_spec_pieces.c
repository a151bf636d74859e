/* The pieces of all ranks cover every tensor once, for any number of ranks, and balance the
 * work. */
#include "spec/config/config.h"
#include "spec/layout/pieces.h"
#include "support/layout.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"

typedef struct cover {
    unsigned char *seen[QD_CKPT_KIND_COUNT][64];
    int64_t most, least;
} cover;

static void mark(cover *c, const qd_program *p, const qd_state_pieces *pieces)
{
    int64_t before = 0;
    for (int i = 0; i < pieces->count; i++) {
        const qd_state_piece *piece = &pieces->list[i];
        const qd_param *param = &p->ledger->params[piece->param];
        assert_int_equal(piece->before, before);
        assert_int_equal(piece->count, piece->box.length[0] * piece->box.length[1]);
        assert_true(piece->count * 4 <= QD_PIECE_BYTES || piece->box.length[0] == 1);
        assert_true(piece->count <= pieces->largest);
        before += piece->count;
        unsigned char **seen = &c->seen[piece->kind][piece->param];
        if (!*seen)
            *seen = calloc((size_t)(param->shape[0] * param->shape[1]), 1);
        assert_true(piece->box.begin[0] + piece->box.length[0] <= param->shape[0]);
        assert_true(piece->box.begin[1] + piece->box.length[1] <= param->shape[1]);
        for (int64_t row = piece->box.begin[0]; row < piece->box.begin[0] + piece->box.length[0]; row++)
            for (int64_t col = piece->box.begin[1]; col < piece->box.begin[1] + piece->box.length[1]; col++)
                (*seen)[row * param->shape[1] + col]++;
    }
    assert_int_equal(before, pieces->elements);
    c->most = before > c->most ? before : c->most;
    c->least = before < c->least ? before : c->least;
}

static void every_element_once(void **state)
{
    (void)state;
    static const char *const models[] = {"model.layers=2 model.hidden=12 model.heads=2 model.vocab=31 ",
                                         "model.arch=gpt2 model.layers=1 model.hidden=8 model.heads=2 model.vocab=97 train.precision=bf16 ",
                                         "model.layers=1 model.hidden=4 model.heads=1 model.vocab=5 model.tied=true train.optimizer=sgd ",
                                         "model.layers=2 model.hidden=12 model.heads=2 model.vocab=31 train.optimizer=muon "};
    static const int kinds[] = {3, 3, 1, 3};
    for (int m = 0; m < 16; m++)
        for (int ranks = 1; ranks <= 9; ranks++) {
            char words[256];
            int zero = m / 4, shard = zero == 3 && ranks % 2 == 0 ? ranks / 2 : -1; /* hybrid: two replicas of each shard */
            snprintf(words, sizeof words, "%sdata.seq=4 train.global_batch=%d parallel.ranks=%d parallel.zero=%d parallel.dp_shard=%d",
                     models[m % 4], ranks, ranks, ranks > 1 ? zero : 0, ranks > 1 ? shard : -1);
            qd_config config = layout_config(words);
            cover c = {.least = INT64_MAX};
            qd_arena *arena;
            const qd_ledger *ledger = NULL;
            int planned = 0, tensors = 0;
            ok(qd_arena_create(&arena));
            for (int rank = 0; rank < ranks; rank++) {
                qd_program *p;
                qd_state_pieces pieces;
                ok(qd_config_build(&config, rank, arena, &p));
                ok(qd_pieces_plan(p, qd_pieces_kinds(p), arena, &pieces));
                assert_int_equal(qd_pieces_bytes(p), pieces.elements * 4);
                mark(&c, p, &pieces);
                ledger = p->ledger;
                planned = qd_pieces_tensors(p);
            }
            int64_t widest = 1;
            for (int i = 0; i < ledger->param_count; i++) {
                const qd_param *param = &ledger->params[i];
                widest = param->shape[1] > widest ? param->shape[1] : widest;
                for (int k = 0; k < QD_CKPT_KIND_COUNT; k++) {
                    bool matrix = strncmp(param->name, "block.", 6) == 0 && param->ndim == 2;
                    bool wanted = param->tied_to < 0 && k < kinds[m % 4] && !(m % 4 == 3 && matrix && k == QD_CKPT_MOMENT2);
                    tensors += wanted;
                    assert_int_equal(c.seen[k][i] != NULL, wanted);
                    for (int64_t e = 0; wanted && e < param->shape[0] * param->shape[1]; e++)
                        assert_int_equal(c.seen[k][i][e], 1);
                    free(c.seen[k][i]);
                }
            }
            assert_int_equal(tensors, planned);
            if (zero == 0) /* ZeRO shards are cut tensor by tensor */
                assert_true(c.most - c.least <= 2 * kinds[m % 4] * widest);
            qd_arena_destroy(arena);
        }
}

/* Rows and columns that tp shards, kv heads that several ranks hold, norms that all hold. */
static void every_element_once_under_tp(void **state)
{
    (void)state;
    static const char *const layouts[] = {
        "parallel.ranks=2 parallel.tp=2 ", "parallel.ranks=4 parallel.tp=4 ", "parallel.ranks=8 parallel.tp=4 parallel.zero=3 ",
        "parallel.ranks=6 parallel.tp=2 parallel.zero=1 ", "parallel.ranks=8 parallel.tp=2 parallel.zero=2 parallel.dp_shard=2 "};
    for (size_t l = 0; l < 2 * sizeof layouts / sizeof *layouts; l++) {
        char words[256];
        snprintf(words, sizeof words,
                 "model.arch=%s model.layers=1 model.hidden=16 model.heads=4 model.vocab=31 %sdata.seq=4 "
                 "train.global_batch=12 %s",
                 l % 2 ? "gpt2" : "llama", l % 2 ? "" : "model.kv_heads=2 ", layouts[l / 2]);
        qd_config config = layout_config(words);
        cover c = {.least = INT64_MAX};
        qd_arena *arena;
        const qd_ledger *ledger = NULL;
        ok(qd_arena_create(&arena));
        for (int rank = 0; rank < config.world; rank++) {
            qd_program *p;
            qd_state_pieces pieces;
            ok(qd_config_build(&config, rank, arena, &p));
            ok(qd_pieces_plan(p, qd_pieces_kinds(p), arena, &pieces));
            mark(&c, p, &pieces);
            ledger = p->ledger;
        }
        for (int i = 0; i < ledger->param_count; i++)
            for (int k = 0; k < QD_CKPT_KIND_COUNT; k++) {
                bool wanted = ledger->params[i].tied_to < 0;
                assert_int_equal(c.seen[k][i] != NULL, wanted);
                for (int64_t e = 0; wanted && e < ledger->params[i].shape[0] * ledger->params[i].shape[1]; e++)
                    assert_int_equal(c.seen[k][i][e], 1);
                free(c.seen[k][i]);
            }
        qd_arena_destroy(arena);
    }
}

/* A tensor of more than QD_PIECE_BYTES is split, so that a reader of some rows verifies little more
 * than those. */
static void large_tensors_are_cut(void **state)
{
    (void)state;
    qd_config config = layout_config("model.layers=1 model.hidden=1024 model.heads=8 model.vocab=50000 data.seq=4 train.global_batch=1");
    qd_arena *arena;
    qd_program *p;
    qd_state_pieces pieces;
    ok(qd_arena_create(&arena));
    ok(qd_config_build(&config, 0, arena, &p));
    ok(qd_pieces_plan(p, 1u << QD_CKPT_VALUE, arena, &pieces));
    cover c = {.least = INT64_MAX};
    mark(&c, p, &pieces);
    int of_table = 0;
    for (int i = 0; i < pieces.count; i++)
        of_table += pieces.list[i].param == 0;
    assert_int_equal(of_table, 4); /* 195 MiB */
    for (int i = 0; i < 64; i++)
        free(c.seen[QD_CKPT_VALUE][i]);
    qd_arena_destroy(arena);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_element_once), cmocka_unit_test(every_element_once_under_tp),
                                       cmocka_unit_test(large_tensors_are_cut)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
