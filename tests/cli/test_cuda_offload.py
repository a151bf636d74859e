"""Optimizer state in host memory on a GPU: bit-identical to state on the device, and less device
memory. Skipped without a CUDA device.
ctest: timeout 600
ctest: serial
It reads the GPU memory in use, which other tests would change.
"""
import json
import os
import sys

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import gpu  # noqa: E402

RUN = [*gpu.SMALL, "train.precision=bf16", "train.deterministic=true", "--device", "cuda", "run.gpu=0"]
CHUNKS = ["train.offload=optimizer", "train.offload_chunk_mb=4"]


class Offload(gpu.GpuTest):
    def step(self, *arguments):
        return json.loads(self.ok(self.run_program("bench", "step", *RUN, *arguments, "--repeat", "3", "--json", timeout=200)).stdout)

    def test_the_bits_are_those_without(self):
        one = [[], ["train.precision=fp32"], ["train.optimizer=sgd", "train.momentum=0.9"]]
        two = [[], ["parallel.zero=1"], ["parallel.zero=2", "train.micro_batch=4"], ["parallel.zero=3"],
               ["parallel.zero=1", "train.optimizer=muon"], ["parallel.tp=2"], ["parallel.pp=2", "train.micro_batch=4"], ["parallel.cp=2"],
               ["model.preset=mixtral-tiny", "parallel.ep=2"]]
        for ranks, extra in [(1, words) for words in one] + [(2, words) for words in two]:
            run = [*RUN, "train.steps=10", f"parallel.ranks={ranks}", *extra]
            name = f"{ranks}-{'-'.join(extra)}"
            with self.subTest(ranks=ranks, extra=extra):
                plain = self.train(f"plain-{name}", *run)
                self.assertEqual(plain, self.train(f"offload-{name}", *run, *CHUNKS))
                if not extra:
                    self.assertEqual(plain, self.train(f"wait-{name}", *run, *CHUNKS, "parallel.overlap=false"))

    def test_the_device_has_less_by_the_state(self):
        for ranks in (1, 2):
            plain, offload = (self.step(f"parallel.ranks={ranks}", *extra) for extra in ([], CHUNKS))
            state = offload["host_planned_bytes"]
            self.assertGreater(state, 12 * 23e6)
            self.assertEqual(state, offload["host_allocated_bytes"])
            self.assertEqual(plain["planned_bytes"] - state, offload["planned_bytes"])
            for report in (plain, offload):
                self.assertEqual(report["planned_bytes"], report["allocated_bytes"])
            # Measured outside the program: the driver's figure for all ranks.
            less = plain["device_bytes"] - offload["device_bytes"]
            self.assertLess(abs(less - ranks * state), 32 << 20, f"{less} bytes less in use, {ranks} x {state} in host memory")

    def test_checkpoints_change_sides(self):
        whole = self.train("whole", *RUN, "train.steps=12", "parallel.ranks=2", "parallel.zero=1")
        run = [*RUN, "parallel.ranks=2", "parallel.zero=1", "run.save_every=4"]
        self.train("parts", *run, *CHUNKS, "train.steps=4")
        self.train("parts", *run, "train.offload=none", "train.steps=8", "run.resume=true")
        self.assertEqual(whole, self.train("parts", *run, *CHUNKS, "train.steps=12", "run.resume=true"))

    def test_copies_run_beside_each_other(self):
        self.train("traced", *RUN, *CHUNKS, "train.steps=4", "run.trace=true")
        with open(self.path("traced/trace.json"), encoding="utf-8") as file:
            events = [e for e in json.load(file)["traceEvents"] if e["ph"] == "X" and e["args"]["step"] == 4]
        copies = {kind: sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["cat"] == kind) for kind in ("fetch", "store")}
        both = sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in copies["fetch"] for b in copies["store"])
        self.assertGreater(len(copies["store"]), 10)
        self.assertGreater(both, 0.3 * sum(end - begin for begin, end in copies["store"]))


if __name__ == "__main__":
    gpu.main()
