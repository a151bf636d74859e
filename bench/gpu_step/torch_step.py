#!/usr/bin/env python3
"""A training step in PyTorch on one GPU, written for speed: the baseline of compare.py; and the floor
of that step on this card.

  torch_step.py step CASE ...    one JSON line per case: milliseconds, peak memory, loss
  torch_step.py floor CASE ...   one JSON line per case: milliseconds of the GEMMs and of attention,
                                 each timed alone, and of the least bytes that the rest must move

The step: torch.compile, cuDNN attention, autocast to bf16, fused AdamW, clipping; fp32 weights.
compare.py runs each case in a process of its own, so that they do not share memory.
"""
import argparse
import json
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from cases import CASES, products

COPY_BYTES = 4.3e12  # bytes per second of memory-bound kernels on an H200


class Block(nn.Module):
    def __init__(self, case):
        super().__init__()
        _, hidden, self.heads, self.kv, ffn, _, self.llama, _, _ = case
        self.head = hidden // self.heads
        bias = not self.llama
        norm = (lambda: nn.RMSNorm(hidden, eps=1e-5)) if self.llama else (lambda: nn.LayerNorm(hidden))
        self.norm1, self.norm2 = norm(), norm()
        self.qkv = nn.Linear(hidden, (self.heads + 2 * self.kv) * self.head, bias=bias)
        self.out = nn.Linear(hidden, hidden, bias=bias)
        self.up = nn.Linear(hidden, (2 if self.llama else 1) * ffn, bias=bias)
        self.down = nn.Linear(ffn, hidden, bias=bias)

    def attend(self, x, cos, sin):
        batch, seq, hidden = x.shape
        sizes = [self.heads * self.head, self.kv * self.head, self.kv * self.head]
        q, k, v = (z.view(batch, seq, -1, self.head).transpose(1, 2) for z in self.qkv(self.norm1(x)).split(sizes, -1))
        if self.llama:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv != self.heads)
        return x + self.out(y.transpose(1, 2).reshape(batch, seq, hidden))

    def forward(self, x, cos, sin):
        x = self.attend(x, cos, sin)
        y = self.up(self.norm2(x))
        if self.llama:
            gate, y = y.chunk(2, -1)
            return x + self.down(F.silu(gate) * y)
        return x + self.down(F.gelu(y, approximate="tanh"))


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return (x * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)


def angles(seq, size, base):
    """Cosines and sines of the rotary embedding of heads with `size` elements."""
    angle = torch.outer(torch.arange(seq).float(), 1.0 / base ** (torch.arange(0, size, 2).float() / size))
    angle = torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


class Model(nn.Module):
    def __init__(self, case):
        super().__init__()
        layers, hidden, heads, _, _, vocab, llama, _, seq = case
        self.tokens = nn.Embedding(vocab, hidden)
        self.positions = None if llama else nn.Embedding(seq, hidden)
        self.blocks = nn.ModuleList(Block(case) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden, eps=1e-5) if llama else nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        if not llama:
            self.head.weight = self.tokens.weight
        size = hidden // heads
        cos, sin = angles(seq, size, 500000)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, targets):
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.view(-1))


def timed(function, warm_up, repeat):
    """Median milliseconds, measured with CUDA events."""
    for _ in range(warm_up):
        function()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeat):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def measure(make, vocab, batch, seq, o, compile_model=torch.compile):
    """Times steps of the model that make() returns; its loss is a function of tokens and targets."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    with torch.device("cuda"):
        model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    compiled = compile_model(model)
    data = torch.randint(0, vocab - 300, (batch, seq + 1), device="cuda")
    tokens, targets = data[:, :-1].contiguous(), data[:, 1:].contiguous()
    last = [None]

    def step():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), torch.autocast("cuda", torch.bfloat16):
            loss = compiled(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        last[0] = loss

    milliseconds = timed(step, o.warm_up, o.repeat)
    free, total = torch.cuda.mem_get_info()
    return {"milliseconds": milliseconds, "peak_bytes": torch.cuda.max_memory_allocated(), "device_bytes": total - free, "loss": last[0].item(),
            "parameters": sum(p.numel() for p in model.parameters()), "torch": torch.__version__}


def run_step(name, o):
    case = CASES[name]
    return {"case": name, **measure(lambda: Model(case), case[5], case[7], case[8], o)}


def three_products(m, n, k):
    """Forward, gradient of the input, gradient of the weight."""
    x, w, y = (torch.randn(*s, device="cuda", dtype=torch.bfloat16) for s in ((m, k), (n, k), (m, n)))
    return timed(lambda: x @ w.t(), 3, 8) + timed(lambda: y @ w, 3, 8) + timed(lambda: y.t() @ x, 3, 8)


def attention(case):
    _, hidden, heads, kv, _, _, _, batch, seq = case
    best = None
    q, k, v = (torch.randn(batch, h, seq, hidden // heads, device="cuda", dtype=torch.bfloat16, requires_grad=True)
               for h in (heads, kv, kv))
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with sdpa_kernel(backend):
                forward = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv != heads)
                grad = torch.randn_like(forward())
                both = timed(lambda: torch.autograd.grad(forward(), (q, k, v), grad), 3, 8)
        except RuntimeError:
            continue  # a backend that does not support this shape
        best = both if best is None else min(best, both)
    return best


def run_floor(name, o):
    case = CASES[name]
    layers, hidden, _, _, ffn, vocab, llama, batch, seq = case
    rows = batch * seq
    # The head is computed in chunks of rows, so that its logits fit into memory.
    product_ms = sum(three_products(m, n, k) * times * rows / m
                     for n, k, times in products(case) for m in [min(rows, 8192) if n == vocab else rows])
    attention_ms = attention(case) * layers
    weights = sum(n * k * times for n, k, times in products(case)) + (vocab * hidden if llama else 0)
    # bf16 passes over the rows in each layer: norms and residual sums 14 of `hidden`, activations 5
    # (GELU) or 7 (SwiGLU) of `ffn`; logits are read twice and written once; AdamW reads 14 and
    # writes 14 bytes of each weight.
    moved = layers * (14 * rows * hidden + (7 if llama else 5) * rows * ffn) * 2 + 3 * rows * vocab * 2 + weights * 28
    bytes_ms = moved / COPY_BYTES * 1e3
    return {"case": name, "products_ms": product_ms, "attention_ms": attention_ms, "bytes_ms": bytes_ms,
            "milliseconds": product_ms + attention_ms + bytes_ms}


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("what", choices=("step", "floor"))
    a.add_argument("cases", nargs="+", choices=sorted(CASES))
    a.add_argument("--warm-up", type=int, default=5)
    a.add_argument("--repeat", type=int, default=20)
    o = a.parse_args()
    for name in o.cases:
        print(json.dumps((run_step if o.what == "step" else run_floor)(name, o)), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
