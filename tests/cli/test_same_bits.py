"""Runs are bit-identical however the ranks are started.
ctest: timeout 300
ctest: processors 2
"""
import json
import os
import sys
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402


class SameBits(program.ProgramTest):
    def run_into(self, folder, *more, launcher=()):
        arguments = self.small("train.steps=8", "train.global_batch=12", f"run.dir={folder}", *more)
        self.ok(self.run_program(*arguments, launcher=launcher))
        return self.numbers(folder)

    def test_backends(self):
        for ranks in (2, 3):
            first = self.run_into(f"processes-{ranks}", f"parallel.ranks={ranks}")
            self.assertEqual(len(first), 8)
            self.assertNotEqual(first[0][1], first[7][1])
            self.assertEqual(self.run_into(f"again-{ranks}", f"parallel.ranks={ranks}"), first)
            self.assertEqual(self.run_into(f"threads-{ranks}", f"parallel.ranks={ranks}", "--ranks-as", "threads"), first)
            self.assertEqual(self.run_into(f"bucket-{ranks}", f"parallel.ranks={ranks}", "parallel.bucket_mb=0.01"), first)
            self.assertEqual(self.run_into(f"late-{ranks}", f"parallel.ranks={ranks}", "parallel.overlap=false"), first)
            if program.MPIRUN:
                launcher = [program.MPIRUN, "--oversubscribe", "-n", str(ranks)]
                self.assertEqual(self.run_into(f"mpi-{ranks}", launcher=launcher), first)

    def test_muon(self):
        muon = ("parallel.ranks=3", "train.optimizer=muon")
        first = self.run_into("muon", *muon)
        self.assertEqual(self.run_into("muon-threads", *muon, "parallel.zero=1", "--ranks-as", "threads"), first)
        for zero in (1, 2, 3):
            self.assertEqual(self.run_into(f"muon-{zero}", *muon, f"parallel.zero={zero}"), first)
        if program.MPIRUN:
            launcher = [program.MPIRUN, "--oversubscribe", "-n", "3"]
            self.assertEqual(self.run_into("muon-mpi", "train.optimizer=muon", "parallel.zero=3", launcher=launcher), first)
            self.assertEqual(self.run_into("muon-mpi-whole", "train.optimizer=muon", launcher=launcher), first)

    def test_kernels(self):
        """bf16 GEMMs and attention of different instruction sets may differ; within one, nothing changes a bit."""
        best = json.loads(self.ok(self.run_program("doctor", "--json")).stdout)["isa"]
        both = ("train.precision=bf16", "parallel.ranks=2", "model.heads=1")  # tiles and dot products need heads of 32
        chosen = self.run_into("chosen", *both)
        others = ("neon",) if best == "neon" else ("avx512bf16_emulated", "amx_emulated", "generic")
        for kernels in dict.fromkeys((best, *others)):
            pinned = (*both, f"run.kernels={kernels}")
            if best == "generic" and kernels != best:  # the emulations need AVX2
                continue
            first = self.run_into(f"{kernels}-1", *pinned, "run.threads=1")
            if kernels == best:
                self.assertEqual(first, chosen)
            self.assertEqual(self.run_into(f"{kernels}-4", *pinned, "run.threads=4", "parallel.zero=1"), first)
            self.assertEqual(self.run_into(f"{kernels}-zero", *pinned, "parallel.zero=3", "--ranks-as", "threads"), first)
            if program.MPIRUN:
                launcher = [program.MPIRUN, "--oversubscribe", "-n", "2"]
                self.assertEqual(self.run_into(f"{kernels}-mpi", *pinned, "train.recompute=full", launcher=launcher), first)
                staged = (*pinned, "parallel.pp=2", "train.micro_batch=3")
                piped = self.run_into(f"{kernels}-gpipe", *staged, "parallel.schedule=gpipe", "run.threads=2")
                self.assertEqual(self.run_into(f"{kernels}-zb", *staged, "parallel.schedule=zb_h1", launcher=launcher), piped)

    def test_tensor_parallel(self):
        layout = ("parallel.ranks=4", "parallel.tp=2")
        first = self.run_into("tp", *layout)
        self.assertEqual(self.run_into("tp-threads", *layout, "parallel.overlap=false", "--ranks-as", "threads"), first)
        self.assertEqual(self.run_into("tp-pieces", *layout, "parallel.tp_overlap=3", "parallel.zero=3"), first)
        if program.MPIRUN:
            launcher = [program.MPIRUN, "--oversubscribe", "-n", "4"]
            self.assertEqual(self.run_into("tp-mpi", "parallel.tp=2", launcher=launcher), first)

    def test_context_parallel(self):
        for mode in ("ring", "gather", "ulysses"):
            cp = ["parallel.ranks=4", "parallel.cp=2", f"parallel.cp_mode={mode}"]
            first = self.run_into(f"processes-{mode}", *cp)
            self.assertEqual(self.run_into(f"threads-{mode}", *cp, "--ranks-as", "threads"), first)
            if program.MPIRUN:
                launcher = [program.MPIRUN, "--oversubscribe", "-n", "4"]
                self.assertEqual(self.run_into(f"mpi-{mode}", *cp[1:], launcher=launcher), first)

    def test_one_rank_is_close(self):
        one = self.run_into("one")
        four = self.run_into("four", "parallel.ranks=4")
        for a, b in zip(one, four):
            self.assertAlmostEqual(float(a[1]), float(b[1]), delta=1e-5 * float(a[1]))


if __name__ == "__main__":
    unittest.main()
