"""The MoE models that are compared on a GPU, with the batch size of each."""
from collections import namedtuple

Case = namedtuple("Case", "layers hidden heads kv_heads vocab experts per_token expert_ffn shared dense ffn batch seq")
# dense: number of blocks before the first with experts; their MLP has `ffn`
CASES = {
    # proportions of Mixtral: 8 experts, 2 per token; 2.4 billion parameters, 0.8 active
    "mixtral-2b": Case(8, 2048, 16, 8, 32000, 8, 2, 5632, 0, 0, 5632, 8, 2048),
    # of DeepSeekMoE: 64 small experts, 6 per token, 2 shared; 2.5 billion parameters, 0.5 active
    "fine-2b": Case(5, 2048, 16, 16, 32000, 64, 6, 1408, 2, 1, 10944, 8, 2048),
}
AUX_LOSS = 0.01


def products(case):
    """Active weights of a token: attention, MLPs of the dense blocks, experts, router, head."""
    head = case.hidden // case.heads
    attention = case.hidden * (2 * case.heads + 2 * case.kv_heads) * head
    blocks = case.layers - case.dense
    expert = 3 * case.hidden * case.expert_ffn
    return (case.layers * attention + case.dense * 3 * case.hidden * case.ffn +
            blocks * ((case.per_token + case.shared) * expert + case.hidden * case.experts) + case.vocab * case.hidden)


def parameters(case):
    blocks = case.layers - case.dense
    expert = 3 * case.hidden * case.expert_ffn
    return products(case) + blocks * (case.experts - case.per_token) * expert + case.vocab * case.hidden


def flops_per_token(case):
    """6 FLOPs for each active weight, and attention, not halved for causality."""
    return 6 * products(case) + 12 * case.layers * case.seq * case.hidden
