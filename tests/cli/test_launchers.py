"""Processes started by a launcher: how they find each other, and what happens when they cannot.
ctest: timeout 120
ctest: processors 2
"""
import os
import sys
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402

LAUNCHERS = ("PMI", "OMPI_", "PALS_", "SLURM_", "HYDI_", "MPI_")


class Launchers(program.ProgramTest):
    def setUp(self):
        super().setUp()
        for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
            self.addCleanup(os.environ.__setitem__, name, os.environ.pop(name))

    def task(self, rank, size, *more, **variables):
        """Task `rank` of a Slurm step, with variables as srun sets them."""
        step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(size), "SLURM_PROCID": str(rank)}
        return self.run_program(*self.small("train.steps=2", "run.dir=run", *more), environment={**step, **variables})

    def refused(self, part, *more, size=4, **variables):
        """Rank 0 reports it, the others end with the same status, and no folder is created."""
        first, other = self.task(0, size, *more, **variables), self.task(1, size, *more, **variables)
        self.one_line(first, first.returncode, part)
        self.assertEqual((other.returncode, other.stderr), (first.returncode, ""))
        self.assertIn(first.returncode, (1, 2))
        self.assertFalse(os.path.exists(self.path("run")))

    def test_tasks_that_mpi_does_not_know(self):
        self.refused("srun --mpi=pmix" if program.MPIRUN else "this build has no MPI")

    def test_tasks_with_local_ranks(self):
        self.refused("srun started 4 processes, and each would train the whole run", "run.backend=local", "--ranks", "2")
        result = self.run_program(*self.small("run.backend=local"), environment={"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"})
        self.one_line(result, 2, "mpirun started 2 processes")

    def test_one_task_starts_its_ranks(self):
        result = self.ok(self.task(0, 1, "--ranks", "2", PMIX_RANK="0", PMI_RANK="0", PMI_SIZE="1"))
        self.assertIn("backend local", result.stdout)
        self.assertEqual(len(self.metrics("run")), 2)

    def test_batch_script_starts_its_ranks(self):
        variables = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "4"}
        result = self.ok(self.run_program(*self.small("train.steps=2", "--ranks", "2"), environment=variables))
        self.assertIn("backend local", result.stdout)


@unittest.skipUnless(program.MPIRUN, "needs mpirun")
class Machines(program.ProgramTest):
    """Two ranks that see different folders under one name, as those of two machines may."""

    def setUp(self):
        super().setUp()
        for rank in "01":
            os.mkdir(self.path(rank))

    def launch(self, *arguments):
        apart = 'cd "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}" && exec "$@"'
        return self.run_program(*arguments, launcher=[program.MPIRUN, "--oversubscribe", "-n", "2", "sh", "-c", apart, "sh"])

    def told_once(self, result, *parts):
        self.assertEqual(result.returncode, 2, result.stdout + result.stderr)
        ours = [line for line in result.stderr.splitlines() if line.startswith("quadrille: ")]
        self.assertEqual(len(ours), 1, result.stderr)
        for part in parts:
            self.assertIn(part, ours[0])

    def test_run_folder(self):
        self.told_once(self.launch(*self.small("train.steps=2", "run.dir=run")), "run.dir: run", "rank 1", "all ranks write checkpoints there")
        self.assertEqual(os.listdir(self.path("0")) + os.listdir(self.path("1")), [])
        self.ok(self.launch(*self.small("train.steps=2", f"run.dir={self.path('run')}", "run.save_every=1")))
        self.assertEqual(sorted(name for name in os.listdir(self.folder) if name.startswith(".")), [])

    def test_run_folder_to_replace(self):
        """The run to be replaced still exists when the new one cannot start."""
        for rank in "01":
            os.mkdir(self.path(f"{rank}/run"))
            self.write(f"{rank}/run/metrics.jsonl", '{"step":1}\n')
            self.write(f"{rank}/run/config.yaml", "train:\n  steps: 1\n")
        self.told_once(self.launch(*self.small("train.steps=2", "run.dir=run", "--overwrite")), "rank 1")
        for rank in "01":
            self.assertEqual(sorted(os.listdir(self.path(f"{rank}/run"))), ["config.yaml", "metrics.jsonl"])

    def test_data(self):
        small = ["train", *program.SMALL, "train.steps=2", "data.path=corpus.txt", f"run.dir={self.path('run')}"]
        with open(self.corpus, encoding="ascii") as file:
            text = file.read()
        for other, part in ((text.replace("q", "k"), "other tokens than rank 0"), (text[:9000], "windows of 32 tokens, rank 0 reads")):
            self.write("0/corpus.txt", text)
            self.write("1/corpus.txt", other)
            self.told_once(self.launch(*small), "data.path: rank 1", part)
            self.assertFalse(os.path.exists(self.path("run/metrics.jsonl")))
        self.write("1/corpus.txt", text)
        self.ok(self.launch(*small))


if __name__ == "__main__":
    unittest.main()
