#!/usr/bin/env python3
"""Compares Quadrille's training step of DeepSeek-shaped models with PyTorch's on one GPU: the same models
and batches, one after another in one run.

  python3 bench/gpu_deepseek/compare.py [CASE ...] [--python VENV/bin/python3]
      [--quadrille build/release/bin/quadrille] [--ours-only] [--json FILE]

Prints tokens per second, model TFLOP/s, MFU, peak memory and the ratio; then a breakdown of our time by
op. PyTorch is compiled block by block, with cuDNN and with flex_attention; the faster one counts.
"""
import os
import sys

from deepseek_cases import AUX_LOSS, BIAS_RATE, CASES, MTP_WEIGHT, ROPE_BASE, ROUTER_SCALE, flops_per_token

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "gpu_step"))
from compare import arguments, fastest_way, last_json, print_breakdown, row_of, run  # noqa: E402


def ours(o, name):
    c = CASES[name]
    keys = {
        "model.arch": "deepseek", "model.layers": c.layers, "model.hidden": c.hidden, "model.heads": c.heads, "model.kv_heads": c.heads,
        "model.ffn": c.ffn, "model.vocab": c.vocab, "model.q_lora_rank": c.q_rank, "model.kv_lora_rank": c.kv_rank,
        "model.qk_nope_head_dim": c.nope, "model.qk_rope_head_dim": c.rope, "model.v_head_dim": c.v, "model.rope_base": ROPE_BASE,
        "model.experts": c.experts, "model.experts_per_token": c.per_token, "model.expert_ffn": c.expert_ffn, "model.shared_experts": c.shared,
        "model.first_dense": c.dense, "model.router": "sigmoid", "model.router_scale": ROUTER_SCALE, "model.router_groups": c.groups,
        "model.router_top_groups": c.top_groups, "model.router_bias_rate": BIAS_RATE, "model.aux_loss": AUX_LOSS, "model.balance": "sequence",
        "model.mtp_modules": c.mtp, "model.mtp_weight": MTP_WEIGHT,
        "data.seq": c.seq, "train.global_batch": c.batch, "train.micro_batch": c.batch, "train.precision": "bf16", "train.master": "split",
        "train.clip": 1, "train.lr": 1e-4, "run.device": "cuda"}
    return last_json([o.quadrille, "bench", "step", "--json", "--warm-up", str(o.warm_up), "--repeat", str(o.repeat)] +
                     [f"{key}={value}" for key, value in keys.items()] + o.set, "quadrille")


def compare(o, name):
    c = CASES[name]
    step = None if o.ours_only else fastest_way(o, os.path.join(HERE, "torch_deepseek.py"), name)
    return row_of(name, c.batch, c.seq, flops_per_token(c), ours(o, name), step)


def main():
    a = arguments(__doc__, CASES)
    a.add_argument("--ways", nargs="+", default=["cudnn", "flex"], help="PyTorch: attention through cuDNN or flex_attention")
    a.add_argument("--limit", type=float, metavar="SECONDS", help="PyTorch: stop after this time")
    return run(a, CASES, compare, print_breakdown)


if __name__ == "__main__":
    sys.exit(main())
