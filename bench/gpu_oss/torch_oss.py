#!/usr/bin/env python3
"""A training step of a GPT-OSS-shaped model in PyTorch on one GPU, written for speed: the baseline of
compare.py.

  torch_oss.py CASE [--ways packed padded]    one JSON line per way: milliseconds, peak memory, loss

Blocks and head compiled, flex_attention with its log-sum-exps for the sinks, torch._grouped_mm with
the counts on the GPU, autocast to bf16, fused AdamW, clipping, load-balancing loss; fp32 weights.
Gradients of biases of experts are a GEMM with the one-hot matrix of rows and experts, because adding
up gathered rows with atomics is slower.
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

from oss_cases import ALPHA, AUX_LOSS, CASES, LIMIT, ROPE_BASE

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "gpu_moe"))
import torch_moe  # noqa: E402
from torch_step import angles, measure, rotate  # noqa: E402

PADS = {"packed": 1, "padded": 16}


class RowBias(torch.autograd.Function):
    """The bias of each row's expert."""

    @staticmethod
    def forward(ctx, bias, expert):
        ctx.save_for_backward(expert)
        ctx.experts = bias.shape[0]
        return bias.bfloat16()[expert]

    @staticmethod
    def backward(ctx, d):
        expert, = ctx.saved_tensors
        rows = (expert.unsqueeze(-1) == torch.arange(ctx.experts, device=d.device)).to(d.dtype)
        return (rows.t() @ d).float(), None


class Experts(torch_moe.Experts):
    def __init__(self, c, pad):
        super().__init__(c, pad)
        self.router = nn.Linear(c.hidden, c.experts)
        self.up_bias = nn.Parameter(torch.zeros(c.experts, 2 * c.expert_ffn))
        self.down_bias = nn.Parameter(torch.zeros(c.experts, c.hidden))

    def apply_experts(self, x, ends):
        # rows of padding after the last expert count as its own, so that their gradients are 0
        ends = torch.cat((ends[:-1], ends.new_full((1,), x.shape[0])))
        expert = torch.searchsorted(ends, torch.arange(x.shape[0], device=x.device, dtype=torch.int32), right=True)
        both = torch._grouped_mm(x, self.up.bfloat16(), offs=ends) + RowBias.apply(self.up_bias, expert)
        gate, up = both.chunk(2, -1)
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        y = (up + 1) * gate * torch.sigmoid(ALPHA * gate)
        return torch._grouped_mm(y, self.down.bfloat16(), offs=ends) + RowBias.apply(self.down_bias, expert)


class Block(nn.Module):
    def __init__(self, c, pad, mask):
        super().__init__()
        self.c, self.mask = c, mask
        self.norm1, self.norm2 = nn.RMSNorm(c.hidden, eps=1e-5), nn.RMSNorm(c.hidden, eps=1e-5)
        self.qkv = nn.Linear(c.hidden, (c.heads + 2 * c.kv_heads) * c.head_dim)
        self.out = nn.Linear(c.heads * c.head_dim, c.hidden)
        self.sinks = nn.Parameter(torch.zeros(c.heads))
        self.experts = Experts(c, pad)

    def attend(self, x, cos, sin):
        c = self.c
        batch, seq, _ = x.shape
        sizes = [c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim]
        q, k, v = (z.view(batch, seq, -1, c.head_dim).transpose(1, 2) for z in self.qkv(x).split(sizes, -1))
        y, lse = flex_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, block_mask=self.mask, enable_gqa=True, return_lse=True)
        y = (y * torch.sigmoid(lse - self.sinks.view(1, -1, 1)).unsqueeze(-1)).to(x.dtype)
        return self.out(y.transpose(1, 2).reshape(batch, seq, -1))

    def forward(self, x, cos, sin):
        x = x + self.attend(self.norm1(x).to(x.dtype), cos, sin)
        y, balance = self.experts(self.norm2(x).view(-1, x.shape[-1]))
        return x + y.view_as(x), balance


class Model(nn.Module):
    def __init__(self, c, pad):
        super().__init__()
        local = create_block_mask(lambda b, h, q, k: (k <= q) & (q - k < c.window), None, None, c.seq, c.seq, device="cuda")
        whole = create_block_mask(lambda b, h, q, k: k <= q, None, None, c.seq, c.seq, device="cuda")
        self.tokens = nn.Embedding(c.vocab, c.hidden)
        self.blocks = nn.ModuleList(Block(c, pad, whole if i % 2 else local) for i in range(c.layers))
        self.norm = nn.RMSNorm(c.hidden, eps=1e-5)
        self.head = nn.Linear(c.hidden, c.vocab, bias=False)
        cos, sin = angles(c.seq, c.head_dim, ROPE_BASE)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, p in self.named_parameters():
            if p.dim() > 1 and "bias" not in name:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, targets):
        x, balance = self.tokens(tokens).bfloat16(), 0.0
        for block in self.blocks:
            x, more = block(x, self.cos, self.sin)
            balance = balance + more
        return self.loss(x, targets) + AUX_LOSS * balance

    def loss(self, x, targets):
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.view(-1))


def compile_blocks(model):
    for block in model.blocks:
        block.compile()
    model.loss = torch.compile(model.loss)
    return model


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("case", choices=sorted(CASES))
    a.add_argument("--warm-up", type=int, default=5)
    a.add_argument("--repeat", type=int, default=20)
    a.add_argument("--ways", nargs="+", choices=PADS, default=list(PADS))
    o = a.parse_args()
    c = CASES[o.case]
    for way in o.ways:
        torch.cuda.reset_peak_memory_stats()
        print(json.dumps({"case": o.case, "way": way, **measure(lambda: Model(c, PADS[way]), c.vocab, c.batch, c.seq, o, compile_blocks)}),
              flush=True)
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
