"""Two machines made of namespaces, with two ranks each: bit-identical to local ranks, errors on one
machine, machines that fail. Times of processes are checked, so it is left out of sanitizer builds.
ctest: not under address
ctest: not under thread
ctest: timeout 180
ctest: processors 2
"""
import json
import os
import signal
import subprocess
import sys
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import hosts  # noqa: E402
import program  # noqa: E402

DEADLINE = 3
EXPERTS = ["model.arch=llama", "model.experts=4", "model.experts_per_token=2", "parallel.ep=4"]


def rank_of(pid):
    """The rank of a process that mpirun started; None for others, and for one that has ended."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = dict(item.split(b"=", 1) for item in file.read().split(b"\0") if b"=" in item)
    except OSError:
        return None
    return int(variables[b"OMPI_COMM_WORLD_RANK"]) if b"OMPI_COMM_WORLD_RANK" in variables else None


class Machines(program.ProgramTest):
    def setUp(self):
        super().setUp()
        self.network = hosts.Hosts(["alpha", "beta"], self.folder)
        self.addCleanup(self.network.remove)
        self.alpha, self.beta = self.network.hosts

    def train(self, *more, slots=(2, 2)):
        return self.run_program(*self.small("train.steps=4", *more), launcher=self.network.mpirun(slots))

    def told_once(self, result, status, *parts):
        self.assertEqual(result.returncode, status, result.stdout + result.stderr)
        ours = [line for line in result.stderr.splitlines() if line.startswith("quadrille: ")]
        self.assertEqual(len(ours), 1, result.stderr)
        for part in parts:
            self.assertIn(part, ours[0])

    def nothing_left(self):
        self.assertTrue(program.wait_until(lambda: not self.alpha.processes() + self.beta.processes(), 20), "processes are left")

    def same_as_local(self, name, *more):
        result = self.ok(self.train(f"run.dir={self.path(name)}", *more))
        self.assertIn("ranks    processes on 2 machines: alpha 0 to 1, beta 2 to 3; backend mpi", result.stdout)
        self.assertNotIn("note ", result.stdout)
        self.ok(self.run_program(*self.small("train.steps=4", f"run.dir={self.path(name)}-local", "--ranks", "4", *more)))
        self.assertEqual(self.numbers(name), self.numbers(f"{name}-local"))

    def test_layouts(self):
        self.same_as_local("stages", "parallel.tp=2", "parallel.pp=2", "train.micro_batch=2")
        self.same_as_local("experts", *EXPERTS, "parallel.dispatch=node", "parallel.nodes=2")
        self.same_as_local("sharded", "parallel.zero=3", "run.save_every=2")
        self.nothing_left()
        # Resumes from what four ranks wrote, on three that are placed unevenly.
        more = [f"run.dir={self.path('sharded')}", "train.steps=6", "train.global_batch=12", "run.resume=true"]
        self.assertIn("alpha 0, beta 1 to 2", self.ok(self.train(*more, slots=(1, 2))).stdout)
        self.ok(self.run_program(*self.small(*more, f"run.dir={self.path('sharded')}-local", "--ranks", "3")))
        self.assertEqual(self.numbers("sharded"), self.numbers("sharded-local"))

    def test_one_time_in_traces(self):
        """The machines' clocks differ by more than an hour."""
        self.ok(self.train(f"run.dir={self.path('run')}", "--trace"))
        with open(self.path("run/trace.json"), encoding="utf-8") as file:
            events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
        first = [min(event["ts"] for event in events if event["pid"] == rank) for rank in range(4)]
        self.assertLess(max(first) - min(first), 5e6, first)

    def test_mistakes_of_one_machine(self):
        os.mkdir(self.path("own"))
        for host, text in ((self.alpha, "train: {lr: 1e-3}"), (self.beta, "train: {lr: 2e-3}")):
            write = "mount -t tmpfs tmpfs $0 && echo \"$1\" >$0/run.yaml"
            subprocess.run(host.enter("sh", "-c", write, self.path("own"), text), check=True)
        self.told_once(self.train(self.path("own/run.yaml")), 2, "train.lr: rank 2 on host beta was given 0.002, rank 0 0.001")
        apart = "on host beta, as rank 2 sees it, is not the folder of rank 0 on host alpha"
        self.told_once(self.train(f"run.dir={self.path('own/run')}"), 2, apart)
        subprocess.run(self.beta.enter("rm", self.path("own/run.yaml")), check=True)
        self.told_once(self.train(self.path("own/run.yaml")), 2, "rank 2 on host beta: ", "own/run.yaml: cannot be read")
        # The run to be replaced stays until the last machine has agreed.
        for host, text in ((self.alpha, "In the beginning"), (self.beta, "And the earth was")):
            subprocess.run(host.enter("sh", "-c", "yes \"$1\" | head -c 20000 >$0/text", self.path("own"), text), check=True)
        self.ok(self.run_program(*self.small("train.steps=2", "run.save_every=2", f"run.dir={self.path('kept')}")))
        before = sorted(os.listdir(self.path("kept/checkpoints")))
        other = [f"data.path={self.path('own/text')}", "data.tokenizer=bytes", f"run.dir={self.path('kept')}", "run.overwrite=true"]
        self.told_once(self.train(*other), 2, "rank 2 on host beta reads other tokens than rank 0")
        self.assertTrue(before)
        self.assertEqual(sorted(os.listdir(self.path("kept/checkpoints"))), before)
        self.assertEqual(len(self.metrics("kept")), 2)
        self.nothing_left()

    def start(self):
        """A run that would take hours, some steps after its start: its process, and the pids of its
        ranks."""
        arguments = self.small("train.steps=100M", "train.schedule=constant", f"run.deadline={DEADLINE}", f"run.dir={self.path('run')}")
        command = [*self.network.mpirun((2, 2)), program.PROGRAM, *arguments]
        with open(self.path("errors"), "w", encoding="utf-8") as errors:
            run = subprocess.Popen(command, cwd=self.folder, stdout=subprocess.DEVNULL, stderr=errors)
        self.addCleanup(lambda: (run.kill(), run.wait()))
        self.assertTrue(program.wait_until(lambda: os.path.exists(self.path("run/metrics.jsonl")) and len(self.metrics("run")) > 2, 30))
        ranks = self.ranks()
        self.assertEqual(sorted(ranks), [0, 1, 2, 3])
        return run, ranks

    def ranks(self):
        """The processes that are alive, by rank."""
        found = {rank_of(pid): pid for host in (self.alpha, self.beta) for pid in host.processes()}
        found.pop(None, None)
        return found

    def errors(self):
        with open(self.path("errors"), encoding="utf-8") as file:
            return file.read()

    def finish(self, run, seconds):
        run.wait(timeout=seconds)
        return subprocess.CompletedProcess(run.args, run.returncode, "", self.errors())

    def test_killed_rank(self):
        run, ranks = self.start()
        os.kill(ranks[3], signal.SIGKILL)
        self.assertIn("rank 3 with PID", self.finish(run, 20).stderr)
        self.assertNotEqual(run.returncode, 0)
        self.nothing_left()

    def test_stop_and_resume(self):
        run, ranks = self.start()
        os.kill(ranks[2], signal.SIGUSR1)
        self.told_once(self.finish(run, 30), 75, "SIGUSR1: stopped after step", "with a checkpoint")
        steps = len(self.metrics("run")) + 2
        more = [f"train.steps={steps}", "train.schedule=constant"]
        self.ok(self.train(*more, f"run.dir={self.path('run')}", "run.resume=true"))
        self.ok(self.run_program(*self.small(*more, f"run.dir={self.path('whole')}", "--ranks", "4")))
        self.assertEqual(self.numbers("run"), self.numbers("whole"))

    def test_network_that_fails(self):
        """The ranks end on both sides, and those next to mpirun report why. mpirun itself waits for
        the other machine."""
        run, _ = self.start()
        self.beta.unplug()
        self.assertTrue(program.wait_until(lambda: not self.ranks(), 10 * DEADLINE), "ranks wait for ever")
        self.assertRegex(self.errors(), rf"(?m)^quadrille: .*rank [23] on host beta .*did not arrive within {DEADLINE} s in ")
        self.beta.plug()
        self.finish(run, 60)
        self.assertNotEqual(run.returncode, 0)
        self.nothing_left()


if __name__ == "__main__":
    hosts.enter()
    unittest.main()
