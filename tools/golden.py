#!/usr/bin/env python3
"""Writes and checks the golden fixtures: small models of each family, trained for 20 steps by PyTorch
in float64.

    golden.py write         FOLDER [NAME ...]    write the fixtures (tests/golden/fixtures), or some of them
    golden.py check         FOLDER    recompute everything from the stored weights and tokens and compare
    golden.py transformers  FOLDER    the same comparison against Hugging Face's own models (needs `transformers`)

Only this script needs PyTorch; the tests read the fixtures. A fixture is a safetensors file:

    __metadata__.config    the model, batch and optimizer as JSON (fields as in data/models.json)
    init.<parameter>       F32, initial weights; logical names, linear weights are (out, in)
    grad.<parameter>       F32, gradient of step 1 before clipping, computed in float64 and rounded once
    tokens, targets        I32 (steps, batch, seq)
    doc_start              I32 (steps, batch, seq), packed documents only: where a token's document begins in its row
    after.<parameter>      F32, Muon and QK-Clip only: weights after 5 steps
    max_scores             F64 (steps), QK-Clip only: the largest attention score, before the update
    mtp_losses             F64 (steps), prediction modules only: the mean of their losses
    losses, grad_norms     F64 (steps), float64 run; the norm is taken before clipping
    losses_f32             F64 (steps), the same run in float32: the effect of rounding
"""
import argparse
import inspect
import json
import math
import pathlib
import sys

import numpy as np
import torch
import torch.nn.functional as F

from golden_cases import *  # noqa: F401,F403
from golden_clip import rescale_heads


# The models, in plain PyTorch.

GATES = {"swiglu": F.silu, "geglu": lambda x: F.gelu(x, approximate="tanh"), "geglu_exact": F.gelu}


def parameter_shapes(c):
    """Logical name -> shape, in the order of the forward pass."""
    h, q, kv, f = c["hidden"], c["heads"] * c["head_dim"], c["kv_heads"] * c["head_dim"], c["ffn"]
    shapes = {"embed.tokens.weight": (c["vocab"], h)}
    if c["position"] == "learned":
        shapes["embed.positions.weight"] = (c["max_seq"], h)

    def norm(name):
        if c["norm"] == "layernorm_plain":
            return
        shapes[name + ".weight"] = (h,)
        if c["norm"] == "layernorm":
            shapes[name + ".bias"] = (h,)

    def linear(name, outputs, inputs, bias):
        shapes[name + ".weight"] = (outputs, inputs)
        if bias:
            shapes[name + ".bias"] = (outputs,)

    def layer(block, i):
        norm(block + "attn_norm")
        if c["family"] in GEMMAS:
            norm(block + "attn_post_norm")
            norm(block + "mlp_post_norm")
        if c.get("qk_norm"):
            wide = c.get("qk_norm_over") == "width"
            shapes[block + "attn.q_norm.weight"] = (q if wide else c["head_dim"],)
            shapes[block + "attn.k_norm.weight"] = (kv if wide else c["head_dim"],)
        mla = c.get("mla")
        if mla:
            rank = mla.get("q_lora_rank")
            if rank:
                linear(block + "attn.q_a", rank, h, False)
                shapes[block + "attn.q_a_norm.weight"] = (rank,)
            linear(block + ("attn.q_b" if rank else "attn.q"), q, rank or h, False)
            linear(block + "attn.kv_a", mla["kv_lora_rank"], h, False)
            linear(block + "attn.k_rope", mla["qk_rope_head_dim"], h, False)
            shapes[block + "attn.kv_a_norm.weight"] = (mla["kv_lora_rank"],)
            linear(block + "attn.kv_b", c["heads"] * (mla["qk_nope_head_dim"] + mla["v_head_dim"]), mla["kv_lora_rank"], False)
            linear(block + "attn.out", h, c["heads"] * mla["v_head_dim"], False)
        else:
            linear(block + "attn.q", q, h, c["qkv_bias"])
            linear(block + "attn.k", kv, h, c["qkv_bias"])
            linear(block + "attn.v", kv, h, c["qkv_bias"])
            linear(block + "attn.out", h, q, c["out_bias"])
            if c.get("sinks"):
                shapes[block + "attn.sinks"] = (c["heads"],)
        norm(block + "mlp_norm")
        if has_experts(c, i):
            linear(block + "mlp.router", c["experts"], h, c.get("router_logit_bias", False))
            widths = {f"experts.{e}": c["moe_ffn"] for e in range(c["experts"])}
            if c.get("shared_experts"):
                widths["shared"] = c.get("shared_expert_ffn") or c["shared_experts"] * c["moe_ffn"]
                if not c.get("mla"):
                    linear(block + "mlp.shared_gate", 1, h, False)
            for name, width in widths.items():
                for matrix, size in (("gate", (width, h)), ("up", (width, h)), ("down", (h, width))):
                    linear(f"{block}mlp.{name}.{matrix}", *size, c["mlp_bias"])
            return
        if c["activation"] in GATES:
            linear(block + "mlp.gate", f, h, c["mlp_bias"])
        linear(block + "mlp.up", f, h, c["mlp_bias"])
        linear(block + "mlp.down", h, f, c["mlp_bias"])

    for i in range(c["layers"]):
        layer(f"block.{i}.", i)
    norm("head.norm")
    if not c["tied"]:
        shapes["head.weight"] = (c["vocab"], h)
    for k in range(c.get("mtp_modules", 0)):
        module = f"head.mtp.{k}."
        for name in ("embed", "hidden"):
            norm(f"{module}{name}_norm")
            linear(f"{module}{name}_proj", h, h, False)
        layer(module, c["layers"] - 1)
        norm(module + "norm")
    return shapes


def has_experts(c, layer):
    return c.get("experts", 0) > 0 and layer >= c["dense_layers"]


def rope_dims(c):
    return c["mla"]["qk_rope_head_dim"] if c.get("mla") else int(c["head_dim"] * c.get("rope_fraction", 1.0))


def rope_frequencies(c, local=False):
    """(rotated elements / 2) float64; linear scaling divides all by `factor`, Llama 3 the low ones, and blends in between. Local:
    of layers with windows, with a base of their own and not scaled."""
    dims = rope_dims(c)
    half, s, base = dims // 2, None if local else c["rope_scaling"], c["rope_local_base"] if local else c["rope_base"]
    if s and s["type"] == "dynamic":
        longer = max(c["seq"] / s["original_max_seq"], 1.0)
        base, s = base * (s["factor"] * longer - (s["factor"] - 1)) ** (dims / (dims - 2)), None
    freq = [base ** (-i / half) for i in range(half)]
    if s and s["type"] == "longrope":
        divisors = s["long_factor" if c["seq"] > s["original_max_seq"] else "short_factor"]
        return torch.tensor([f / d for f, d in zip(freq, divisors, strict=True)], dtype=torch.float64)
    if s is None or s["type"] == "linear":
        return torch.tensor(freq, dtype=torch.float64) / (s["factor"] if s else 1.0)
    if s["type"] == "yarn":
        index = lambda turns: dims * math.log(s["original_max_seq"] / (turns * 2 * math.pi)) / (2 * math.log(c["rope_base"]))
        low, high = index(s["beta_fast"]), index(s["beta_slow"])
        low, high = (math.floor(low), math.ceil(high)) if s["truncate"] else (low, high)
        low, high = max(low, 0), min(high, dims - 1)
        ramp = [min(max((i - low) / (high - low), 0), 1) for i in range(half)]
        assert low < high and any(0 < x < 1 for x in ramp), "the case must exercise the blend"
        return torch.tensor([f / s["factor"] * x + f * (1 - x) for f, x in zip(freq, ramp)], dtype=torch.float64)
    out, regimes = [], set()
    for f in freq:
        wavelength = 2 * math.pi / f
        if wavelength < s["original_max_seq"] / s["high_freq_factor"]:
            keep = 1.0
        elif wavelength > s["original_max_seq"] / s["low_freq_factor"]:
            keep = 0.0
        else:
            keep = ((s["original_max_seq"] / wavelength - s["low_freq_factor"])
                    / (s["high_freq_factor"] - s["low_freq_factor"]))
        regimes.add("kept" if keep == 1 else "divided" if keep == 0 else "blended")
        out.append(keep * f + (1 - keep) * f / s["factor"])
    assert len(regimes) == 3, "the case must exercise all three regimes of the scaling"
    return torch.tensor(out, dtype=torch.float64)


def rope_scale(c):
    """YaRN and LongRoPE multiply rotated queries and keys by their attention factor."""
    s = c["rope_scaling"]
    if s and s["type"] == "longrope":
        return s.get("attention_factor") or math.sqrt(1 + math.log(s["factor"]) / math.log(s["original_max_seq"]))
    if not s or s["type"] != "yarn":
        return 1.0
    length = lambda mscale: 0.1 * mscale * math.log(s["factor"]) + 1.0
    return length(s["mscale"]) / length(s["mscale_all_dim"]) if s.get("mscale") else s.get("attention_factor") or length(1.0)


def score_scale(c):
    """DeepSeek's scores grow with YaRN's factor."""
    s, scale = c["rope_scaling"] or {}, c.get("score_scale") or 1 / math.sqrt(c["head_dim"])
    return scale * (0.1 * s["mscale_all_dim"] * math.log(s["factor"]) + 1.0) ** 2 if s.get("mscale_all_dim") else scale


def rotate_pairs(x, cos, sin):
    """x (B, heads, T, n): neighbours are a pair."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def rotate(x, cos, sin):
    """x (B, heads, T, head_dim): pairs (i, i + n/2) of the first n elements."""
    rest = x[..., 2 * cos.shape[-1]:]
    a, b = x[..., :2 * cos.shape[-1]].chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def has_window(c, layer):
    every = c.get("full_every", 0)
    return c.get("window", 0) > 0 and layer >= c.get("window_from", 0) and not (every and (layer + 1) % every == 0)


def has_rope(c, layer):
    every = c.get("nope_every", 0)
    return c["position"] == "rope" and not (every and (layer + 1) % every == 0)


def visible(c, doc_start, layer):
    """(B or 1, 1, T, T) bool: row t sees doc_start[t] .. t, in layers with a window the last of them."""
    t = torch.arange(c["seq"])
    mask = (t[None, :] <= t[:, None])[None, None]
    if has_window(c, layer):
        mask = mask & (t[None, :] > t[:, None] - c["window"])
    if doc_start is not None:
        mask = mask & (t[None, None, None, :] >= doc_start[:, None, :, None])
    return mask


def loss_of(c, p, tokens, targets, doc_start):
    """Mean cross-entropy over all B*T tokens. p: name -> tensor; the computation runs in the parameters' type. With prediction
    modules: the sum with theirs, and without."""
    def rms_norm(name, x, eps=c["norm_eps"]):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (p[name + ".weight"] + (c["norm"] == "rmsnorm_plus_one"))

    def norm(name, x):
        if c["norm"] == "layernorm":
            return F.layer_norm(x, (c["hidden"],), p[name + ".weight"], p[name + ".bias"], c["norm_eps"])
        if c["norm"] == "layernorm_plain":
            return F.layer_norm(x, (c["hidden"],), None, None, c["norm_eps"])
        return rms_norm(name, x)

    def before(name, x):
        return x if post else norm(name, x)

    def behind(name, x):
        return norm(name, x) if post else norm(name.replace("_norm", "_post_norm"), x) if c["family"] in GEMMAS else x

    def query_key(name, x, count):
        x = linear(name, x)
        if c.get("qk_norm") and c.get("qk_norm_over") == "width":
            x = rms_norm(name + "_norm", x)
        x = heads(x, count)
        return clip(rms_norm(name + "_norm", x) if c.get("qk_norm") and c.get("qk_norm_over") != "width" else x)

    def clip(x):
        return x.clamp(-c["clip_qkv"], c["clip_qkv"]) if c.get("clip_qkv") else x

    def linear(name, x):
        return F.linear(x, p[name + ".weight"], p.get(name + ".bias"))

    def heads(x, count):  # (B, T, count*d) -> (B, count, T, d)
        return x.view(*x.shape[:2], count, -1).transpose(1, 2)

    def latent(block, x):
        """Queries, keys and values of DeepSeek: (B, heads, T, …) each."""
        mla = c["mla"]
        turn = rotate_pairs if mla.get("rope_interleave", True) else rotate
        cos, sin = turns(False)
        if mla.get("q_lora_rank"):
            q = linear(block + "attn.q_b", rms_norm(block + "attn.q_a_norm", linear(block + "attn.q_a", x), LATENT_EPS))
        else:
            q = linear(block + "attn.q", x)
        q_nope, q_rope = heads(q, c["heads"]).split([mla["qk_nope_head_dim"], mla["qk_rope_head_dim"]], dim=-1)
        k_rope = turn(heads(linear(block + "attn.k_rope", x), 1), cos, sin).expand_as(q_rope)
        kv = linear(block + "attn.kv_b", rms_norm(block + "attn.kv_a_norm", linear(block + "attn.kv_a", x), LATENT_EPS))
        k_nope, v = heads(kv, c["heads"]).split([mla["qk_nope_head_dim"], mla["v_head_dim"]], dim=-1)
        return torch.cat((q_nope, turn(q_rope, cos, sin)), dim=-1), torch.cat((k_nope, k_rope), dim=-1), v

    def deepseek_mixture(name, x):
        """Sigmoid routing to the best experts of the best groups, and experts for all."""
        groups, (B, T, h) = c["router_groups"], x.shape
        scores = linear(name + ".router", x).sigmoid()
        by_group = scores.detach().view(B, T, groups, -1)
        best = by_group.topk(c["router_group_best"]).values.sum(-1).topk(c["router_top_groups"]).indices
        allowed = torch.zeros(B, T, groups, dtype=torch.bool).scatter(2, best, True).repeat_interleave(by_group.shape[-1], dim=2)
        chosen = scores.detach().masked_fill(~allowed, -math.inf).topk(c["topk"]).indices
        weight = scores.gather(2, chosen)
        weight = c["router_scale"] * weight / weight.sum(-1, keepdim=True)
        dense = torch.zeros_like(scores).scatter(2, chosen, weight)
        return mlp(name + ".shared", x) + sum(dense[..., e:e + 1] * mlp(f"{name}.experts.{e}", x) for e in range(c["experts"]))

    def mlp(name, y):
        if c["activation"] == "swiglu_clamped":
            gate = linear(name + ".gate", y).clamp(max=c["swiglu_limit"])
            up = linear(name + ".up", y).clamp(-c["swiglu_limit"], c["swiglu_limit"])
            return linear(name + ".down", (up + 1) * gate * torch.sigmoid(c["swiglu_alpha"] * gate))
        return linear(name + ".down", GATES[c["activation"]](linear(name + ".gate", y)) * linear(name + ".up", y))

    def mixture(name, y):
        """Each token's best experts, weighted by their probabilities; the shared one behind its gate."""
        weight, choice = linear(name + ".router", y).softmax(-1).topk(c["topk"])
        if c["router_normalised"]:
            weight = weight / weight.sum(-1, keepdim=True)
        out = sum(mlp(f"{name}.experts.{e}", y) * torch.where(choice == e, weight, 0.0).sum(-1, keepdim=True) for e in range(c["experts"]))
        return out + torch.sigmoid(linear(name + ".shared_gate", y)) * mlp(name + ".shared", y) if c.get("shared_experts") else out

    loss_of.scores = {}
    post = c["family"] == "olmo2"
    x = p["embed.tokens.weight"][tokens]
    if c.get("embed_scaled"):
        x = x * float(np.float32(math.sqrt(c["hidden"])))
    if c["position"] == "learned":
        x = x + p["embed.positions.weight"][: c["seq"]]
    else:
        def turns(local):
            angle = torch.outer(torch.arange(c["seq"], dtype=torch.float64), rope_frequencies(c, local))
            scale = 1.0 if local else rope_scale(c)
            return (scale * angle.cos()).to(x.dtype), (scale * angle.sin()).to(x.dtype)

    def layer(block, i, x):
        mask = visible(c, doc_start, i)
        y = before(block + "attn_norm", x)
        if c.get("mla"):
            q, k, v = latent(block, y)
        else:
            q = query_key(block + "attn.q", y, c["heads"])
            k = query_key(block + "attn.k", y, c["kv_heads"])
            v = clip(heads(linear(block + "attn.v", y), c["kv_heads"]))
        if has_rope(c, i) and not c.get("mla"):
            cos, sin = turns(has_window(c, i) and bool(c.get("rope_local_base")))
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = c["heads"] // c["kv_heads"]  # query head h reads key head h / group
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        score = (q @ k.transpose(-1, -2)) * score_scale(c)
        if c.get("score_softcap"):
            score = c["score_softcap"] * torch.tanh(score / c["score_softcap"])
        score = score.masked_fill(~mask, -math.inf)
        loss_of.scores[block] = score.detach().amax((0, 2, 3))
        if c.get("sinks"):  # one more column, whose share of the softmax has no value
            sink = p[block + "attn.sinks"].view(1, -1, 1, 1).expand(*score.shape[:-1], 1)
            o = torch.cat((score, sink), -1).softmax(-1)[..., :-1] @ v
        else:
            o = score.softmax(-1) @ v
        x = x + behind(block + "attn_norm", linear(block + "attn.out", o.transpose(1, 2).flatten(2)))
        y = before(block + "mlp_norm", x)
        if has_experts(c, i):
            return x + (deepseek_mixture if c.get("mla") else mixture)(block + "mlp", y)
        if c["activation"] in GATES:
            y = GATES[c["activation"]](linear(block + "mlp.gate", y)) * linear(block + "mlp.up", y)
        else:
            y = F.gelu(linear(block + "mlp.up", y), approximate="tanh" if c["activation"] == "gelu_tanh" else "none")
        return x + behind(block + "mlp_norm", linear(block + "mlp.down", y))

    def cross_entropy(x, wanted):
        logits = F.linear(x, p["embed.tokens.weight" if c["tied"] else "head.weight"])
        if c.get("logit_softcap"):
            logits = c["logit_softcap"] * torch.tanh(logits / c["logit_softcap"])
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum", ignore_index=-1) / wanted.numel()

    def predict_further(x):
        """The mean of the losses of DeepSeek V3's prediction modules. Module k reads the tokens k further on, and its targets are
        the tokens after these; all are normalized by all tokens. Nothing is predicted from one document about another."""
        losses = []
        for k in range(1, c["mtp_modules"] + 1):
            module = f"head.mtp.{k - 1}."
            further, wanted = F.pad(tokens[:, k:], (0, k)), F.pad(targets[:, k:], (0, k), value=-1)
            if doc_start is not None:
                wanted = torch.where(F.pad(doc_start[:, k:], (0, k), value=-1) == doc_start, wanted, -1)
            x = linear(module + "embed_proj", norm(module + "embed_norm", p["embed.tokens.weight"][further])) + \
                linear(module + "hidden_proj", norm(module + "hidden_norm", x))
            x = norm(module + "norm", layer(module, c["layers"] - 1, x))
            losses.append(cross_entropy(x, wanted))
        return sum(losses) / len(losses)

    for i in range(c["layers"]):
        x = layer(f"block.{i}.", i, x)
    x = norm("head.norm", x)
    loss = cross_entropy(x, targets)
    return (loss + c["mtp_weight"] * predict_further(x), loss) if c.get("mtp_modules") else loss


# Data and training.

def initial_weights(c, rng):
    """Larger than in practice, so that softmax, norms and activations are far from linear and clipping occurs.

    Without rotation the gradient of the key bias is exactly zero, so float32 gives only rounding noise,
    which the comparison rule relates to 1e-3 of the RMS norm. Weaker attention keeps that noise (1e-6 by
    the rule) well below the tests' 1e-5, while the gradients of q and k stay far above the 1e-3.
    """
    quiet = {} if c["position"] == "rope" else {"q": 0.5, "k": 0.5, "v": 0.15, "out": 0.15}
    init = {}
    for name, shape in parameter_shapes(c).items():
        if name.startswith("embed."):
            value = 0.5 * rng.standard_normal(shape)
        elif len(shape) == 2:
            value = 1.2 / math.sqrt(shape[1]) * rng.standard_normal(shape)
        else:
            value = (1.0 if name.endswith("norm.weight") and c["norm"] != "rmsnorm_plus_one" else 0.0) + 0.1 * rng.standard_normal(shape)
        if name.endswith("attn.sinks"):
            value *= 10.0
        if ".attn." in name:
            value *= quiet.get(name.split(".")[3], 1.0)
        init[name] = value.astype(np.float32)
    return init


def make_data(c, rng):
    """Noisy arithmetic progressions modulo the vocabulary: something to learn. Targets are the next tokens."""
    shape = (STEPS, BATCH, c["seq"] + 1)
    seq = np.empty(shape, dtype=np.int32)
    seq[..., 0] = rng.integers(0, c["vocab"], shape[:2])
    for t in range(1, shape[2]):
        noise = rng.random(shape[:2]) < 0.2
        seq[..., t] = np.where(noise, rng.integers(0, c["vocab"], shape[:2]), (seq[..., t - 1] * 3 + 7) % c["vocab"])
    data = {"tokens": seq[..., :-1].copy(), "targets": seq[..., 1:].copy()}
    if c["packed"]:
        starts = rng.random((STEPS, BATCH, c["seq"])) < 0.2
        starts[..., 0] = True
        starts[:, 0, 5:7] = True      # a document of one token
        starts[:, 1, 1:] = False      # a row that is one document
        where = np.where(starts, np.arange(c["seq"]), 0)
        data["doc_start"] = np.maximum.accumulate(where, axis=-1).astype(np.int32)
    return data


def muon_class():
    """PyTorch's own Muon, with its Newton-Schulz iteration in the matrices' dtype instead of bfloat16."""
    import torch.optim._muon as module
    name = "_zeropower_via_newtonschulz"
    if not getattr(module, "in_own_type", False):
        source = inspect.getsource(getattr(module, name))
        if "torch.bfloat16" not in source:
            sys.exit(f"{name} of PyTorch {torch.__version__} has changed: this script does not support it")
        exec(source.replace("torch.bfloat16", "grad.dtype"), vars(module))
        module.in_own_type = True
    return torch.optim.Muon


def optimizers(o, named):
    matrix = lambda name, p: o["name"] == "muon" and name.startswith("block.") and p.ndim == 2
    decays = lambda name, p: p.ndim >= 2 and not name.endswith("_bias")  # stacked biases of experts
    groups = [{"params": [p for name, p in named.items() if not matrix(name, p) and decays(name, p)], "weight_decay": o["weight_decay"]},
              {"params": [p for name, p in named.items() if not matrix(name, p) and not decays(name, p)], "weight_decay": 0.0}]
    made = [torch.optim.AdamW(groups, lr=o["lr"], betas=(o["beta1"], o["beta2"]), eps=o["eps"], foreach=False)]
    if o["name"] == "muon":
        made.append(muon_class()([p for name, p in named.items() if matrix(name, p)], lr=o["muon_lr"],
                                 weight_decay=o["weight_decay"], momentum=o["muon_momentum"], nesterov=o["muon_nesterov"],
                                 ns_steps=o["muon_steps"], adjust_lr_fn=o["muon_scale"]))
    return made


def train(o, named, step_loss, after_step=lambda: None):
    """20 steps. Returns float64 arrays (losses, norms before clipping), the gradients of step 1 and the weights after AFTER.
    train.objectives: losses with those of prediction modules."""
    made = optimizers(o, named)
    losses, norms, first, after, objectives = [], [], None, None, []
    for step in range(STEPS):
        for optimizer in made:
            optimizer.zero_grad()
        loss = step_loss(step)
        objective, loss = loss if isinstance(loss, tuple) else (loss, loss)
        objective.backward()
        if first is None:
            first = {name: p.grad.detach().clone() for name, p in named.items()}
        norm = torch.nn.utils.clip_grad_norm_(list(named.values()), o["clip"], foreach=False)
        for optimizer in made:
            optimizer.step()
        after_step()
        if step + 1 == AFTER:
            after = {name: p.detach().clone() for name, p in named.items()}
        losses.append(loss.item())
        objectives.append(objective.item())
        norms.append(norm.item())
    train.objectives = np.array(objectives)
    return np.array(losses), np.array(norms), first, after


def batch_of(data, step):
    """(tokens, targets, doc_start or None) of a step, as int64 tensors."""
    return tuple(torch.from_numpy(data[k][step].astype(np.int64)) if k in data else None
                 for k in ("tokens", "targets", "doc_start"))


def run_ours(c, init, data, dtype):
    p = {name: torch.tensor(value, dtype=dtype, requires_grad=True) for name, value in init.items()}
    most = run_ours.max_scores = []

    def limit_scores():
        most.append(max(float(x.max()) for x in loss_of.scores.values()))
        rescale_heads(c, p, loss_of.scores)

    return train(c["optimizer"], p, lambda step: loss_of(c, p, *batch_of(data, step)),
                 *[limit_scores] if c["optimizer"].get("qk_clip") else [])


def config_of(metadata):
    """The model of a fixture. Older ones have one flag for the biases of the attention output and of the MLP, and leave
    out defaults of the router."""
    c = json.loads(metadata["config"])
    both = c.pop("linear_bias", False)
    return {"out_bias": both, "mlp_bias": both, "router_normalised": True, **c}


def split(tensors, prefix):
    return {name[len(prefix):]: t for name, t in tensors.items() if name.startswith(prefix)}


# Hugging Face.

def gpt_oss_state(c, ours, ours_block, theirs_block):
    """Sinks, router and experts of a GPT-OSS block: stacked, matrices as (in, out), outputs of gate and up alternate."""
    out = {theirs_block + "self_attn.sinks": ours[ours_block + "attn.sinks"]}
    for kind in ("weight", "bias"):
        all_of = lambda name: torch.stack([ours[f"{ours_block}mlp.experts.{e}.{name}.{kind}"] for e in range(c["experts"])])
        end = "" if kind == "weight" else "_bias"
        turned = lambda x: x.transpose(1, 2) if kind == "weight" else x
        gate_up = torch.stack((all_of("gate"), all_of("up")), dim=2).flatten(1, 2)
        out[f"{theirs_block}mlp.experts.gate_up_proj{end}"] = turned(gate_up).contiguous()
        out[f"{theirs_block}mlp.experts.down_proj{end}"] = turned(all_of("down")).contiguous()
        out[f"{theirs_block}mlp.router.{kind}"] = ours[f"{ours_block}mlp.router.{kind}"]
    return out


def hf_state(c, ours):
    """Our tensors (weights or gradients) under Hugging Face's names and layouts."""
    t = lambda name: ours[name]
    out = {}
    if c["family"] == "gpt2":
        pre = "transformer."
        out[pre + "wte.weight"], out[pre + "wpe.weight"] = t("embed.tokens.weight"), t("embed.positions.weight")
        for i in range(c["layers"]):
            b, h = f"block.{i}.", f"{pre}h.{i}."
            for ours_norm, theirs in (("attn_norm", "ln_1"), ("mlp_norm", "ln_2")):
                for kind in ("weight", "bias"):
                    out[f"{h}{theirs}.{kind}"] = t(f"{b}{ours_norm}.{kind}")
            out[h + "attn.c_attn.weight"] = torch.cat([t(f"{b}attn.{x}.weight").T for x in "qkv"], dim=1)
            out[h + "attn.c_attn.bias"] = torch.cat([t(f"{b}attn.{x}.bias") for x in "qkv"])
            for a, z in (("attn.out", "attn.c_proj"), ("mlp.up", "mlp.c_fc"), ("mlp.down", "mlp.c_proj")):
                out[f"{h}{z}.weight"], out[f"{h}{z}.bias"] = t(f"{b}{a}.weight").T, t(f"{b}{a}.bias")
        out[pre + "ln_f.weight"], out[pre + "ln_f.bias"] = t("head.norm.weight"), t("head.norm.bias")
    else:
        out["model.embed_tokens.weight"] = t("embed.tokens.weight")
        if c["norm"] != "layernorm_plain":
            out["model.norm.weight"] = t("head.norm.weight")
        names = {"attn_norm": "input_layernorm", "attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj",
                 "attn.v": "self_attn.v_proj", "attn.out": "self_attn.o_proj", "mlp_norm": "post_attention_layernorm",
                 "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
                 "attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm"}
        if c["family"] in GEMMAS:
            names.update({"attn_post_norm": "post_attention_layernorm", "mlp_norm": "pre_feedforward_layernorm",
                          "mlp_post_norm": "post_feedforward_layernorm"})
        if c["family"] == "olmo2":
            names.update({"attn_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"})
        names.update({"attn.q_a": "self_attn.q_a_proj", "attn.q_a_norm": "self_attn.q_a_layernorm", "attn.q_b": "self_attn.q_b_proj",
                      "attn.kv_a_norm": "self_attn.kv_a_layernorm", "attn.kv_b": "self_attn.kv_b_proj",
                      **{f"mlp.shared.{x}": f"mlp.shared_experts.{x}_proj" for x in ("gate", "up", "down")}})
        for i in range(c["layers"]):
            if c.get("mla"):
                out[f"model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight"] = torch.cat(
                    [t(f"block.{i}.attn.{x}.weight") for x in ("kv_a", "k_rope")])
            for a, z in names.items():
                for kind in ("weight", "bias"):
                    if f"block.{i}.{a}.{kind}" in ours:
                        out[f"model.layers.{i}.{z}.{kind}"] = t(f"block.{i}.{a}.{kind}")
    if c.get("hf_type") == "phi3":
        for i in range(c["layers"]):
            h, q, k, v = f"model.layers.{i}.", *(f"model.layers.{i}.self_attn.{x}_proj.weight" for x in "qkv")
            out[h + "self_attn.qkv_proj.weight"] = torch.cat([out.pop(name) for name in (q, k, v)])
            out[h + "mlp.gate_up_proj.weight"] = torch.cat([out.pop(f"{h}mlp.{x}_proj.weight") for x in ("gate", "up")])
    for i in range(c["layers"]):
        b, h = f"block.{i}.mlp.", f"model.layers.{i}.mlp."
        if not has_experts(c, i):
            continue
        if c.get("sinks"):
            out.update(gpt_oss_state(c, ours, f"block.{i}.", f"model.layers.{i}."))
            continue
        each = lambda matrix: torch.stack([t(f"{b}experts.{e}.{matrix}.weight") for e in range(c["experts"])])
        out[h + "gate.weight"] = t(b + "router.weight")
        out[h + "experts.gate_up_proj"] = torch.cat((each("gate"), each("up")), dim=1)
        out[h + "experts.down_proj"] = each("down")
        if c.get("shared_experts") and not c.get("mla"):
            out[h + "shared_expert_gate.weight"] = t(b + "shared_gate.weight")
            for matrix in ("gate", "up", "down"):
                out[f"{h}shared_expert.{matrix}_proj.weight"] = t(f"{b}shared.{matrix}.weight")
    if not c["tied"]:
        out["lm_head.weight"] = t("head.weight")
    return out


def hf_model(c):
    import transformers
    if c["family"] == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=c["vocab"], n_positions=c["max_seq"], n_embd=c["hidden"], n_layer=c["layers"],
            n_head=c["heads"], n_inner=c["ffn"], layer_norm_epsilon=c["norm_eps"], tie_word_embeddings=c["tied"],
            bos_token_id=None, eos_token_id=None,
            activation_function="gelu_new" if c["activation"] == "gelu_tanh" else "gelu",
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager")
        return transformers.GPT2LMHeadModel(config)
    rope = {"rope_type": "default", "rope_theta": c["rope_base"]}
    s = c["rope_scaling"]
    if s and s["type"] == "linear":
        rope.update(rope_type="linear", factor=s["factor"])
    elif s and s["type"] == "dynamic":
        rope.update(rope_type="dynamic", factor=s["factor"])
    elif s and s["type"] == "yarn":
        rope.update({"rope_type": "yarn", "original_max_position_embeddings": s["original_max_seq"],
                     **{key: s[key] for key in ("factor", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale",
                                                "mscale_all_dim") if key in s}})
    elif s and s["type"] == "longrope":
        rope.update({"rope_type": "longrope", "original_max_position_embeddings": s["original_max_seq"],
                     **{key: s[key] for key in ("factor", "short_factor", "long_factor", "attention_factor") if key in s}})
    elif s:
        rope.update(rope_type="llama3", factor=s["factor"], low_freq_factor=s["low_freq_factor"],
                    high_freq_factor=s["high_freq_factor"], original_max_position_embeddings=s["original_max_seq"])
    # Llama cannot have biases on q, k and v only; Qwen2 is the same model with them.
    kind = {"olmo": "Olmo", "olmo2": "Olmo3" if c.get("window") else "Olmo2", "gemma2": "Gemma2", "gemma3": "Gemma3",
            "deepseek": "DeepseekV3"}.get(c["family"]) or (
        "Qwen2" if c["qkv_bias"] and not c["out_bias"] else {"mistral": "Mistral", "phi3": "Phi3"}[c["hf_type"]] if c.get("hf_type")
        else "SmolLM3" if c.get("nope_every") else "Qwen3" if c.get("qk_norm") else "Llama")
    if c.get("experts") and not c.get("mla"):
        kind = ("GptOss" if c.get("sinks") else "Qwen2Moe" if c.get("shared_gate") else "Olmoe" if c.get("qk_norm_over") == "width"
                else "Qwen3Moe" if c.get("qk_norm") else "Mixtral")
    options = dict(
        vocab_size=c["vocab"], hidden_size=c["hidden"], intermediate_size=c["ffn"], num_hidden_layers=c["layers"],
        num_attention_heads=c["heads"], num_key_value_heads=c["kv_heads"], head_dim=c["head_dim"],
        max_position_embeddings=c["max_seq"], rms_norm_eps=c["norm_eps"], tie_word_embeddings=c["tied"], pad_token_id=None,
        bos_token_id=None, eos_token_id=None,
        attn_implementation="eager")
    if c.get("experts") and not c.get("mla"):
        own = kind in ("Qwen2Moe", "Qwen3Moe")  # the others have one width for experts and dense layers
        options.update(num_experts_per_tok=c["topk"], intermediate_size=c["ffn"] if own else c["moe_ffn"],
                       **{"num_local_experts" if kind in ("Mixtral", "GptOss") else "num_experts": c["experts"]},
                       **({} if kind in ("Mixtral", "GptOss") else {"norm_topk_prob": c["router_normalised"]}),
                       **({"moe_intermediate_size": c["moe_ffn"], "mlp_only_layers": list(range(c["dense_layers"]))} if own else {}),
                       **({"shared_expert_intermediate_size": c["shared_expert_ffn"], "qkv_bias": c["qkv_bias"]} if kind == "Qwen2Moe" else {}))
    if kind == "GptOss":
        options.update(swiglu_alpha=c["swiglu_alpha"], swiglu_limit=c["swiglu_limit"], attention_bias=c["out_bias"],
                       sliding_window=c.get("window") or 128, experts_implementation="eager",
                       layer_types=["sliding_attention" if has_window(c, i) else "full_attention" for i in range(c["layers"])])
    if kind in ("Mistral", "Mixtral", "Phi3"):
        options["sliding_window"] = c.get("window") or None
    elif kind == "SmolLM3":
        options["no_rope_layers"] = [int(has_rope(c, i)) for i in range(c["layers"])]
        options["pad_token_id"] = None
    if kind in ("Qwen2", "SmolLM3", "Qwen2Moe") and c.get("window"):
        options.update(use_sliding_window=True, sliding_window=c["window"],
                       layer_types=["sliding_attention" if has_window(c, i) else "full_attention" for i in range(c["layers"])])
    elif kind in ("Gemma2", "Gemma3"):
        options.update(hidden_activation={"geglu": "gelu_pytorch_tanh", "geglu_exact": "gelu"}[c["activation"]],
                       query_pre_attn_scalar=round(1 / c["score_scale"] ** 2) if c.get("score_scale") else c["head_dim"],
                       attn_logit_softcapping=c.get("score_softcap") or None, final_logit_softcapping=c.get("logit_softcap") or None,
                       sliding_window=c.get("window") or 4096,
                       layer_types=["sliding_attention" if has_window(c, i) else "full_attention" for i in range(c["layers"])])
        options["attention_bias"] = c["out_bias"]
    elif kind in ("Olmo", "Olmo2", "Olmo3", "Olmoe"):
        options["attention_bias"] = c["out_bias"]
        if kind == "Olmo3":
            options.update(sliding_window=c["window"],
                           layer_types=["sliding_attention" if has_window(c, i) else "full_attention" for i in range(c["layers"])])
        if kind in ("Olmo", "Olmoe"):
            options["clip_qkv"] = c.get("clip_qkv") or None
    elif kind == "Llama":
        options.update(attention_bias=c["out_bias"], mlp_bias=c["mlp_bias"])
    if kind == "Phi3":
        rope["partial_rotary_factor"] = c.get("rope_fraction", 1.0)
        options["original_max_position_embeddings"] = rope.get("original_max_position_embeddings", 4096)
    if kind == "DeepseekV3":
        del options["head_dim"]
        options.update({"q_lora_rank": None, **c["mla"]}, first_k_dense_replace=c.get("dense_layers", c["layers"]), num_mtp_layers=0)
        if c.get("experts"):
            options.update(n_routed_experts=c["experts"], num_experts_per_tok=c["topk"], moe_intermediate_size=c["moe_ffn"],
                           n_shared_experts=c["shared_experts"], n_group=c["router_groups"], topk_group=c["router_top_groups"],
                           routed_scaling_factor=c["router_scale"])
    if kind in ("Gemma3", "Olmo3"):
        local = {"rope_type": "default", "rope_theta": c["rope_local_base"]} if c.get("rope_local_base") else rope
        rope = {"full_attention": rope, "sliding_attention": local}
    if int(transformers.__version__.split(".")[0]) >= 5:
        options["rope_parameters"] = rope
    else:
        options.update(rope_theta=c["rope_base"], rope_scaling=rope if c["rope_scaling"] else None)
    config = getattr(transformers, kind + ("TextConfig" if kind == "Gemma3" else "Config"))(**options)
    return getattr(transformers, kind + "ForCausalLM")(config)


def run_hf(c, init, data):
    model = hf_model(c).to(torch.float64).train()
    model.config._experts_implementation = "eager"  # PyTorch's grouped GEMM does not support float64
    state = hf_state(c, {k: torch.tensor(v, dtype=torch.float64) for k, v in init.items()})
    named = dict(model.named_parameters())
    if set(named) != set(state):
        sys.exit(f"parameters differ: {sorted(set(named) ^ set(state))}")
    with torch.no_grad():
        for name, value in state.items():
            named[name].copy_(value)

    def step_loss(step):
        tokens, targets, doc_start = batch_of(data, step)
        mask = None
        if doc_start is not None:
            mask = torch.zeros((), dtype=torch.float64).masked_fill(~visible(c, doc_start, 0), -math.inf)
        logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return train(c["optimizer"], named, step_loss)


# Commands.

def tensor_error(got, want):
    """Largest ‖a-b‖ / max(‖b‖, 1e-3 · RMS of all tensors' norms), and its tensor."""
    if set(got) != set(want):
        sys.exit(f"tensors differ in names: {sorted(set(got) ^ set(want))}")
    norms = [float(want[k].norm()) for k in want]
    rms = math.sqrt(sum(n * n for n in norms) / len(norms))
    return max((float((got[k].double() - want[k].double()).norm()) / max(float(want[k].norm()), 1e-3 * rms), k)
               for k in want)


def relative(a, b):
    return float(np.max(np.abs(a - b) / np.abs(b)))


def write(folder, names):
    folder.mkdir(parents=True, exist_ok=True)
    total = 0
    for number, (name, c) in enumerate(CASES.items()):
        if names and name not in names:
            continue
        rng = np.random.Generator(np.random.PCG64(20250 + number))
        init, data = initial_weights(c, rng), make_data(c, rng)
        losses, norms, grads, after = run_ours(c, init, data, torch.float64)
        objectives, scores = train.objectives, run_ours.max_scores
        losses32, _, grads32, after32 = run_ours(c, init, data, torch.float32)
        tensors = {"losses": losses, "grad_norms": norms, "losses_f32": losses32}
        if c.get("mtp_modules"):
            tensors["mtp_losses"] = (objectives - losses) / c["mtp_weight"]
        tensors.update({"init." + k: v for k, v in init.items()})
        tensors.update({"grad." + k: v.numpy().astype(np.float32) for k, v in grads.items()})
        if scores:
            tensors["max_scores"] = np.array(scores)
        if c["optimizer"]["name"] == "muon" or scores:
            tensors.update({"after." + k: v.numpy().astype(np.float32) for k, v in after.items()})
            print(f"{name:18s} float32: weights after {AFTER} steps {tensor_error(after32, after)[0]:.1e}")
        tensors.update(data)
        path = folder / f"{name}.safetensors"
        save(path, tensors, {"format": "quadrille-golden-1", "name": name, "torch": torch.__version__.split("+")[0],
                             "config": json.dumps(c)})
        total += path.stat().st_size
        error, worst = tensor_error(grads32, grads)
        count = sum(v.size for v in init.values())
        print(f"{name:18s} {count:6d} parameters, loss {losses[0]:.4f} -> {losses[-1]:.4f}, "
              f"norm {norms.min():.2f}..{norms.max():.2f}; float32: loss {relative(losses32, losses):.1e}, "
              f"gradients {error:.1e} ({worst})")
    print(f"{total} bytes")


def check(folder, runner, loss_tolerance, grad_tolerance):
    bad = 0
    for path in sorted(folder.glob("*.safetensors")):
        metadata, tensors = load(path)
        c = config_of(metadata)
        muon = c["optimizer"]["name"] == "muon"
        if runner is run_hf and c["family"] == "llama" and (c.get("score_softcap") or c.get("rope_local_base")):
            print(f"--  {path.stem:18s} Hugging Face's Llama has no soft-cap, and one rotary base")
            continue
        if runner is run_hf and c.get("mtp_modules"):
            print(f"--  {path.stem:18s} Hugging Face's models do not train prediction modules")
            continue
        if runner is run_hf and c["optimizer"].get("qk_clip"):
            print(f"--  {path.stem:18s} Hugging Face's models fuse matrices that QK-Clip rescales")
            continue
        if runner is run_hf and muon:
            print(f"--  {path.stem:18s} Hugging Face's models fuse matrices, which Muon would treat differently")
            continue
        losses, norms, grads, after = runner(c, split(tensors, "init."), tensors)
        want = {k: torch.tensor(v) for k, v in split(tensors, "grad.").items()}
        if runner is run_hf:
            want = hf_state(c, want)
        error, worst = tensor_error(grads, want)
        loss_error, norm_error = relative(losses, tensors["losses"]), relative(norms, tensors["grad_norms"])
        if muon:
            error = max(error, tensor_error(after, {k: torch.tensor(v) for k, v in split(tensors, "after.").items()})[0])
        ok = max(loss_error, norm_error) <= loss_tolerance and error <= grad_tolerance
        bad += not ok
        print(f"{'ok ' if ok else 'BAD'} {path.stem:18s} losses {loss_error:.1e}, norms {norm_error:.1e}, "
              f"gradients {error:.1e} ({worst})")
    return 1 if bad else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["write", "check", "transformers"])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("names", nargs="*", help="write: these fixtures only")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.command == "write":
        return write(args.folder, args.names)
    if args.command == "check":
        # The fixture's gradients are rounded to float32, so 1e-7 is the best possible agreement.
        return check(args.folder, lambda c, init, data: run_ours(c, init, data, torch.float64), 1e-10, 1e-6)
    # Hugging Face computes rotary angles, and part of RMSNorm, in float32 whatever the model's
    # dtype.
    return check(args.folder, run_hf, 1e-5, 1e-5)


if __name__ == "__main__":
    sys.exit(main())
