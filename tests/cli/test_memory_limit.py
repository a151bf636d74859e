"""Under a memory limit, a model that does not fit trains when it is sharded, and so does a long
sequence under context parallelism.
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

# 38 million parameters in 12 equal blocks: a block is small compared with the whole.
MODEL = ["model.layers=12", "model.hidden=512", "model.heads=8", "data.seq=16", "train.global_batch=4", "train.steps=2",
         "run.threads=1", "parallel.ranks=4", "parallel.bucket_mb=4"]


# Limit, and the line of /proc/PID/status that it applies to. Several ranks reserve shared address
# space, one rank does not: where the number of ranks differs, their own memory is limited.
ADDRESSES = (resource.RLIMIT_AS, "VmPeak:")
OWN = (resource.RLIMIT_DATA, "VmData:")
NEVER_REACHED = 1 << 46  # still a limit: under one, ranks have their buffers in private memory


def amount(pid, line_name):
    """What a process uses of it, in bytes; 0 when it has ended."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii") as file:
            for line in file:
                if line.startswith(line_name):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


# Few parameters, long sequences: nearly all of the memory is activations.
LONG = ["model.layers=6", "model.hidden=64", "model.heads=4", "model.ffn=768", "data.seq=4096", "train.global_batch=1", "train.steps=2",
        "run.threads=1"]


@unittest.skipIf(program.SANITIZED, "sanitizers reserve address space by the terabyte")
class MemoryLimit(program.ProgramTest):
    def arguments(self, options, folder):
        return [program.PROGRAM, "train", f"data.path={self.corpus}", *options, f"run.dir={self.path(folder)}"]

    def planned(self, options):
        out = self.ok(self.run_program("check", *options, "--json")).stdout
        return json.loads(out)["memory_bytes_per_rank"]

    def run_limited(self, options, folder, kind, limit):
        return subprocess.run(self.arguments(options, folder), capture_output=True, text=True, timeout=150, check=False,
                              preexec_fn=lambda: resource.setrlimit(kind[0], (limit, limit)))

    def highest(self, options, folder, kind):
        """Trains without a limit; returns the largest use of a rank."""
        with subprocess.Popen(self.arguments(options, folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                              preexec_fn=lambda: resource.setrlimit(kind[0], (NEVER_REACHED, NEVER_REACHED))) as run:
            highest = 0
            while run.poll() is None:
                ranks = [pid for pid in program.processes(self.path(folder)) if program.rank_of(pid) is not None]
                highest = max([highest, *(amount(pid, kind[1]) for pid in ranks)])
                time.sleep(0.02)
            self.assertEqual(run.returncode, 0)
        self.assertGreater(highest, self.planned(options))
        return highest

    def fits_where_the_other_does_not(self, small, large, kind):
        room = (self.planned(large) - self.planned(small)) // 2
        self.assertGreater(room, 48 << 20)
        limit = self.highest(small, "free", kind) + room
        self.ok(self.run_limited(small, "limited", kind, limit))
        self.assertEqual(self.numbers("limited"), self.numbers("free"))
        refused = self.run_limited(large, "refused", kind, limit)
        self.assertEqual(refused.returncode, 1, refused.stdout + refused.stderr)
        self.assertIn("memory", refused.stderr)

    def test_zero_3_fits_where_zero_1_does_not(self):
        self.fits_where_the_other_does_not([*MODEL, "parallel.zero=3"], [*MODEL, "parallel.zero=1"], ADDRESSES)

    def test_a_limit_of_the_control_group_is_seen_before_the_start(self):
        with open("/proc/self/cgroup", encoding="ascii") as file:
            groups = [line.strip().split(":", 2) for line in file]
        place = next((("memory", "memory.limit_in_bytes", path) for _, kind, path in groups if kind == "memory"), None)
        place = place or next((("", "memory.max", path) for number, _, path in groups if number == "0"), None)
        if not place:
            self.skipTest("no control groups")
        group = os.path.join("/sys/fs/cgroup", place[0], place[2].lstrip("/"), f"quadrille-test-{os.getpid()}")
        try:
            os.mkdir(group)
            self.addCleanup(os.rmdir, group)
            with open(os.path.join(group, place[1]), "w", encoding="ascii") as file:
                file.write(str(200 << 20))
        except OSError as error:
            self.skipTest(f"no control group can be made: {error}")

        def enter():
            with open(os.path.join(group, "cgroup.procs"), "w", encoding="ascii") as file:
                file.write(str(os.getpid()))

        result = subprocess.run(self.arguments(MODEL, "run"), capture_output=True, text=True, timeout=100, preexec_fn=enter, check=False)
        self.one_line(result, 1, "are free on this machine", "the plan needs")
        self.assertEqual(result.stdout, "")

    def test_cp_4_fits_where_one_rank_does_not(self):
        self.fits_where_the_other_does_not([*LONG, "parallel.ranks=4", "parallel.cp=4"], [*LONG, "parallel.ranks=1"], OWN)


if __name__ == "__main__":
    unittest.main()
