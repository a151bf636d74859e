#!/usr/bin/env python3
"""The step of bench/gpu_lora/compare.py in PyTorch: transformers, peft, bf16, compiled, fused AdamW."""
import argparse
import json
import sys
import time


def main():
    a = argparse.ArgumentParser(description=__doc__)
    a.add_argument("--rank", type=int, default=16)
    a.add_argument("--peft", default="", help="folder or wheel to import peft from")
    o = a.parse_args()
    if o.peft:
        sys.path.insert(0, o.peft)
    import peft
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(num_hidden_layers=8, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336,
                         vocab_size=128256, rope_theta=500000.0, max_position_embeddings=8192, tie_word_embeddings=False,
                         attn_implementation="sdpa", use_cache=False)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    model = peft.get_peft_model(model, peft.LoraConfig(r=o.rank, lora_alpha=o.rank, target_modules="all-linear", bias="none",
                                                       task_type="CAUSAL_LM"), autocast_adapter_dtype=False)
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    tokens = torch.randint(0, config.vocab_size, (4, 4096), device="cuda")

    def step():
        loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(5):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    times.sort()
    print(json.dumps({"seconds": times[len(times) // 2], "peak_bytes": torch.cuda.max_memory_allocated(), "peft": peft.__version__}))


if __name__ == "__main__":
    main()
