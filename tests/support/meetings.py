"""Ranks that meet without MPI and keep their processes when others are lost (run.restarts)."""
import os
import shutil
import signal
import subprocess

import program
import worlds

SECRET = "0123456789abcdef0123456789abcdef"
# Runs are stopped once what is tested has happened, however fast the machine is.
ENDLESS = ["train.steps=100M", "train.schedule=constant"]
BATCH = "train.global_batch=12"


class Meetings(program.ProgramTest):
    def setUp(self):
        super().setUp()
        self.port = worlds.free_port()
        self.runs = []
        self.outputs = 0
        self.apart = ()  # ranks that others reach over TCP

    def spawn(self, rank, *arguments, size=3, secret=SECRET, **more):
        variables = worlds.named(size, MASTER_PORT=str(self.port), QUADRILLE_SECRET=secret, **more)
        self.outputs += 1
        with open(self.path(f"output{self.outputs}"), "w", encoding="utf-8") as output:
            command = [*(worlds.apart() if rank in self.apart else []), program.PROGRAM, *self.small("run.dir=run", *arguments)]
            run = subprocess.Popen(command, cwd=self.folder, stdout=output, stderr=subprocess.PIPE, text=True,
                                   env=worlds.environment(variables, rank))
        run.output = f"output{self.outputs}"
        self.addCleanup(run.stderr.close)
        self.addCleanup(run.wait)
        self.addCleanup(run.kill)
        return run

    def start(self, *arguments, size=3, restarts=5, wait=20, steps=5):
        """One process per rank, which have done some steps when this returns."""
        self.arguments = [*arguments, f"run.restarts={restarts}", f"run.join_deadline={wait}"]
        self.size = size
        self.runs = [self.spawn(rank, *self.arguments, size=size) for rank in range(size)]
        program.wait_until(lambda: self.steps_done() >= steps or any(run.poll() is not None for run in self.runs), 60)
        for run in self.runs:
            if run.poll() is not None:
                errors = "".join(run.communicate()[1] for run in self.runs)
                if worlds.NO_UCX in errors:
                    self.skipTest(worlds.NO_UCX)
                self.fail(errors)

    def replace(self, rank, *more):
        """Another process takes the place of a rank that has ended."""
        self.runs[rank] = self.spawn(rank, *self.arguments, *more, size=self.size)

    def kill(self, rank):
        self.runs[rank].kill()
        self.runs[rank].wait()

    def end(self, status, seconds=60):
        """All ranks end with the status; returns what they have to say about it."""
        errors = [run.communicate(timeout=seconds)[1] for run in self.runs]
        self.assertEqual([run.returncode for run in self.runs], [status] * self.size, (errors, self.journal()))
        return "".join(errors)

    def stop_and_repeat(self, *whole):
        """Stops the run with a checkpoint; a run in the folder whole does as many steps undisturbed."""
        done = self.steps_done()
        self.wait(lambda: self.steps_done() >= done + 5)
        for run in self.runs:
            run.send_signal(signal.SIGTERM)
        self.end(75)
        shutil.rmtree(self.path("whole"), ignore_errors=True)
        steps = [f"train.steps={self.steps_done()}", "train.schedule=constant"]
        self.ok(self.run_program(*self.small("run.dir=whole", *whole, *steps)))

    def stop(self, *whole):
        """The same with local ranks, which have the same result."""
        self.stop_and_repeat("--ranks", str(self.size), *whole)
        self.assertEqual(self.numbers("run"), self.numbers("whole"))
        self.assertEqual(self.weights("run"), self.weights("whole"))

    def wait(self, condition, seconds=60):
        self.assertTrue(program.wait_until(condition, seconds), (self.journal(), [run.poll() for run in self.runs]))

    def text(self, name):
        with open(self.path(name), encoding="utf-8") as file:
            return file.read()

    @staticmethod
    def resident(pid):
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    def events(self, kind):
        return [line for line in self.journal() if line["event"] == kind]

    def recovered(self, count):
        self.wait(lambda: len(self.events("recovered")) == count)

    def weights(self, folder):
        with open(self.path(f"{folder}/checkpoints/latest/manifest.json"), encoding="utf-8") as file:
            text = file.read()
        return text[text.index('"tensors"'):]  # names, shapes and the checksums of all values and moments
