"""Worlds without MPI on one machine, started as torchrun, Kubernetes operators and srun do it: the
variables, and what is refused. Several machines: tests/fault/test_strangers.py.
ctest: not under thread
ctest: processors 2
"""
import os
import signal
import subprocess
import sys
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import inject  # noqa: E402
import program  # noqa: E402
import worlds  # noqa: E402


class Joins(program.ProgramTest):
    def start_all(self, name, variables, *more, ranks=2):
        """One process per rank; returns (status, standard output, standard error) of each."""
        arguments = self.small("train.steps=2", f"run.dir={self.path(name)}", "run.join_deadline=15", *more)
        runs = [subprocess.Popen([program.PROGRAM, *arguments], cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                 env=worlds.environment(variables, rank))
                for rank in range(ranks)]
        results = []
        for run in runs:
            out, err = run.communicate(timeout=60)
            results.append((run.returncode, out, err))
        if any(worlds.NO_UCX in err for _, _, err in results):
            self.skipTest(worlds.NO_UCX)
        return results

    def slurm(self, **more):
        # The job only chooses the port.
        return {"SLURM_JOB_ID": str(os.getpid() * 7), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "{rank}",
                "SLURM_STEP_NODELIST": "[127-128].0.0.[1,003-010],other", **more}

    def test_starts(self):
        self.ok(self.run_program(*self.small("train.steps=2", f"run.dir={self.path('local')}", "--ranks", "2")))
        # With torchrun's own store at the port, rank 0 takes the next one.
        starts = {"named": worlds.named(), "store": worlds.named(TORCHELASTIC_USE_AGENT_STORE="True"), "slurm": self.slurm()}
        for name, variables in starts.items():
            for status, _, err in (results := self.start_all(name, variables)):
                self.assertEqual((status, err), (0, ""))
            self.assertIn("ranks    processes, backend ucx", results[0][1])
            self.assertEqual(results[1][1], "")
            self.assertEqual(self.numbers(name), self.numbers("local"))

    def test_mistakes(self):
        """Each is reported once, by the rank that knows."""
        results = self.start_all("mistake", worlds.named(), "train.lr=-1")
        self.assertEqual([status for status, _, _ in results], [2, 2])
        self.assertEqual("".join(err for _, _, err in results).count("quadrille: "), 1)
        (status, _, err), = self.start_all("late", worlds.named(), "run.join_deadline=0.5", ranks=1)
        self.assertEqual(status, 1)
        self.assertIn("waited 0.5 s in vain for rank 1", err)
        self.assertNotIn("run.interface", err)
        (status, _, err), = self.start_all("late", worlds.named(QUADRILLE_SECRET=32 * "s"), "run.join_deadline=0.5", ranks=1)
        self.assertIn("other machines cannot reach that address: name another one in MASTER_ADDR, or set run.interface", err)
        (status, _, err), = self.start_all("elsewhere", worlds.named(MASTER_ADDR="192.0.2.1", QUADRILLE_SECRET=32 * "s"), ranks=1)
        self.assertEqual(status, 2)
        self.assertIn("192.0.2.1 is not an address of this machine, and rank 0 must run there", err)
        secret = self.write("secret", 32 * "s")
        os.chmod(secret, 0o644)
        (status, _, err), = self.start_all("open", worlds.named(), f"run.secret_file={secret}", ranks=1)
        self.assertEqual(status, 2)
        self.assertIn(f"other users can open {secret}: chmod 600", err)
        (status, _, err), = self.start_all("none", {}, "run.backend=ucx", ranks=1)
        self.assertEqual(status, 2)
        self.assertIn("the environment does not name their world", err)
        (status, _, err), = self.start_all("alone", worlds.named(MASTER_ADDR="192.0.2.1", RANK="1"), ranks=1)
        self.assertEqual(status, 2)
        self.assertIn("there is no secret that keeps strangers out", err)
        for key, by, more in (("run.available=x", "another program", {}), ("run.elastic=1..2", "torchrun", {"TORCHELASTIC_RUN_ID": "x"})):
            results = self.start_all("supervised", worlds.named(**more), key, "run.restarts=2")
            self.assertEqual([status for status, _, _ in results], [2, 2])
            self.assertIn(f"{key.split('=')[0]} is for the process that starts the ranks, and {by} started these: leave it out", results[0][2])

        results = self.start_all("supervised", self.slurm(), "run.restarts=2")
        self.assertEqual([status for status, _, _ in results], [2, 2])
        self.assertIn("run.restarts is for the process that starts the ranks, and srun started these: call quadrille train once", results[0][2])

    def test_incomplete_variables(self):
        """Each process would be a run of its own, in the same folder."""
        for name, value in (("RANK", ""), ("MASTER_PORT", "auto"), ("WORLD_SIZE", "two")):
            for status, _, err in self.start_all("partly", worlds.named(**{name: value})):
                self.assertEqual(status, 2)
                self.assertIn(f"this is one of several processes, but {name} is missing or no such number", err)
        (status, _, err), = self.start_all("one", worlds.named(WORLD_SIZE="1", RANK=""), ranks=1)
        self.assertEqual((status, err), (0, ""))

    def test_signals(self):
        """A start that waits for other ranks ends when it is asked to."""
        for rank, number, status, message in ((0, signal.SIGTERM, 75, "SIGTERM: stopped before the first step, while ranks were missing"),
                                              (1, signal.SIGINT, 1, "interrupted before the first step, while ranks were missing")):
            variables = worlds.named()
            run = subprocess.Popen([program.PROGRAM, *self.small()], cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                   text=True, env=worlds.environment(variables, rank))
            self.addCleanup(lambda r=run: (r.kill(), r.communicate()))
            port = f":{int(variables['MASTER_PORT']):04X}"
            # Rank 0 listens; rank 1 has found nothing there.
            program.wait_until(lambda r=run, p=port: r.poll() is not None or self.has_socket(p), 2)
            run.send_signal(number)
            err = run.communicate(timeout=20)[1]
            if worlds.NO_UCX in err:
                self.skipTest(worlds.NO_UCX)
            self.assertEqual(run.returncode, status, err)
            self.assertIn(message, err)

    @staticmethod
    def has_socket(port):
        with open("/proc/net/tcp", encoding="ascii") as table:
            return any(line.split()[1].endswith(port) for line in list(table)[1:])

    @unittest.skipUnless(inject.POSSIBLE, inject.MISSING)
    def test_ports_that_stay_open(self):
        """A kernel, or a container's, that has no filters."""
        source = self.write("refuse.c", """#include <errno.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>
int setsockopt(int fd, int level, int name, const void *value, socklen_t bytes)
{
    errno = ENOPROTOOPT;
    return level == SOL_SOCKET && name == SO_ATTACH_FILTER ? -1 : (int)syscall(SYS_setsockopt, fd, level, name, value, bytes);
}
""")
        library = self.path("refuse.so")
        subprocess.run([inject.COMPILER, "-shared", "-fPIC", "-o", library, source], check=True)
        results = self.start_all("open", worlds.named(LD_PRELOAD=library))
        errors = "".join(err for _, _, err in results)
        self.assertEqual([status for status, _, _ in results], [0, 0], errors)
        self.assertEqual(errors.count("the ports of UCX stay open for the whole run, to anyone who can reach them"), 1, errors)

    def test_limit_of_files(self):
        """A soft limit is raised; the hard one is reported at once."""
        script = 'ulimit -S -n 40; ulimit -H -n 100; exec "$0" "$@"'
        variables = worlds.environment(worlds.named(64), 0)
        result = subprocess.run(["sh", "-c", script, program.PROGRAM, *self.small("train.global_batch=64")], cwd=self.folder, env=variables,
                                capture_output=True, text=True, timeout=20, check=False)
        if worlds.NO_UCX in result.stderr:
            self.skipTest(worlds.NO_UCX)
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertIn("rank 0 is connected to 64 ranks and may have 100 files open: raise the limit (ulimit -n) to 320", result.stderr)

    def test_rank_that_starts_again(self):
        """Rank 1 is killed after it has sent its address, while rank 0 waits for rank 2."""
        variables = worlds.named(3)
        arguments = self.small("train.steps=2", "train.global_batch=12", "run.join_deadline=20")

        def start(rank):
            run = subprocess.Popen([program.PROGRAM, *arguments], cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                   text=True, env=worlds.environment(variables, rank))
            self.addCleanup(lambda: (run.kill(), run.communicate()))
            return run

        def has_sent():
            with open("/proc/net/tcp", encoding="ascii") as table:
                rows = [line.split() for line in list(table)[1:]]
            port = f":{int(variables['MASTER_PORT']):04X}"
            return any(row[1].endswith(port) and row[3] == "01" and int(row[4].split(":")[1], 16) > 0 for row in rows)

        runs = [start(0), start(1)]
        if not program.wait_until(lambda: has_sent() or runs[0].poll() is not None, 15) or runs[0].poll() is not None:
            err = runs[0].communicate(timeout=30)[1]
            self.assertIn(worlds.NO_UCX, err)
            self.skipTest(worlds.NO_UCX)
        runs[1].kill()
        runs[1].wait()
        runs[1] = start(1)
        self.assertTrue(program.wait_until(lambda: has_sent() or runs[0].poll() is not None, 15))
        runs.append(start(2))
        for run in runs:
            err = run.communicate(timeout=60)[1]
            self.assertEqual((run.returncode, err), (0, ""))


if __name__ == "__main__":
    unittest.main()
