"""run.restarts: a supervised run restarts by itself after ranks are killed and ends bit-identically
to an undisturbed one; its journal tells what happened. QUADRILLE_FAILURES=100 for the long form.
ctest: timeout 240
ctest: processors 2
"""
import os
import random
import signal
import subprocess
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402

RANKS = 3
FAILURES = int(os.environ.get("QUADRILLE_FAILURES", "4"))
PART = 50  # steps
STEPS = PART * FAILURES
RUN = ["train.global_batch=6", f"train.steps={STEPS}", f"parallel.ranks={RANKS}", "run.save_every=10"]


class Restarts(program.ProgramTest):
    def weights(self, folder):
        with open(self.path(f"{folder}/checkpoints/latest/manifest.json"), encoding="utf-8") as file:
            text = file.read()
        return text[text.index('"tensors"'):]  # names, shapes and the checksums of all values and moments

    def ranks(self, run):
        pids = {program.rank_of(pid): pid for pid in program.processes(self.corpus) if pid != run.pid}
        return {rank: pid for rank, pid in pids.items() if rank is not None}

    def test_random_failures(self):
        self.ok(self.run_program(*self.small(*RUN, "run.dir=whole")))
        chance = random.Random(3)
        with open(self.path("output"), "w", encoding="utf-8") as output, subprocess.Popen(
                [program.PROGRAM, *self.small(*RUN, "run.dir=run", "--restarts", str(2 * FAILURES))], cwd=self.folder,
                stdout=output, stderr=subprocess.PIPE, text=True) as run:
            self.addCleanup(run.kill)
            for i in range(FAILURES):
                # At a random moment of the next part of the run, also before its first checkpoint.
                wanted = PART * i + chance.randrange(PART - 10)
                program.wait_until(lambda w=wanted: self.steps_done("run") >= w or run.poll() is not None, 60)
                if ranks := self.ranks(run):
                    os.kill(chance.choice(sorted(ranks.values())), chance.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGABRT)))
                time.sleep(0.05)
            errors = run.communicate(timeout=120)[1]
        with open(self.path("output"), encoding="utf-8") as file:
            output = file.read()
        self.assertEqual((run.returncode, errors), (0, ""), output + errors)
        self.assertEqual(self.numbers("run"), self.numbers("whole"))
        self.assertEqual(self.weights("run"), self.weights("whole"))
        lines = self.journal("run")
        failures = [line for line in lines if line["event"] == "failure"]
        self.assertGreaterEqual(len(failures), max(1, FAILURES - 2))
        for line in failures:
            self.assertEqual(line["cause"], "rank lost")
            self.assertRegex(line["message"], r"^rank \d was killed by signal (6|9)")
        lost = [line["seconds"] for line in lines if line["event"] == "recovered"]
        self.assertLess(sorted(lost)[len(lost) // 2], 2)
        self.assertIn("restart 1 of", output)
        self.assertEqual(program.processes(self.corpus), [])
        if FAILURES > 10:
            print(f"{len(failures)} failures, {sum(lost) / len(lost):.3f} s lost per failure, at most {max(lost):.3f} s")

    def test_one_rank(self):
        """The only rank is a process too, so that the launcher survives it."""
        small = self.small("train.steps=100M", "run.dir=run", "--restarts", "1", "parallel.ranks=1")
        with subprocess.Popen([program.PROGRAM, *small], cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True) as run:
            self.addCleanup(run.kill)
            for _ in range(2):
                before = len(self.journal("run")) if os.path.exists(self.path("run/restarts.jsonl")) else 0
                self.assertTrue(program.wait_until(lambda: self.ranks(run) and self.steps_done("run") > 2, 30))
                os.kill(self.ranks(run)[0], signal.SIGKILL)
                program.wait_until(lambda n=before: run.poll() is not None or (
                    os.path.exists(self.path("run/restarts.jsonl")) and len(self.journal("run")) >= n + 3), 30)
            errors = run.communicate(timeout=30)[1]
        self.assertEqual(run.returncode, 1)
        self.assertRegex(errors, r"^quadrille: failed after 1 restart, see run/restarts.jsonl: rank 0 was killed by signal 9.*\n$")
        self.assertEqual([line["event"] for line in self.journal("run")], ["failure", "restart", "recovered", "failure", "given up"])

    def test_replaced_run_is_not_resumed(self):
        """A rank is lost before it has cleared the folder of the run that this one replaces."""
        self.ok(self.run_program(*self.small("train.steps=3", "train.lr=0.01", "run.dir=run")))
        self.ok(self.run_program(*self.small("train.steps=6", "run.dir=fresh")))
        with subprocess.Popen([program.PROGRAM, *self.small("train.steps=6", "run.dir=run", "--overwrite", "--restarts", "1")],
                              cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
            self.addCleanup(run.kill)
            children = []
            while not children and run.poll() is None:  # at once, while it starts
                with open(f"/proc/{run.pid}/task/{run.pid}/children", encoding="ascii") as file:
                    children = file.read().split()
            os.kill(int(children[0]), signal.SIGKILL)
            errors = run.communicate(timeout=30)[1]
        self.assertEqual((run.returncode, errors), (0, ""))
        self.assertEqual(self.numbers("run"), self.numbers("fresh"))
        self.assertEqual(self.weights("run"), self.weights("fresh"))

    def test_stop_is_no_failure(self):
        with subprocess.Popen([program.PROGRAM, *self.small("train.steps=100M", "run.dir=run", "--restarts", "5", "--ranks", "2")],
                              cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
            self.addCleanup(run.kill)
            self.assertTrue(program.wait_until(lambda: self.steps_done("run") > 2, 30))
            run.send_signal(signal.SIGTERM)
            errors = run.communicate(timeout=30)[1]
        self.assertEqual(run.returncode, 75, errors)
        self.assertFalse(os.path.exists(self.path("run/restarts.jsonl")))

    def test_repeated_failure(self):
        """Non-finite numbers occur again at the same step: there are no further attempts."""
        diverges = ["train.optimizer=sgd", "train.lr=1000", "train.clip=0", "train.warmup=0"]
        result = self.run_program(*self.small("train.steps=50", *diverges, "run.dir=run", "--restarts", "9", "--ranks", "2"))
        self.one_line(result, 1, "2 equal failures in a row after step", "restarts.jsonl")
        self.assertEqual(len([line for line in self.journal("run") if line["event"] == "failure"]), 2)

    def test_refusals(self):
        """Bad configurations are not tried again, and options that cannot work are refused."""
        self.one_line(self.run_program(*self.small("--restarts", "2", "run.dir=run", "parallel.tp=3", "--ranks", "2")), 2)
        self.assertFalse(os.path.exists(self.path("run/restarts.jsonl")))
        self.one_line(self.run_program(*self.small("--restarts", "2")), 2, "run.restarts needs run.dir")
        self.one_line(self.run_program(*self.small("--restarts", "2", "run.dir=run", "run.save=false")), 2, "run.save=false")
        self.one_line(self.run_program(*self.small("--restarts", "2", "run.dir=run", "--ranks", "2", "--ranks-as", "threads")), 2,
                      "run.ranks_as")

    @unittest.skipUnless(program.MPIRUN, "there is no mpirun")
    def test_refused_under_mpirun(self):
        result = self.run_program(*self.small("--restarts", "2", "run.dir=run"), launcher=[program.MPIRUN, "--oversubscribe", "-n", "2"])
        self.assertIn("run.restarts is for the process that starts the ranks, and mpirun started these", result.stderr)

    @unittest.skipUnless(program.MPIRUN, "there is no mpirun")
    def test_ranks_of_a_command(self):
        """run.launcher: mpirun ends all ranks when one is killed; the run goes on by itself."""
        run = ["train.global_batch=6", "train.steps=60", "run.save_every=10"]
        command = f"run.launcher={program.MPIRUN} --oversubscribe -n 3"
        self.ok(self.run_program(*self.small(*run, "run.dir=whole", "parallel.ranks=3")))
        with open(self.path("output"), "w", encoding="utf-8") as output, subprocess.Popen(
                [program.PROGRAM, *self.small(*run, "run.dir=run", "--restarts", "3", command)], cwd=self.folder,
                stdout=output, stderr=subprocess.PIPE, text=True) as supervisor:
            self.addCleanup(supervisor.kill)
            self.assertTrue(program.wait_until(lambda: self.steps_done("run") >= 15 or supervisor.poll() is not None, 60))
            ranks = [pid for pid in program.processes(self.corpus) if program.is_mpi_rank(pid)]
            self.assertEqual(len(ranks), 3)
            os.kill(ranks[1], signal.SIGKILL)
            errors = supervisor.communicate(timeout=90)[1]
        self.assertEqual(supervisor.returncode, 0, errors)
        self.assertEqual(self.numbers("run"), self.numbers("whole"))
        self.assertEqual(self.weights("run"), self.weights("whole"))
        events = [(line["event"], line.get("resumes")) for line in self.journal("run")]
        self.assertEqual(events, [("failure", None), ("restart", True)])
        self.assertEqual(program.processes(self.corpus), [])

    @unittest.skipUnless(program.MPIRUN, "there is no mpirun")
    def test_command_that_is_stopped_or_refused(self):
        mpirun = f"run.launcher={program.MPIRUN} --oversubscribe -n 2"
        with subprocess.Popen([program.PROGRAM, *self.small("train.steps=100M", "run.dir=run", "--restarts", "5", mpirun)],
                              cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
            self.addCleanup(run.kill)
            self.assertTrue(program.wait_until(lambda: self.steps_done("run") > 2, 60))
            run.send_signal(signal.SIGTERM)
            errors = run.communicate(timeout=60)[1]
        self.assertEqual(run.returncode, 75, errors)
        self.assertFalse(os.path.exists(self.path("run/restarts.jsonl")))
        # What no restart can help is not tried again.
        result = self.run_program(*self.small("train.steps=5", "run.dir=other", "--restarts", "5", mpirun, "parallel.tp=5"))
        self.assertEqual(result.returncode, 2, result.stderr)
        result = self.run_program(*self.small("run.dir=other", "--restarts", "5", "run.launcher=no-such-command"))
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertIn("run.launcher: 'no-such-command' cannot be run\n", result.stderr)
        self.one_line(self.run_program(*self.small("run.dir=other", mpirun)), 2, "run.restarts")


if __name__ == "__main__":
    unittest.main()
