"""The DeepSeek-shaped models that are compared on a GPU, with the batch size of each."""
from collections import namedtuple

Case = namedtuple("Case", "layers hidden heads vocab q_rank kv_rank nope rope v experts per_token groups top_groups expert_ffn shared dense ffn batch seq")
# dense: number of blocks before the first with experts; their MLP has `ffn`. q_rank, kv_rank: of
# compressed queries and keys; a head has `nope` elements without positions, then `rope` with
CASES = {
    # the heads and ranks of V3 with the experts of DeepSeekMoE: 2.5 billion parameters, 0.5 active
    "deepseek-2b": Case(5, 2048, 16, 32000, 768, 512, 128, 64, 128, 64, 6, 8, 3, 1408, 2, 1, 10944, 4, 4096),
}
AUX_LOSS, BIAS_RATE, ROUTER_SCALE, ROPE_BASE = 1e-4, 1e-3, 2.5, 10000


def attention_weights(c):
    return (c.hidden * (c.q_rank + c.kv_rank + c.rope) + c.q_rank * c.heads * (c.nope + c.rope) + c.kv_rank * c.heads * (c.nope + c.v) +
            c.heads * c.v * c.hidden)


def products(c):
    """Active weights of a token: attention, MLPs of the dense blocks, experts, router, head."""
    expert = 3 * c.hidden * c.expert_ffn
    blocks = c.layers - c.dense
    return (c.layers * attention_weights(c) + c.dense * 3 * c.hidden * c.ffn +
            blocks * ((c.per_token + c.shared) * expert + c.hidden * c.experts) + c.vocab * c.hidden)


def parameters(c):
    expert = 3 * c.hidden * c.expert_ffn
    return products(c) + (c.layers - c.dense) * (c.experts - c.per_token) * expert + c.vocab * c.hidden


def flops_per_token(c):
    """6 FLOPs for each active weight, and attention, not halved for causality."""
    return 6 * products(c) + 6 * c.layers * c.seq * c.heads * (c.nope + c.rope + c.v)
