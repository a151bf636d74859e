/* Names that other trainers use for our keys: nanoGPT, torchtitan, Megatron-LM, DeepSpeed and the
 * Trainer of transformers, so that a message can name the key that a user is looking for. Names are
 * suggested, never accepted: a name whose meaning differs slightly (batch_size) would otherwise
 * change a run silently. */
#include "base/options/options_impl.h"

#include <stdio.h>
#include <string.h>

/* Lower case, with '_' for '-'. A name with a dot matches that section only, others match any. A
 * {word} of a note becomes the value that the user wrote, if there is one. */
static const qd_synonym synonyms[] = {
    /* Options of single commands first: where they exist, they are meant. */
    {"max_new_tokens n_tokens max_length num_tokens_to_generate", "tokens", NULL, NULL},
    {"temp", "temperature", NULL, NULL},
    {"output_file out_file out", "output", NULL, NULL},
    {"num_gpus ngpus n_gpus world_size", "gpus", NULL, NULL},

    {"config config_file config_path cfg job.config_file", NULL, NULL,
     "the configuration file is a plain argument, as in: quadrille train run.yaml"},

    {"model_name model_config model.name model.flavor size model_size", "model.preset", NULL, NULL},
    {"model_name_or_path model_path hf_assets_path", NULL, NULL,
     "model.preset names a shape; weights come from run.weights=FOLDER, after quadrille convert for a Hugging Face folder"},
    {"architecture model_type model_arch", "model.arch", NULL, NULL},
    {"n_layer n_layers num_layers num_hidden_layers nlayers nlayer depth num_blocks n_blocks blocks", "model.layers", NULL, NULL},
    {"n_embd n_embed d_model hidden_size embed_dim embedding_dim emb_dim dim width model_dim embedding_size", "model.hidden", NULL, NULL},
    {"hidden_dim", NULL, NULL, "the width of the residual stream is model.hidden, that of the MLP model.ffn"},
    {"n_head n_heads num_heads num_attention_heads nhead nheads attention_heads", "model.heads", NULL, NULL},
    {"n_kv_head n_kv_heads num_kv_heads num_key_value_heads num_query_groups n_query_groups kv_groups", "model.kv_heads", NULL, NULL},
    {"head_size d_head dim_head kv_channels d_kv", "model.head_dim", NULL, NULL},
    {"ffn_hidden_size intermediate_size d_ff ffn_dim mlp_dim n_inner d_inner ffn_size ff_dim mlp_hidden_size", "model.ffn", NULL, NULL},
    {"vocab_size n_vocab padded_vocab_size vocabulary vocabulary_size", "model.vocab", NULL, NULL},
    {"max_position_embeddings n_positions", "model.max_seq", NULL, NULL},
    {"rms_norm_eps layer_norm_eps layernorm_eps layernorm_epsilon layer_norm_epsilon norm_epsilon", "model.norm_eps", NULL, NULL},
    {"rope_theta rotary_base rope_freq_base", "model.rope_base", NULL, NULL},
    {"tie_word_embeddings tie_embeddings tied_embeddings share_embeddings weight_tying tie_weights", "model.tied", NULL, NULL},
    {"untie_embeddings_and_output_weights", "model.tied", "true=false|false=true", NULL},
    {"dropout_rate dropout_p resid_pdrop embd_pdrop hidden_dropout resid_dropout", "model.dropout", NULL, NULL},
    {"attention_dropout attn_pdrop attn_dropout", NULL, NULL,
     "there is no dropout inside attention; model.dropout is applied to the embedding and each residual branch"},
    {"initializer_range init_method_std", "model.init_std", NULL, NULL},
    {"hidden_act activation_function act_fn activation_fn mlp_activation", "model.activation",
     "silu=swiglu|swish=swiglu|gelu_new=gelu_tanh|gelu_pytorch_tanh=gelu_tanh|gelu_fast=gelu_tanh", NULL},
    {"add_qkv_bias", "model.qkv_bias", NULL, NULL},
    {"bias add_bias_linear attention_bias", NULL, NULL, "biases are model.qkv_bias, model.out_bias and model.mlp_bias"},
    {"num_experts n_experts num_local_experts n_routed_experts moe_num_experts", "model.experts", NULL, NULL},
    {"top_k topk num_experts_per_tok moe_router_topk moe_top_k experts_per_tok n_activated_experts", "model.experts_per_token", NULL, NULL},
    {"moe_intermediate_size moe_ffn_hidden_size expert_dim", "model.expert_ffn", NULL, NULL},
    {"n_shared_experts num_shared_experts", "model.shared_experts", NULL, NULL},
    {"router_aux_loss_coef moe_aux_loss_coeff aux_loss_coef aux_loss_coeff load_balance_loss_weight", "model.aux_loss", NULL, NULL},
    {"router_z_loss_coef moe_z_loss_coeff z_loss_coef", "model.z_loss", NULL, NULL},
    {"capacity_factor moe_expert_capacity_factor expert_capacity_factor", "model.expert_capacity", NULL, NULL},

    {"dataset data_path dataset_path dataset_name dataset_dir train_data data_dir data_file train_file train_files train_path input_file "
     "corpus text_file data_prefix input_dir",
     "data.path", NULL, NULL},
    {"tokenizer_path tokenizer_name tokenizer_file tokenizer_model tokenizer_name_or_path", "data.tokenizer", NULL, NULL},
    {"val_fraction val_split validation_split validation_fraction val_ratio test_split eval_split holdout", "data.validation", NULL, NULL},
    {"doc_mask document_masking reset_attention_mask intra_document_masking", "data.document_mask", NULL, NULL},
    {"text_column text_field text_key text_column_name json_key", "data.field", NULL, NULL},
    {"document_separator doc_separator delimiter", "data.separator", NULL, NULL},
    {"cache_dir data_cache_path", "data.cache", NULL, NULL},
    {"seq_len seq_length sequence_length sequence_len block_size context_length context_len context_size ctx_len n_ctx max_seq_len "
     "max_seq_length max_sequence_length max_length context_window context",
     "data.seq", NULL, NULL},
    {"shuffle", NULL, NULL, "samples are always drawn in a random order, which train.seed sets: remove it"},

    {"max_steps num_steps n_steps total_steps train_steps training_steps num_train_steps max_iters train_iters num_iters num_iterations "
     "max_iterations iterations iters n_iters",
     "train.steps", NULL, NULL},
    {"lora_r lora_rank r lora.r peft.r", "lora.rank", NULL, NULL},
    {"lora_alpha peft.lora_alpha", "lora.alpha", NULL, NULL},
    {"lora_dropout peft.lora_dropout", "lora.dropout", NULL, NULL},
    {"use_rslora", "lora.rslora", NULL, NULL},
    {"target_modules lora_target_modules lora_targets", "lora.targets", NULL, NULL},
    {"num_epochs n_epochs max_epochs num_train_epochs epoch", "train.epochs", NULL, NULL},
    {"max_tokens total_tokens train_tokens num_tokens training_tokens token_budget", NULL, NULL,
     "train.steps counts steps: {the tokens} / (train.global_batch x data.seq)"},
    {"train_samples num_samples", NULL, NULL, "train.steps counts steps: {the samples} / train.global_batch"},
    {"lr_decay_iters lr_decay_steps max_lr_steps", NULL, NULL,
     "the decay ends with train.steps; train.decay_steps is the length of the decay of train.schedule=wsd"},
    {"eval_interval eval_steps eval_freq eval_every_n_steps val_interval val_every validation_interval val_check_interval validate_every",
     "train.eval_every", NULL, NULL},
    {"sample_interval generate_every generation_interval sample_freq sample_steps", "run.sample_every", NULL, NULL},
    {"sample_prompt prompts prompt", "run.sample_prompts", NULL, NULL},
    {"eval_iters eval_iterations val_iters val_batches limit_val_batches max_eval_steps", "train.eval_batches", NULL, NULL},
    {"batch_size batch bs bsz batchsize", NULL, NULL,
     "sequences per step over all ranks are train.global_batch={N}; those that a rank computes at once are train.micro_batch={N}"},
    {"total_batch_size batch_size_tokens global_batch_tokens batch_tokens tokens_per_step tokens_per_batch", NULL, NULL,
     "train.global_batch counts sequences: {the tokens} / data.seq"},
    {"global_batch_size train_batch_size effective_batch_size gbs", "train.global_batch", NULL, NULL},
    {"micro_batch_size microbatch_size microbatch per_device_batch_size per_device_train_batch_size train_micro_batch_size_per_gpu "
     "local_batch_size device_batch_size per_gpu_batch_size batch_size_per_gpu micro_bs mbs",
     "train.micro_batch", NULL, NULL},
    {"grad_accum grad_accum_steps gradient_accumulation gradient_accumulation_steps gradient_accumulation_iters grad_accumulation_steps "
     "accumulate_grad_batches accumulation_steps acc_steps grad_acc",
     NULL, NULL, "accumulation follows from the batch: set train.global_batch to {N} x train.micro_batch x the data-parallel degree"},
    {"optim optimizer_type optimizer_name optimizer.type optimizer.name opt", "train.optimizer",
     "adam=adamw|adamw_torch=adamw|adamw_torch_fused=adamw|fused_adam=adamw|momentum=sgd", NULL},
    {"learning_rate base_lr peak_lr max_lr lr_max init_lr lr_peak learningrate", "train.lr", NULL, NULL},
    {"min_learning_rate lr_min final_lr eta_min lr_end end_lr", "train.min_lr", NULL, NULL},
    {"min_lr_ratio min_lr_factor min_lr_rate", NULL, NULL, "train.min_lr is a learning rate: {the ratio} x train.lr"},
    {"lr_scheduler lr_scheduler_type lr_schedule scheduler scheduler_type lr_decay_style lr_decay_type", "train.schedule",
     "cosine_with_warmup=cosine|cosine_warmup=cosine|linear_warmup=linear|warmup_stable_decay=wsd|trapezoidal=wsd|constant_with_warmup="
     "constant|none=constant",
     NULL},
    {"warmup_steps warmup_iters warmup_iterations lr_warmup_steps lr_warmup_iters num_warmup_steps", "train.warmup", NULL, NULL},
    {"warmup_ratio warmup_fraction lr_warmup_fraction lr_warmup_ratio", NULL, NULL,
     "train.warmup counts steps: {the ratio} x train.steps"},
    {"adam_beta1 beta_1 adam_beta_1", "train.beta1", NULL, NULL},
    {"adam_beta2 beta_2 adam_beta_2", "train.beta2", NULL, NULL},
    {"betas adam_betas", NULL, NULL, "the two are train.beta1 and train.beta2"},
    {"adam_epsilon adam_eps epsilon eps_adam", "train.eps", NULL, NULL},
    {"wd l2 decay_rate", "train.weight_decay", NULL, NULL},
    {"grad_clip clip_grad gradient_clip gradient_clipping max_grad_norm max_norm clip_grad_norm gradient_clip_val grad_norm_clip "
     "clip_norm grad_clip_norm",
     "train.clip", NULL, NULL},
    {"random_seed manual_seed rng_seed", "train.seed", NULL, NULL},
    {"dtype mixed_precision torch_dtype param_dtype compute_dtype data_type amp mixed_precision_param", "train.precision",
     "bfloat16=bf16|float32=fp32|f32=fp32|torch.bfloat16=bf16|torch.float32=fp32|single=fp32|no=fp32|bf16_mixed=bf16|mixed=bf16|"
     "float16=bf16|fp16=bf16|half=bf16",
     NULL},
    {"bf16 bfloat16", "train.precision", "true=bf16|false=fp32", NULL},
    {"fp32", "train.precision", "true=fp32|false=bf16", NULL},
    {"fp8 float8", "train.precision", "true=fp8|false=bf16|hybrid=fp8|e4m3=fp8|tensorwise=fp8", NULL},
    {"fp16 float16 loss_scale", NULL, NULL,
     "models train in fp32 or, with train.precision=bf16, in bf16, which needs no loss scaling"},
    {"reduce_dtype mixed_precision_reduce", "train.grad_dtype", "bfloat16=bf16|float32=fp32", NULL},
    {"accumulate_allreduce_grads_in_fp32 grad_reduce_in_fp32", "train.grad_dtype", "true=fp32|false=bf16", NULL},
    {"gradient_checkpointing activation_checkpointing activation_checkpoint activation_checkpoint.mode checkpoint_activations "
     "recompute_activations recompute_granularity remat grad_checkpoint grad_checkpointing",
     "train.recompute", "true=full|on=full|yes=full|false=none|off=none|no=none", NULL},
    {"recompute_num_layers", "train.recompute_layers", NULL, NULL},
    {"cpu_offload offload_optimizer optimizer_offload enable_cpu_offload optimizer_cpu_offload", "train.offload",
     "true=optimizer|on=optimizer|cpu=optimizer|false=none|off=none", NULL},
    {"deterministic_mode use_deterministic_algorithms", "train.deterministic", NULL, NULL},
    {"compile torch_compile flash_attn flash_attention use_flash_attn use_flash_attention attn_implementation", NULL, NULL,
     "there is nothing to switch on: kernels are compiled, and attention never stores its matrix; remove it"},

    {"world_size num_gpus n_gpus n_gpu ngpu ngpus gpus gpu_count nproc_per_node nproc num_processes nprocs num_ranks n_ranks num_devices "
     "devices",
     "parallel.ranks", NULL, NULL},
    {"nnodes num_nodes n_nodes num_machines machines", "parallel.nodes", NULL, NULL},
    {"data_parallel data_parallel_size data_parallel_degree dp_size dp_degree", "parallel.dp", NULL, NULL},
    {"data_parallel_shard_degree dp_shard_degree fsdp_size fsdp_degree", "parallel.dp_shard", NULL, NULL},
    {"tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size tp_size tp_degree model_parallel "
     "model_parallel_size",
     "parallel.tp", NULL, NULL},
    {"pipeline_parallel pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel_size pp_size pp_degree num_stages",
     "parallel.pp", NULL, NULL},
    {"pipeline_schedule pp_schedule pipeline_parallel_schedule", "parallel.schedule",
     "interleaved1f1b=interleaved|interleaved_1f1b=interleaved|zbvzerobubble=zb_v|zbv=zb_v|zb1p=zb_h1|zero_bubble=zb_h1|"
     "dualpipev=dualpipe_v|dualpipe=dualpipe_v",
     NULL},
    {"virtual_pipeline_model_parallel_size virtual_pipeline_size num_virtual_stages vpp", "parallel.virtual_stages", NULL, NULL},
    {"context_parallel context_parallel_size context_parallel_degree cp_size cp_degree", "parallel.cp", NULL, NULL},
    {"expert_parallel expert_parallel_size expert_parallel_degree expert_model_parallel_size ep_size ep_degree", "parallel.ep", NULL, NULL},
    {"expert_tensor_parallel_size expert_tensor_parallel_degree", "parallel.etp", NULL, NULL},
    {"sequence_parallel enable_sequence_parallel", "parallel.sp", NULL, NULL},
    {"zero_stage zero_level zero_optimization.stage zero_optimization sharding_stage", "parallel.zero", NULL, NULL},
    {"fsdp fsdp2 sharding_strategy", "parallel.zero", "true=3|full_shard=3|shard_grad_op=2|no_shard=0|false=0", NULL},
    {"use_distributed_optimizer distributed_optimizer", "parallel.zero", "true=1|false=0", NULL},
    {"bucket_cap_mb bucket_size_mb", "parallel.bucket_mb", NULL, NULL},
    {"overlap_grad_reduce overlap_comm overlap_param_gather", "parallel.overlap", NULL, NULL},

    {"out_dir output_dir output_folder save_dir save_path checkpoint_dir ckpt_dir run_dir log_dir dump_folder work_dir results_dir "
     "checkpoint_path",
     "run.dir", NULL, NULL},
    {"save_interval save_steps save_freq checkpoint_every checkpoint_interval checkpoint.interval ckpt_interval ckpt_every "
     "save_every_n_steps",
     "run.save_every", NULL, NULL},
    {"save_total_limit keep_last keep_last_n max_checkpoints keep_checkpoints keep_latest_k", "run.keep", NULL, NULL},
    {"resume_from resume_from_checkpoint resume_path load load_dir load_checkpoint restore", NULL, NULL,
     "--resume --dir FOLDER resumes a run; run.weights=FOLDER only starts from its weights"},
    {"auto_resume continue resume_training", "run.resume", NULL, NULL},
    {"init_from pretrained pretrained_path pretrained_checkpoint init_checkpoint load_weights initial_load_path", "run.weights", NULL,
     NULL},
    {"log_interval log_freq log_steps logging_steps logging_interval print_every", "run.log_every", NULL, NULL},
    {"profile profiler profiling enable_profiling", "run.trace", NULL, NULL},
    {"profile_steps", "run.trace_steps", NULL, NULL},
    {"num_threads n_threads omp_num_threads cpu_threads", "run.threads", NULL, NULL},
    {"gpu_id device_id cuda_device", "run.gpu", NULL, NULL},
    {"device_type accelerator", "run.device", "gpu=cuda|nvidia=cuda", NULL},
    {"distributed_backend dist_backend comm_backend", "run.backend", NULL, NULL},
    {"timeout dist_timeout comm_timeout", "run.deadline", NULL, NULL},
    {"use_tensorboard enable_tensorboard log_to_tensorboard tb", "run.tensorboard", NULL, NULL},
    {"wandb use_wandb wandb_project wandb_log report_to", NULL, NULL,
     "metrics are written to metrics.jsonl in run.dir, and quadrille report shows them; remove it"},
};

/* Lower case, with '_' for '-'; false if it does not fit. */
static bool normal_form(const char *written, char *out, size_t size)
{
    size_t length = strlen(written);
    if (length >= size)
        return false;
    for (size_t i = 0; i <= length; i++)
        out[i] = written[i] == '-' ? '_' : written[i] >= 'A' && written[i] <= 'Z' ? (char)(written[i] + 32) : written[i];
    return true;
}

const qd_synonym *qd_synonym_table(int *count)
{
    *count = (int)(sizeof synonyms / sizeof *synonyms);
    return synonyms;
}

const qd_synonym *qd_synonym_find(const char *written, int which)
{
    char name[96];
    if (!normal_form(written, name, sizeof name))
        return NULL;
    /* The whole name, then without its sections one by one. */
    for (const char *part = name; part; part = strchr(part, '.') ? strchr(part, '.') + 1 : NULL)
        for (size_t i = 0; i < sizeof synonyms / sizeof *synonyms; i++)
            if (qd_text_has_word(synonyms[i].names, part) && which-- == 0)
                return &synonyms[i];
    return NULL;
}

bool qd_synonym_value(const qd_synonym *synonym, const char *value, char *out, size_t size)
{
    char wanted[64];
    if (!synonym->values || !normal_form(value, wanted, sizeof wanted))
        return false;
    size_t length = strlen(wanted);
    for (const char *at = synonym->values; at; at = strchr(at, '|') ? strchr(at, '|') + 1 : NULL) {
        const char *equals = strchr(at, '=');
        if ((size_t)(equals - at) == length && memcmp(at, wanted, length) == 0) {
            snprintf(out, size, "%.*s", (int)strcspn(equals + 1, "|"), equals + 1);
            return true;
        }
    }
    return false;
}

bool qd_synonym_choice(const char *key, const char *value, char *out, size_t size)
{
    for (size_t i = 0; i < sizeof synonyms / sizeof *synonyms; i++)
        if (synonyms[i].key && strcmp(synonyms[i].key, key) == 0 && qd_synonym_value(&synonyms[i], value, out, size))
            return true;
    return false;
}
