"""QK-Clip of Kimi K2 for tools/golden.py: rescales the weights of heads whose largest attention score of a step is above a limit.

Written from arXiv 2507.20534, section 2.1, in terms of whole heads; shares no code with src/parallel/clip.c.
"""

import torch


def rescale_heads(c, p, scores):
    """p: name -> parameter, changed in place. scores: block -> (heads) largest scores of the step, before the update. With key heads
    that several query heads share, the keys take the strongest factor, and the queries what is missing to their own."""
    with torch.no_grad():
        for block, most in scores.items():
            gamma = torch.clamp(c["optimizer"]["qk_clip"] / most, max=1.0)
            gamma = torch.where(most > 0, gamma, torch.ones_like(gamma))
            if c.get("mla"):
                mla, heads = c["mla"], c["heads"]
                nope = mla["qk_nope_head_dim"]
                q = p[block + ("attn.q_b.weight" if mla.get("q_lora_rank") else "attn.q.weight")].view(heads, c["head_dim"], -1)
                kv = p[block + "attn.kv_b.weight"].view(heads, nope + mla["v_head_dim"], -1)
                q[:, :nope] *= gamma.sqrt()[:, None, None]
                q[:, nope:] *= gamma[:, None, None]
                kv[:, :nope] *= gamma.sqrt()[:, None, None]
                continue
            group = c["heads"] // c["kv_heads"]
            keys = gamma.view(-1, group).amin(1).sqrt()
            queries = gamma / keys.repeat_interleave(group)
            for name, factor in (("q", queries), ("k", keys)):
                for kind in ("weight", "bias"):
                    value = p.get(f"{block}attn.{name}.{kind}")
                    if value is not None:
                        value.view(len(factor), c["head_dim"], -1).mul_(factor[:, None, None])
