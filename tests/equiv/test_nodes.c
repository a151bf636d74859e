/* Dispatch by node, which sends a row to a node once, against one rank and against flat dispatch;
 * the bytes that cross nodes.
 * ctest: timeout 300 */
#include "spec/layout/nodes.h"
#include "support/models/expert_models.h"
#include "support/outcome.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#define NODE "parallel.dispatch=node "
#define COUNT(list) (sizeof(list) / sizeof *(list))

/* Two to eight nodes, with one or several ranks each; rows beyond the buffer space take extra
 * dispatch rounds. */
static void against_one_rank(void **state)
{
    (void)state;
    static const char *const layouts[] = {
        NODE "parallel.ranks=8 parallel.ep=8 parallel.nodes=2 ",
        NODE "parallel.ranks=8 parallel.ep=8 parallel.nodes=4 parallel.overlap=false ",
        NODE "parallel.ranks=8 parallel.ep=8 parallel.nodes=8 train.recompute=full ",
        NODE "parallel.ranks=8 parallel.ep=4 parallel.nodes=4 train.recompute=selective parallel.zero=1 ",
        NODE "parallel.ranks=8 parallel.tp=2 parallel.ep=4 parallel.etp=2 parallel.nodes=4 parallel.zero=3 ",
        NODE "parallel.ranks=8 parallel.ep=4 parallel.etp=2 parallel.nodes=2 parallel.split_backward=true ",
        NODE "parallel.ranks=8 parallel.pp=2 parallel.ep=4 parallel.nodes=4 parallel.zero=1 parallel.schedule=zb_h1 ",
        NODE "parallel.ranks=8 parallel.cp=2 parallel.tp=2 parallel.ep=8 parallel.nodes=2 parallel.zero=2 ",
        NODE "parallel.ranks=8 parallel.ep=8 parallel.nodes=2 parallel.expert_rows=0.3 ",
        NODE "parallel.ranks=4 parallel.ep=4 parallel.nodes=4 parallel.expert_rows=0.4 parallel.split_backward=true ",
        NODE "parallel.ranks=8 parallel.tp=2 parallel.ep=4 parallel.etp=2 parallel.nodes=2 parallel.expert_rows=0.15 train.recompute=full ",
        NODE "parallel.ranks=8 parallel.ep=4 parallel.nodes=2 ", /* inside a node: flat */
    };
    outcome_compare_all(RUN MIXTRAL, (qd_random_tokens){.seed = 6, .documents = 3}, layouts, COUNT(layouts));
    outcome_compare_all(RUN DEEPSEEK, (qd_random_tokens){.seed = 7}, layouts, COUNT(layouts));
}

/* Runs on one mesh are bit-identical, whatever else is chosen. */
static void same_bits(void **state)
{
    (void)state;
    static const char *const variants[] = {
        "parallel.zero=3 ",
        "parallel.zero=2 parallel.overlap=false train.grad_sync=per_step ",
        "parallel.zero=1 train.recompute=full ",
        "parallel.split_backward=true train.recompute=selective ",
        "parallel.ranks=8 parallel.nodes=4 parallel.pp=2 ",
        "parallel.ranks=8 parallel.nodes=4 parallel.pp=2 parallel.schedule=zb_v parallel.zero=1 ",
    };
    static const char *const rooms[] = {"", "parallel.expert_rows=0.3 "};
    for (size_t i = 0; i < COUNT(rooms); i++) {
        char base[1024];
        snprintf(base, sizeof base,
                 RUN DEEPSEEK NODE "train.grad_sync=per_step train.micro_batch=1 parallel.ranks=4 parallel.nodes=2 parallel.ep=4 %s",
                 rooms[i]);
        TRAINED_COMPARE(base, variants, 3, 2, .seed = 9);
    }
}

static void favour_one(qd_team *team)
{
    outcome_favour(team, (const int[]){5}, 1);
}

/* One expert gets all rows, the ranks of the others none: no additional memory, which outcome_run
 * compares with the plan. */
static void one_expert_has_all(void **state)
{
    (void)state;
    static const char *const layouts[] = {
        NODE "parallel.ranks=8 parallel.ep=8 parallel.nodes=2 ",
        NODE "parallel.ranks=8 parallel.ep=8 parallel.nodes=4 parallel.expert_rows=1 parallel.overlap=false ",
        NODE "parallel.ranks=8 parallel.ep=4 parallel.etp=2 parallel.nodes=2 parallel.expert_rows=0.2 parallel.split_backward=true ",
        NODE "parallel.ranks=4 parallel.ep=4 parallel.nodes=4 parallel.expert_rows=0.7 train.recompute=full ",
    };
    outcome_prepare = favour_one;
    outcome_compare_all(RUN DEEPSEEK "model.experts_per_token=1 model.router_groups=1 model.router_top_groups=1 ",
                        (qd_random_tokens){.seed = 8}, layouts, COUNT(layouts));
    /* Two nodes of two ranks: the node of expert 5 relays all 4 · 2 · 17 rows, 68 on each rank, to
     * one rank with buffer space for 34; each relay has space for 34: three extra rounds, in which
     * rows go there and back, and in the backward pass twice, on two ranks and in two blocks. */
    outcome r = outcome_run(RUN DEEPSEEK NODE "model.experts_per_token=1 model.router_groups=1 model.router_top_groups=1 parallel.ranks=4 "
                            "parallel.ep=4 parallel.nodes=2 parallel.expert_rows=1 ", (qd_random_tokens){.seed = 8});
    assert_int_equal(r.rounds, OUTCOME_STEPS * 3 * (2 + 4) * 2 * 2);
    outcome_free(&r);
    outcome_prepare = NULL;
}

/* Experts with a capacity limit drop the same rows as with flat dispatch. */
static void capacity(void **state)
{
    (void)state;
    static const char base[] = RUN MIXTRAL "model.expert_capacity=0.8 model.drop=least parallel.ranks=8 parallel.ep=8 parallel.nodes=4 ";
    qd_random_tokens random = {.seed = 5};
    char words[1024];
    qd_config config = layout_config(base);
    qd_arena *arena;
    qd_program *program;
    trained_ok(qd_arena_create(&arena));
    trained_ok(qd_config_build(&config, 0, arena, &program));
    outcome flat = outcome_run(base, random);
    snprintf(words, sizeof words, "%s" NODE, base);
    outcome node = outcome_run(words, random);
    outcome_compare(words, program->ledger, &node, &flat);
    outcome_free(&flat);
    outcome_free(&node);
    qd_arena_destroy(arena);
}

typedef struct crossing {
    int64_t crossed, flat; /* as the dispatch counts them */
    int64_t backend;       /* between ranks of groups that span nodes, as the backend counts them */
} crossing;

static qd_status count(qd_trainer *trainer, qd_comm *world, void *argument)
{
    const qd_program *p = qd_trainer_program(trainer);
    qd_group across = qd_nodes_group(&p->ledger->mesh);
    qd_dispatched d = qd_trainer_dispatched(trainer);
    int64_t mine[3] = {d.crossed, d.flat, 0}, sum[3];
    for (int g = 0; g < p->group_count; g++) {
        qd_comm_stats stats = qd_comm_stats_default();
        qd_comm_get_stats(qd_trainer_bound(trainer)->groups[g], &stats);
        if (qd_group_equal(p->groups[g], across))
            mine[2] += stats.bytes[QD_COLL_ALL_TO_ALL];
    }
    QD_TRY(qd_comm_all_reduce(world, mine, sum, 3, QD_I64, QD_SUM, NULL));
    if (qd_comm_rank(world) == 0)
        *(crossing *)argument = (crossing){sum[0], sum[1], sum[2]};
    return QD_OK;
}

/* One step. experts: the ones that all tokens choose; count 0: any. */
static crossing cross(const char *words, const int *experts, int experts_count)
{
    qd_config config = layout_config(words);
    qd_random_tokens random = {.seed = 3, .vocab = config.model.vocab};
    qd_batch_source source = qd_random_source(&random);
    qd_team *team;
    qd_step_output out;
    crossing result;
    trained_ok(qd_team_create(&config, &source, &team));
    if (experts_count > 0)
        outcome_favour(team, experts, experts_count);
    trained_ok(qd_team_step(team, &out));
    trained_ok(qd_team_call(team, count, &result));
    qd_team_destroy(team);
    return result;
}

/* The bytes of a step with known choices: rows of each rank with their metadata, there and back,
 * forward and backward, in two blocks. Full recompute sends rows there again; flat dispatch also
 * brings them back again. */
static crossing by_hand(const qd_mesh *mesh, const int *experts, int k, int64_t rows, int64_t row_bytes, bool recompute)
{
    int64_t copy_bytes = (4 + recompute) * row_bytes + 8 * k * (1 + recompute) + 4 * k;
    int nodes = mesh->nodes, size = mesh->world / nodes, ranks = qd_expert_ranks(mesh), spanned = ranks / size, each = 16 / spanned;
    crossing c = {0};
    for (int rank = 0; rank < mesh->world; rank++) {
        bool to[8] = {false};
        int own = rank % ranks / size, copies = 0, far = 0;
        for (int j = 0; j < k; j++) {
            far += experts[j] / each != own;
            to[experts[j] / each] = true;
        }
        for (int b = 0; b < spanned; b++)
            copies += to[b] && b != own;
        c.crossed += 2 * rows * copies * copy_bytes;
        c.flat += 2 * rows * far * mesh->etp * (4 + 2 * recompute) * row_bytes;
    }
    return c;
}

static void bytes(void **state)
{
    (void)state;
    static const char *const layouts[] = {
        "parallel.ranks=8 parallel.ep=8 parallel.nodes=2 ",
        "parallel.ranks=8 parallel.ep=8 parallel.nodes=4 ",
        "parallel.ranks=8 parallel.ep=4 parallel.nodes=4 train.recompute=full ",
        "parallel.ranks=8 parallel.ep=4 parallel.nodes=8 parallel.overlap=false ",
        "parallel.ranks=8 parallel.tp=2 parallel.ep=4 parallel.etp=2 parallel.nodes=4 ",
        "parallel.ranks=8 parallel.tp=2 parallel.ep=2 parallel.etp=2 parallel.nodes=4 ",
    };
    static const int favoured[][3] = {{0, 1, 2}, {4, 5, 15}, {2, 7, 12}};
    for (size_t i = 0; i < COUNT(layouts); i++) {
        for (size_t f = 0; f <= COUNT(favoured); f++) {
            char words[1024];
            bool known = f < COUNT(favoured), recompute = strstr(layouts[i], "recompute") != NULL;
            const int *experts = known ? favoured[f] : NULL;
            if (!sample_has(i, f, 3))
                continue;
            snprintf(words, sizeof words,
                     RUN DEEPSEEK "model.router_groups=1 model.router_top_groups=1 data.seq=16 %sparallel.expert_rows=8 ", layouts[i]);
            crossing flat = cross(words, experts, known ? 3 : 0);
            strcat(words, NODE);
            crossing node = cross(words, experts, known ? 3 : 0);
            qd_config config = layout_config(words);
            qd_arena *arena;
            qd_program *program;
            trained_ok(qd_arena_create(&arena));
            trained_ok(qd_config_build(&config, 0, arena, &program));
            const qd_mesh *mesh = &program->ledger->mesh;
            assert_int_equal(node.crossed, node.backend);
            assert_int_equal(flat.crossed, flat.flat);
            assert_int_equal(node.flat, flat.crossed);
            if (known) {
                crossing hand = by_hand(mesh, experts, 3, 8 * 16 / mesh->world, 32 * 4, recompute);
                assert_int_equal(node.crossed, hand.crossed);
                assert_int_equal(flat.crossed, hand.flat);
                printf("%s: experts %d, %d, %d: %.2f times less across nodes\n", layouts[i], experts[0], experts[1], experts[2],
                       (double)flat.crossed / (double)node.crossed);
            } else {
                /* Each copy has the same bytes; at least one of a row's choices is on its node, at
                 * most all. */
                int64_t copy = (4 + recompute) * 32 * 4 + (12 + 8 * recompute) * 3,
                        far = flat.crossed / (mesh->etp * (4 + 2 * recompute) * 32 * 4);
                assert_int_equal(node.crossed % copy, 0);
                assert_in_range(node.crossed / copy, (far + 2) / 3, far);
                qd_across expected = qd_nodes_across(program);
                printf("%s: %.2f times less across nodes, %.2f expected\n", layouts[i], (double)flat.crossed / (double)node.crossed,
                       (double)expected.flat / (double)expected.by_node);
                /* 128 rows of random tokens are near the mean. */
                assert_float_equal((double)flat.crossed / (double)expected.flat, 1.0, 0.25);
                assert_float_equal((double)node.crossed / (double)expected.by_node, 1.0, 0.25);
            }
            qd_arena_destroy(arena);
        }
    }
}

/* The expected number of nodes per row, compared with counting all choices. */
static void expectation(void **state)
{
    (void)state;
    static const qd_moe models[] = {
        {.experts = 8, .per_token = 2, .groups = 1, .top_groups = 1},  {.experts = 8, .per_token = 3, .groups = 4, .top_groups = 2},
        {.experts = 12, .per_token = 4, .groups = 2, .top_groups = 1}, {.experts = 12, .per_token = 3, .groups = 6, .top_groups = 3},
    };
    static const int nodes[] = {1, 2, 4};
    for (size_t m = 0; m < COUNT(models); m++) {
        for (size_t i = 0; i < COUNT(nodes); i++) {
            const qd_moe *e = &models[m];
            int size = e->experts / e->groups, each = e->experts / nodes[i];
            double sum = 0.0, weight = 0.0;
            if (e->groups % nodes[i] != 0 && nodes[i] % e->groups != 0)
                continue;
            /* Every pair of a set of open groups and a set of choices in them is equally likely. */
            for (unsigned open = 0; open < 1u << e->groups; open++) {
                for (unsigned chosen = 0; __builtin_popcount(open) == e->top_groups && chosen < 1u << e->experts; chosen++) {
                    unsigned hit = 0;
                    bool fits = __builtin_popcount(chosen) == e->per_token;
                    for (int x = 0; x < e->experts && fits; x++) {
                        if (!(chosen >> x & 1))
                            continue;
                        fits = open >> x / size & 1;
                        hit |= 1u << x / each;
                    }
                    sum += fits ? __builtin_popcount(hit) : 0;
                    weight += fits;
                }
            }
            assert_float_equal(qd_nodes_expected(e, nodes[i]), sum / weight, 1e-6);
        }
    }
}

static void refuse(const char *words, const char *message)
{
    qd_config config = layout_config(words);
    qd_arena *arena;
    qd_program *program;
    trained_ok(qd_arena_create(&arena));
    assert_int_not_equal(qd_config_build(&config, 0, arena, &program), QD_OK);
    if (!strstr(qd_error_message(), message))
        fail_msg("%s: \"%s\" does not say \"%s\"", words, qd_error_message(), message);
    qd_arena_destroy(arena);
}

static void refusals(void **state)
{
    (void)state;
    refuse(MIXTRAL "train.global_batch=8 parallel.ranks=8 parallel.nodes=3 ", "parallel.nodes is 3, which does not divide the 8 ranks");
    refuse("train.global_batch=8 parallel.ranks=8 parallel.nodes=2 " NODE, "the model has no experts");
    refuse(MIXTRAL "train.global_batch=12 parallel.ranks=12 parallel.ep=4 parallel.nodes=2 " NODE, "do not divide one another");
    refuse(MIXTRAL "train.global_batch=8 parallel.ranks=8 parallel.ep=2 parallel.etp=4 parallel.nodes=4 " NODE,
           "would share an expert across nodes");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(expectation),  cmocka_unit_test(refusals),           cmocka_unit_test(bytes),
        cmocka_unit_test(capacity),     cmocka_unit_test(one_expert_has_all), cmocka_unit_test(same_bits),
        cmocka_unit_test(against_one_rank),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
