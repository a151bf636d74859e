"""Worlds without MPI on one machine, started as torchrun, Kubernetes operators and srun do it: the
variables, and what is refused. Several machines: tests/fault/test_strangers.py.
ctest: not under thread
ctest: processors 2
"""
import os
import socket
import subprocess
import sys
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Joins(program.ProgramTest):
    def start_all(self, name, variables, *more, ranks=2):
        """One process per rank; returns (status, standard output, standard error) of each."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "PMI", "SLURM_", "MASTER_", "TORCH"))}
        if program.SANITIZED:
            clean["ASAN_OPTIONS"] = "detect_leaks=0"  # UCX
        arguments = self.small("train.steps=2", f"run.dir={self.path(name)}", "run.join_deadline=15", *more)
        runs = [subprocess.Popen([program.PROGRAM, *arguments], cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                 env={**clean, **{key: value.replace("{rank}", str(rank)) for key, value in variables.items()}})
                for rank in range(ranks)]
        results = []
        for run in runs:
            out, err = run.communicate(timeout=60)
            results.append((run.returncode, out, err))
        if any("this build has no UCX" in err for _, _, err in results):
            self.skipTest("this build has no UCX")
        return results

    def named(self, **more):
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "{rank}", "WORLD_SIZE": "2", "LOCAL_RANK": "{rank}",
                **more}

    def slurm(self, **more):
        # The job only chooses the port.
        return {"SLURM_JOB_ID": str(os.getpid() * 7), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "{rank}",
                "SLURM_STEP_NODELIST": "localhost,other[003-010,12]", **more}

    def test_starts(self):
        self.ok(self.run_program(*self.small("train.steps=2", f"run.dir={self.path('local')}", "--ranks", "2")))
        # With torchrun's own store at the port, rank 0 takes the next one.
        starts = {"named": self.named(), "store": self.named(TORCHELASTIC_USE_AGENT_STORE="True"), "slurm": self.slurm()}
        for name, variables in starts.items():
            for status, _, err in (results := self.start_all(name, variables)):
                self.assertEqual((status, err), (0, ""))
            self.assertIn("ranks    processes, backend ucx", results[0][1])
            self.assertEqual(results[1][1], "")
            self.assertEqual(self.numbers(name), self.numbers("local"))

    def test_mistakes(self):
        """Each is reported once, by the rank that knows."""
        results = self.start_all("mistake", self.named(), "train.lr=-1")
        self.assertEqual([status for status, _, _ in results], [2, 2])
        self.assertEqual("".join(err for _, _, err in results).count("quadrille: "), 1)
        (status, _, err), = self.start_all("late", self.named(), "run.join_deadline=0.5", ranks=1)
        self.assertEqual(status, 1)
        self.assertIn("waited 0.5 s in vain for rank 1", err)
        (status, _, err), = self.start_all("elsewhere", self.named(MASTER_ADDR="192.0.2.1", QUADRILLE_SECRET=32 * "s"), ranks=1)
        self.assertEqual(status, 2)
        self.assertIn("192.0.2.1 is not an address of this machine, and rank 0 must run there", err)
        secret = self.write("secret", 32 * "s")
        os.chmod(secret, 0o644)
        (status, _, err), = self.start_all("open", self.named(), f"run.secret_file={secret}", ranks=1)
        self.assertEqual(status, 2)
        self.assertIn(f"other users can open {secret}: chmod 600", err)
        (status, _, err), = self.start_all("none", {}, "run.backend=ucx", ranks=1)
        self.assertEqual(status, 2)
        self.assertIn("the environment does not name their world", err)


if __name__ == "__main__":
    unittest.main()
