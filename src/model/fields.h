/* The table of model fields. A row is a member of qd_model or of one of its groups (qd_rope,
 * qd_moe), the option that sets it, its keys in data/models.json and in config.json of
 * transformers, and when it applies. The structs, the option rows, presets, equality, the saved
 * configuration and the one-to-one part of the Hugging Face mapping are generated from it (model.h,
 * field_table.h, spec/config/config.c, ckpt/hf_config.c), so a new field is one row and its use.
 *
 * F(kind, member, key, default, limits, preset, hf, when, help): a field with the option
 * model.<key>. I(kind, member, words, preset): a field that the architecture implies, without an
 * option.
 *   kind     INT, SIZE (64 bits), REAL, LIST (of numbers, each within `limits`), FLAG, AUTO (a
 *            flag with the option auto|true|false), ENUM(type), whose values are the words of
 *            `limits` in their order
 *   default  as a user would write it; auto: the value of the architecture or the preset
 *   limits   QD_RANGE(least, most), QD_WORDS("a|b"), QD_AUTO or QD_ANY
 *   preset   key in data/models.json, a.b inside an object; NULL: the same as `key`
 *   hf       key of a number or a flag in config.json of transformers, if most families have it
 *            with the same value, else NULL; for names of single families see ckpt/hf_family.c
 *   when     a field is compared and saved ALWAYS, or only in models to which it applies
 *
 * The order is that of the options in files, help and reference. */
#ifndef QD_MODEL_FIELDS_H
#define QD_MODEL_FIELDS_H

/* Architectures: enumerator, name in model.arch, family that declares it. The first is the
 * default. */
#define QD_ARCHS(A) \
    A(LLAMA, "llama", prenorm) \
    A(GPT2, "gpt2", prenorm) \
    A(OLMO, "olmo", prenorm) \
    A(OLMO2, "olmo2", postnorm) \
    A(GEMMA2, "gemma2", sandwich) \
    A(GEMMA3, "gemma3", sandwich) \
    A(DEEPSEEK, "deepseek", latent)
#define QD_ARCH_WORD(name, word, family) "|" word

#define QD_MODEL_SIZES(F, I) \
    F(ENUM(qd_arch), arch, "arch", "llama", QD_WORDS(&(QD_ARCHS(QD_ARCH_WORD))[1]), NULL, NULL, ALWAYS, \
      "architecture when no preset is given") \
    F(INT, layers, "layers", "4", QD_RANGE(1, 100000), NULL, "num_hidden_layers", ALWAYS, "transformer blocks") \
    F(SIZE, hidden, "hidden", "128", QD_RANGE(1, 1e6), NULL, "hidden_size", ALWAYS, "width of the residual stream") \
    F(INT, heads, "heads", "4", QD_RANGE(1, 1e5), NULL, "num_attention_heads", ALWAYS, "query heads") \
    F(INT, kv_heads, "kv_heads", "0", QD_RANGE(0, 1e5), NULL, "num_key_value_heads", ALWAYS, "key and value heads; 0: as many as heads") \
    F(INT, head_dim, "head_dim", "0", QD_RANGE(0, 256), NULL, "head_dim", ALWAYS, "size of a head; 0: hidden / heads") \
    F(SIZE, ffn, "ffn", "0", QD_RANGE(0, 1e7), NULL, "intermediate_size", ALWAYS, \
      "inner width of the MLP; 0: 4 x hidden (gpt2), 8/3 x hidden rounded up to a multiple of 32 (llama)") \
    F(SIZE, vocab, "vocab", "256", QD_RANGE(1, 2147483647), NULL, "vocab_size", ALWAYS, "vocabulary; raw bytes need 256") \
    /* Upper bound of seq for learned positions. */ \
    F(SIZE, max_seq, "max_seq", "0", QD_RANGE(0, 1e9), NULL, "max_position_embeddings", ALWAYS, \
      "rows of the learned position table; 0: data.seq") \
    I(ENUM(qd_norm_kind), norm, "layernorm|rmsnorm|layernorm_plain|rmsnorm_plus_one", "norm") \
    F(REAL, norm_eps, "norm_eps", "1e-5", QD_RANGE(1e-12, 1), NULL, "rms_norm_eps", ALWAYS, "epsilon of the norms") \
    I(ENUM(qd_position_kind), position, "learned|rope", "position")

/* Scaling of the rotary embedding. linear: all frequencies are divided by `factor`. llama3:
 * frequencies with wavelengths above original_seq / low_factor are divided by `factor`, those with
 * wavelengths below original_seq / high_factor are kept, those in between are blended. yarn:
 * frequencies that turn fewer than beta_slow times in original_seq tokens are divided by `factor`,
 * those that turn more than beta_fast times are kept, those in between are blended by their index;
 * rotated queries and keys are multiplied by attention_factor. dynamic: sequences longer than
 * original_seq have a larger base, shorter ones are not scaled. longrope: each frequency has a
 * divisor of its own, from long_factor in sequences longer than original_seq, else from
 * short_factor; rotated queries and keys are multiplied by attention_factor in both. */
#define QD_ROPE_FIELDS(F, I) \
    F(REAL, base, "rope_base", "10000", QD_RANGE(1.000001, 1e12), NULL, NULL, ALWAYS, "base of the rotary embedding") \
    F(ENUM(qd_rope_scaling), scaling, "rope_scaling", "none", QD_WORDS("none|llama3|linear|yarn|dynamic|longrope"), \
      "rope_scaling.type", NULL, ALWAYS, "scaling of the rotary embedding for long contexts") \
    F(REAL, factor, "rope_factor", "8", QD_RANGE(1, 1e6), "rope_scaling.factor", NULL, SCALED, \
      "scaling: divisor of the frequencies; llama3, yarn: of the low ones; dynamic: how fast the base grows with the sequence; " \
      "longrope: gives rope_attention_factor") \
    F(REAL, low_factor, "rope_low_factor", "1", QD_RANGE(1e-6, 1e6), "rope_scaling.low_freq_factor", NULL, LLAMA3, \
      "llama3 scaling: lower bound of the blend") \
    F(REAL, high_factor, "rope_high_factor", "4", QD_RANGE(1e-6, 1e6), "rope_scaling.high_freq_factor", NULL, LLAMA3, \
      "llama3 scaling: upper bound of the blend") \
    F(SIZE, original_seq, "rope_original_seq", "8192", QD_RANGE(1, 1e9), "rope_scaling.original_max_seq", NULL, ORIGINAL, \
      "llama3 and yarn scaling: context length of the original training; dynamic: length from which on it scales; longrope: longest " \
      "sequence with rope_short_factor") \
    F(REAL, beta_fast, "rope_beta_fast", "32", QD_RANGE(1e-6, 1e6), "rope_scaling.beta_fast", NULL, YARN, \
      "yarn scaling: turns from which on frequencies are kept") \
    F(REAL, beta_slow, "rope_beta_slow", "1", QD_RANGE(1e-6, 1e6), "rope_scaling.beta_slow", NULL, YARN, \
      "yarn scaling: turns up to which frequencies are divided") \
    F(FLAG, truncate, "rope_truncate", "true", QD_ANY, "rope_scaling.truncate", NULL, YARN, \
      "yarn scaling: the bounds of the blend are whole indices") \
    F(REAL, attention_factor, "rope_attention_factor", "0", QD_RANGE(0, 1e3), "rope_scaling.attention_factor", NULL, LENGTHS, \
      "yarn and longrope scaling: factor on rotated queries and keys; 0: 0.1 ln(rope_factor) + 1, or by rope_mscale (yarn), " \
      "sqrt(1 + ln(rope_factor) / ln(rope_original_seq)) (longrope)") \
    F(REAL, mscale, "rope_mscale", "0", QD_RANGE(0, 1e3), "rope_scaling.mscale", NULL, YARN, \
      "yarn scaling (DeepSeek): rotated queries and keys are multiplied by (0.1 rope_mscale ln(rope_factor) + 1), divided by the " \
      "same of rope_mscale_all_dim; 0: by rope_attention_factor") \
    F(REAL, mscale_all_dim, "rope_mscale_all_dim", "0", QD_RANGE(0, 1e3), "rope_scaling.mscale_all_dim", NULL, YARN, \
      "yarn scaling (DeepSeek): scores are multiplied by (0.1 rope_mscale_all_dim ln(rope_factor) + 1)^2; 0: they are not") \
    F(LIST, short_factor, "rope_short_factor", "", QD_RANGE(1e-6, 1e6), "rope_scaling.short_factor", NULL, LONGROPE, \
      "longrope scaling: divisors of the frequencies, one for each pair of rotated elements, in sequences of up to rope_original_seq") \
    F(LIST, long_factor, "rope_long_factor", "", QD_RANGE(1e-6, 1e6), "rope_scaling.long_factor", NULL, LONGROPE, \
      "longrope scaling: the same in longer sequences") \
    F(REAL, local_base, "rope_local_base", "0", QD_RANGE(0, 1e12), NULL, NULL, WINDOW, \
      "window: base of the rotary embedding of layers that have it, without scaling (Gemma 3); 0: that of the others") \
    F(REAL, fraction, "rope_fraction", "1", QD_RANGE(0, 1), NULL, NULL, ALWAYS, \
      "share of each head that is rotated, its first elements; the others carry no position") \
    F(INT, nope_every, "nope_every", "0", QD_RANGE(0, 100000), NULL, NULL, ALWAYS, \
      "every n-th layer has no rotary embedding (4: every fourth; SmolLM3); 0: all have it")

/* Attention scores. In a layer with a window, a token attends to the last `window` tokens, itself
 * included: layers from window_from on, without every full_every-th of all layers. */
#define QD_SCORE_FIELDS(F, I) \
    F(SIZE, window, "window", "0", QD_RANGE(0, 1e9), NULL, NULL, ALWAYS, \
      "tokens that a token attends to in layers with a window, itself included; 0: all before it, in every layer") \
    F(INT, window_from, "window_from", "0", QD_RANGE(0, 100000), NULL, NULL, WINDOW, \
      "window: first layer that has it, counted from 0") \
    F(INT, full_every, "full_every", "0", QD_RANGE(0, 100000), NULL, NULL, WINDOW, \
      "window: every n-th layer does not have it (2: every second; Gemma 2); 0: none") \
    F(REAL, score_scale, "score_scale", "0", QD_RANGE(0, 1e6), NULL, NULL, ALWAYS, \
      "factor on attention scores; 0: 1 / sqrt(head_dim)") \
    F(REAL, score_softcap, "score_softcap", "0", QD_RANGE(0, 1e6), NULL, NULL, ALWAYS, \
      "soft-cap of attention scores, cap x tanh(score / cap); 0: none") \
    F(FLAG, sinks, "sinks", "false", QD_ANY, NULL, NULL, ALWAYS, \
      "attention sinks (GPT-OSS): a learned logit per head joins the denominator of attention's softmax")

/* Multi-head latent attention: keys and values of all heads are linear functions of one vector of
 * kv_lora_rank elements, and all keys share the part that carries the position. */
#define QD_LATENT_FIELDS(F, I) \
    F(INT, kv_lora_rank, "kv_lora_rank", "0", QD_RANGE(0, 1e5), "mla.kv_lora_rank", "kv_lora_rank", LATENT, \
      "deepseek: width of compressed keys and values; 0: 4 x v_head_dim") \
    F(INT, q_lora_rank, "q_lora_rank", "0", QD_RANGE(0, 1e5), "mla.q_lora_rank", NULL, LATENT, \
      "deepseek: width of compressed queries; 0: they are not compressed") \
    F(INT, qk_nope_head_dim, "qk_nope_head_dim", "0", QD_RANGE(0, 256), "mla.qk_nope_head_dim", "qk_nope_head_dim", LATENT, \
      "deepseek: elements of a query or key head without position; 0: hidden / heads") \
    F(INT, qk_rope_head_dim, "qk_rope_head_dim", "0", QD_RANGE(0, 256), "mla.qk_rope_head_dim", "qk_rope_head_dim", LATENT, \
      "deepseek: elements of a query or key head that are rotated by position; all heads of a token share those of the key; 0: half of " \
      "qk_nope_head_dim") \
    F(INT, v_head_dim, "v_head_dim", "0", QD_RANGE(0, 256), "mla.v_head_dim", "v_head_dim", LATENT, \
      "deepseek: size of a head of values; 0: qk_nope_head_dim") \
    F(FLAG, rope_interleave, "rope_interleave", "true", QD_ANY, "mla.rope_interleave", NULL, LATENT, \
      "deepseek: neighbours are rotated together; false: elements i and i + qk_rope_head_dim / 2") \
    F(REAL, latent_norm_eps, "latent_norm_eps", "1e-6", QD_RANGE(1e-12, 1), "mla.norm_eps", NULL, LATENT, \
      "deepseek: epsilon of the norms of compressed queries and keys") \
    /* Multi-token prediction: module k predicts the token k further on than the head does. */ \
    F(INT, mtp_modules, "mtp_modules", "0", QD_RANGE(0, 4), NULL, NULL, LATENT, \
      "deepseek: modules that predict further tokens while training (DeepSeek V3: 1); models with experts have at most 1") \
    F(REAL, mtp_weight, "mtp_weight", "0.3", QD_RANGE(0, 1e3), NULL, NULL, MTP, \
      "mtp_modules: factor on the mean of their losses")

#define QD_MODEL_KINDS(F, I) \
    F(ENUM(qd_activation), activation, "activation", "auto", QD_WORDS("auto|gelu_tanh|gelu|swiglu|geglu|geglu_exact|swiglu_clamped"), \
      NULL, NULL, ALWAYS, \
      "activation function of the MLP; geglu: gated by gelu_tanh; swiglu_clamped: that of GPT-OSS; auto: gelu_tanh (gpt2), geglu " \
      "(gemma2, gemma3), swiglu (others)") \
    /* (up + 1) · gate · sigmoid(alpha · gate), with gate at most limit, and up between -limit and \
     * limit */ \
    F(REAL, swiglu_alpha, "swiglu_alpha", "1.702", QD_RANGE(1e-6, 1e6), NULL, "swiglu_alpha", CLAMPED, \
      "swiglu_clamped: factor on the gate inside the sigmoid") \
    F(REAL, swiglu_limit, "swiglu_limit", "7", QD_RANGE(1e-6, 1e6), NULL, "swiglu_limit", CLAMPED, \
      "swiglu_clamped: gates are clipped to this from above, the other half to plus and minus this") \
    F(AUTO, qk_norm, "qk_norm", "auto", QD_AUTO, NULL, NULL, ALWAYS, \
      "RMS norm of queries and keys (Qwen3, OLMo 2, Gemma 3); auto: as in the preset, else only olmo2 and gemma3") \
    F(ENUM(qd_qk_over), qk_over, "qk_norm_over", "auto", QD_WORDS("auto|head|width"), NULL, NULL, QK_NORM, \
      "qk_norm: each head, or all heads of a token together (OLMo 2, OLMoE); auto: width (olmo2), head (others)") \
    F(REAL, clip_qkv, "clip_qkv", "0", QD_RANGE(0, 1e6), NULL, NULL, ALWAYS, \
      "queries, keys and values are clipped to this absolute value (OLMo); 0: not clipped") \
    F(AUTO, qkv_bias, "qkv_bias", "auto", QD_AUTO, NULL, NULL, ALWAYS, "biases of q, k, v; auto: only gpt2") \
    F(AUTO, out_bias, "out_bias", "auto", QD_AUTO, NULL, NULL, ALWAYS, "bias of the attention output; auto: only gpt2") \
    F(AUTO, mlp_bias, "mlp_bias", "auto", QD_AUTO, NULL, NULL, ALWAYS, "biases of the MLP, and of routed experts; auto: only gpt2") \
    F(AUTO, tied, "tied", "auto", QD_AUTO, NULL, "tie_word_embeddings", ALWAYS, \
      "the head shares the token table; auto: only gpt2, gemma2 and gemma3") \
    F(AUTO, embed_scaled, "embed_scaled", "auto", QD_AUTO, NULL, NULL, ALWAYS, \
      "embeddings are multiplied by sqrt(hidden); auto: only gemma2 and gemma3") \
    F(REAL, logit_softcap, "logit_softcap", "0", QD_RANGE(0, 1e6), NULL, NULL, ALWAYS, \
      "soft-cap of logits, cap x tanh(logit / cap); 0: none") \
    F(REAL, dropout, "dropout", "0", QD_RANGE(0, 0.99), NULL, NULL, ALWAYS, "dropout after the embedding and each residual branch") \
    F(REAL, init_std, "init_std", "0.02", QD_RANGE(0, 10), NULL, "initializer_range", ALWAYS, "standard deviation of initial weights") \
    /* Mistral and Phi-3 may compute what Llama does, so only this tells them apart. */ \
    F(ENUM(qd_hf_type), hf_type, "hf_type", "derived", QD_WORDS("derived|mistral|phi3"), NULL, NULL, ALWAYS, \
      "model_type in Hugging Face folders; derived: by the other keys; mistral, phi3: for models that would be llama")

/* Mixture of experts: from block first_dense on, the MLP is a router and many small gated MLPs, of
 * which each token uses a few (docs/moe.md). */
#define QD_MOE_FIELDS(F, I) \
    F(INT, experts, "experts", "0", QD_RANGE(0, 65536), NULL, NULL, ALWAYS, \
      "routed experts per block; 0: dense blocks") \
    F(INT, per_token, "experts_per_token", "2", QD_RANGE(1, 1024), "topk", "num_experts_per_tok", EXPERTS, \
      "experts that each token chooses") \
    F(SIZE, ffn, "expert_ffn", "0", QD_RANGE(0, 1e7), "moe_ffn", NULL, EXPERTS, \
      "inner width of an expert; 0: model.ffn") \
    /* Together they are one MLP. */ \
    F(INT, shared, "shared_experts", "0", QD_RANGE(0, 1024), NULL, NULL, EXPERTS, \
      "experts that every token uses, in addition to the chosen ones") \
    F(SIZE, shared_ffn, "shared_ffn", "0", QD_RANGE(0, 1e7), "shared_expert_ffn", NULL, SHARED, \
      "shared_experts: inner width of all of them together; 0: shared_experts x expert_ffn") \
    F(FLAG, shared_gate, "shared_gate", "false", QD_ANY, NULL, NULL, SHARED, \
      "shared_experts: each token multiplies their result by a gate of its own, between 0 and 1 (Qwen2-MoE)") \
    F(INT, first_dense, "first_dense", "0", QD_RANGE(0, 100000), "dense_layers", NULL, EXPERTS, \
      "dense blocks before the first with experts") \
    F(ENUM(qd_router_kind), router, "router", "softmax", QD_WORDS("softmax|sigmoid"), NULL, NULL, EXPERTS, \
      "how router logits become expert scores") \
    F(FLAG, normalised, "router_normalised", "true", QD_ANY, NULL, NULL, EXPERTS, \
      "the weights of the chosen experts add up to model.router_scale") \
    F(REAL, scale, "router_scale", "1", QD_RANGE(1e-6, 1e6), NULL, NULL, EXPERTS, "factor on the weights of the chosen experts") \
    /* Equal groups; a token chooses from the best top_groups of them. */ \
    F(INT, groups, "router_groups", "1", QD_RANGE(1, 65536), NULL, NULL, EXPERTS, \
      "equal groups of experts, to limit choices to some of them (one group per node, for example)") \
    F(INT, top_groups, "router_top_groups", "1", QD_RANGE(1, 65536), NULL, NULL, EXPERTS, "groups that a token may choose from") \
    F(INT, group_best, "router_group_best", "0", QD_RANGE(0, 65536), NULL, NULL, EXPERTS, \
      "experts of a group whose scores are added to rank it; 0: experts_per_token / router_top_groups (sigmoid), 1 (softmax)") \
    F(FLAG, logit_bias, "router_logit_bias", "false", QD_ANY, NULL, NULL, EXPERTS, \
      "bias of the router's logits, trained like other weights (GPT-OSS)") \
    F(AUTO, bias, "router_bias", "auto", QD_AUTO, NULL, NULL, EXPERTS, \
      "bias per expert that only affects the choice; auto: with router_bias_rate") \
    F(REAL, bias_rate, "router_bias_rate", "0", QD_RANGE(0, 10), NULL, NULL, EXPERTS, \
      "loss-free balancing: after each step the biases of overloaded experts decrease by this, the others increase") \
    F(REAL, aux_loss, "aux_loss", "0", QD_RANGE(0, 1e3), NULL, NULL, EXPERTS, "coefficient of the load-balancing loss") \
    F(ENUM(qd_balance), balance, "balance", "sequence", QD_WORDS("sequence|batch"), NULL, NULL, EXPERTS, \
      "aux_loss: balance each sequence, or all that the ranks compute at the same time") \
    F(REAL, z_loss, "z_loss", "0", QD_RANGE(0, 1e3), NULL, NULL, EXPERTS, "coefficient of the router's z-loss") \
    F(REAL, capacity, "expert_capacity", "0", QD_RANGE(0, 1e6), NULL, NULL, EXPERTS, \
      "capacity of an expert as a multiple of the mean load of a rank's micro-batch; the rest is dropped; 0: nothing is dropped") \
    F(ENUM(qd_drop), drop, "drop", "last", QD_WORDS("last|least"), NULL, NULL, EXPERTS, \
      "expert_capacity: drop the last tokens, or those with the smallest weight")

#define QD_MODEL_FIELDS(F, I) QD_MODEL_SIZES(F, I) QD_ROPE_FIELDS(F, I) QD_SCORE_FIELDS(F, I) \
    QD_LATENT_FIELDS(F, I) QD_MODEL_KINDS(F, I) QD_MOE_FIELDS(F, I)

/* Options of earlier versions that set two flags at once: S(key, one, other, help), with keys as in
 * the rows above. Configurations and data/models.json may still have them; they are never saved. */
#define QD_MODEL_SYNONYMS(S) S("linear_bias", "out_bias", "mlp_bias", "old option: sets model.out_bias and model.mlp_bias")

/* What the columns expand to. */

#define QD_FIELD_TYPE_INT int
#define QD_FIELD_TYPE_SIZE int64_t
#define QD_FIELD_TYPE_REAL double
#define QD_FIELD_TYPE_LIST qd_number_list
#define QD_FIELD_TYPE_FLAG bool
#define QD_FIELD_TYPE_AUTO bool
#define QD_FIELD_TYPE_ENUM(type) type

#define QD_FIELD_OPTION_INT QD_OPTION_INT
#define QD_FIELD_OPTION_SIZE QD_OPTION_INT
#define QD_FIELD_OPTION_REAL QD_OPTION_FLOAT
#define QD_FIELD_OPTION_LIST QD_OPTION_FLOAT_LIST
#define QD_FIELD_OPTION_FLAG QD_OPTION_BOOL
#define QD_FIELD_OPTION_AUTO QD_OPTION_ENUM
#define QD_FIELD_OPTION_ENUM(type) QD_OPTION_ENUM

/* least, most and choices of a qd_option */
#define QD_RANGE(least, most) least, most, NULL
#define QD_WORDS(words) 0, 0, words
#define QD_AUTO 0, 0, "auto|true|false"
#define QD_ANY 0, 0, NULL

/* A row as a member of a struct. */
#define QD_FIELD_MEMBER(kind, member, key, fallback, limits, preset, hf, when, help) QD_FIELD_TYPE_##kind member;
#define QD_FIELD_IMPLIED_MEMBER(kind, member, words, preset) QD_FIELD_TYPE_##kind member;
/* A row as a qd_option; the last argument is `limits`. */
#define QD_FIELD_OPTION(kind, key, fallback, help, ...) {"model." key, QD_FIELD_OPTION_##kind, fallback, __VA_ARGS__, help, NULL}
/* A synonym as a qd_option. */
#define QD_SYNONYM_OPTION(key, one, other, help) {"model." key, QD_OPTION_ENUM, "auto", QD_AUTO, help, NULL}
#endif
