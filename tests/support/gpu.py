"""Shared by tests of whole runs on a GPU."""
import os
import sys
import unittest

import program

TEXT = os.path.join(program.SOURCE, "examples", "data", "king-james.txt")
# 25 M parameters on bytes: large enough for bf16 to matter, small enough for 200 steps in seconds.
# At the default rate of 1e-3 the first steps are unstable: on the CPU too, two bf16 layouts differ
# by 0.02 after 18 steps, and by 0.04 from fp32; at 1e-4 by 0.0003 and 0.002.
SMALL = ["model.layers=8", "model.hidden=512", "model.heads=8", "model.kv_heads=4", "data.seq=256", "train.global_batch=16",
         "train.lr=1e-4"]


class GpuTest(program.ProgramTest):
    def train(self, folder, *arguments, timeout=400):
        self.ok(self.run_program("train", f"data.path={TEXT}", f"run.dir={folder}", "train.schedule=constant", *arguments,
                                 timeout=timeout))
        return self.numbers(folder)

    def losses(self, rows):
        return [float(row[1]) for row in rows]

    def close(self, left, right, relative):
        for step, (a, b) in enumerate(zip(self.losses(left), self.losses(right)), 1):
            self.assertLessEqual(abs(a - b), relative * abs(b), f"step {step}: {a} and {b}")
        self.assertEqual(len(left), len(right))

    def near(self, left, right, limit=0.005):
        for step, (a, b) in enumerate(zip(self.losses(left), self.losses(right)), 1):
            self.assertLessEqual(abs(a - b), limit, f"step {step}: {a} and {b}")
        self.assertEqual(len(left), len(right))


def has_device():
    result = program.ProgramTest().run_anywhere("bench", "step", "--device", "cuda", "model.layers=1", "--repeat", "1")
    if result.returncode != 0:
        print("skipped:", result.stderr.strip())
    return result.returncode == 0


def main():
    """Exits with 77, the status of a skipped test, if there is no GPU."""
    if not has_device():
        sys.exit(77)
    unittest.main()
