"""Ways to train a small model in parallel, for trials that must hold with each of them."""

MODEL = ["model.layers=4", "model.hidden=32", "model.heads=4", "data.seq=32", "train.global_batch=12", "run.threads=1"]
EXPERTS = ["model.experts=4", "model.expert_ffn=16"]

# Name: (ranks, options).
LAYOUTS = {
    "dp2": (2, []),
    "dp3": (3, []),
    "dp4 zero1": (4, ["parallel.zero=1"]),
    "dp2 zero2": (2, ["parallel.zero=2"]),
    "dp4 zero3": (4, ["parallel.zero=3"]),
    "tp2": (2, ["parallel.tp=2"]),
    "tp4": (4, ["parallel.tp=4"]),
    "dp2 tp2": (4, ["parallel.tp=2", "parallel.zero=1"]),
    "pp2": (2, ["parallel.pp=2"]),
    "pp4": (4, ["parallel.pp=4"]),
    "pp2 interleaved": (2, ["parallel.pp=2", "parallel.schedule=interleaved"]),
    "pp2 zero bubble": (2, ["parallel.pp=2", "parallel.schedule=zb_v"]),
    "cp2": (2, ["parallel.cp=2"]),
    "cp2 ulysses": (2, ["parallel.cp=2", "parallel.cp_mode=ulysses"]),
    "cp2 tp2": (4, ["parallel.cp=2", "parallel.tp=2"]),
    "pp2 tp2": (4, ["parallel.pp=2", "parallel.tp=2"]),
    "pp2 dp2": (4, ["parallel.pp=2", "parallel.zero=1"]),
    "ep2": (2, ["parallel.ep=2", *EXPERTS]),
    "ep2 pp2": (4, ["parallel.ep=2", "parallel.pp=2", *EXPERTS]),
    "dp2 cp2 tp2": (8, ["parallel.cp=2", "parallel.tp=2", "parallel.zero=1"]),
    "dp2 cp2 tp2 pp2": (16, ["parallel.cp=2", "parallel.tp=2", "parallel.pp=2", "parallel.zero=1"]),
}


def arguments(name):
    """(ranks, arguments of the model and the layout)"""
    ranks, options = LAYOUTS[name]
    return ranks, [*MODEL, *options]
