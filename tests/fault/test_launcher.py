"""Ranks and launchers that are killed or stopped: all processes exit, the rank is named, nothing is
left.
ctest: timeout 240
ctest: processors 2
"""
import ctypes
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402

RANKS = 4


class Faults(program.ProgramTest):
    def start(self, *more):
        """A run that would take hours, some steps after its start."""
        self.left_before = program.shared_files()
        run = subprocess.Popen([program.PROGRAM, *self.small("train.steps=100M", f"parallel.ranks={RANKS}",
                                                             f"run.dir={self.folder}/run", "--overwrite", *more)],
                               cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(self.end, run)
        for line in run.stdout:
            if line.startswith("step "):
                break
        ranks = {program.rank_of(pid): pid for pid in program.processes(self.folder) if pid != run.pid}
        self.assertEqual(sorted(ranks), list(range(RANKS)))
        return run, ranks

    def end(self, run):
        if run.poll() is None:
            run.kill()
        run.communicate()

    def finish(self, run, seconds):
        _, errors = run.communicate(timeout=seconds)
        return errors

    def nothing_left(self, seconds=0):
        left = program.wait_until(lambda: not program.processes(self.folder), seconds)
        self.assertTrue(left, f"still there: {program.processes(self.folder)}")
        self.assertEqual(program.shared_files(), self.left_before)

    def test_killed_rank(self):
        chance = random.Random(1)
        for number in (signal.SIGKILL, signal.SIGABRT, signal.SIGKILL):
            run, ranks = self.start()
            victim = chance.randrange(RANKS)
            time.sleep(chance.random() * 0.3)
            begin = time.monotonic()
            os.kill(ranks[victim], number)
            errors = self.finish(run, 20)
            self.assertLess(time.monotonic() - begin, 10)
            self.assertEqual(run.returncode, 1)
            self.assertEqual(errors.count("\n"), 1, errors)
            self.assertRegex(errors, rf"^quadrille: rank {victim} was killed by signal {int(number)} \([A-Z][a-z]+\) at 'step \d+, [a-z]+[^']*', "
                                     r"(in|after) [a-z-]+.*, (operation|message) \d+ of group \w+")
            self.nothing_left()

    def test_several_killed_ranks(self):
        run, ranks = self.start()
        os.kill(ranks[1], signal.SIGKILL)
        try:
            os.kill(ranks[3], signal.SIGKILL)
        except ProcessLookupError:  # it has received the first before this process continued
            pass
        errors = self.finish(run, 20)
        self.assertEqual(run.returncode, 1)
        self.assertRegex(errors, r"^quadrille: .*rank [13] was killed by signal 9")
        self.assertEqual(errors.count("\n"), 1, errors)
        self.nothing_left()

    def test_stopped_rank(self):
        for victim in (0, 2):
            run, ranks = self.start("run.deadline=2")
            begin = time.monotonic()
            os.kill(ranks[victim], signal.SIGSTOP)
            errors = self.finish(run, 30)
            self.assertLess(time.monotonic() - begin, 15)
            self.assertEqual(run.returncode, 1)
            self.assertEqual(errors.count("\n"), 1, errors)
            self.assertRegex(errors, rf"\brank {victim}\b.*step \d+")
            self.nothing_left()

    def test_stopped_rank_by_default(self):
        """Without a deadline of the user: within max(5 s, 3 steps), with operation, number and place."""
        run, ranks = self.start()
        begin = time.monotonic()
        os.kill(ranks[1], signal.SIGSTOP)
        errors = self.finish(run, 30)
        self.assertLess(time.monotonic() - begin, 6)
        self.assertEqual(run.returncode, 1)
        self.assertRegex(errors, r"^quadrille: rank 1 has been stopped by a signal for \d\.\d s at 'step \d+, [^']+', "
                                 r"(in|after) [a-z-]+.*, (operation|message) \d+ of group \S+; .*\n$")
        self.nothing_left()

    def test_debugger_is_no_failure(self):
        """A rank that a debugger holds is not late, for longer than the deadline."""
        attach, detach = 16, 17  # PTRACE_ATTACH, PTRACE_DETACH
        ptrace = ctypes.CDLL(None, use_errno=True).ptrace
        ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
        run, ranks = self.start("run.deadline=2")
        if ptrace(attach, ranks[1], None, None) != 0:
            self.skipTest("this system does not allow to trace processes")
        os.waitpid(ranks[1], 0x40000000)  # __WALL
        time.sleep(4)
        self.assertIsNone(run.poll())
        self.assertEqual(ptrace(detach, ranks[1], None, None), 0)
        time.sleep(0.5)
        run.send_signal(signal.SIGINT)
        errors = self.finish(run, 20)
        self.assertRegex(errors, r"^quadrille: interrupted after step")
        self.nothing_left()

    def test_slow_rank_is_no_failure(self):
        run, ranks = self.start("run.deadline=10")
        os.kill(ranks[1], signal.SIGSTOP)
        time.sleep(1)
        os.kill(ranks[1], signal.SIGCONT)
        time.sleep(0.5)
        self.assertIsNone(run.poll())
        run.send_signal(signal.SIGINT)
        errors = self.finish(run, 20)
        self.assertRegex(errors, r"^quadrille: interrupted after step")
        self.nothing_left()

    def test_killed_launcher(self):
        for stopped in (False, True):
            run, ranks = self.start()
            if stopped:
                os.kill(ranks[2], signal.SIGSTOP)
            run.kill()
            run.communicate()
            self.nothing_left(seconds=5)

    def test_second_interrupt_ends_at_once(self):
        run, ranks = self.start("run.deadline=100")
        os.kill(ranks[0], signal.SIGSTOP) # so that the first one cannot take effect
        run.send_signal(signal.SIGINT)
        time.sleep(0.5)
        self.assertIsNone(run.poll())
        run.send_signal(signal.SIGINT)
        errors = self.finish(run, 5)
        self.assertEqual((run.returncode, errors), (1, "quadrille: interrupted\n"))
        self.nothing_left()

    def test_one_rank_fails(self):
        """The rank that failed is named, not the peers that it aborts."""
        run, _ = self.start()
        run.send_signal(signal.SIGINT)
        self.finish(run, 20)
        os.remove(self.path("run/metrics.jsonl"))
        os.symlink(program.TAKES_NO_TEXT, self.path("run/metrics.jsonl"))
        for ranks_as in ("processes", "threads"):
            result = self.run_program(*self.small("train.steps=100M", f"parallel.ranks={RANKS}", f"run.dir={self.folder}/run",
                                                  "--overwrite", "--ranks-as", ranks_as))
            self.one_line(result, 1, "rank 0: ", "metrics.jsonl", "Invalid argument")
            self.nothing_left()

    def test_a_shard_that_is_cut_off(self):
        """While a run reads it: the file is named instead of a bus error."""
        self.ok(self.run_program("tokenize", self.corpus, "--output", "shards", "--train", "300"))
        shard = self.path("shards/shard-00000.qds")
        run = subprocess.Popen([program.PROGRAM, *self.small("data.path=shards", "model.vocab=300", "train.steps=100M", "data.seq=16",
                                                             "parallel.ranks=2", f"run.dir={self.folder}/cut")],
                               cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.addCleanup(self.end, run)
        self.assertTrue(program.wait_until(lambda: os.path.exists(self.path("cut/metrics.jsonl")) and self.metrics("cut"), 30))
        os.truncate(shard, 1024)
        errors = self.finish(run, 30)
        self.assertEqual(run.returncode, 2, errors)
        self.assertRegex(errors, r"^quadrille: rank \d, action .*shard-00000.qds: ends before byte \d+: it has shrunk.*\n$")

    @staticmethod
    def mapped(pid):
        """The files of /dev/shm that a process has mapped."""
        with open(f"/proc/{pid}/maps", encoding="utf-8") as file:
            return {line.split(None, 5)[5].strip() for line in file if " /dev/shm/" in line}

    @unittest.skipUnless(program.MPIRUN, "there is no mpirun")
    def test_shared_memory_after_mpirun_is_killed(self):
        """Open MPI kills the ranks and leaves its shared memory. The next start in the folder
        removes that of its own run."""
        more = [f"run.dir={self.folder}/run", "run.deadline=5"]
        run = subprocess.Popen([program.MPIRUN, "--oversubscribe", "-n", "2", program.PROGRAM, *self.small("train.steps=100M", *more)],
                               cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        self.addCleanup(run.kill)
        self.assertTrue(program.wait_until(lambda: os.path.exists(self.path("run/metrics.jsonl")) and self.metrics("run"), 60))
        mapped = {path for pid in program.processes(self.folder) for path in self.mapped(pid)}
        run.kill()
        run.wait()
        self.assertTrue(program.wait_until(lambda: not program.processes(self.folder), 30))
        left = sorted(path for path in mapped if os.path.exists(path))
        if not left:
            self.skipTest("this MPI library leaves none")
        with open(self.path("run/shared-memory.json"), encoding="utf-8") as file:
            self.assertEqual(sorted(entry["path"] for entry in json.load(file)), left)
        other = re.sub(r"\.\d+$", ".of-another", left[0])
        with open(other, "w", encoding="ascii"):
            self.addCleanup(os.remove, other)
        self.assertTrue(all(os.path.exists(path) for path in left), left)
        self.ok(self.run_program(*self.small("train.steps=2", *more, "--overwrite")))
        self.assertFalse(any(os.path.exists(path) for path in left), left)
        self.assertTrue(os.path.exists(other))
        self.assertFalse(os.path.exists(self.path("run/shared-memory.json")))

    def test_full_disk(self):
        """Lines of metrics.jsonl that cannot be written are reported, and the run continues."""
        os.mkdir(self.path("full"))
        os.symlink("/dev/full", self.path("full/metrics.jsonl"))
        for ranks_as in ("processes", "threads"):
            result = self.ok(self.run_program(*self.small("train.steps=5", f"parallel.ranks={RANKS}", f"run.dir={self.folder}/full",
                                                          "--overwrite", "--ranks-as", ranks_as)))
            self.assertEqual(result.stdout.count("No space left"), 1)
            self.assertIn("metrics.jsonl: 5 steps were not written: the disk was full", result.stdout)

    def test_random_moments(self):
        """Also while the ranks start and end."""
        chance = random.Random(5)
        for _ in range(12):
            run = subprocess.Popen([program.PROGRAM, *self.small("train.steps=100M", f"parallel.ranks={RANKS}",
                                                                 f"run.dir={self.folder}/run", "--overwrite", "run.deadline=5")],
                                   cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            self.addCleanup(self.end, run)
            self.left_before = program.shared_files()
            ranks = program.wait_until(lambda r=run: [p for p in program.processes(self.folder) if p != r.pid], 20)
            time.sleep(chance.random() * 0.2)
            try:
                os.kill(chance.choice(ranks), signal.SIGKILL)
            except ProcessLookupError:
                continue
            errors = self.finish(run, 30)
            self.assertEqual(run.returncode, 1, errors)
            self.assertTrue(re.match(r"quadrille: .*rank \d was killed by signal 9", errors), errors)
            self.assertEqual(errors.count("\n"), 1, errors)
            self.nothing_left()


if __name__ == "__main__":
    unittest.main()
