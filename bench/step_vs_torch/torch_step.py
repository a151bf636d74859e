#!/usr/bin/env python3
"""A training step in PyTorch on CPU cores: the baseline of compare.py and bench/zero/compare.py.

One process is one rank. With --ranks above 1 it joins the others over gloo, with
DistributedDataParallel or, with --sharded, FSDP2 (fully_shard of each block and of the rest). The
model follows the PyTorch documentation's advice for speed: fused attention, fused AdamW, one
backward pass. Every rank prints one JSON object: seconds of each timed step, the loss of the last
step, and this process's resident bytes before the model was created and at the peak while training.
With --text it trains on a file's bytes, in consecutive windows in random order, as ours does, instead
of random tokens, and prints the losses of all steps (losses.py).
"""
import argparse
import json
import os
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class RMSNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Block(nn.Module):
    def __init__(self, m):
        super().__init__()
        self.m, llama = m, m["arch"] == "llama"
        q, kv = m["heads"] * m["head_dim"], m["kv_heads"] * m["head_dim"]
        make_norm = (lambda: RMSNorm(m["hidden"], m["norm_eps"])) if llama else (lambda: nn.LayerNorm(m["hidden"], m["norm_eps"]))
        self.norm1, self.norm2 = make_norm(), make_norm()
        self.qkv = nn.Linear(m["hidden"], q + 2 * kv, bias=m["qkv_bias"])
        self.out = nn.Linear(q, m["hidden"], bias=m["out_bias"])
        self.up = nn.Linear(m["hidden"], (2 if llama else 1) * m["ffn"], bias=m["mlp_bias"])
        self.down = nn.Linear(m["ffn"], m["hidden"], bias=m["mlp_bias"])

    def forward(self, x, cos, sin):
        m = self.m
        b, t, _ = x.shape
        h, kv, d = m["heads"], m["kv_heads"], m["head_dim"]
        q, k, v = self.qkv(self.norm1(x)).split([h * d, kv * d, kv * d], dim=-1)
        q, k, v = (z.view(b, t, -1, d).transpose(1, 2) for z in (q, k, v))
        if m["arch"] == "llama":
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=h != kv)
        x = x + self.out(o.transpose(1, 2).reshape(b, t, h * d))
        y = self.up(self.norm2(x))
        if m["arch"] == "llama":
            gate, y = y.chunk(2, dim=-1)
            y = F.silu(gate) * y
        else:
            y = F.gelu(y, approximate="tanh")
        return x + self.down(y)


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Model(nn.Module):
    def __init__(self, m, seq):
        super().__init__()
        self.m = m
        self.tokens = nn.Embedding(m["vocab"], m["hidden"])
        self.positions = nn.Embedding(m["max_seq"], m["hidden"]) if m["position"] == "learned" else None
        self.blocks = nn.ModuleList(Block(m) for _ in range(m["layers"]))
        self.norm = RMSNorm(m["hidden"], m["norm_eps"]) if m["arch"] == "llama" else nn.LayerNorm(m["hidden"], m["norm_eps"])
        self.head = nn.Linear(m["hidden"], m["vocab"], bias=False)
        if m["tied"]:
            self.head.weight = self.tokens.weight
        half = m["head_dim"] // 2
        angle = torch.arange(seq)[:, None] * (m["rope_base"] or 1e4) ** (-torch.arange(half) / half)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for name, p in self.named_parameters():
            if p.dim() > 1: # projections back to the residual are smaller, as in GPT-2
                nn.init.normal_(p, std=0.02 / (2 * m["layers"])**0.5 if name.endswith(("out.weight", "down.weight")) else 0.02)

    def forward(self, tokens, targets):
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


def resident(what):
    with open("/proc/self/status", encoding="utf-8") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith(what + ":"))


def forget_peak():
    """Resets VmHWM, so that memory used while creating the model does not count."""
    with open("/proc/self/clear_refs", "w", encoding="utf-8") as f:
        f.write("5")


def shard(model):
    """As in the FSDP2 tutorial: one unit per block, the rest in the root."""
    from torch.distributed.fsdp import fully_shard
    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--models", required=True, help="data/models.json")
    a.add_argument("--model", required=True)
    a.add_argument("--vocab", type=int, default=0)
    a.add_argument("--seq", type=int, required=True)
    a.add_argument("--batch", type=int, required=True, help="sequences per rank")
    a.add_argument("--steps", type=int, default=5)
    a.add_argument("--warm-up", type=int, default=2)
    a.add_argument("--threads", type=int, default=1)
    a.add_argument("--rank", type=int, default=0)
    a.add_argument("--ranks", type=int, default=1)
    a.add_argument("--port", type=int, default=29555)
    a.add_argument("--compile", action="store_true")
    a.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="bf16: autocast")
    a.add_argument("--seed", type=int, default=1)
    a.add_argument("--text", help="file to train on, one byte per token")
    a.add_argument("--sharded", action="store_true", help="FSDP2 instead of DistributedDataParallel")
    o = a.parse_args()
    torch.set_num_threads(o.threads)
    torch.manual_seed(o.seed)
    m = next(x for x in json.load(open(o.models)) if x["name"] == o.model)
    if o.vocab:
        m["vocab"] = o.vocab
    before = resident("VmRSS")
    model = Model(m, o.seq)
    if o.compile:
        model = torch.compile(model)
    if o.ranks > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(o.port), GLOO_SOCKET_IFNAME="lo")
        torch.distributed.init_process_group("gloo", rank=o.rank, world_size=o.ranks)
        model = shard(model) if o.sharded else nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-3,
                                  betas=(0.9, 0.95), fused=True)
    seconds, losses = [], []
    corpus = torch.frombuffer(bytearray(open(o.text, "rb").read()), dtype=torch.uint8).long() if o.text else None
    order = torch.cat([torch.randperm((len(corpus) - 1) // o.seq) for _ in range(1 + (o.warm_up + o.steps) * o.batch * o.seq // len(corpus))]
                      ).tolist() if o.text else []
    forget_peak()
    for step in range(o.warm_up + o.steps):
        if corpus is None:
            text = torch.randint(0, m["vocab"], (o.batch, o.seq + 1))
        else:
            text = torch.stack([corpus[at * o.seq:(at + 1) * o.seq + 1] for at in order[step * o.batch:(step + 1) * o.batch]])
        begin = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=o.precision == "bf16"):
            loss = model(text[:, :-1], text[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if corpus is not None:
            losses.append(loss.item())
        if step >= o.warm_up:
            seconds.append(time.perf_counter() - begin)
    print(json.dumps({"seconds": seconds, "loss": loss.item(), "torch": torch.__version__, "start_bytes": before,
                      "peak_bytes": resident("VmHWM"), **({"losses": losses} if losses else {})}))
    if o.ranks > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
