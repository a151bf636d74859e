#!/usr/bin/env python3
"""A training step of an MoE model in PyTorch on one GPU, written for speed: the baseline of
compare.py.

  torch_moe.py CASE [--pad N]    one JSON line: milliseconds, peak memory, loss

Grouped GEMMs (torch._grouped_mm with the counts on the GPU: the host never waits), rows sorted by
expert, torch.compile over the whole model, cuDNN attention, bf16, fused AdamW, clipping,
load-balancing loss. --pad N aligns each expert's rows to multiples of N, which some shapes need.
"""
import argparse
import json
import os
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

from moe_cases import AUX_LOSS, CASES

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "gpu_step"))
import torch_step  # noqa: E402
from torch_step import measure  # noqa: E402


def dense_case(c):
    """The case as a dense model, whose blocks are reused."""
    return (c.layers, c.hidden, c.heads, c.kv_heads, c.ffn, c.vocab, True, c.batch, c.seq)


class Experts(nn.Module):
    def __init__(self, c, pad):
        super().__init__()
        self.c, self.pad = c, pad
        self.router = nn.Linear(c.hidden, c.experts, bias=False)
        self.up = nn.Parameter(torch.empty(c.experts, c.hidden, 2 * c.expert_ffn))
        self.down = nn.Parameter(torch.empty(c.experts, c.expert_ffn, c.hidden))
        if c.shared:
            self.shared_up = nn.Linear(c.hidden, 2 * c.shared * c.expert_ffn, bias=False)
            self.shared_down = nn.Linear(c.shared * c.expert_ffn, c.hidden, bias=False)

    def route(self, logits):
        """Scores of the balance loss, weights and choice of each row."""
        scores = logits.softmax(-1)
        weight, choice = scores.topk(self.c.per_token, -1)
        return scores, weight / weight.sum(-1, keepdim=True), choice

    def balance(self, scores, choice, counts):
        load = counts.float() * (self.c.experts / choice.numel())
        return (scores.mean(0) * load).sum()

    def forward(self, x):
        c = self.c
        rows = x.shape[0]
        with torch.autocast(x.device.type, enabled=False):
            scores, weight, choice = self.route(F.linear(x.float(), self.router.weight, self.router.bias))
        flat = choice.reshape(-1)
        order = flat.argsort(stable=True)
        counts = torch.zeros(c.experts, dtype=torch.int32, device=x.device).scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
        token = order // c.per_token
        x = x.bfloat16()
        place = torch.arange(flat.numel(), device=x.device)
        if self.pad > 1:
            padded = (counts + self.pad - 1) // self.pad * self.pad
            ends = padded.cumsum(0)
            place = place - (counts.cumsum(0) - counts)[flat[order]] + (ends - padded)[flat[order]]
            sorted_x = x.new_zeros(flat.numel() + c.experts * self.pad, c.hidden).index_copy(0, place, x[token])
        else:
            ends = counts.cumsum(0)
            sorted_x = x[token]
        ends = ends.to(torch.int32)
        y = self.apply_experts(sorted_x, ends)
        back = torch.empty_like(order).scatter_(0, order, place)
        y = (y[back].view(rows, c.per_token, c.hidden) * weight.unsqueeze(-1).to(y.dtype)).sum(1)
        if c.shared:
            gate, up = self.shared_up(x).chunk(2, -1)
            y = y + self.shared_down(F.silu(gate) * up)
        return y, self.balance(scores, choice, counts)

    def apply_experts(self, x, ends):
        """x: rows sorted by expert; ends: the row after the last of each."""
        gate, up = torch._grouped_mm(x, self.up.bfloat16(), offs=ends).chunk(2, -1)
        return torch._grouped_mm(F.silu(gate) * up, self.down.bfloat16(), offs=ends)


class Block(torch_step.Block):
    def __init__(self, c, pad):
        super().__init__(dense_case(c)[:4] + (1,) + dense_case(c)[5:])
        del self.up, self.down
        self.experts = Experts(c, pad)

    def forward(self, x, cos, sin):
        x = self.attend(x, cos, sin)
        y, balance = self.experts(self.norm2(x).view(-1, x.shape[-1]))
        return x + y.view_as(x), balance


class Model(torch_step.Model):
    def __init__(self, c, pad):
        super().__init__((c.dense,) + dense_case(c)[1:])
        self.moe = nn.ModuleList(Block(c, pad) for _ in range(c.layers - c.dense))
        for p in self.moe.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, targets):
        x, balance = self.tokens(tokens), 0.0
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        for block in self.moe:
            x, more = block(x, self.cos, self.sin)
            balance = balance + more
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.view(-1)) + AUX_LOSS * balance


def run(name, o):
    c = CASES[name]
    return {"case": name, "pad": o.pad, **measure(lambda: Model(c, o.pad), c.vocab, c.batch, c.seq, o)}


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("case", choices=sorted(CASES))
    a.add_argument("--pad", type=int, default=1)
    a.add_argument("--warm-up", type=int, default=5)
    a.add_argument("--repeat", type=int, default=20)
    o = a.parse_args()
    print(json.dumps(run(o.case, o)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
