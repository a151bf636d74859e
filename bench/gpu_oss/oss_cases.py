"""GPT-OSS-shaped models that are compared on a GPU, with the batch size of each."""
from collections import namedtuple

Case = namedtuple("Case", "layers hidden heads kv_heads head_dim vocab experts per_token expert_ffn shared window batch seq")
CASES = {
    # half the width of GPT-OSS 20B and its 32 experts, 4 per token; 2.2 billion weights, 0.4 active
    "oss-2b": Case(10, 1440, 32, 4, 64, 32000, 32, 4, 1440, 0, 128, 8, 4096),
    "oss-2b-2l": Case(2, 1440, 32, 4, 64, 32000, 32, 4, 1440, 0, 128, 8, 4096),
}
AUX_LOSS, ALPHA, LIMIT, ROPE_BASE = 0.01, 1.702, 7.0, 150000


def products(case):
    """Active weights of a token: attention, experts, router, head."""
    attention = case.hidden * (2 * case.heads + 2 * case.kv_heads) * case.head_dim
    experts = case.per_token * 3 * case.hidden * case.expert_ffn + case.hidden * case.experts
    return case.layers * (attention + experts) + case.vocab * case.hidden


def parameters(case):
    """Without biases, norms and sinks."""
    return products(case) + case.layers * (case.experts - case.per_token) * 3 * case.hidden * case.expert_ffn + case.vocab * case.hidden


def flops_per_token(case):
    """6 FLOPs for each active weight, and attention, not halved for causality; every second layer has a window."""
    keys = (case.layers + 1) // 2 * min(case.window, case.seq) + case.layers // 2 * case.seq
    return 6 * products(case) + 12 * keys * case.heads * case.head_dim
