#!/usr/bin/env python3
"""Writes tests/golden/lora/llama.safetensors: 20 steps of LoRA by `peft` and PyTorch in float64.

Needs torch, transformers, peft and safetensors. Tensors have the logical names of Quadrille:
init.<parameter> (all), after.<parameter> (adapters), tokens and targets (steps, batch, seq), losses.
"""
import json
import os

import peft
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

STEPS, BATCH, SEQ = 20, 3, 12
RANK, ALPHA = 4, 6
LR, BETAS, EPS, DECAY, CLIP = 1e-2, (0.9, 0.95), 1e-8, 0.1, 0.5
SIZES = {"layers": 2, "hidden": 24, "heads": 4, "kv_heads": 2, "head_dim": 6, "ffn": 40, "vocab": 53}
PARTS = {"self_attn.q_proj": "attn.q", "self_attn.k_proj": "attn.k", "self_attn.v_proj": "attn.v", "self_attn.o_proj": "attn.out",
         "mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down",
         "input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"}
ENDS = {"model.embed_tokens.weight": "embed.tokens.weight", "model.norm.weight": "head.norm.weight", "lm_head.weight": "head.weight"}


def logical(name):
    """base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight -> block.0.attn.q.lora_A.weight"""
    name = name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".default", "")
    if name in ENDS:
        return ENDS[name]
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    for theirs, ours in PARTS.items():
        if rest.startswith(theirs + "."):
            return f"block.{layer}.{ours}.{rest[len(theirs) + 1:]}"
    raise ValueError(name)


def main():
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    config = LlamaConfig(
        num_hidden_layers=SIZES["layers"], hidden_size=SIZES["hidden"], num_attention_heads=SIZES["heads"],
        num_key_value_heads=SIZES["kv_heads"], head_dim=SIZES["head_dim"], intermediate_size=SIZES["ffn"], vocab_size=SIZES["vocab"],
        rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False, initializer_range=0.2, attn_implementation="eager")
    model = peft.get_peft_model(LlamaForCausalLM(config), peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules="all-linear", bias="none", task_type="CAUSAL_LM"), autocast_adapter_dtype=False)
    with torch.no_grad():  # B starts at 0 in PEFT; here no gradient is 0, and values are exact in float32
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.randn_like(p) * 0.05)
            p.copy_(p.float().double())
    tensors = {f"init.{logical(name)}": p.detach().float().contiguous() for name, p in model.named_parameters()}
    tokens = torch.randint(0, SIZES["vocab"], (STEPS, BATCH, SEQ + 1))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    losses = []
    for step in range(STEPS):
        logits = model(tokens[step, :, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, SIZES["vocab"]), tokens[step, :, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        losses.append(loss.item())
    tensors |= {f"after.{logical(name)}": p.detach().float().contiguous() for name, p in model.named_parameters() if p.requires_grad}
    tensors["tokens"] = tokens[:, :, :-1].to(torch.int32).contiguous()
    tensors["targets"] = tokens[:, :, 1:].to(torch.int32).contiguous()
    tensors["losses"] = torch.tensor(losses)
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "golden", "lora", "llama.safetensors")
    save_file(tensors, path, metadata={"config": json.dumps({"steps": STEPS, "peft": peft.__version__})})
    print(f"{os.path.getsize(path)} bytes, losses {losses[0]:.6f} to {losses[-1]:.6f}")


if __name__ == "__main__":
    main()
