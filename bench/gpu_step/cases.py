"""The six models that are compared on a GPU, with the batch size of each."""

PEAK_FLOPS = 989.5e12  # dense bf16 of an H100 or H200, as specified by NVIDIA

# name: layers, hidden, heads, kv heads, ffn, vocabulary, Llama-style (else GPT-2), micro-batch,
# sequence
CASES = {
    "gpt2-124m": (12, 768, 12, 12, 3072, 50304, False, 64, 1024),
    "gpt2-355m": (24, 1024, 16, 16, 4096, 50304, False, 32, 1024),
    "gpt2-1558m": (48, 1600, 25, 25, 6400, 50304, False, 16, 1024),
    "gpt3-1.3b": (24, 2048, 16, 16, 8192, 50304, False, 16, 2048),
    "llama3.2-1b": (16, 2048, 32, 8, 8192, 128256, True, 8, 2048),
    "llama3-8b-8l": (8, 4096, 32, 8, 14336, 32768, True, 4, 4096),
}


def products(case):
    """(outputs, inputs, count) of the GEMMs of one forward pass: per token 2 FLOPs for each weight."""
    layers, hidden, heads, kv, ffn, vocab, llama, _, _ = case
    head = hidden // heads
    return [((heads + 2 * kv) * head, hidden, layers), (hidden, hidden, layers), ((2 if llama else 1) * ffn, hidden, layers),
            (hidden, ffn, layers), (vocab, hidden, 1)]


def flops_per_token(case):
    """6 FLOPs for each weight of a GEMM, and attention, not halved for causality."""
    layers, hidden, seq = case[0], case[1], case[8]
    return 6 * sum(n * k * times for n, k, times in products(case)) + 12 * layers * seq * hidden
