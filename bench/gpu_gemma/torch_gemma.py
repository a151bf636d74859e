#!/usr/bin/env python3
"""A training step of a Gemma 2-shaped model in PyTorch on one GPU, written for speed: the baseline of
compare.py.

  torch_gemma.py CASE [--ways blocks whole]    one JSON line per way: milliseconds, peak memory, loss

torch.compile, flex_attention (masks by blocks, soft-capped scores), autocast to bf16, fused AdamW,
clipping; fp32 weights. Compiled are the blocks and the head, which takes a minute less, or the whole
model.
"""
import argparse
import gc
import json
import os
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from gemma_cases import CASES, LOGIT_CAP, SCORE_CAP

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "gpu_step"))
from torch_step import angles, measure, rotate  # noqa: E402


class Norm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return (F.rms_norm(x.float(), (x.shape[-1],), None, 1e-6) * (1 + self.weight)).to(x.dtype)


def capped_score(score, batch, head, query, key):
    return SCORE_CAP * torch.tanh(score / SCORE_CAP)


class Block(nn.Module):
    def __init__(self, c, mask):
        super().__init__()
        self.c, self.mask, self.width = c, mask, c.heads * c.head_dim
        self.norms = nn.ModuleList(Norm(c.hidden) for _ in range(4))
        self.qkv = nn.Linear(c.hidden, self.width + 2 * c.kv_heads * c.head_dim, bias=False)
        self.out = nn.Linear(self.width, c.hidden, bias=False)
        self.up = nn.Linear(c.hidden, 2 * c.ffn, bias=False)
        self.down = nn.Linear(c.ffn, c.hidden, bias=False)

    def attend(self, x, cos, sin):
        batch, seq, _ = x.shape
        kv = self.c.kv_heads * self.c.head_dim
        q, k, v = (z.view(batch, seq, -1, self.c.head_dim).transpose(1, 2) for z in self.qkv(x).split([self.width, kv, kv], -1))
        y = flex_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, score_mod=capped_score, block_mask=self.mask, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, self.width))

    def forward(self, x, cos, sin):
        x = x + self.norms[1](self.attend(self.norms[0](x), cos, sin))
        gate, y = self.up(self.norms[2](x)).chunk(2, -1)
        return x + self.norms[3](self.down(F.gelu(gate, approximate="tanh") * y))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        local = create_block_mask(lambda b, h, q, k: (k <= q) & (q - k < c.window), None, None, c.seq, c.seq, device="cuda")
        whole = create_block_mask(lambda b, h, q, k: k <= q, None, None, c.seq, c.seq, device="cuda")
        self.tokens = nn.Embedding(c.vocab, c.hidden)
        self.blocks = nn.ModuleList(Block(c, whole if i % 2 else local) for i in range(c.layers))
        self.norm = Norm(c.hidden)
        cos, sin = angles(c.seq, c.head_dim, 10000)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, targets):
        x = (self.tokens(tokens) * self.c.hidden ** 0.5).to(torch.bfloat16)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.loss(x, targets)

    def loss(self, x, targets):
        logits = F.linear(self.norm(x), self.tokens.weight)
        logits = LOGIT_CAP * torch.tanh(logits.float() / LOGIT_CAP)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def compile_blocks(model):
    for block in model.blocks:
        block.compile()
    model.loss = torch.compile(model.loss)
    return model


WAYS = {"blocks": compile_blocks, "whole": torch.compile}


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("case", choices=sorted(CASES))
    a.add_argument("--warm-up", type=int, default=5)
    a.add_argument("--repeat", type=int, default=20)
    a.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    o = a.parse_args()
    c = CASES[o.case]
    for way in o.ways:
        torch.cuda.reset_peak_memory_stats()
        print(json.dumps({"case": o.case, "way": way, **measure(lambda: Model(c), c.vocab, c.batch, c.seq, o, WAYS[way])}), flush=True)
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
