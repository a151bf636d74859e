/* Names that users of other trainers guess, and typical mistakes: each is refused with the key and
 * the value that were meant. Preset names are accepted in their authors' spelling. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/options/options_impl.h"
#include "spec/config/config.h"

#include <quadrille/config.h>
#include <stdio.h>
#include <string.h>

static qd_options *fresh(void)
{
    qd_options *options;
    qd_option_table table = qd_config_table();
    assert_int_equal(qd_options_create(&table, 1, &options), QD_OK);
    return options;
}

/* Arguments (two words are separated by a blank) or, if they contain ": ", a line of a file. */
static qd_status give(qd_options *options, const char *text)
{
    char copy[128], *argv[2] = {copy, NULL};
    const char *words[2];
    int count;
    if (strstr(text, ": "))
        return qd_options_load_text(options, "run.yaml", text, strlen(text));
    snprintf(copy, sizeof copy, "%s", text);
    argv[1] = strchr(copy, ' ');
    if (argv[1])
        *argv[1]++ = '\0';
    return qd_options_parse(options, argv[1] ? 2 : 1, argv, words, &count);
}

static const struct {
    const char *written, *suggested; /* the message contains it */
} rows[] = {
    /* nanoGPT */
    {"learning_rate=3e-4", "did you mean 'train.lr=3e-4'?"},
    {"--learning_rate=3e-4", "did you mean '--lr 3e-4'?"},
    {"train: {learning_rate: 3e-4}", "run.yaml:1:9: unknown key 'train.learning_rate'; did you mean 'train.lr: 3e-4'?"},
    {"max_iters=600", "'train.steps=600'"},
    {"n_layer=12", "'model.layers=12'"},
    {"n_head=12", "'model.heads=12'"},
    {"n_embd=768", "'model.hidden=768'"},
    {"block_size=1024", "'data.seq=1024'"},
    {"grad_clip=1.0", "'train.clip=1.0'"},
    {"warmup_iters=100", "'train.warmup=100'"},
    {"beta_2=0.95", "'train.beta2=0.95'"},
    {"dtype=bfloat16", "'train.precision=bf16'"},
    {"out_dir=out", "'run.dir=out'"},
    {"init_from=runs/a", "'run.weights=runs/a'"},
    {"dataset=shakespeare.txt", "'data.path=shakespeare.txt'"},
    {"gradient_accumulation_steps=8", "train.global_batch to 8 x train.micro_batch x the data-parallel degree"},
    {"bsz=12", "train.global_batch=12; those that a rank computes at once"},
    {"batch_size=12", "train.global_batch=12; those that a rank computes at once are train.micro_batch=12"},
    {"compile=true", "nothing to switch on"},
    {"wandb_log=true", "metrics.jsonl"},
    {"eval_interval=250", "'train.eval_every=250'"},
    {"eval_iters=20", "'train.eval_batches=20'"},
    {"enable_tensorboard=true", "'run.tensorboard=true'"},
    {"log_interval=10", "'run.log_every=10'"},
    {"bias=false", "model.qkv_bias, model.out_bias and model.mlp_bias"},
    /* torchtitan */
    {"training.local_batch_size=4", "'train.micro_batch=4'"},
    {"training.global_batch_size=64", "'train.global_batch=64'"},
    {"training.seq_len=4096", "'data.seq=4096'"},
    {"training: {steps: 10}", "did you mean 'train.steps'?"},
    {"optimizer.lr=8e-4", "did you mean 'train.lr'?"},
    {"lr_scheduler.warmup_steps=200", "'train.warmup=200'"},
    {"parallelism.tensor_parallel_degree=2", "'parallel.tp=2'"},
    {"parallelism.data_parallel_shard_degree=8", "'parallel.dp_shard=8'"},
    {"parallelism.pipeline_parallel_schedule=Interleaved1F1B", "'parallel.schedule=interleaved'"},
    {"activation_checkpoint.mode=selective", "'train.recompute=selective'"},
    {"checkpoint.interval=500", "'run.save_every=500'"},
    {"model.flavor=llama3-8b", "'model.preset=llama3-8b'"},
    /* Megatron-LM */
    {"--tensor-model-parallel-size 8", "did you mean '--tp 8'?"},
    {"--pipeline-model-parallel-size 4", "did you mean '--pp 4'?"},
    {"--context-parallel-size 2", "did you mean '--cp 2'?"},
    {"--expert-model-parallel-size 8", "did you mean '--ep 8'?"},
    {"--num-layers 32", "did you mean '--model.layers 32'?"},
    {"--hidden-size 4096", "did you mean '--model.hidden 4096'?"},
    {"--ffn-hidden-size 14336", "did you mean '--model.ffn 14336'?"},
    {"--num-query-groups 8", "did you mean '--model.kv_heads 8'?"},
    {"--micro-batch-size 1", "did you mean '--train.micro_batch 1'?"},
    {"--global-batch-size 256", "did you mean '--train.global_batch 256'?"},
    {"--train-iters 1000", "did you mean '--steps 1000'?"},
    {"--clip-grad 1.0", "did you mean '--train.clip 1.0'?"},
    {"--bf16", "did you mean '--train.precision'?"},
    {"--bf16=true", "did you mean '--train.precision bf16'?"},
    {"--sequence-parallel=true", "did you mean '--parallel.sp'?"},
    {"--use-distributed-optimizer=true", "did you mean '--zero 1'?"},
    {"--recompute-granularity full", "did you mean '--train.recompute full'?"},
    {"--untie-embeddings-and-output-weights=true", "did you mean '--model.tied false'?"},
    {"--save-interval 100", "did you mean '--save-every 100'?"},
    {"--load out", "--resume --dir FOLDER resumes a run"},
    /* transformers and DeepSpeed */
    {"per_device_train_batch_size=4", "'train.micro_batch=4'"},
    {"max_steps=1000", "'train.steps=1000'"},
    {"num_train_epochs=3", "'train.epochs=3'"},
    {"warmup_ratio=0.1", "train.warmup counts steps: 0.1 x train.steps"},
    {"lr_scheduler_type=cosine", "'train.schedule=cosine'"},
    {"lr_scheduler_type=polynomial", "did you mean 'train.schedule'?"},
    {"optim=adamw_torch", "'train.optimizer=adamw'"},
    {"adam_epsilon=1e-8", "'train.eps=1e-8'"},
    {"max_grad_norm=1", "'train.clip=1'"},
    {"save_total_limit=3", "'run.keep=3'"},
    {"gradient_checkpointing=true", "'train.recompute=full'"},
    {"resume_from_checkpoint=runs/a", "--resume --dir FOLDER"},
    {"num_hidden_layers=16", "'model.layers=16'"},
    {"rope_theta=500000", "'model.rope_base=500000'"},
    {"tie_word_embeddings=true", "'model.tied=true'"},
    {"hidden_act=silu", "'model.activation=swiglu'"},
    {"zero_optimization: {stage: 3}", "did you mean 'parallel.zero: 3'?"},
    {"fp16=true", "train.precision=bf16"},
    {"num_local_experts=8", "'model.experts=8'"},
    /* values */
    {"train.precision=bfloat16", "not one of fp32, bf16, fp8; did you mean 'bf16'?"},
    {"run.device=gpu", "did you mean 'cuda'?"},
    {"train.optimizer=Adam", "did you mean 'adamw'?"},
    {"train.recompute=true", "did you mean 'full'?"},
    {"train.schedule=COSINE", "did you mean 'cosine'?"},
    {"parallel.schedule=1F1B", "did you mean '1f1b'?"},
    /* slips */
    {"--config run.yaml", "the configuration file is a plain argument"},
    {"--world-size 4", "did you mean '--ranks 4'?"},
    {"--gpus 4", "did you mean '--ranks 4'?"},
    {"train.batchsize=8", "train.global_batch=8"},
    {"total_tokens=1e9", "1e9 / (train.global_batch x data.seq)"},
    {"warmup_steps=", "did you mean 'train.warmup'?"},
    {"trian.steps=5", "did you mean 'train.steps'?"},
    {"Train.Steps=5", "did you mean 'train.steps'?"},
    {"--global-batch 8", "did you mean '--train.global_batch'?"},
};

static void guessed_names(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        qd_options *options = fresh();
        assert_int_equal(give(options, rows[i].written), QD_USAGE);
        if (!strstr(qd_error_message(), rows[i].suggested))
            fail_msg("%s: '%s' is not in: %s", rows[i].written, rows[i].suggested, qd_error_message());
        assert_null(strchr(qd_error_message(), '\n'));
        qd_options_destroy(options);
    }
}

static bool of_command(const char *key)
{
    return key && qd_text_has_word("tokens temperature output gpus", key);
}

/* What is suggested exists, is not one of our own names, and is suggested for one reason only. */
static void the_table(void **state)
{
    (void)state;
    int count;
    const qd_synonym *table = qd_synonym_table(&count);
    qd_options *options = fresh();
    for (int i = 0; i < count; i++) {
        bool known = !table[i].key || of_command(table[i].key) || qd_options_find(options, table[i].key);
        if (!known)
            fail_msg("'%s' is not a key", table[i].key);
        assert_true((table[i].key == NULL) == (table[i].note != NULL));
        char names[512], value[64], *rest = names, *name;
        assert_true(strlen(table[i].names) < sizeof names);
        strcpy(names, table[i].names);
        while ((name = strsep(&rest, " ")) != NULL) {
            assert_null(qd_options_find(options, name));
            int which = 0; /* the first that is not for an option of a command */
            while (!of_command(table[i].key) && of_command(qd_synonym_find(name, which)->key))
                which++;
            assert_ptr_equal(qd_synonym_find(name, which), &table[i]);
        }
        /* Converted values are values of the key. */
        for (const char *at = table[i].values; at; at = strchr(at, '|') ? strchr(at, '|') + 1 : NULL) {
            char theirs[64];
            snprintf(theirs, sizeof theirs, "%.*s", (int)strcspn(at, "="), at);
            assert_true(qd_synonym_value(&table[i], theirs, value, sizeof value));
            assert_int_equal(qd_options_set(options, table[i].key, value), QD_OK);
        }
    }
    qd_options_destroy(options);
}

static void preset_names(void **state)
{
    (void)state;
    static const char *const same[][2] = {
        {"llama-3-8b", "llama3-8b"},          {"Llama3-8B", "llama3-8b"},
        {"meta-llama/Meta-Llama-3-8B", "llama3-8b"}, {"Llama-3.1-8B", "llama3.1-8b"},
        {"meta-llama/Llama-3.2-1B", "llama3.2-1b"},  {"llama_2_7b", "llama2-7b"},
        {"gpt2", "gpt2-124M"},                {"gpt2-small", "gpt2-124M"},
        {"openai-community/gpt2-xl", "gpt2-1558M"},  {"gpt2-124m", "gpt2-124M"},
        {"GPT-2", "gpt2-124M"},               {"Qwen/Qwen3-0.6B", "qwen3-0.6b"},
        {"Qwen2.5-7B", "qwen2.5-7b"},         {"mistralai/Mistral-7B-v0.3", "mistral-7b-v0.3"},
        {"Mixtral-8x7B", "mixtral-8x7b"},
    };
    static const char *const near[][2] = {
        {"llama3-8", "llama3-8b"},     {"llama-3-1-8b", "llama3.1-8b"},     {"Llama-2-7b-hf", "llama2-7b"},
        {"mistral-7b", "mistral-7b-v0.3"}, {"Mixtral-8x7B-v0.1", "mixtral-8x7b"}, {"Llama-3.1-8B-Instruct", "llama3.1-8b"},
        {"llama3.3-70b", "llama3.1-70b"},   {"qwen3-30b", "qwen3-30b-a3b"},        {"gpt2-117M", "gpt2-124M"},
    };
    qd_model model;
    for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
        assert_int_equal(qd_preset_find(same[i][0], &model), QD_OK);
        assert_string_equal(model.name, same[i][1]);
    }
    for (size_t i = 0; i < sizeof near / sizeof *near; i++) {
        char message[96];
        snprintf(message, sizeof message, "did you mean '%s'?", near[i][1]);
        assert_int_equal(qd_preset_find(near[i][0], &model), QD_USAGE);
        if (!strstr(qd_error_message(), message))
            fail_msg("%s: %s", near[i][0], qd_error_message());
    }
    /* Every preset is found by its own name, none hides another. */
    const char *const *names;
    assert_int_equal(qd_config_presets(true, &names), QD_OK);
    for (; *names; names++) {
        assert_int_equal(qd_preset_find(*names, &model), QD_OK);
        assert_string_equal(model.name, *names);
    }
    /* A model that can only be simulated, in its authors' spelling. */
    char differences[256];
    qd_options *options = fresh();
    assert_int_equal(qd_options_set(options, "model.preset", "nvidia/Nemotron4-15B"), QD_OK);
    assert_int_equal(qd_preset_nearest(options, differences, sizeof differences), QD_OK);
    assert_non_null(strstr(differences, "nemotron4-15b cannot be trained"));
    qd_options_destroy(options);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(guessed_names),
        cmocka_unit_test(the_table),
        cmocka_unit_test(preset_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
