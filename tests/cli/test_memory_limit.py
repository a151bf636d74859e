"""Under a limit of address space, a model trains sharded that does not train otherwise.
ctest: timeout 400
ctest: processors 2
"""
import json
import os
import resource
import subprocess
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402

# 38 million parameters in 12 equal blocks: a block is small beside the whole.
MODEL = ["model.layers=12", "model.hidden=512", "model.heads=8", "data.seq=16", "train.global_batch=4", "train.steps=2",
         "run.threads=1", "parallel.ranks=4", "parallel.bucket_mb=4"]


def peak(pid):
    """Most address space a process has had, in bytes; 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii") as file:
            for line in file:
                if line.startswith("VmPeak:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


@unittest.skipIf(program.SANITIZED, "sanitizers reserve address space by the terabyte")
class MemoryLimit(program.ProgramTest):
    def arguments(self, zero, folder):
        return [program.PROGRAM, "train", f"data.path={self.corpus}", *MODEL, f"parallel.zero={zero}", f"run.dir={self.path(folder)}"]

    def planned(self, zero):
        out = self.ok(self.run_program("check", *MODEL, f"parallel.zero={zero}", "--json")).stdout
        return json.loads(out)["memory_bytes_per_rank"]

    def run_limited(self, zero, folder, limit):
        return subprocess.run(self.arguments(zero, folder), capture_output=True, text=True, timeout=150, check=False,
                              preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))

    def test_zero_3_fits_where_zero_1_does_not(self):
        with subprocess.Popen(self.arguments(3, "free"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
            highest = 0
            while run.poll() is None:
                ranks = [pid for pid in program.processes(self.path("free")) if program.rank_of(pid) is not None]
                highest = max([highest, *map(peak, ranks)])
                time.sleep(0.02)
            self.assertEqual(run.returncode, 0)
        self.assertGreater(highest, self.planned(3))
        room = (self.planned(1) - self.planned(3)) // 2
        self.assertGreater(room, 48 << 20)
        limit = highest + room
        self.ok(self.run_limited(3, "limited", limit))
        self.assertEqual(self.numbers("limited"), self.numbers("free"))
        refused = self.run_limited(1, "refused", limit)
        self.assertEqual(refused.returncode, 1, refused.stdout + refused.stderr)
        self.assertIn("memory", refused.stderr)


if __name__ == "__main__":
    unittest.main()
