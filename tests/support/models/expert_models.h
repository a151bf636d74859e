/* Small models with experts, and the training settings that layout tests use for them. */
#ifndef QD_TESTS_SUPPORT_EXPERT_MODELS_H
#define QD_TESTS_SUPPORT_EXPERT_MODELS_H

#define RUN "train.optimizer=sgd train.lr=0.3 train.clip=0.8 train.schedule=constant train.steps=50 train.global_batch=8 run.threads=1 "
#define MIXTRAL                                                                                             \
    "model.layers=2 model.hidden=32 model.heads=4 model.kv_heads=4 model.ffn=48 model.vocab=67 data.seq=16 model.experts=8 " \
    "model.experts_per_token=2 model.expert_ffn=24 model.aux_loss=0.05 model.balance=batch model.qk_norm=true "
#define DEEPSEEK                                                                                            \
    "model.layers=3 model.hidden=32 model.heads=4 model.kv_heads=4 model.ffn=48 model.vocab=67 data.seq=17 model.experts=16 " \
    "model.experts_per_token=3 model.expert_ffn=16 model.shared_experts=1 model.first_dense=1 model.router=sigmoid " \
    "model.router_scale=2.5 model.router_groups=4 model.router_top_groups=2 model.router_bias_rate=0.01 " \
    "model.aux_loss=0.02 model.z_loss=0.001 model.dropout=0.1 "
#endif
