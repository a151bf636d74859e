"""Gemma 2-shaped models that are compared on a GPU, with the batch size of each."""
from collections import namedtuple

Case = namedtuple("Case", "layers hidden heads kv_heads head_dim ffn vocab window batch seq")
CASES = {
    "gemma2-2b": Case(26, 2304, 8, 4, 256, 9216, 256000, 4096, 1, 8192),
    "gemma2-2b-6l": Case(6, 2304, 8, 4, 256, 9216, 256000, 4096, 1, 8192),
}
SCORE_CAP, LOGIT_CAP = 50.0, 30.0


def flops_per_token(case):
    """6 FLOPs for each weight of a GEMM, and attention, not halved for causality; every second layer has a window."""
    width = case.heads * case.head_dim
    weights = case.layers * (case.hidden * (2 * width + 2 * case.kv_heads * case.head_dim) + 3 * case.hidden * case.ffn)
    keys = (case.layers + 1) // 2 * min(case.window, case.seq) + case.layers // 2 * case.seq
    return 6 * (weights + case.hidden * case.vocab) + 12 * keys * width
