"""SIGTERM, SIGUSR1, SIGHUP and SIGPIPE: a checkpoint within one step, exit status 75, and a
bit-identical resume.
ctest: timeout 240
ctest: processors 2
"""
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

RANKS = 3
STOPPED = 75
# Steps of some tens of milliseconds: a signal arrives during one of them, not between two.
SLOW = ["model.layers=3", "model.hidden=64", "data.seq=96", "train.global_batch=6", "train.steps=80", "train.lr=1e-3"]


class Signals(program.ProgramTest):
    def start(self, *more, launcher=(), after=3):
        """A run that has done `after` steps, and the processes of its ranks."""
        run = subprocess.Popen([*launcher, program.PROGRAM, *self.small(*SLOW, *more)], cwd=self.folder, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, start_new_session=True)
        self.addCleanup(self.end, run)
        if launcher and launcher != ["nohup"]:  # mpirun gives ranks a terminal, where one line is rewritten
            program.wait_until(lambda: os.path.exists(self.path("run/metrics.jsonl")) and len(self.metrics("run")) >= after, 60)
        else:
            for line in run.stdout:
                if re.match(rf"step +{after}/", line):
                    break
        ranks = {program.rank_of(pid): pid for pid in program.processes(self.folder)}
        return run, ranks

    def end(self, run):
        if run.poll() is None:
            run.kill()
        run.communicate()

    def finish(self, run):
        output, errors = run.communicate(timeout=60)
        return output, errors

    def saved(self, folder):
        return sorted(int(name[5:]) for name in os.listdir(self.path(f"{folder}/checkpoints")) if name.startswith("step-"))

    def test_every_target_and_resume(self):
        self.ok(self.run_program(*self.small(*SLOW, f"parallel.ranks={RANKS}", "--dir", "whole")))
        whole = self.numbers("whole")
        cases = [(signal.SIGTERM, "launcher"), (signal.SIGUSR1, "launcher"), (signal.SIGTERM, 2), (signal.SIGUSR1, 1),
                 (signal.SIGTERM, "all"), (signal.SIGUSR1, "all")]
        for i, (number, target) in enumerate(cases):
            with self.subTest(signal=number.name, target=target):
                folder = f"run{i}"
                run, ranks = self.start(f"parallel.ranks={RANKS}", "--dir", folder)
                if target == "launcher":
                    run.send_signal(number)
                elif target == "all":
                    os.killpg(run.pid, number)
                else:
                    os.kill(ranks[target], number)
                sent = len(self.metrics(folder))
                _, errors = self.finish(run)
                self.assertEqual(run.returncode, STOPPED, errors)
                self.assertRegex(errors, rf"^quadrille: {number.name}: stopped after step \d+ of 80 with a checkpoint: .*--resume\n$")
                last = len(self.metrics(folder))
                # The current step, and one that a rank had begun before; the launcher may be slow
                # to pass it on.
                if target != "launcher":
                    self.assertLessEqual(last, sent + 2)
                self.assertEqual(self.saved(folder), [last])
                if i % 3 == 0:
                    self.ok(self.run_program("train", "--dir", folder, "--resume"))
                    self.assertEqual(self.numbers(folder), whole)

    def test_closed_terminal(self):
        """SIGHUP goes to all processes of the terminal. Those started by nohup ignore it."""
        for more in ([f"parallel.ranks={RANKS}"], ["parallel.ranks=1"], [f"parallel.ranks={RANKS}", "--ranks-as", "threads"]):
            run, _ = self.start(*more, "--dir", "run", "--overwrite")
            os.killpg(run.pid, signal.SIGHUP)
            _, errors = self.finish(run)
            self.assertEqual(run.returncode, STOPPED, errors)
            self.assertRegex(errors, r"^quadrille: SIGHUP: stopped after step \d+ of 80 with a checkpoint: .*--resume\n$")
            self.assertEqual(self.saved("run"), [len(self.metrics("run"))])
        run, _ = self.start(f"parallel.ranks={RANKS}", "--dir", "deaf", launcher=["nohup"])
        os.killpg(run.pid, signal.SIGHUP)
        self.finish(run)
        self.assertEqual(run.returncode, 0)

    def test_nobody_reads_the_output(self):
        """`quadrille train ... | head`"""
        for more in ([f"parallel.ranks={RANKS}"], ["parallel.ranks=1"], [f"parallel.ranks={RANKS}", "--ranks-as", "threads"]):
            run, _ = self.start(*more, "--dir", "run", "--overwrite")
            run.stdout.close()
            errors = run.stderr.read()
            self.assertEqual(run.wait(60), STOPPED, errors)
            self.assertRegex(errors, r"^quadrille: SIGPIPE \(standard output is closed\): stopped after step \d+ of 80 with a checkpoint")
            self.assertEqual(self.saved("run"), [len(self.metrics("run"))])

    def suspend(self, run):
        os.killpg(run.pid, signal.SIGSTOP)
        time.sleep(1.6)
        os.killpg(run.pid, signal.SIGCONT)

    def test_a_job_that_is_suspended_and_continued(self):
        """For longer than the deadline (Ctrl-Z, Slurm): no rank is late, because none ran."""
        run, _ = self.start(f"parallel.ranks={RANKS}", "run.deadline=1", "train.steps=120", "--dir", "run")
        for _ in range(3):
            self.suspend(run)
            time.sleep(0.3)
        _, errors = self.finish(run)
        self.assertEqual(run.returncode, 0, errors)

    def test_the_rank_that_others_wait_for_wakes_last(self):
        """Signals reach processes one after another, and the scheduler runs them in any order."""
        run, ranks = self.start(f"parallel.ranks={RANKS}", "run.deadline=2", "train.steps=120", "--dir", "run")
        os.kill(ranks[1], signal.SIGSTOP)
        time.sleep(0.4)  # the others wait for it
        os.killpg(run.pid, signal.SIGSTOP)
        time.sleep(3)
        for pid in (run.pid, *[pid for rank, pid in ranks.items() if rank not in (None, 1)]):
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.4)
        os.kill(ranks[1], signal.SIGCONT)
        _, errors = self.finish(run)
        self.assertEqual(run.returncode, 0, errors)

    def test_one_rank_that_is_suspended_is_late(self):
        run, ranks = self.start(f"parallel.ranks={RANKS}", "run.deadline=1", "train.steps=100M")
        os.kill(ranks[1], signal.SIGSTOP)
        _, errors = self.finish(run)
        self.assertEqual(run.returncode, 1, errors)
        self.assertIn("rank 1", errors)

    @unittest.skipUnless(program.MPIRUN, "there is no mpirun")
    def test_mpi_that_is_suspended_and_continued(self):
        run, _ = self.start("--dir", "run", "run.deadline=1", "train.steps=120", launcher=[program.MPIRUN, "--oversubscribe", "-n", "2"])
        processes = [run.pid, *[pid for pid in program.processes(self.folder) if pid != run.pid]]
        for _ in range(2):
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for pid in processes:
                    os.kill(pid, number)
                time.sleep(1.6 if number == signal.SIGSTOP else 0.3)
        _, errors = self.finish(run)
        self.assertEqual(run.returncode, 0, errors)

    def test_while_text_becomes_tokens(self):
        """The run ends at once, without a complete tokenizer or step. Partial tokens are removed,
        and the same call starts again."""
        words = random.Random(3)
        self.write("long.txt", " ".join(f"{words.getrandbits(36):09x}" for _ in range(150_000)))
        call = ["train", "data.path=long.txt", "model.layers=1", "model.hidden=32", "model.heads=2", "model.vocab=60000", "data.seq=32",
                "train.global_batch=4", "train.steps=100000", "parallel.ranks=2"]
        for number, status, begin in ((signal.SIGTERM, STOPPED, "SIGTERM: stopped"), (signal.SIGINT, 1, "interrupted")):
            run = subprocess.Popen([program.PROGRAM, *call, f"run.dir={number.name}"], cwd=self.folder,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            self.addCleanup(self.end, run)
            self.assertTrue(program.wait_until(lambda: os.path.isdir(self.path(number.name)), 30))
            run.send_signal(number)
            _, errors = self.finish(run)
            self.assertEqual(run.returncode, status, errors)
            self.assertRegex(errors, rf"^quadrille: {begin} before the first step, while the text was tokenized.*\n$")
            self.assertEqual(os.listdir(self.path(number.name)), [])

    def test_threads_and_one_rank(self):
        for more in (["parallel.ranks=2", "--ranks-as", "threads"], ["parallel.ranks=1"]):
            run, _ = self.start(*more, "--dir", "run", "--overwrite")
            run.send_signal(signal.SIGUSR1)
            _, errors = self.finish(run)
            self.assertEqual(run.returncode, STOPPED, errors)
            self.assertEqual(self.saved("run"), [len(self.metrics("run"))])

    def test_signals_follow_each_other(self):
        """Schedulers send SIGUSR1 as a warning and SIGTERM after it."""
        run, _ = self.start(f"parallel.ranks={RANKS}", "--dir", "run")
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM):
            run.send_signal(number)
        _, errors = self.finish(run)
        self.assertEqual(run.returncode, STOPPED, errors)
        self.assertEqual(self.saved("run"), [len(self.metrics("run"))])

    def test_old_checkpoint_that_cannot_be_removed(self):
        """A new checkpoint that is complete and in its place counts, even if old ones cannot be
        removed; the next one tries again."""
        # Root may remove anything, unless this capability is dropped.
        launcher = ("setpriv", "--bounding-set", "-dac_override") if os.geteuid() == 0 else ()
        if launcher and subprocess.run([*launcher, "true"], capture_output=True, check=False).returncode != 0:
            self.skipTest("root cannot give up its power over files here")
        more = ["parallel.ranks=2", "--dir", "run", "run.save_every=1000", "run.keep=1"]
        self.ok(self.run_program(*self.small(*SLOW, "train.steps=2", *more)))
        old = self.path("run/checkpoints/step-000000000002")
        os.chmod(old, 0o555)
        self.addCleanup(lambda: os.path.exists(old) and os.chmod(old, 0o755))
        result = self.ok(self.run_program(*self.small(*SLOW, "train.steps=4", *more, "--resume"), launcher=launcher))
        self.assertRegex(result.stdout, "step-000000000002: cannot be removed: Permission denied")
        self.assertEqual(self.saved("run"), [2, 4])
        self.assertEqual(os.readlink(self.path("run/checkpoints/latest")), "step-000000000004")
        run, _ = self.start(*more, "--resume", launcher=launcher, after=6)
        run.send_signal(signal.SIGTERM)
        self.finish(run)
        self.assertEqual(run.returncode, STOPPED)
        self.assertEqual(len(self.saved("run")), 2)
        os.chmod(old, 0o755)
        self.ok(self.run_program(*self.small(*SLOW, *more, "--resume")))
        self.assertEqual(self.saved("run"), [80])

    def test_without_a_checkpoint(self):
        run, _ = self.start(f"parallel.ranks={RANKS}")
        run.send_signal(signal.SIGTERM)
        _, errors = self.finish(run)
        self.assertEqual(run.returncode, 1, errors)
        self.assertRegex(errors, r"^quadrille: interrupted after step \d+ of 80 without a checkpoint: there is no run.dir\n$")
        run, _ = self.start(f"parallel.ranks={RANKS}", "--dir", "run")
        self.write("run/checkpoints", "a file where the folder should be")
        run.send_signal(signal.SIGTERM)
        output, errors = self.finish(run)
        self.assertEqual(run.returncode, 1, errors)
        self.assertRegex(errors, r"^quadrille: interrupted after step \d+ of 80 without a checkpoint\n$")
        self.assertIn("no checkpoint after step", output)

    def test_interrupt_keeps_a_checkpoint_unless_disabled(self):
        """Exit status 1, not 75: no scheduler requested the stop."""
        for folder, more, end in (("run", [], "with a checkpoint: resume with --dir run --resume"),
                                  ("unsaved", ["run.save=false"], "without a checkpoint: run.save is false")):
            run, _ = self.start(f"parallel.ranks={RANKS}", "--dir", folder, *more)
            os.killpg(run.pid, signal.SIGINT)
            _, errors = self.finish(run)
            self.assertEqual(run.returncode, 1)
            self.assertRegex(errors, rf"^quadrille: interrupted after step \d+ of 80 {end}\n$")
        self.assertEqual(self.saved("run"), [len(self.metrics("run"))])
        self.assertFalse(os.path.exists(self.path("unsaved/checkpoints")))

    @unittest.skipUnless(program.MPIRUN, "there is no mpirun")
    def test_mpi(self):
        run, _ = self.start("--dir", "run", "train.steps=5000", launcher=[program.MPIRUN, "--oversubscribe", "-n", "2"])
        ranks = [pid for pid in program.processes(self.folder) if pid != run.pid and b"mpirun" not in command(pid)]
        self.assertEqual(len(ranks), 2)
        os.kill(ranks[1], signal.SIGUSR1)
        _, errors = self.finish(run)
        self.assertEqual(run.returncode, STOPPED, errors)
        self.assertIn("quadrille: SIGUSR1: stopped after step", errors)
        self.assertEqual(self.saved("run"), [len(self.metrics("run"))])


def command(pid):
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()


if __name__ == "__main__":
    unittest.main()
