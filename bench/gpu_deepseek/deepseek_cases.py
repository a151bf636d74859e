"""The DeepSeek-shaped models that are compared on a GPU, with the batch size of each."""
from collections import namedtuple

Case = namedtuple("Case", "layers hidden heads vocab q_rank kv_rank nope rope v experts per_token groups top_groups expert_ffn shared dense ffn batch seq mtp")
# dense: number of blocks before the first with experts; their MLP has `ffn`. q_rank, kv_rank: of
# compressed queries and keys; a head has `nope` elements without positions, then `rope` with.
# mtp: modules that predict one token more, each with a block with experts
CASES = {
    # the heads and ranks of V3 with the experts of DeepSeekMoE: 2.5 billion parameters, 0.5 active
    "deepseek-2b": Case(5, 2048, 16, 32000, 768, 512, 128, 64, 128, 64, 6, 8, 3, 1408, 2, 1, 10944, 4, 4096, 0),
    # the same size, with a block less and a prediction module
    "deepseek-2b-mtp": Case(4, 2048, 16, 32000, 768, 512, 128, 64, 128, 64, 6, 8, 3, 1408, 2, 1, 10944, 4, 4096, 1),
}
AUX_LOSS, BIAS_RATE, ROUTER_SCALE, ROPE_BASE, MTP_WEIGHT = 1e-4, 1e-3, 2.5, 10000, 0.3


def attention_weights(c):
    return (c.hidden * (c.q_rank + c.kv_rank + c.rope) + c.q_rank * c.heads * (c.nope + c.rope) + c.kv_rank * c.heads * (c.nope + c.v) +
            c.heads * c.v * c.hidden)


def products(c):
    """Active weights of a token: attention, MLPs of the dense blocks, experts, router, heads, and what joins
    the two inputs of prediction modules."""
    expert = 3 * c.hidden * c.expert_ffn
    return ((c.layers + c.mtp) * attention_weights(c) + c.dense * 3 * c.hidden * c.ffn +
            blocks(c) * ((c.per_token + c.shared) * expert + c.hidden * c.experts) + (1 + c.mtp) * c.vocab * c.hidden +
            c.mtp * 2 * c.hidden * c.hidden)


def blocks(c):
    """Blocks with experts."""
    return c.layers - c.dense + c.mtp


def parameters(c):
    """The head and the token table are shared with the prediction modules."""
    expert = 3 * c.hidden * c.expert_ffn
    return products(c) + blocks(c) * (c.experts - c.per_token) * expert + (1 - c.mtp) * c.vocab * c.hidden


def flops_per_token(c):
    """6 FLOPs for each active weight, and attention, not halved for causality."""
    return 6 * products(c) + 6 * (c.layers + c.mtp) * c.seq * c.heads * (c.nope + c.rope + c.v)
