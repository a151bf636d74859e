#!/usr/bin/env python3
"""The step of bench/gpu_lora/compare.py in PyTorch: transformers, peft, bf16, compiled, fused AdamW.

Decoder layers are compiled one by one (regional compilation): all eight share the code of the first, so
compilation takes seconds instead of minutes. The head and the loss are compiled as one function.
"""
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
        sys.path.append(o.peft)
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
    causal = model.get_base_model()
    for layer in causal.model.layers:
        layer.compile()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    tokens = torch.randint(0, config.vocab_size, (4, 4096), device="cuda")

    @torch.compile
    def head_loss(hidden, targets):
        logits = causal.lm_head(hidden[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets[:, 1:].flatten())

    def step():
        loss = head_loss(causal.model(input_ids=tokens).last_hidden_state, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    begin = time.perf_counter()
    for i in range(5):
        step()
        torch.cuda.synchronize()
        if i == 0:
            print(f"compiled in {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
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
