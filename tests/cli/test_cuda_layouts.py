"""Ranks that share a GPU: tensor, sequence and pipeline parallelism, ZeRO stages, Muon, each
against one rank, and their traces. Skipped without a CUDA device.
ctest: timeout 900
ctest: processors 8
"""
import json
import os
import sys

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
from gpu import SMALL, GpuTest, main  # noqa: E402

LAYOUTS = {
    "tp2": ["parallel.ranks=2", "parallel.tp=2", "parallel.sp=false"],
    "tp2-sp": ["parallel.ranks=2", "parallel.tp=2", "parallel.sp=true"],
    "tp2-pieces": ["parallel.ranks=2", "parallel.tp=2", "parallel.tp_overlap=2"],
    "tp4-sp": ["parallel.ranks=4", "parallel.tp=4"],
    "pp2-1f1b": ["parallel.ranks=2", "parallel.pp=2", "parallel.schedule=1f1b"],
    "pp2-zb_h1": ["parallel.ranks=2", "parallel.pp=2", "parallel.schedule=zb_h1"],
    "pp2-interleaved": ["parallel.ranks=2", "parallel.pp=2", "parallel.schedule=interleaved"],
    "tp2-pp2-dp2": ["parallel.ranks=8", "parallel.tp=2", "parallel.pp=2", "parallel.dp=2"],
    "tp2-pp2-dp2-zero3": ["parallel.ranks=8", "parallel.tp=2", "parallel.pp=2", "parallel.dp=2", "parallel.zero=3"],
}
RUN = [*SMALL, "train.micro_batch=2", "train.steps=20", "--device", "cuda", "run.gpu=0", "train.deterministic=true"]


def spans(path):
    """Per rank: times of computation, and of communication by kind, in microseconds."""
    ranks = {}
    with open(path, encoding="utf-8") as file:
        for event in json.load(file)["traceEvents"]:
            if event["ph"] == "X":
                rank = ranks.setdefault(event["pid"], {"compute": [], "communication": []})
                span = (event["ts"], event["ts"] + event["dur"], event["cat"], event["name"])
                rank["compute" if event["tid"] == 0 else "communication"].append(span)
    return ranks


def beside(span, others):
    """How much of a span other spans cover."""
    covered, at = 0.0, span[0]
    for begin, end, *_ in sorted(others):
        begin, end = max(begin, at), min(end, span[1])
        if end > begin:
            covered += end - begin
            at = end
    return covered


class Layouts(GpuTest):
    def test_layouts_follow_one_rank(self):
        for precision in ("fp32", "bf16"):
            one = self.train(f"one-{precision}", *RUN, f"train.precision={precision}")
            for name, layout in LAYOUTS.items():
                with self.subTest(layout=name, precision=precision):
                    many = self.train(f"{name}-{precision}", *RUN, f"train.precision={precision}", *layout)
                    if precision == "fp32":
                        self.close(many, one, 1e-5)
                    else:
                        self.near(many, one)

    def test_stages_of_zero_agree(self):
        """Not to the bit as on the CPU: GEMM algorithms also depend on the alignment of addresses,
        which differs between stages."""
        for precision in ("fp32", "bf16"):
            for ranks in (2, 4):
                run = [*RUN, f"parallel.ranks={ranks}", f"train.precision={precision}"]
                stages = [self.train(f"zero-{stage}-{ranks}-{precision}", *run, f"parallel.zero={stage}") for stage in range(4)]
                for stage in stages[1:]:
                    if precision == "fp32":
                        self.close(stage, stages[0], 1e-5)
                    else:
                        self.near(stage, stages[0])
                self.assertEqual(self.train(f"again-{ranks}-{precision}", *run, "parallel.zero=3"), stages[3])

    def test_muon_follows_the_cpu(self):
        run = ["model.layers=2", "model.hidden=64", "model.heads=4", "data.seq=32", "train.global_batch=8", "train.steps=20",
               "train.optimizer=muon", "train.deterministic=true"]
        cpu = self.train("muon-cpu", *run, "--device", "cpu")
        gpu = self.train("muon-gpu", *run, "--device", "cuda")
        self.close(gpu, cpu, 1e-4)
        stages = [self.train(f"muon-{stage}", *run, "--device", "cuda", "run.gpu=0", "parallel.ranks=2", f"parallel.zero={stage}") for stage in range(4)]
        for stage in stages:
            self.close(stage, gpu, 1e-5)

    def test_traces_show_communication_beside_computation(self):
        """All-gathers and reduce-scatters of ZeRO 3 overlap with computation."""
        for ranks in (2, 4):
            self.train(f"trace-{ranks}", "model.preset=gpt2-124M", "data.tokenizer=bytes", "data.seq=512",
                       f"train.global_batch={4 * ranks}", "train.micro_batch=4", "train.precision=bf16", "train.steps=4",
                       "--device", "cuda", "run.gpu=0", f"parallel.ranks={ranks}", "parallel.zero=3", "--trace")
            found = spans(self.path(os.path.join(f"trace-{ranks}", "trace.json")))
            self.assertEqual(len(found), ranks)
            for rank, tracks in sorted(found.items()):
                for kind in ("gather", "reduce_scatter"):
                    moved = [span for span in tracks["communication"] if span[2] == kind]
                    total = sum(span[1] - span[0] for span in moved)
                    covered = sum(beside(span, tracks["compute"]) for span in moved)
                    print(f"{ranks} ranks, rank {rank}: {len(moved)} x {kind}, {total / 1e3:.2f} ms, {covered / total:.0%} beside computation", file=sys.stderr)
                    self.assertGreater(len(moved), 10)
                    self.assertGreater(covered, 0.3 * total)

    def test_traces_without_overlap(self):
        """Each exchange once, as on the CPU, and none overlaps with computation."""
        run = ["model.layers=3", "model.hidden=64", "model.heads=4", "data.seq=32", "train.global_batch=4", "train.micro_batch=1", "train.steps=2",
               "parallel.ranks=2", "parallel.zero=3", "parallel.overlap=false", "--trace"]
        found = {}
        for device in ("cpu", "cuda"):
            self.train(f"traced-{device}", *run, "--device", device, *(["run.gpu=0"] if device == "cuda" else []))
            found[device] = spans(self.path(os.path.join(f"traced-{device}", "trace.json")))
        self.assertEqual(len(found["cuda"]), 2)
        for rank, tracks in found["cuda"].items():
            exchanges = {device: sorted(span[2] for track in ranks[rank].values() for span in track if span[2] in ("gather", "reduce_scatter", "reduce"))
                         for device, ranks in found.items()}
            self.assertEqual(exchanges["cuda"], exchanges["cpu"])
            self.assertGreater(len(exchanges["cuda"]), 10)
            moved = [span for span in tracks["communication"] if span[2] in ("gather", "reduce_scatter", "reduce")]
            self.assertLess(sum(beside(span, tracks["compute"]) for span in moved), 0.01 * sum(span[1] - span[0] for span in moved) + 1)


if __name__ == "__main__":
    main()
