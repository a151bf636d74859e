/* The ledger, the step program, its memory plan and its checker. */
#include "spec/passes/passes.h"
#include "support/layout.h"

#include <quadrille/check.h>

#include <math.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"

#define SMALL "model.layers=3 model.hidden=32 model.heads=4 model.kv_heads=2 model.vocab=97 data.seq=16 train.global_batch=8 "

static qd_program *build(const char *words, qd_arena **arena)
{
    qd_config config = layout_config(words);
    qd_program *program;
    ok(qd_arena_create(arena));
    ok(qd_config_build(&config, 0, *arena, &program));
    return program;
}

static void refused(const char *words, const char *expected)
{
    qd_options *options = layout_options(words);
    qd_config config;
    qd_arena *arena;
    qd_program *program;
    ok(qd_arena_create(&arena));
    qd_status status = qd_config_resolve(options, 0, &config);
    if (status == QD_OK)
        status = qd_config_build(&config, 0, arena, &program);
    assert_true(status == QD_USAGE || status == QD_UNSUPPORTED);
    if (!strstr(qd_error_message(), expected))
        fail_msg("'%s' gave: %s", words, qd_error_message());
    qd_arena_destroy(arena);
    qd_options_destroy(options);
}

/* Stages are balanced by cost per token: a token uses four of 64 experts, which cost less than the
 * dense MLPs of the first blocks. */
static void stages_count_the_experts_a_token_meets(void **state)
{
    (void)state;
    qd_arena *arena;
    const qd_program *p = build("model.layers=8 model.hidden=64 model.heads=4 model.vocab=97 data.seq=16 model.ffn=512 model.first_dense=4 "
                                "model.experts=64 model.experts_per_token=4 model.expert_ffn=32 parallel.ranks=2 parallel.pp=2 ", &arena);
    int dense = 0, experts = 0; /* on the first stage */
    for (int i = 0; i < p->ledger->module_count; i++) {
        const qd_module *m = &p->ledger->modules[i];
        dense += m->stage == 0 && m->layer >= 0 && m->layer < 4;
        experts += m->stage == 0 && m->layer >= 4;
    }
    assert_int_equal(dense, 3); /* 3 x 115 k of 647 k elements; with all experts counted it would be all four and more */
    assert_int_equal(experts, 0);
    qd_arena_destroy(arena);
}

/* The first two of eight blocks attend to all of 4096 positions, which takes 229 k FLOPs per token,
 * and cost 251 k; the others have windows of 64, which take 7 k, and cost 29 k. */
static void stages_count_the_keys_in_windows(void **state)
{
    (void)state;
    qd_arena *arena;
    const qd_program *p = build("model.layers=8 model.hidden=16 model.heads=2 model.head_dim=4 model.vocab=97 data.seq=4096 "
                                "model.window=64 model.window_from=2 parallel.ranks=2 parallel.pp=2 train.global_batch=2 ", &arena);
    int blocks = 0;
    for (int i = 0; i < p->ledger->module_count; i++)
        blocks += p->ledger->modules[i].stage == 0 && p->ledger->modules[i].layer >= 0;
    assert_int_equal(blocks, 1); /* without windows four */
    qd_arena_destroy(arena);
}

/* FLOPs of the model and of the program, by formula: a token attends to W of T positions, fewer at
 * the beginning. Matrices count 6 per element, attention 12 per key and column in the model (twice
 * the causal half) and 14 in the program, which recomputes scores. */
static void flops_follow_the_windows(void **state)
{
    (void)state;
    enum { T = 128, W = 16, D = 32, LAYERS = 6, WINDOWS = 3 };
    qd_arena *arena;
    const qd_program *p = build("model.layers=6 model.hidden=32 model.heads=4 model.ffn=48 model.vocab=97 data.seq=128 model.window=16 "
                                "model.window_from=1 model.full_every=3 train.global_batch=2 train.micro_batch=2 ", &arena);
    double keys = 0.0, matrices = 6.0 * (LAYERS * (4.0 * D * D + 3.0 * D * 48) + 97.0 * D);
    for (int t = 0; t < T; t++)
        keys += WINDOWS * (t < W ? t + 0.5 : W) + (LAYERS - WINDOWS) * (t + 0.5);
    keys /= T;
    assert_true(qd_model_flops_per_token(&p->ledger->model, T) == matrices + 24.0 * keys * D);
    /* Latent attention: parameters as in transformers, with the biases of experts, and the
     * published 250 GFLOP per token of DeepSeek V3. */
    qd_model v3;
    ok(qd_preset_find("deepseek-v3", &v3));
    assert_int_equal(qd_model_parameters(&v3), 671026404352 + 58 * 256);
    assert_float_equal(qd_model_flops_per_token(&v3, 4096) - qd_model_attention_flops(&v3, 4096) / 2, 250e9, 0.005 * 250e9);
    ok(qd_preset_find("kimi-k2", &v3));
    assert_int_equal(qd_model_parameters(&v3), 1026408209408 + 60 * 384);
    assert_true(qd_model_attention_flops(&p->ledger->model, T) == 24.0 * keys * D);
    assert_true(fabs(qd_program_flops(p) / (2.0 * T) - (matrices + 14.0 * keys * D)) < 1.0);
    qd_arena_destroy(arena);
}

static void bad_layouts_are_refused(void **state)
{
    (void)state;
    refused(SMALL "model.window=4 model.window_from=3", "model.window_from is 3: the model has 3 layers");
    refused(SMALL "model.window=4 model.full_every=1", "model.full_every is 1, so no layer has the window");
    refused(SMALL "model.head_dim=8 model.rope_fraction=0.4", "model.rope_fraction is 0.4, which rotates 3 of the 8 elements");
    refused(SMALL "model.nope_every=1", "model.nope_every is 1");
    refused(SMALL "model.window=4 model.rope_local_base=0.5", "model.rope_local_base is 0.5");
    refused(SMALL "model.arch=gpt2 model.nope_every=2", "for rotary positions, which this model does not have");
    refused(SMALL "parallel.ranks=3", "not a multiple of the data-parallel degree (3)");
    refused(SMALL "parallel.ranks=4 parallel.dp=3", "dp 3 is a layout of 3 ranks, but there are 4");
    refused(SMALL "model.activation=gelu train.swiglu=keep", "the model has no SwiGLU");
    refused(SMALL "parallel.ranks=2 train.micro_batch=3", "train.micro_batch (3) does not divide");
    refused(SMALL "parallel.ranks=16 parallel.cp=16", "needs at least 32 positions");
    refused(SMALL "parallel.ranks=8 parallel.pp=8", "needs at least as many modules, but the model has 5 (3 blocks, embedding and head)");
    refused(SMALL "parallel.ranks=2 parallel.pp=2 parallel.layers=3,1", "must add up to the model's 3 blocks");
    refused(SMALL "parallel.ranks=2 parallel.pp=2 parallel.layers=2", "expected 2 block counts, one per stage");
    refused(SMALL "parallel.ranks=2 parallel.pp=2 parallel.layers=1,1,1", "one number for each of the 2 stages");
    refused(SMALL "parallel.ranks=3 parallel.pp=3 parallel.layers=3,0,0", "stage 1 would hold nothing");
    refused(SMALL "parallel.ranks=2 parallel.pp=2 parallel.virtual_stages=2", "has 1 stage per pipeline rank, not 2");
    refused(SMALL "parallel.ranks=2 parallel.pp=2 parallel.schedule=dualpipe_v train.micro_batch=4", "4 for 2 ranks, but there are 2");
    refused(SMALL "parallel.ranks=2 parallel.pp=2 parallel.schedule_file=/nowhere.csv", "parallel.schedule_file: /nowhere.csv");
    refused(SMALL "parallel.ranks=2 parallel.pp=2 parallel.schedule=1f1b parallel.schedule_file=/nowhere.csv",
            "parallel.schedule (1f1b) and parallel.schedule_file (/nowhere.csv) both");
    refused(SMALL "parallel.ranks=2 parallel.pp=2 parallel.schedule=file parallel.schedule_file=/nowhere.csv",
            "parallel.schedule_file: /nowhere.csv");
    refused(SMALL "parallel.ranks=2 parallel.pp=2 parallel.schedule=file", "parallel.schedule_file is not set");
    refused(SMALL "parallel.ranks=3 parallel.tp=3", "does not divide the model's 4 heads (a head is never cut): take 2 or 4");
    refused(SMALL "model.heads=6 model.kv_heads=3 model.head_dim=8 parallel.ranks=2 parallel.tp=2", "one must divide the other");
    refused(SMALL "model.heads=6 model.kv_heads=3 model.head_dim=8 parallel.ranks=2 parallel.tp=2", "have the same: take 1 or 3");
    refused(SMALL "model.ffn=3 parallel.ranks=4 parallel.tp=4", "more than the model's inner width (3): take 2");
    refused(SMALL "model.experts=4 parallel.ranks=3 parallel.ep=3 train.global_batch=12", "the model's 4 experts: take 2 or 4");
    refused(SMALL "model.experts=4 model.expert_ffn=10 parallel.ranks=4 parallel.etp=4", "inner width (10): take 2 or 5");
    refused(SMALL "parallel.dp=-1 parallel.tp=-1", "both -1");
    refused("model.heads=4 model.kv_heads=3", "multiple of model.kv_heads (3)");
    refused("model.hidden=30 model.heads=4", "set model.head_dim");
    refused("model.preset=llama3-8", "did you mean 'llama3-8b'");
    refused("model.preset=nemotron4-15b", "LayerNorm without bias");
    refused("model.preset=gpt2-124M data.seq=2048", "1024 learned positions");
    refused("train.warmup=200", "longer than train.steps (100): set train.warmup=10");
    refused("run.trace=true", "run.trace needs run.dir");
    refused(SMALL "parallel.ranks=4 parallel.zero=1 parallel.dp_shard=3", "parallel.dp_shard is 3, which does not divide");
    refused(SMALL "model.experts=4 parallel.ranks=8 parallel.ep=4 parallel.zero=1 parallel.dp_shard=2", "cannot hold all experts");
    refused(SMALL "parallel.ranks=4 parallel.zero=3 parallel.reshard_after_forward=3", "does not divide the 4 ranks");
    refused(SMALL "model.experts=4 parallel.ranks=8 parallel.ep=4 parallel.zero=3 parallel.reshard_after_forward=2",
            "cannot hold all experts");
    refused("parallel.reshard_after_forward=maybe", "must be true, false, or a number");
}

/* Tables and objects list ops and actions together, so names must be unique. */
static void rows_have_names_of_their_own(void **state)
{
    (void)state;
    for (int a = 0; a < QD_ACTION_KIND_COUNT; a++)
        for (int o = 0; o < QD_OP_KIND_COUNT; o++)
            assert_string_not_equal(qd_action_row_name((qd_action_kind)a), qd_op_name((qd_op_kind)o));
}

/* Enumerators, roles and names of operands come from one table. */
static void operands_have_names(void **state)
{
    (void)state;
    assert_int_equal(QD_LINEAR_DW_BIAS_GRAD, QD_LINEAR_DW_OPERANDS - 1);
    assert_string_equal(qd_op_roles(QD_OP_LINEAR_DW), "rrgg");
    assert_string_equal(qd_op_operand_name(QD_OP_LINEAR_DW, QD_LINEAR_DW_BIAS_GRAD), "BIAS_GRAD");
    assert_true(qd_op_operand_needed(QD_OP_LINEAR_DW, QD_LINEAR_DW_WEIGHT_GRAD));
    assert_false(qd_op_operand_needed(QD_OP_LINEAR_DW, QD_LINEAR_DW_BIAS_GRAD));
    for (int kind = 0; kind < QD_OP_KIND_COUNT; kind++) {
        int count = (int)strlen(qd_op_roles((qd_op_kind)kind));
        assert_in_range(count, 1, QD_OP_SLOTS);
        for (int i = 0; i < count; i++)
            for (int j = 0; j < i; j++)
                assert_string_not_equal(qd_op_operand_name((qd_op_kind)kind, i), qd_op_operand_name((qd_op_kind)kind, j));
    }
}

/* An op with a missing required operand, or with an operand of another kind, is reported; optional
 * ones may be absent. */
static void ops_without_their_operands_are_refused(void **state)
{
    (void)state;
    qd_class_config config = {.activation = QD_F32};
    qd_class_writer w = {.config = &config};
    ok(qd_arena_create(&w.arena));
    int x = qd_class_f32(&w, "x", 2, 3), y = qd_class_f32(&w, "y", 2, 3), weight = qd_class_f32(&w, "weight", 3, 3);
    const qd_op *op = QD_CLASS_OP(&w, LINEAR, (Y, y), (WEIGHT, weight), (X, x));
    assert_null(w.wrong);
    assert_int_equal(op->slot[QD_LINEAR_X], x);
    assert_int_equal(op->slot[QD_LINEAR_WEIGHT], weight);
    assert_int_equal(op->slot[QD_LINEAR_BIAS], -1);
    assert_int_equal(op->slot[QD_LINEAR_Y], y);
    QD_CLASS_OP(&w, LINEAR, (X, x), (WEIGHT, -1), (Y, y));
    assert_string_equal(w.wrong, "linear lacks its operand WEIGHT");
    w.wrong = NULL;
    qd_class_op(&w, QD_OP_DROPOUT, QD_OPERANDS(ADD, (A, x), (B, y), (Y, y)));
    assert_string_equal(w.wrong, "dropout is given operands of another kind");
    assert_int_equal(w.op_count, 1);
    qd_arena_destroy(w.arena);
}

/* FLOPs per token of sequences of 8,192, one preset of each family: 6 per element of the matrices
 * that a token uses (of experts the chosen ones and the shared one with its gate, and the head),
 * and 12 per column of queries and key: all keys, or twice the mean number that a window contains.
 * Computed by these rules apart from the code. */
static void presets_have_flops_by_formula(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        double flops;
    } cases[] = {{"mistral-7b-v0.1", 52326039552.0}, {"qwen2.5-7b", 52286717952.0},        {"gemma2-2b", 20264779776.0},
                 {"gemma3-1b", 6669336576.0},        {"gemma3-27b", 170981818368.0},       {"olmo-1b", 10281811968.0},
                 {"olmo2-7b", 54207184896.0},        {"olmo3-7b", 51789447168.0},          {"olmoe-1b-7b", 10294394880.0},
                 {"mixtral-8x7b", 89376423936.0},    {"qwen1.5-moe-a2.7b", 19098402816.0}, {"qwen3-30b-a3b", 37577293824.0},
                 {"gpt-oss-20b", 26624507904.0},      {"gpt-oss-120b", 38259081216.0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        qd_model model;
        ok(qd_preset_find(cases[i].name, &model));
        if (fabs(qd_model_flops_per_token(&model, 8192) / cases[i].flops - 1.0) > 1e-12)
            fail_msg("%s: %.0f FLOPs per token instead of %.0f", cases[i].name, qd_model_flops_per_token(&model, 8192), cases[i].flops);
    }
}

static void presets_have_their_published_size(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        int64_t parameters;
        /* The counts of transformers (tools/hf_parameters.py). */
    } cases[] = {{"gpt2-124M", 124439808},       {"llama3-8b", 8030261248},    {"llama3.1-405b", 405853388800},
                 {"mistral-tiny", 803968},       {"qwen2-tiny", 772224},       {"mistral-7b-v0.3", 7248023552},
                 {"qwen2.5-0.5b", 494032768},    {"qwen2.5-1.5b", 1543714304}, {"qwen2.5-7b", 7615616512},
                 {"qwen2.5-72b", 72706203648},   {"mistral-7b-v0.1", 7241732096}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        qd_model model;
        ok(qd_preset_find(cases[i].name, &model));
        assert_int_equal(qd_model_parameters(&model), cases[i].parameters);
    }
    const char *const *names;
    ok(qd_config_presets(true, &names));
    qd_mesh mesh;
    ok(qd_mesh_create(1, (const int[]){1, 1, 1, 1}, &mesh));
    for (; *names; names++) { /* the ledger has exactly the parameters of the formula */
        qd_model model;
        qd_arena *arena;
        qd_ledger *ledger;
        qd_storage storage;
        ok(qd_preset_find(*names, &model));
        if (model.position == QD_POSITION_LEARNED && model.max_seq == 0)
            continue;
        ok(qd_arena_create(&arena));
        ok(qd_ledger_create(&model, NULL, &mesh, arena, &ledger));
        ok(qd_storage_create(ledger, 0, 1, 0, arena, &storage));
        assert_int_equal(storage.held, qd_model_parameters(&model));
        assert_int_equal(qd_ledger_parameters(ledger), qd_model_parameters(&model));
        qd_arena_destroy(arena);
    }
}

/* No two live buffers overlap, all are inside the dynamic area, and the peak is reached. */
static void check_plan(const char *words)
{
    qd_arena *arena;
    qd_program *p = build(words, &arena);
    bool *alive = calloc((size_t)p->buffer_count, sizeof *alive);
    int64_t top = 0;
    for (int i = 0; i < p->action_count; i++) {
        const qd_action *a = &p->actions[i];
        if (a->kind == QD_ACTION_FREE)
            alive[a->buffer] = false;
        if (a->kind != QD_ACTION_ALLOC)
            continue;
        const qd_buffer *b = &p->buffers[a->buffer];
        assert_true(b->offset % 256 == 0 && b->offset >= 0 && b->offset + b->bytes <= p->dynamic_bytes);
        for (int o = 0; o < p->buffer_count; o++) {
            const qd_buffer *other = &p->buffers[o];
            if (alive[o])
                assert_true(b->offset + b->bytes <= other->offset || other->offset + other->bytes <= b->offset);
        }
        alive[a->buffer] = true;
        top = b->offset + b->bytes > top ? b->offset + b->bytes : top;
    }
    assert_true(p->dynamic_bytes - top < 256);
    qd_memory_report report;
    ok(qd_memory_account(p, &report));
    assert_int_equal(report.total, p->persistent_bytes + p->dynamic_bytes);
    assert_true(report.live_peak <= report.total);
    assert_true((double)report.live_peak >= 0.95 * (double)report.total); /* packing loses little */
    free(alive);
    qd_arena_destroy(arena);
}

static void memory_plan_is_sound(void **state)
{
    (void)state;
    check_plan(SMALL);
    check_plan(SMALL "train.micro_batch=2 parallel.split_backward=true");
    check_plan(SMALL "parallel.ranks=4 train.micro_batch=1 model.dropout=0.1");
    check_plan(SMALL "model.arch=gpt2 train.precision=bf16 model.dropout=0.1 parallel.split_backward=true");
    check_plan("model.preset=gpt2-124M data.seq=1024 train.global_batch=8 train.micro_batch=4");
}

static int count_kind(const qd_program *p, qd_action_kind kind)
{
    int count = 0;
    for (int i = 0; i < p->action_count; i++)
        count += p->actions[i].kind == kind;
    return count;
}

/* Buckets cover every gradient once, whatever their size. */
static void buckets_cover_all_gradients(void **state)
{
    (void)state;
    static const char *const sizes[] = {"0.0001", "0.01", "0.1", "1000"};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        char words[256];
        snprintf(words, sizeof words, SMALL "parallel.ranks=2 train.micro_batch=1 parallel.bucket_mb=%s", sizes[s]);
        qd_arena *arena;
        qd_program *p = build(words, &arena);
        int64_t next = p->storage.values;
        for (int i = 0; i < p->action_count; i++) {
            const qd_action *a = &p->actions[i];
            if (a->kind != QD_ACTION_REDUCE || a->buffer != p->persistent[QD_BUFFER_GRAD])
                continue;
            assert_int_equal(a->first + a->count, next);
            next = a->first;
        }
        assert_int_equal(next, 0);
        assert_int_equal(count_kind(p, QD_ACTION_FORWARD), 4 * 5);
        assert_int_equal(qd_program_comm_bytes(p), qd_coll_bytes(QD_COLL_ALL_REDUCE, 2, QD_F64, 2) + 2 * p->storage.values * 4);
        qd_arena_destroy(arena);
    }
}

static void bf16_takes_16_bytes_per_parameter(void **state)
{
    (void)state;
    qd_arena *arena;
    for (int split = 0; split < 2; split++) {
        qd_program *p = build(split ? SMALL "train.precision=bf16 train.master=split" : SMALL "train.precision=bf16", &arena);
        int64_t bytes = 0;
        static const qd_buffer_kind kinds[] = {QD_BUFFER_PARAM, QD_BUFFER_GRAD, QD_BUFFER_MASTER, QD_BUFFER_MOMENT1, QD_BUFFER_MOMENT2};
        for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
            bytes += p->buffers[p->persistent[kinds[i]]].bytes;
        assert_int_equal(bytes, (split ? 14 : 16) * p->storage.values);
        assert_true(qd_update_bytes(&p->strategy) == (split ? 26.0 : 28.0));
        qd_arena_destroy(arena);
    }
}

/* The split master needs low bits to store, and weights that the update can reach. */
static void masters_are_not_split_in_vain(void **state)
{
    (void)state;
    static const char *const cases[][2] = {
        {"", "set train.precision=bf16"},
        {"train.precision=bf16 train.offload=optimizer", "train.offload=optimizer"},
        {"train.precision=bf16 train.optimizer=muon", "train.optimizer adamw and sgd"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char words[256];
        snprintf(words, sizeof words, SMALL "train.master=split %s", cases[i][0]);
        qd_config config = layout_config(words);
        qd_arena *arena;
        qd_program *p;
        ok(qd_arena_create(&arena));
        assert_int_not_equal(qd_config_build(&config, 0, arena, &p), QD_OK);
        assert_non_null(strstr(qd_error_message(), cases[i][1]));
        config.strategy.training = false; /* a reader of the weights does not need the master */
        qd_error_clear();
        ok(qd_config_build(&config, 0, arena, &p));
        qd_arena_destroy(arena);
    }
}

/* Bytes of tensors and state per rank, and the total traffic: the figures of the ZeRO paper (7.5
 * billion parameters on 64 ranks) and the usual formulas. */
static void stages_take_what_the_paper_says(void **state)
{
    (void)state;
    static const double gigabytes[] = {120.0, 31.4, 16.6, 1.9};
    static const char *const theory[] = {"2Ψ(n-1)", "2Ψ(n-1)", "2Ψ(n-1)", "3Ψ(n-1)"};
    for (int zero = 0; zero <= 3; zero++) {
        char words[256];
        snprintf(words, sizeof words, "model.arch=gpt2 model.layers=36 model.hidden=4096 model.heads=32 model.vocab=60000 data.seq=1024 "
                                      "train.global_batch=64 train.precision=bf16 parallel.ranks=64 parallel.zero=%d", zero);
        qd_options *options = layout_options(words);
        qd_check_report report = qd_check_report_default();
        ok(qd_check(options, 0, &report));
        assert_true(fabs((double)report.parameters - 7.5e9) < 0.005e9);
        if (fabs((double)report.state_bytes * 1e-9 - gigabytes[zero]) > 0.05)
            fail_msg("stage %d: %.2f GB", zero, (double)report.state_bytes * 1e-9);
        assert_string_equal(report.theory, theory[zero]);
        assert_int_equal(report.theory_bytes, (zero == 3 ? 3 : 2) * report.parameters * 2 * 63);
        int64_t moved = 0;
        for (int i = 0; i < report.traffic_count; i++)
            moved +=
                strstr(report.traffic[i].name, "parameters") || strstr(report.traffic[i].name, "gradients") ? report.traffic[i].bytes : 0;
        assert_int_equal(moved, report.theory_bytes - report.kept_bytes + report.padding_bytes);
        assert_int_equal(report.padding_bytes, 0);
        /* The head's norm is read by its backward pass immediately; its matrix is the token table,
         * which is gathered again. */
        assert_int_equal(report.kept_bytes, zero == 3 ? 63 * 2 * 2 * 4096 : 0);
        qd_options_destroy(options);
    }
}

/* 16Ψ, 4Ψ + 12Ψ/n, 2Ψ + 14Ψ/n, 16Ψ/n bytes with bf16, on every rank, also if rows do not divide. */
static void bytes_per_parameter(void **state)
{
    (void)state;
    for (int ranks = 2; ranks <= 8; ranks *= 2)
        for (int zero = 0; zero <= 3; zero++) {
            int64_t total = 0;
            for (int rank = 0; rank < ranks; rank++) {
                char words[256];
                snprintf(words, sizeof words, SMALL "train.precision=bf16 parallel.ranks=%d parallel.zero=%d", ranks, zero);
                qd_config config = layout_config(words);
                qd_arena *arena;
                qd_program *p;
                ok(qd_arena_create(&arena));
                ok(qd_config_build(&config, rank, arena, &p));
                static const qd_buffer_kind kinds[] = {QD_BUFFER_PARAM, QD_BUFFER_GRAD, QD_BUFFER_MASTER, QD_BUFFER_MOMENT1,
                                                       QD_BUFFER_MOMENT2};
                for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
                    total += p->buffers[p->persistent[kinds[i]]].bytes;
                static const int whole[] = {16, 4, 2, 0};
                if (rank == ranks - 1)
                    assert_int_equal(total, ranks * whole[zero] * p->storage.values + (16 - whole[zero]) * p->storage.held);
                qd_arena_destroy(arena);
            }
        }
}

/* Shards cover every row once, and a run's shards are contiguous in a sharded buffer. */
static void parts_cover_all_rows(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 7; ranks++) {
        qd_arena *arena;
        qd_program *p = build("model.arch=gpt2 model.layers=1 model.hidden=24 model.heads=4 model.vocab=97 data.seq=5", &arena);
        const qd_ledger *l = p->ledger;
        int64_t *next = calloc((size_t)l->param_count, sizeof *next), total = 0;
        for (int part = 0; part < ranks; part++) {
            qd_storage s;
            ok(qd_storage_create(l, 0, ranks, part, arena, &s));
            int64_t end = 0;
            for (int i = 0; i < l->param_count; i++) {
                if (l->params[i].tied_to >= 0)
                    continue;
                qd_extent e = qd_storage_part(&s, i, ranks, part);
                assert_int_equal(e.first, next[i]);
                assert_int_equal(s.shard_offset[i], end);
                assert_int_equal(s.shard_count[i], e.count);
                next[i] += e.count;
                end += e.count;
            }
            assert_int_equal(end, s.shard_values);
            total += end;
        }
        assert_int_equal(total, p->storage.held);
        free(next);
        qd_arena_destroy(arena);
    }
}

/* Programs that do not match are refused, naming both sides. */
static void checker_refuses_broken_programs(void **state)
{
    (void)state;
    qd_arena *arena, *other_arena;
    const char *words = SMALL "parallel.ranks=4 parallel.bucket_mb=0.02";
    qd_program *good = build(words, &arena), *bad = build(words, &other_arena);
    const qd_mesh *mesh = &good->ledger->mesh;
    const qd_program *programs[4] = {good, good, bad, good};
    ok(qd_check_programs(mesh, programs));
    int reduces[64], count = 0;
    for (int i = 0; i < bad->action_count && count < 64; i++)
        if (bad->actions[i].kind == QD_ACTION_REDUCE)
            reduces[count++] = i;
    assert_true(count >= 3);
    qd_action kept = bad->actions[reduces[1]];

    bad->actions[reduces[1]].count--; /* resized */
    assert_int_equal(qd_check_programs(mesh, programs), QD_MISMATCH);
    assert_non_null(strstr(qd_error_message(), "rank 2"));
    bad->actions[reduces[1]] = kept;

    bad->actions[reduces[1]].kind = QD_ACTION_ZERO; /* missing */
    assert_int_equal(qd_check_programs(mesh, programs), QD_MISMATCH);
    bad->actions[reduces[1]] = kept;

    bad->actions[reduces[1]].dtype = QD_BF16; /* other type */
    assert_int_equal(qd_check_programs(mesh, programs), QD_MISMATCH);
    bad->actions[reduces[1]] = kept;

    bad->actions[reduces[count - 1]].kind = QD_ACTION_ZERO; /* ends its step early */
    assert_int_equal(qd_check_programs(mesh, programs), QD_MISMATCH);
    assert_non_null(strstr(qd_error_message(), "ended its step"));
    qd_arena_destroy(arena);
    qd_arena_destroy(other_arena);
}

/* The memory plan refuses programs that use memory that is not allocated. */
static void plan_refuses_broken_programs(void **state)
{
    (void)state;
    qd_arena *arena;
    qd_program *p = build(SMALL "parallel.ranks=2", &arena);
    for (int i = 0; i < p->action_count; i++) {
        qd_action kept = p->actions[i];
        if (kept.kind != QD_ACTION_ALLOC && kept.kind != QD_ACTION_FREE)
            continue;
        p->actions[i].kind = QD_ACTION_NORM; /* neither allocates nor frees */
        p->actions[i].buffer = -1;
        assert_int_equal(qd_memory_plan(p), QD_USAGE);
        p->actions[i] = kept;
    }
    ok(qd_memory_plan(p));
    qd_arena_destroy(arena);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stages_count_the_experts_a_token_meets),
        cmocka_unit_test(stages_count_the_keys_in_windows),
        cmocka_unit_test(flops_follow_the_windows),
        cmocka_unit_test(bad_layouts_are_refused),
        cmocka_unit_test(rows_have_names_of_their_own),
        cmocka_unit_test(operands_have_names),
        cmocka_unit_test(ops_without_their_operands_are_refused),
        cmocka_unit_test(presets_have_flops_by_formula),
        cmocka_unit_test(presets_have_their_published_size),
        cmocka_unit_test(memory_plan_is_sound),
        cmocka_unit_test(buckets_cover_all_gradients),
        cmocka_unit_test(bf16_takes_16_bytes_per_parameter),
        cmocka_unit_test(masters_are_not_split_in_vain),
        cmocka_unit_test(checker_refuses_broken_programs),
        cmocka_unit_test(plan_refuses_broken_programs),
        cmocka_unit_test(stages_take_what_the_paper_says),
        cmocka_unit_test(bytes_per_parameter),
        cmocka_unit_test(parts_cover_all_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
