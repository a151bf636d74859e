#!/usr/bin/env python3
"""Writes tests/golden/dpo: preferences.jsonl, and llama.safetensors with DPO by `trl` in float64.

Needs torch, transformers, trl, datasets and safetensors. Tensors have the logical names of Quadrille:
init.<parameter>; reference (pairs, 2): log-probabilities of chosen and rejected completions for another
model; <loss>.loss and <loss>.gradient.<parameter> of the first step, for the losses below; losses, margins
and after.<parameter> of 20 steps of the sigmoid loss. Tokens are bytes, and every step has all pairs.
"""
import json
import os
import tempfile

import torch
import trl
from datasets import Dataset
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl.trainer.dpo_trainer import DataCollatorForPreference

STEPS = 20
LR, BETAS, EPS, DECAY, CLIP = 3e-3, (0.9, 0.95), 1e-5, 0.0, 0.5
LOSSES = {"sigmoid": {"beta": 0.3}, "hinge": {"beta": 0.01}, "ipo": {"beta": 0.4}, "robust": {"beta": 0.3, "label_smoothing": 0.2}}
PAIRS = [("2 + 2 = ", "4", "5, or so"), ("The sky is ", "blue.", "made of stone."), ("Name a fish: ", "cod", "a brick"),
         ("> ", "Hello!", "What?"), ("Count: 1, 2, ", "3, 4, 5", "9"), ("é is ", "é", "e")]
PARTS = {"self_attn.q_proj": "attn.q", "self_attn.k_proj": "attn.k", "self_attn.v_proj": "attn.v", "self_attn.o_proj": "attn.out",
         "mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down",
         "input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"}
ENDS = {"model.embed_tokens.weight": "embed.tokens.weight", "model.norm.weight": "head.norm.weight", "lm_head.weight": "head.weight"}


def logical(name):
    if name in ENDS:
        return ENDS[name]
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    for theirs, ours in PARTS.items():
        if rest.startswith(theirs + "."):
            return f"block.{layer}.{ours}.{rest[len(theirs) + 1:]}"
    raise ValueError(name)


def new_model():
    config = LlamaConfig(num_hidden_layers=2, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
                         intermediate_size=24, vocab_size=256, rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False,
                         initializer_range=0.2, attn_implementation="eager", bos_token_id=None, eos_token_id=None, pad_token_id=0)
    model = LlamaForCausalLM(config).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.float().double())
    return model


def make_trainer(model, reference, loss, options):
    """The data set is only what the constructor needs: batches are made from bytes below."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)} | {"<eos>": 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    some = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    config = trl.DPOConfig(output_dir=tempfile.mkdtemp(), loss_type=loss, use_cpu=True, bf16=False, fp16=False, report_to=[],
                           gradient_checkpointing=False, **options)
    return trl.DPOTrainer(model=model, ref_model=reference, args=config, train_dataset=some, processing_class=fast)


def batch():
    examples = [{"prompt_ids": list(p.encode()), "chosen_ids": list(c.encode()), "rejected_ids": list(r.encode())} for p, c, r in PAIRS]
    return DataCollatorForPreference(pad_token_id=0)(examples)


def gradients(model):
    return {logical(name): p.grad.detach().float().contiguous().clone() for name, p in model.named_parameters()}


def log_probabilities(model, inputs):
    with torch.no_grad():
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
        of_target = logits.log_softmax(-1).gather(2, inputs["input_ids"][:, 1:, None])[..., 0]
        sums = (of_target * inputs["completion_mask"][:, 1:]).sum(1)
    return torch.stack(sums.chunk(2), dim=1).contiguous()


def main():
    torch.manual_seed(5)
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "golden", "dpo")
    model, reference = new_model(), new_model()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    inputs = batch()
    tensors = {f"init.{logical(name)}": p.detach().float().contiguous() for name, p in model.named_parameters()}
    tensors["reference"] = log_probabilities(reference, inputs)
    for loss, options in LOSSES.items():
        trainer = make_trainer(model, reference, loss, options)
        model.zero_grad()
        value = trainer.compute_loss(model, inputs)
        value.backward()
        tensors[f"{loss}.loss"] = value.detach().double().reshape(1)
        tensors |= {f"{loss}.gradient.{name}": g for name, g in gradients(model).items()
                    if loss == "sigmoid" or name in ("block.0.attn.q.weight", "head.norm.weight")}
    trainer = make_trainer(model, reference, "sigmoid", LOSSES["sigmoid"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    losses, margins = [], []
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(start[name])
    for _ in range(STEPS):
        now = log_probabilities(model, inputs) - tensors["reference"]
        margins.append(LOSSES["sigmoid"]["beta"] * (now[:, 0] - now[:, 1]).mean().item())
        loss = trainer.compute_loss(model, inputs)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
    tensors |= {f"after.{logical(name)}": p.detach().float().contiguous() for name, p in model.named_parameters()}
    tensors["losses"] = torch.tensor(losses, dtype=torch.float64)
    tensors["margins"] = torch.tensor(margins, dtype=torch.float64)
    with open(os.path.join(folder, "preferences.jsonl"), "w", encoding="utf-8") as out:
        for p, c, r in PAIRS:
            print(json.dumps({"prompt": p, "chosen": c, "rejected": r}, ensure_ascii=False), file=out)
    path = os.path.join(folder, "llama.safetensors")
    save_file(tensors, path, metadata={"config": json.dumps({"trl": trl.__version__, "losses": LOSSES})})
    print(f"{os.path.getsize(path)} bytes, losses {losses[0]:.6f} to {losses[-1]:.6f}, first",
          {loss: round(tensors[f'{loss}.loss'].item(), 6) for loss in LOSSES})


if __name__ == "__main__":
    main()
