"""run.elastic and run.recover: surviving ranks keep their processes and their state when a rank is
lost, and the number of ranks changes while a run continues. QUADRILLE_ELASTIC=30 for the long form.
ctest: timeout 240
ctest: processors 2
"""
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402

LONG = int(os.environ.get("QUADRILLE_ELASTIC", "0"))
BATCH = "train.global_batch=40"  # sequences: divisible by 8 and by 5
# Runs are stopped once what is tested has happened, however fast the machine is.
ENDLESS = ["train.steps=100M", "train.schedule=constant"]


class Elastic(program.ProgramTest):
    def events(self, kind, folder="run"):
        return [line for line in self.journal(folder) if line["event"] == kind]

    def weights(self, folder):
        with open(self.path(f"{folder}/checkpoints/latest/manifest.json"), encoding="utf-8") as file:
            text = file.read()
        return text[text.index('"tensors"'):]  # names, shapes and the checksums of all values and moments

    def children(self, run):
        with open(f"/proc/{run.pid}/task/{run.pid}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]

    def start(self, *arguments):
        with open(self.path("output"), "w", encoding="utf-8") as output:
            run = subprocess.Popen([program.PROGRAM, *self.small(*arguments)], cwd=self.folder, stdout=output, stderr=subprocess.PIPE,
                                   text=True)
        self.addCleanup(run.wait)
        self.addCleanup(run.kill)
        return run

    def wait(self, run, condition, seconds=60):
        self.assertTrue(program.wait_until(lambda: condition() or run.poll() is not None, seconds), self.journal())
        self.assertIsNone(run.poll(), run.stderr.read() if run.poll() is not None else "")

    def finish(self, run, status=0):
        errors = run.communicate(timeout=200)[1]
        with open(self.path("output"), encoding="utf-8") as file:
            self.output = file.read()
        self.assertEqual(run.returncode, status, f"{errors}\n{self.journal()}\n{self.output[-3000:]}")
        self.assertEqual(program.processes(self.corpus), [])
        return errors

    def stop(self, run, *whole):
        """Stops the run with a checkpoint, and does as many steps undisturbed in the folder `whole`."""
        run.send_signal(signal.SIGTERM)
        self.finish(run, 75)
        shutil.rmtree(self.path("whole"), ignore_errors=True)
        steps = [f"train.steps={self.steps_done()}", "train.schedule=constant"]
        self.ok(self.run_program(*self.small(*whole, *steps, "run.dir=whole")))

    def resize(self, ranks):
        self.ok(subprocess.run([program.PROGRAM, "resize", self.path("run"), str(ranks)], capture_output=True, text=True, check=False))

    def same_samples(self, folder="run", whole="whole", tolerance=1e-5):
        """Each step once, with the same samples: the losses agree as far as sums of another order do."""
        a, b = self.metrics(folder), self.metrics(whole)
        self.assertEqual([line["step"] for line in a], [line["step"] for line in b])
        self.assertEqual([line["tokens"] for line in a], [line["tokens"] for line in b])
        worst = max(abs(x["loss"] - y["loss"]) / y["loss"] for x, y in zip(a, b))
        self.assertLess(worst, tolerance)
        return worst

    def test_shrinks_and_grows(self):
        """8 to 5 to 8 ranks: each sample once, losses as if nothing had happened; survivors stay the same processes."""
        arguments = [BATCH, "run.save_every=20", "--ranks", "8"]
        run = self.start(*arguments, *ENDLESS, "run.dir=run", "--restarts", "5", "run.elastic=5..8")
        self.wait(run, lambda: self.steps_done() >= 5)
        before = set(self.children(run))
        self.assertEqual(len(before), 8)
        self.resize(5)
        self.wait(run, lambda: len(self.events("recovered")) == 1)
        program.wait_until(lambda: len(self.children(run)) == 5, 10)
        self.assertEqual(len(self.children(run)), 5)
        self.assertLessEqual(set(self.children(run)), before)
        self.resize(8)
        self.wait(run, lambda: len(self.events("recovered")) == 2)
        done = self.steps_done()
        self.wait(run, lambda: self.steps_done() >= done + 5)
        self.stop(run, *arguments)
        worst = self.same_samples()
        shapes = [(line["from"], line["ranks"], line["in_memory"]) for line in self.events("resize")]
        self.assertEqual(shapes, [(8, 5, True), (5, 8, True)])
        with open(self.path("run/starts.jsonl"), encoding="utf-8") as file:
            self.assertEqual([json.loads(line)["ranks"] for line in file], [8, 5, 8])
        self.ok(self.run_program("report", "run"))
        self.assertIn("run", self.ok(self.run_program("runs", ".")).stdout)
        self.assertIn("5 ranks are available: the run continues with 5 ranks instead of 8", self.output)
        if LONG:
            print(f"8 to 5 to 8 ranks: largest relative difference of losses {worst:.2e}, seconds "
                  f"{[round(line['seconds'], 3) for line in self.events('resize')]}")

    def kill_one(self, run, chance):
        pids = {program.rank_of(pid): pid for pid in self.children(run)}
        if victims := [pid for pid in pids.values() if pid]:
            os.kill(chance.choice(victims), signal.SIGKILL)

    def fail_often(self, failures, *arguments):
        """Ranks of a supervised run are killed one after another; how many processes stay each time."""
        run = self.start(*arguments, *ENDLESS, "run.dir=run", "--restarts", str(2 * failures))
        chance = random.Random(5)
        stayed = []
        for i in range(failures):
            done = self.steps_done() if i else 0
            self.wait(run, lambda n=done + 3 + chance.randrange(20): self.steps_done() >= n)
            before = set(self.children(run))
            self.kill_one(run, chance)
            self.wait(run, lambda n=i: len(self.events("recovered")) > n)
            stayed.append(len(before & set(self.children(run))))
        return run, stayed

    def test_survivors_continue(self):
        """A lost rank costs no step where replicas have its state; the result is bit-identical."""
        arguments = [BATCH, "--ranks", "4", "run.save_every=10"]
        for recover in ("replicas", "checkpoint") if LONG else ("replicas",):
            begin = time.monotonic()
            run, stayed = self.fail_often(LONG or 2, *arguments, "--overwrite", f"run.recover={recover}")
            disturbed = time.monotonic() - begin
            self.stop(run, *arguments)
            self.assertEqual(self.numbers("run"), self.numbers("whole"))
            self.assertEqual(self.weights("run"), self.weights("whole"))
            lost = [line["seconds"] for line in self.events("recovered")]
            if LONG:
                steps = [line["step_seconds"] for line in self.metrics("whole")]
                print(f"run.recover={recover}: {len(lost)} failures; {sum(lost) / len(lost):.3f} s from a failure to the next step, at most "
                      f"{max(lost):.3f} s; {(disturbed - sum(steps)) / len(lost):.3f} s longer per failure")
            if recover == "checkpoint":
                continue
            self.assertGreaterEqual(min(stayed), 2)
            self.assertTrue(all(line["in_memory"] for line in self.events("restart")), self.journal())
            # No step is repeated: the next one to be done is the first that was not.
            pairs = list(zip(self.events("failure"), self.events("recovered")))
            self.assertTrue(all(after["step"] <= (before["step"] or 0) + 2 for before, after in pairs), pairs)

    def test_replicas_of_shards(self):
        """Two copies of sharded state: one survives."""
        arguments = [BATCH, "--ranks", "4", "parallel.zero=2", "parallel.dp_shard=2"]
        run = self.start(*arguments, *ENDLESS, "run.dir=run", "--restarts", "3")
        self.wait(run, lambda: self.steps_done() >= 5)
        self.kill_one(run, random.Random(2))
        self.wait(run, lambda: self.events("recovered"))
        self.stop(run, *arguments)
        self.assertEqual(self.numbers("run"), self.numbers("whole"))
        self.assertEqual(self.weights("run"), self.weights("whole"))

    def test_sharded_state(self):
        """State that is sharded over all ranks: a change of their number hands it over, a lost rank
        costs the steps since the last checkpoint."""
        arguments = [BATCH, "run.save_every=10", "--ranks", "4", "parallel.zero=2"]
        run = self.start(*arguments, *ENDLESS, "run.dir=run", "--restarts", "5", "run.elastic=2..4")
        self.wait(run, lambda: self.steps_done() >= 12)
        self.resize(3)  # 40 sequences are not a multiple of 3
        self.wait(run, lambda: len(self.events("recovered")) == 1)
        os.kill(self.children(run)[1], signal.SIGKILL)
        self.wait(run, lambda: len(self.events("recovered")) == 2)
        self.stop(run, *arguments)
        self.same_samples()
        resized, restart = self.events("resize")[0], self.events("restart")[0]
        self.assertEqual((resized["ranks"], resized["in_memory"]), (2, True))
        self.assertEqual(resized["reason"], "3 ranks are available, of which a layout can use 2")
        self.assertEqual((restart["in_memory"], restart["resumes"]), (False, True))

    def test_killed_while_it_changes(self):
        """A rank is killed at a random moment of a change; then the launcher, and the run is resumed."""
        trials = LONG or 2
        arguments = [BATCH, "run.save_every=20"]
        run = self.start(*arguments, *ENDLESS, "run.dir=run", "--restarts", str(3 * trials), "run.elastic=2..4", "--ranks", "4")
        chance = random.Random(11)
        for i in range(trials):
            done = self.steps_done() if i else 0
            self.wait(run, lambda n=done + 25: self.steps_done() >= n)
            self.resize(2 if i % 2 == 0 else 4)
            time.sleep(chance.random())
            if i == trials - 1:
                run.kill()
                break
            self.kill_one(run, chance)
        run.communicate()
        self.assertTrue(program.wait_until(lambda: not program.processes(self.corpus), 10))
        done = self.steps_done()
        run = self.start(BATCH, *ENDLESS, "run.dir=run", "--resume")
        self.wait(run, lambda: self.steps_done() >= done + 5)
        self.stop(run, *arguments, "--ranks", "4")
        self.same_samples()
        self.assertEqual(program.shared_files(), set())

    def test_too_few(self):
        run = self.start(BATCH, "train.steps=100M", "run.dir=run", "--ranks", "4", "--restarts", "5", "run.elastic=2..4",
                         f"run.available={self.path('ranks')}")
        self.wait(run, lambda: self.steps_done() > 2)
        refused = subprocess.run([program.PROGRAM, "resize", self.path("run"), "2"], capture_output=True, text=True, check=False)
        self.one_line(refused, 2, "run.available")
        self.write("ranks", "1\n")
        errors = self.finish(run, 75)
        self.assertIn("with a checkpoint", errors)
        self.assertIn("1 rank is available, and run.elastic needs at least 2", self.output)

    def test_replaced_run(self):
        """The number of ranks of the run that is replaced is not that of the new one."""
        for more in ([], ["--overwrite"]):
            run = self.start(BATCH, "train.steps=200", "run.dir=run", "--ranks", "4", "--restarts", "3", "run.elastic=2..4", *more)
            self.finish(run)
            self.assertEqual(self.journal(), [])
            self.resize(2)

    def test_refusals(self):
        small = self.small("run.dir=run", "--ranks", "4")
        for words, part in ((["run.elastic=5..8", "--restarts", "3"], "parallel.ranks is 4"), (["run.elastic=2..4"], "set run.restarts"),
                            (["run.elastic=4", "--restarts", "3"], "5..8"), (["run.available=x", "--restarts", "3"], "run.elastic"),
                            (["run.elastic=2..4", "--restarts", "3", "run.recover=checkpoint"], "run.recover=checkpoint"),
                            (["run.hosts=x", "--restarts", "3"], "run.launcher"),
                            (["run.elastic=2..4", "--restarts", "3", "run.launcher=mpirun -n 4"], "{ranks}")):
            self.one_line(self.run_program(*small, *words), 2, part)
        self.ok(self.run_program(*self.small("run.dir=fixed", "train.steps=2")))
        for words, part in ((["fixed", "2"], "is fixed"), (["none", "2"], "config.yaml"), (["fixed", "two"], "a number of ranks")):
            self.one_line(self.run_program("resize", *words), 2, part)

    def test_bad_host(self):
        """One of the hosts always fails: it is excluded, and the run continues without it."""
        self.write("hosts", "# two machines\nalpha slots=2\nbeta slots=2\n")
        script = self.write("start", """ranks=$1 hosts=$2; shift 2
echo "ranks $ranks hosts $hosts" >> starts
case $hosts in *beta*) echo "mpirun noticed that process rank 2 with PID 7 on node beta exited on signal 9 (Killed)." >&2; exit 137;; esac
exec "$@"
""")
        run = self.start(BATCH, "train.steps=6", "run.dir=run", "--restarts", "5", "run.elastic=1..4", "run.hosts=hosts",
                         f"run.launcher=sh {script} {{ranks}} {{hosts}}", "run.host_check=test {host} != gamma")
        self.finish(run)
        with open(self.path("starts"), encoding="utf-8") as file:
            self.assertEqual(file.read().splitlines(), 2 * ["ranks 4 hosts alpha:2,beta:2"] + ["ranks 2 hosts alpha:2"])
        self.assertEqual([line["event"] for line in self.journal()],
                         ["failure", "restart", "excluded", "failure", "restart", "resize"])
        self.assertEqual(self.events("excluded")[0]["host"], "beta")
        self.assertIn("host beta is excluded after 2 failures in a row", self.output)
        self.assertEqual(len(self.metrics("run")), 6)
        # Without run.elastic the other hosts are spares. One that does not answer is not used.
        self.write("hosts", "gamma slots=2\nalpha slots=2\n")
        run = self.start(BATCH, "train.steps=4", "run.dir=spare", "--ranks", "2", "--restarts", "5", "run.hosts=hosts",
                         f"run.launcher=sh {script} {{ranks}} {{hosts}}", "run.host_check=test {host} != gamma")
        self.finish(run)
        self.assertEqual(self.events("absent", "spare")[0]["host"], "gamma")

    def test_command_that_waits_for_a_machine(self):
        """A machine goes down just before the command starts, which waits for it, as srun does: the run continues on the other."""
        self.write("hosts", "alpha slots=2\nbeta slots=2\n")
        self.write("beta", "")
        self.write("alpha", "")
        script = self.write("start", """ranks=$1 hosts=$2; shift 2
echo "ranks $ranks hosts $hosts" >> starts
case $hosts in *beta*) rm beta; exec sleep 1000;; esac
exec "$@"
""")
        run = self.start(BATCH, "train.steps=6", "run.dir=run", "--restarts", "1", "run.elastic=1..4", "run.hosts=hosts",
                         f"run.launcher=sh {script} {{ranks}} {{hosts}}", f"run.host_check=test -e {self.path('{host}')}")
        self.finish(run)
        with open(self.path("starts"), encoding="utf-8") as file:
            self.assertEqual(file.read().splitlines(), ["ranks 4 hosts alpha:2,beta:2", "ranks 2 hosts alpha:2"])
        self.assertEqual([line["event"] for line in self.journal()], ["absent", "resize"])
        self.assertEqual(len(self.metrics("run")), 6)

    def test_command_that_locks_itself_up(self):
        """mpirun may hang after it has lost a rank that was starting: it is ended, and the run starts again."""
        script = self.write("start", """[ -e first ] && exec "$@"
touch first
echo "mpirun noticed that process rank 2 with PID 0 on node vm exited on signal 9 (Killed)." >&2
exec sleep 1000
""")
        run = self.start(BATCH, "train.steps=6", "run.dir=run", "--restarts", "1", f"run.launcher=sh {script}")
        self.finish(run)
        self.assertEqual([line["event"] for line in self.journal()], ["failure", "restart"])
        self.assertEqual(len(self.metrics("run")), 6)


if __name__ == "__main__":
    unittest.main()
