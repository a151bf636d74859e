#!/usr/bin/env python3
"""Full fine-tuning of a model of Llama 3.2 1B's shape on one GPU, from Hugging Face folder to Hugging Face folder.

  python3 bench/gpu_lora/finetune.py --quadrille build/release/bin/quadrille --work FOLDER [--layers 16] [--steps 40]

Makes a folder with random bf16 weights and a small byte-level tokenizer, and 2,000 examples for supervised
fine-tuning; trains with `train --from`; exports; loads the export in transformers and compares its loss on
held-out examples with that of `quadrille eval`. Needs torch, transformers and tokenizers. --cpu: a small
model, for a trial on a machine without a GPU.
"""
import argparse
import json
import os
import random
import subprocess
import sys
import time


def make_folder(path, o):
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    torch.manual_seed(0)
    small = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128, vocab_size=512)
    large = dict(hidden_size=2048, num_attention_heads=32, num_key_value_heads=8, head_dim=64, intermediate_size=8192, vocab_size=128256)
    config = LlamaConfig(num_hidden_layers=o.layers, rope_theta=500000.0, max_position_embeddings=8192, tie_word_embeddings=True,
                         rms_norm_eps=1e-5, bos_token_id=256, eos_token_id=256, **(small if o.cpu else large))
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cpu" if o.cpu else "cuda"):
        model = LlamaForCausalLM(config)
    model.save_pretrained(path)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(path)


def make_examples(path):
    draw = random.Random(0)
    with open(path, "w", encoding="utf-8") as out:
        for _ in range(2000):
            a, b = draw.randrange(100), draw.randrange(100)
            print(json.dumps({"prompt": f"Add {a} and {b}: ", "completion": f"the sum of {a} and {b} is {a + b}."}), file=out)


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(" ".join(command[:3]) + ": " + (done.stderr.strip() or done.stdout.strip())[-2000:])
    return done.stdout


def loss_in_transformers(folder, examples, o):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    device = "cpu" if o.cpu else "cuda"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total = count = 0
    with torch.no_grad():
        for line in examples:
            prompt = tokenizer(line["prompt"], add_special_tokens=False).input_ids
            ids = tokenizer(line["prompt"] + line["completion"], add_special_tokens=False).input_ids + [tokenizer.eos_token_id]
            x = torch.tensor([ids], device=device)
            logits = model(input_ids=x).logits[0, len(prompt) - 1:-1].float()
            total += torch.nn.functional.cross_entropy(logits, x[0, len(prompt):], reduction="sum").item()
            count += len(ids) - len(prompt)
    return total / count


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--quadrille", default="build/release/bin/quadrille")
    a.add_argument("--work", required=True, help="a folder that does not exist")
    a.add_argument("--layers", type=int, default=16)
    a.add_argument("--steps", type=int, default=40)
    a.add_argument("--cpu", action="store_true")
    o = a.parse_args()
    os.makedirs(o.work)
    base, tuned, data = (os.path.join(o.work, name) for name in ("base", "tuned", "sums.jsonl"))
    begin = time.time()
    make_folder(base, o)
    make_examples(data)
    print(f"folder made in {time.time() - begin:.0f} s", flush=True)
    seq, batch = (128, 4) if o.cpu else (2048, 4)
    begin = time.time()
    run(o.quadrille, "train", "--from", base, f"data.path={data}", "data.format=examples", f"data.seq={seq}", "data.validation=0.02",
        f"train.global_batch={batch}", f"train.steps={o.steps}", f"train.lr={1e-3 if o.cpu else 1e-4}", "train.warmup=5",
        f"train.precision={'fp32' if o.cpu else 'bf16'}", f"run.device={'cpu' if o.cpu else 'cuda'}", "--dir", tuned)
    with open(os.path.join(tuned, "metrics.jsonl"), encoding="utf-8") as lines:
        steps = [json.loads(line) for line in lines]
    steps = [s for s in steps if "loss" in s and "step" in s]
    seconds = sorted(s["step_seconds"] for s in steps)[len(steps) // 2]
    print(f"trained in {time.time() - begin:.0f} s: loss {steps[0]['loss']:.3f} to {steps[-1]['loss']:.3f}, "
          f"{batch * seq / seconds:.0f} positions/s, {steps[-1]['memory_peak_bytes'] / 2**30:.1f} GiB", flush=True)
    export = os.path.join(o.work, "export")
    run(o.quadrille, "convert", tuned, export, "--dtype", "fp32")
    with open(data, encoding="utf-8") as lines:
        held_out = [json.loads(line) for line in lines][-40:]
    ours = json.loads(run(o.quadrille, "eval", tuned, "--json", "--device", "cpu" if o.cpu else "cuda").strip().splitlines()[-1])["loss"]
    theirs = loss_in_transformers(export, held_out, o)
    print(f"held-out loss: quadrille {ours:.5f}, transformers {theirs:.5f} on the export")
    if not (steps[-1]["loss"] < 0.7 * steps[0]["loss"] and abs(ours - theirs) < (1e-4 if o.cpu else 0.03)):
        sys.exit("failed: the loss did not fall, or the export differs")


if __name__ == "__main__":
    main()
