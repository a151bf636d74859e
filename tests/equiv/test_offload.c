/* Optimizer state in host memory: bit-identical to state on the device, planned memory on both
 * sides, checkpoints in both directions.
 * ctest: timeout 600 */
#include "support/sample.h"
#include "support/scratch.h"
#include "support/trained.h"
#include "spec/config/fit.h"
#include "spec/program/offload.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#define LLAMA "model.layers=2 model.hidden=48 model.heads=4 model.kv_heads=2 model.vocab=101 data.seq=16 "
#define GPT2 "model.arch=gpt2 model.layers=2 model.hidden=32 model.heads=4 model.vocab=67 data.seq=17 "
#define RUN "train.lr=1e-3 train.schedule=constant train.steps=50 run.threads=1 train.clip=0.5 "
#define OFFLOAD "train.offload=optimizer train.offload_chunk_mb=0.02 "

#define COMPARE(base, variants, steps, ...) TRAINED_COMPARE(base, variants, steps, 3, __VA_ARGS__)

/* Compared with plain data parallelism with the state on the device. Small chunks cut tensors
 * anywhere; large ones hold a module. */
static const char *const stages[] = {
    OFFLOAD,
    OFFLOAD "parallel.zero=1",
    OFFLOAD "parallel.zero=2",
    OFFLOAD "parallel.zero=3",
    OFFLOAD "parallel.zero=0 parallel.overlap=false",
    OFFLOAD "parallel.zero=2 parallel.bucket_mb=0.001 train.offload_chunk_mb=0.0011",
    "train.offload=optimizer parallel.zero=1",
    "train.offload=optimizer parallel.zero=3 parallel.overlap=false train.recompute=full",
};

static void stages_give_the_same_bits(void **state)
{
    (void)state;
    COMPARE(LLAMA RUN "parallel.ranks=2 train.global_batch=4 ", stages, 8, .seed = 1);
    COMPARE(GPT2 RUN "parallel.ranks=2 train.global_batch=4 train.precision=bf16 model.dropout=0.1 ", stages, 8, .seed = 2);
    COMPARE(GPT2 RUN "parallel.ranks=3 train.global_batch=6 train.precision=bf16 train.grad_dtype=fp32 ", stages, 4, .seed = 3);
    COMPARE(LLAMA RUN "parallel.ranks=1 train.global_batch=2 train.precision=bf16 model.tied=true ", stages, 4, .seed = 4);
}

static void accumulation_gives_the_same_bits(void **state)
{
    (void)state;
    COMPARE(LLAMA RUN "parallel.ranks=2 train.global_batch=8 train.micro_batch=2 train.grad_sync=per_step train.precision=bf16 ", stages, 5,
            .seed = 5);
    COMPARE(GPT2 RUN "parallel.ranks=2 train.global_batch=8 train.micro_batch=1 train.grad_sync=per_microbatch ", stages, 5, .seed = 6);
}

/* Other optimizers keep other state: momentum; master weights only; Muon's momentum of matrices and
 * the moments of the rest. */
static void optimizers_give_the_same_bits(void **state)
{
    (void)state;
    COMPARE(LLAMA RUN "parallel.ranks=2 train.global_batch=4 train.optimizer=sgd train.momentum=0.9 ", stages, 5, .seed = 7);
    COMPARE(LLAMA RUN "parallel.ranks=2 train.global_batch=4 train.optimizer=sgd train.precision=bf16 ", stages, 5, .seed = 8);
    COMPARE(LLAMA RUN "parallel.ranks=2 train.global_batch=4 train.optimizer=muon ", stages, 5, .seed = 9);
    COMPARE(GPT2 RUN "parallel.ranks=2 train.global_batch=4 train.optimizer=muon train.precision=bf16 ", stages, 5, .seed = 10);
}

/* With the other axes; router biases are parameters with their own update rule. */
static void axes_give_the_same_bits(void **state)
{
    (void)state;
    static const char *const plain[] = {OFFLOAD, OFFLOAD "parallel.zero=1", OFFLOAD "parallel.zero=2 parallel.overlap=false"};
    COMPARE(LLAMA RUN "parallel.ranks=4 parallel.pp=2 train.global_batch=8 train.micro_batch=2 train.grad_sync=per_step "
                      "train.precision=bf16 model.tied=true ",
            plain, 4, .seed = 11);
    COMPARE(LLAMA RUN "parallel.ranks=4 parallel.tp=2 train.global_batch=4 train.precision=bf16 ", plain, 4, .seed = 12);
    COMPARE(LLAMA RUN "parallel.ranks=4 parallel.tp=2 train.global_batch=4 train.optimizer=muon train.precision=bf16 ", plain, 4,
            .seed = 13);
    COMPARE(LLAMA RUN
            "parallel.ranks=2 parallel.ep=2 train.global_batch=4 model.experts=4 model.router=sigmoid model.router_bias_rate=0.01 "
            "train.precision=bf16 train.grad_dtype=fp32 ",
            plain, 4, .seed = 14);
}

typedef struct taken {
    int64_t device, host, state; /* state: the size of the optimizer's buffers, in either memory */
} taken;

static qd_status look(qd_trainer *trainer, qd_comm *world, void *argument)
{
    const qd_program *p = qd_trainer_program(trainer);
    taken mine = {qd_trainer_allocated(trainer), qd_trainer_allocated_host(trainer), 0};
    qd_memory_report memory;
    QD_TRY(qd_memory_account(p, &memory));
    for (int kind = QD_BUFFER_MASTER; kind <= QD_BUFFER_MOMENT2; kind++)
        mine.state += p->persistent[kind] >= 0 ? p->buffers[p->persistent[kind]].bytes : 0;
    if (mine.device != p->persistent_bytes + p->dynamic_bytes || mine.device != memory.total)
        return QD_FAIL(QD_DIFFERENT, "planned %lld bytes, allocated %lld", (long long)memory.total, (long long)mine.device);
    if (mine.host != p->host_bytes || mine.host != memory.host_total)
        return QD_FAIL(QD_DIFFERENT, "planned %lld bytes of host memory, allocated %lld", (long long)memory.host_total,
                       (long long)mine.host);
    if (qd_comm_rank(world) == 0)
        *(taken *)argument = mine;
    return QD_OK;
}

static taken measure(const char *words)
{
    qd_random_tokens random = {.seed = 1};
    qd_team *team = trained_team(words, &random);
    taken before, after;
    qd_step_output out;
    trained_ok(qd_team_call(team, look, &before));
    trained_ok(qd_team_step(team, &out));
    trained_ok(qd_team_call(team, look, &after));
    assert_memory_equal(&before, &after, sizeof after);
    qd_team_destroy(team);
    return after;
}

/* The device holds everything but the state, plus at most three chunks; here the chunks fit into
 * memory that activations have left. */
static void memory_is_as_planned(void **state)
{
    (void)state;
    static const char *const layouts[] = {
        "parallel.ranks=1 ", "parallel.ranks=2 ", "parallel.ranks=2 parallel.zero=1 ", "parallel.ranks=4 parallel.zero=2 ",
        "parallel.ranks=4 parallel.zero=3 ", "parallel.ranks=2 parallel.zero=1 train.optimizer=muon ",
        "parallel.ranks=2 train.optimizer=sgd train.momentum=0.9 ",
    };
    for (size_t l = 0; l < sizeof layouts / sizeof *layouts; l++) {
        for (int half = 0; half < 2; half++) {
            char plain[512], offloaded[640];
            snprintf(plain, sizeof plain, LLAMA RUN "train.global_batch=16 %s%s", layouts[l], half ? "train.precision=bf16 " : "");
            snprintf(offloaded, sizeof offloaded, "%s" OFFLOAD, plain);
            taken without = measure(plain), with = measure(offloaded);
            assert_int_equal(without.host, 0);
            assert_int_equal(with.host, without.state);
            if (with.device != without.device - without.state)
                fail_msg("%s: %lld bytes on the device, %lld without the state", offloaded, (long long)with.device,
                         (long long)(without.device - without.state));
        }
    }
}

/* All of the state passes through the device exactly once, without gaps. */
static void chunks_cover_the_state(void **state)
{
    (void)state;
    static const char *const layouts[] = {"parallel.ranks=1 ", "parallel.ranks=3 parallel.zero=2 ",
                                          "parallel.ranks=2 train.optimizer=muon "};
    for (size_t l = 0; l < sizeof layouts / sizeof *layouts; l++) {
        char words[512];
        snprintf(words, sizeof words, LLAMA RUN OFFLOAD "train.global_batch=6 train.precision=bf16 %s", layouts[l]);
        qd_arena *arena;
        qd_program *p = trained_program(words, &arena);
        int64_t held = 0, fetched = 0;
        for (int kind = QD_BUFFER_MASTER; kind <= QD_BUFFER_MOMENT2; kind++) {
            int buffer = p->persistent[kind];
            int8_t *in = calloc((size_t)p->buffers[buffer].bytes / 4, 1), *out = calloc((size_t)p->buffers[buffer].bytes / 4, 1);
            for (int i = 0; i < p->action_count; i++) {
                const qd_action *a = &p->actions[i];
                qd_section sections[QD_STATE_KINDS];
                int count = qd_action_copies(a) ? qd_offload_sections(p, a, sections) : 0;
                for (int s = 0; s < count && kind == QD_BUFFER_MASTER && a->kind == QD_ACTION_FETCH; s++)
                    fetched += sections[s].count;
                for (int s = 0; s < count; s++) {
                    assert_true((sections[s].chunk + sections[s].count) * 4 <= p->buffers[a->chunk].bytes);
                    for (int64_t k = 0; k < sections[s].count && sections[s].kind == (qd_buffer_kind)kind; k++)
                        (a->kind == QD_ACTION_FETCH ? in : out)[sections[s].host + k]++;
                }
            }
            for (int param = 0; param < p->ledger->param_count; param++) {
                qd_holding h = qd_program_holding(p, (qd_buffer_kind)kind, param);
                for (int64_t k = h.offset; k < h.offset + h.count && p->ledger->params[param].tied_to < 0; k++, held++)
                    if (in[k] != 1 || out[k] != 1)
                        fail_msg("%s: element %lld of %s of %s is fetched %d times and stored %d times", words, (long long)(k - h.offset),
                                 qd_buffer_kind_name((qd_buffer_kind)kind), p->ledger->params[param].name, in[k], out[k]);
            }
            free(in);
            free(out);
        }
        assert_true(fetched >= held && fetched <= held + held / 40); /* and little padding between tensors */
        qd_arena_destroy(arena);
    }
}

enum { EACH = 3, PARTS = 3, STEPS = EACH * PARTS };

/* A run that changes sides twice is bit-identical to one that never does. */
static void resume_changes_sides(void **state)
{
    static const char *const bases[] = {"parallel.ranks=2 train.precision=bf16 ", "parallel.ranks=2 parallel.zero=1 ",
                                        "parallel.ranks=2 parallel.zero=3 train.precision=bf16 ", "parallel.ranks=2 train.optimizer=muon "};
    static const char *const sides[][PARTS] = {{"", "", ""}, {OFFLOAD, "", OFFLOAD}, {"", OFFLOAD, ""}};
    for (size_t b = 0; b < sizeof bases / sizeof *bases; b++) {
        char words[400];
        double losses[3][STEPS];
        snprintf(words, sizeof words, GPT2 RUN "train.global_batch=4 %s", bases[b]);
        for (size_t k = 0; k < sizeof sides / sizeof *sides; k++) {
            trained_onward(words, sides[k], PARTS, EACH, (qd_random_tokens){.seed = 11}, losses[k]);
            assert_int_equal(scratch_teardown(state) | scratch_setup(state), 0); /* the next one starts without checkpoints */
            for (int s = 0; s < STEPS; s++)
                if (losses[k][s] != losses[0][s])
                    fail_msg("%s: step %d: %.17g on one side, %.17g after a change", words, s + 1, losses[0][s], losses[k][s]);
        }
    }
}

/* A skipped step leaves the state unchanged, with or without chunks. */
static void skipped_steps_touch_nothing(void **state)
{
    (void)state;
    float bad[48], *before, *after, good[48];
    qd_random_tokens random = {.seed = 11};
    qd_step_output out;
    int64_t count;
    qd_team *team = trained_team(
        LLAMA RUN OFFLOAD "train.global_batch=4 parallel.ranks=2 parallel.zero=1 train.precision=bf16 train.on_nonfinite=skip", &random);
    trained_ok(qd_team_step(team, &out));
    trained_ok(qd_team_read(team, "block.1.mlp_norm.weight", QD_TENSOR_VALUE, good, 48));
    for (int i = 0; i < 48; i++)
        bad[i] = i == 7 ? NAN : 1.0f;
    static const qd_tensor_kind kinds[] = {QD_TENSOR_MOMENT1, QD_TENSOR_MOMENT2};
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        trained_read(team, kinds[k], &before, &count);
        trained_ok(qd_team_write(team, "block.1.mlp_norm.weight", bad, 48));
        trained_ok(qd_team_step(team, &out));
        assert_true(out.skipped);
        trained_read(team, kinds[k], &after, &count);
        assert_memory_equal(before, after, (size_t)count * sizeof *after);
        free(before);
        free(after);
        trained_ok(qd_team_write(team, "block.1.mlp_norm.weight", good, 48));
    }
    trained_ok(qd_team_step(team, &out));
    assert_false(out.skipped);
    qd_team_destroy(team);
}

static bool copies(const qd_action *a)
{
    return qd_action_copies(a) || a->kind == QD_ACTION_UPDATE;
}

/* Every copy and every update of a chunk matters. */
static void actions_matter(void **state)
{
    (void)state;
    static const char *const layouts[] = {"parallel.ranks=2 parallel.zero=1 train.precision=bf16 ",
                                          "parallel.ranks=1 train.optimizer=muon "};
    int tried = 0;
    size_t met = 0;
    for (size_t l = 0; l < sizeof layouts / sizeof *layouts; l++) {
        char words[640];
        snprintf(words, sizeof words, GPT2 RUN "train.offload=optimizer train.offload_chunk_mb=0.08 train.global_batch=2 %s", layouts[l]);
        trained_actions_matter(words, 3, copies, 5, &met, &tried);
    }
    assert_true(met > 20 && tried >= sample_count((int)met, (int)met / 10));
}

/* A chunk that is freed, or filled again, while a copy of it is in flight is refused. */
static void copies_are_waited_for(void **state)
{
    (void)state;
    qd_arena *arena;
    qd_program *p = trained_program(LLAMA RUN OFFLOAD "train.global_batch=4 parallel.ranks=1", &arena);
    int refused = 0;
    for (int i = 0; i < p->action_count; i++) {
        qd_action *a = &p->actions[i];
        int deps = a->dep_count;
        if (a->kind != QD_ACTION_FREE || p->buffers[a->buffer].kind != QD_BUFFER_CHUNK)
            continue;
        a->dep_count = 0;
        assert_int_equal(qd_memory_plan(p), QD_USAGE);
        assert_non_null(strstr(qd_error_message(), "is in flight"));
        a->dep_count = deps;
        refused++;
    }
    assert_int_equal(refused, 3);
    trained_ok(qd_memory_plan(p));
    qd_arena_destroy(arena);
}

static void nothing_to_offload_is_refused(void **state)
{
    (void)state;
    qd_config config = layout_config(LLAMA RUN "train.offload=optimizer train.optimizer=sgd");
    qd_arena *arena;
    qd_program *p;
    trained_ok(qd_arena_create(&arena));
    assert_int_equal(qd_config_build(&config, 0, arena, &p), QD_USAGE);
    assert_non_null(strstr(qd_error_message(), "train.offload=optimizer: train.optimizer=sgd without train.momentum keeps no state"));
    qd_arena_destroy(arena);
}

/* If only offload would make a run fit, the message suggests it. */
static void advice_names_it(void **state)
{
    (void)state;
    qd_config config = layout_config(LLAMA RUN "train.global_batch=1 train.precision=bf16 train.recompute=full train.swiglu=again"),
              offloaded = config;
    offloaded.strategy.offload = true;
    qd_strbuf text = {0};
    trained_bytes bytes = trained_needs(&offloaded);
    trained_ok(qd_fit_explain(&config, 0, bytes.persistent + bytes.dynamic, false, &text));
    if (!strstr(text.data, " train.offload=optimizer needs"))
        fail_msg("%s", text.data);
    assert_non_null(strstr(text.data, "GiB of host memory"));
    qd_strbuf_free(&text);
    trained_ok(qd_fit_explain(&offloaded, 0, bytes.persistent, false, &text));
    assert_null(strstr(text.data, "train.offload=optimizer needs"));
    qd_strbuf_free(&text);
}

/* An argument picks tests by name, with * for any letters. */
int main(int argc, char **argv)
{
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stages_give_the_same_bits),     cmocka_unit_test(accumulation_gives_the_same_bits),
        cmocka_unit_test(optimizers_give_the_same_bits), cmocka_unit_test(axes_give_the_same_bits),
        cmocka_unit_test(memory_is_as_planned),          cmocka_unit_test(chunks_cover_the_state),
        cmocka_unit_test_setup_teardown(resume_changes_sides, scratch_setup, scratch_teardown),
        cmocka_unit_test(skipped_steps_touch_nothing),
        cmocka_unit_test(actions_matter),
        cmocka_unit_test(copies_are_waited_for),
        cmocka_unit_test(nothing_to_offload_is_refused),
        cmocka_unit_test(advice_names_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
