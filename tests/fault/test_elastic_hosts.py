"""A supervised run on two machines made of namespaces, one of which vanishes: the run continues on
the other, and on both once it has returned. Under mpirun, and under Slurm where slurmctld, slurmd
and srun are found. Takes minutes of waiting: QUADRILLE_HOSTS=1 runs it.
ctest: not under address
ctest: not under thread
ctest: timeout 400
"""
import os
import signal
import subprocess
import sys
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import hosts  # noqa: E402
import program  # noqa: E402
import slurm  # noqa: E402

DEADLINE = 3


class Vanishing(program.ProgramTest):
    def setUp(self):
        super().setUp()
        self.network = hosts.Hosts(["alpha", "beta"], self.folder)
        self.addCleanup(self.network.remove)
        self.alpha, self.beta = self.network.hosts

    def has(self, event, count=1):
        return len([line for line in self.journal() if line["event"] == event]) >= count

    def start(self, *words, environment=None):
        """The supervisor runs on alpha."""
        arguments = self.small(*words)
        with open(self.path("log"), "w", encoding="utf-8") as log:
            run = subprocess.Popen(self.alpha.enter(program.PROGRAM, *arguments), cwd=self.folder, stdout=log, stderr=subprocess.STDOUT,
                                   env=environment)
        self.addCleanup(lambda: (run.kill(), run.wait()))
        return run

    def log(self):
        with open(self.path("log"), encoding="utf-8") as file:
            return file.read()[-6000:]

    def wait(self, run, condition, seconds):
        self.assertTrue(program.wait_until(lambda: condition() or run.poll() is not None, seconds), f"{self.log()}\n{self.journal()}")
        self.assertIsNone(run.poll(), f"{self.log()}\n{self.journal()}")

    def vanish_and_return(self, launcher, answers, environment=None):
        # Slurm takes half a minute to notice a loss: few, small steps keep rounding errors small.
        steps = ["train.global_batch=8", "data.seq=128", "model.hidden=128", "model.layers=4", "run.save_every=50", "train.lr=1e-4",
                 "train.schedule=constant"]
        self.write("machines", "alpha slots=2\nbeta slots=2\n")
        run = self.start(*steps, "train.steps=100M", f"run.dir={self.path('run')}", f"run.deadline={DEADLINE}", "--restarts", "6",
                         "run.elastic=1..4", f"run.hosts={self.path('machines')}", f"run.host_check={answers}", f"run.launcher={launcher}",
                         environment=environment)
        self.wait(run, lambda: self.steps_done() >= 60, 60)
        self.beta.unplug()
        self.wait(run, lambda: self.has("resize"), 90)
        done = self.steps_done()
        self.wait(run, lambda: self.steps_done() > done + 20, 60)
        self.beta.plug()
        self.wait(run, lambda: self.has("resize", 2), 90)
        done = self.steps_done()
        self.wait(run, lambda: self.steps_done() > done + 20, 60)
        run.send_signal(signal.SIGTERM)
        run.wait(timeout=60)
        self.assertEqual(run.returncode, 75, f"{self.log()}\n{self.journal()}")
        self.assertEqual([(line["from"], line["ranks"]) for line in self.journal() if line["event"] == "resize"], [(4, 2), (2, 4)])
        steps.append(f"train.steps={self.steps_done()}")
        self.ok(self.run_program(*self.small(*steps, f"run.dir={self.path('whole')}", "--ranks", "4")))
        a, b = self.metrics("run"), self.metrics("whole")
        self.assertEqual([line["step"] for line in a], [line["step"] for line in b])
        worst = max(abs(x["loss"] - y["loss"]) / y["loss"] for x, y in zip(a, b))
        self.assertLess(worst, 1e-5)
        seconds = [(line["event"], round(line["seconds"], 1)) for line in self.journal() if "seconds" in line]
        print(f"{len(a)} steps, largest relative difference of losses {worst:.2e}; {seconds}")

    def test_slurm(self):
        if slurm.missing():
            self.skipTest(f"Slurm is not installed: {', '.join(slurm.missing())}")
        cluster = slurm.Slurm(self.network)
        self.addCleanup(cluster.remove)
        self.vanish_and_return(f"{cluster.srun()} --mpi=pmix --nodelist={{names}} --nodes={{nodes}} --ntasks={{ranks}}", cluster.answers(),
                               cluster.environment)

    def test_mpirun(self):
        start = [w for w in self.network.mpirun((1, 1), oob_tcp_keepalive_time=2, oob_tcp_keepalive_intvl=1, oob_tcp_keepalive_probes=2)]
        words = start[start.index("mpirun"):]
        words[words.index("--host") + 1] = "{hosts}"
        root = "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
        # A machine that is there refuses the connection at once; one that has vanished does not.
        self.write("answers.py", "import socket, sys\ntry:\n    socket.create_connection((sys.argv[1], 9), 2)\n"
                                 "except ConnectionRefusedError:\n    sys.exit(0)\nexcept OSError:\n    sys.exit(1)\n")
        self.vanish_and_return(f"env {root} {' '.join(words)} -n {{ranks}}", f"{sys.executable} {self.path('answers.py')} {{host}}")


if __name__ == "__main__":
    if not os.environ.get("QUADRILLE_HOSTS"):
        print("skipped: takes long; QUADRILLE_HOSTS=1 runs it")
        sys.exit(hosts.SKIPPED)
    hosts.enter()
    unittest.main()
