#!/usr/bin/env python3
"""A training step of a DeepSeek-shaped model in PyTorch on one GPU, written for speed: the baseline of
compare.py.

  torch_deepseek.py CASE [--ways cudnn flex]    one JSON line per way: milliseconds, peak memory, loss

Latent attention through cuDNN or flex_attention with heads of 192 and values of 128; grouped GEMMs
(torch._grouped_mm with the counts on the GPU), rows sorted by expert; routing by groups with sigmoid
scores, biases that are updated, and a loss that balances sequences. torch.compile of each block and of
the head, autocast to bf16, fused AdamW, clipping; fp32 weights.
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

from deepseek_cases import AUX_LOSS, BIAS_RATE, CASES, MTP_WEIGHT, ROPE_BASE, ROUTER_SCALE

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[1:1] = [os.path.join(HERE, "..", "gpu_moe"), os.path.join(HERE, "..", "gpu_step")]
import torch_moe  # noqa: E402
from torch_step import measure  # noqa: E402


def rotate(x, cos, sin):
    """Rotates pairs (2i, 2i + 1)."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)


def norm(size):
    return nn.RMSNorm(size, eps=1e-6)


class Attention(nn.Module):
    def __init__(self, c, attend):
        super().__init__()
        self.c, self.attend = c, attend
        self.q_a, self.q_norm = nn.Linear(c.hidden, c.q_rank, bias=False), norm(c.q_rank)
        self.q_b = nn.Linear(c.q_rank, c.heads * (c.nope + c.rope), bias=False)
        self.kv_a, self.kv_norm = nn.Linear(c.hidden, c.kv_rank + c.rope, bias=False), norm(c.kv_rank)
        self.kv_b = nn.Linear(c.kv_rank, c.heads * (c.nope + c.v), bias=False)
        self.out = nn.Linear(c.heads * c.v, c.hidden, bias=False)

    def forward(self, x, cos, sin):
        c = self.c
        batch, seq, _ = x.shape
        q = self.q_b(self.q_norm(self.q_a(x))).view(batch, seq, c.heads, -1).transpose(1, 2)
        latent, k_rope = self.kv_a(x).split([c.kv_rank, c.rope], -1)
        k, v = self.kv_b(self.kv_norm(latent)).view(batch, seq, c.heads, -1).transpose(1, 2).split([c.nope, c.v], -1)
        q_nope, q_rope = q.split([c.nope, c.rope], -1)
        k_rope = rotate(k_rope, cos, sin).unsqueeze(1).expand(-1, c.heads, -1, -1)
        y = self.attend(torch.cat((q_nope, rotate(q_rope, cos, sin)), -1), torch.cat((k, k_rope.to(k.dtype)), -1), v)
        return self.out(y.transpose(1, 2).reshape(batch, seq, c.heads * c.v))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.up, self.down = nn.Linear(c.hidden, 2 * c.ffn, bias=False), nn.Linear(c.ffn, c.hidden, bias=False)

    def forward(self, x):
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up), 0.0


class Experts(torch_moe.Experts):
    def __init__(self, c):
        super().__init__(c, 1)
        self.register_buffer("bias", torch.zeros(c.experts), persistent=False)

    def route(self, logits):
        c = self.c
        scores = logits.sigmoid()
        biased = (scores.detach() + self.bias).unflatten(-1, (c.groups, -1))
        best = biased.topk(c.per_token // c.top_groups, -1).values.sum(-1).topk(c.top_groups, -1).indices
        eligible = torch.zeros_like(biased[..., 0], dtype=torch.bool).scatter(-1, best, True)
        choice = biased.masked_fill(~eligible.unsqueeze(-1), float("-inf")).flatten(-2).topk(c.per_token, -1).indices
        weight = scores.gather(-1, choice)
        return scores / scores.sum(-1, keepdim=True), weight * (ROUTER_SCALE / weight.sum(-1, keepdim=True)), choice

    def balance(self, scores, choice, counts):
        c = self.c
        chosen = choice.view(c.batch, -1)
        load = torch.zeros(c.batch, c.experts, device=scores.device).scatter_add_(1, chosen, torch.ones_like(chosen, dtype=torch.float32))
        total = counts.float()
        self.bias.add_(BIAS_RATE * torch.sign(total.mean() - total))
        return (scores.view(c.batch, c.seq, -1).mean(1) * load * (c.experts / chosen.shape[1])).sum() / c.batch


class Block(nn.Module):
    def __init__(self, c, attend, mlp):
        super().__init__()
        self.norm1, self.norm2 = norm(c.hidden), norm(c.hidden)
        self.attention, self.mlp = Attention(c, attend), mlp

    def forward(self, x, cos, sin):
        x = x + self.attention(self.norm1(x), cos, sin)
        y, balance = self.mlp(self.norm2(x).view(-1, x.shape[-1]))
        return x + y.view_as(x), balance


class Prediction(nn.Module):
    """A block that sees the trunk's output and the token after it: it predicts the one after that."""

    def __init__(self, c, attend):
        super().__init__()
        self.norm_x, self.norm_token, self.norm = norm(c.hidden), norm(c.hidden), norm(c.hidden)
        self.join, self.block = nn.Linear(2 * c.hidden, c.hidden, bias=False), Block(c, attend, Experts(c))

    def forward(self, x, token, cos, sin):
        x, balance = self.block(self.join(torch.cat((self.norm_token(token), self.norm_x(x)), -1)), cos, sin)
        return self.norm(x), balance


class Model(nn.Module):
    def __init__(self, c, attend):
        super().__init__()
        self.tokens, self.norm, self.head = nn.Embedding(c.vocab, c.hidden), norm(c.hidden), nn.Linear(c.hidden, c.vocab, bias=False)
        self.blocks = nn.ModuleList(Block(c, attend, MLP(c) if i < c.dense else Experts(c)) for i in range(c.layers))
        self.predictions = nn.ModuleList(Prediction(c, attend) for _ in range(c.mtp))
        angle = torch.outer(torch.arange(c.seq).float(), 1.0 / ROPE_BASE ** (torch.arange(0, c.rope, 2).float() / c.rope))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, targets):
        x, balance = self.tokens(tokens), 0.0
        for block in self.blocks:
            x, more = block(x, self.cos, self.sin)
            balance = balance + more
        loss = self.loss(self.norm(x), targets)
        for prediction in self.predictions:
            x, more = prediction(x, self.tokens(targets), self.cos, self.sin)
            balance = balance + more
            targets = targets.roll(-1, 1)
            loss = loss + MTP_WEIGHT / len(self.predictions) * self.loss(x, targets)
        return loss + AUX_LOSS * balance

    def loss(self, x, targets):
        logits = self.head(x)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.view(-1))


def attend_with(way, c):
    if way == "cudnn":
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    mask = create_block_mask(lambda b, h, q, k: k <= q, None, None, c.seq, c.seq, device="cuda")
    return lambda q, k, v: flex_attention(q, k, v, block_mask=mask)


def compile_blocks(model):
    for block in [*model.blocks, *model.predictions]:
        block.compile()
    model.loss = torch.compile(model.loss)
    return model


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("case", choices=sorted(CASES))
    a.add_argument("--warm-up", type=int, default=5)
    a.add_argument("--repeat", type=int, default=20)
    a.add_argument("--ways", nargs="+", choices=["cudnn", "flex"], default=["cudnn", "flex"])
    o = a.parse_args()
    c = CASES[o.case]
    for way in o.ways:
        torch.cuda.reset_peak_memory_stats()
        result = measure(lambda: Model(c, attend_with(way, c)), c.vocab, c.batch, c.seq, o, compile_blocks)
        print(json.dumps({"case": o.case, "way": way, **result}), flush=True)
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
