"""Rough conditions: limited terminals, full outputs, folders in use, results that cannot be saved.
ctest: timeout 120
"""
import fcntl
import json
import os
import re
import subprocess
import sys
import threading
import time
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402

LONG = ["train.steps=100000", "parallel.ranks=2"]


class RoughUse(program.ProgramTest):
    def test_a_dumb_terminal_gets_lines(self):
        self.assertIn("\033[K", self.on_terminal(*self.small("train.steps=3"), TERM="xterm"))
        dumb = self.on_terminal(*self.small("train.steps=3"), TERM="dumb")
        self.assertNotIn("\033", dumb)
        self.assertIn("\nstep 2/3", dumb)

    def test_lines_of_progress_fit_the_terminal(self):
        """On a narrow terminal the bar is dropped first, then MFU, the norm, the speed, the validation
        loss, the learning rate and the times; the rest is truncated. 80 columns keep the times and the rate."""
        for columns, steps, begins in ((140, 3, r"\[.{16}\] step +1/3  loss .* lr .* norm .* MFU .* left"),
                                       (80, 3, r"step +1/3  loss [0-9.]+  lr [0-9.e-]+  .*s, .* left"),
                                       (80, 10**9, r"step +\d+/1000000000  loss [0-9.]+  lr [0-9.e-]+  .*s, .* left"),
                                       (50, 3, r"step +1/3  loss [0-9.]+  .* left"), (30, 3, "step +1/3  loss ")):
            stopped = steps > 3
            shown = self.on_terminal(*self.small(f"train.steps={steps}"), columns=columns, status=124 if stopped else 0,
                                     launcher=["timeout", "-s", "INT", "4"] if stopped else [], TERM="xterm", LC_ALL="C.UTF-8")
            lines = [re.sub(r"\033\[\d+m", "", line.split("\033[K")[0]) for line in shown.split("\r")[1:]]
            self.assertTrue(any(re.match(begins, line) for line in lines), lines)
            self.assertLess(max(map(len, lines)), columns)

    def test_colours_where_they_are_wanted(self):
        small = self.small("train.steps=2")
        self.assertIn("\033[32m", self.on_terminal(*small, columns=160, TERM="xterm"))
        self.assertNotIn("\033[32m", self.on_terminal(*small, columns=160, TERM="xterm", NO_COLOR="1"))

    def test_output_that_is_full(self):
        for arguments in (self.small("train.steps=2"), ["help", "train"], ["check", *program.SMALL]):
            with open("/dev/full", "w", encoding="ascii") as full:
                result = subprocess.run([program.PROGRAM, *arguments], cwd=self.folder, stdout=full, stderr=subprocess.PIPE, text=True,
                                        timeout=60, check=False)
            self.assertEqual(result.returncode, 1, result.stderr)
            self.assertRegex(result.stderr, r"^quadrille: standard output cannot be written: .*\n$")

    def start(self, *more):
        run = subprocess.Popen([program.PROGRAM, *self.small(*LONG, *more)], cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True)
        self.addCleanup(self.end, run)
        return run

    @staticmethod
    def end(run):
        if run.poll() is None:
            run.terminate()
        return run.communicate(timeout=60)

    def test_a_folder_that_another_run_writes(self):
        run = self.start("--dir", "taken")
        self.assertTrue(program.wait_until(lambda: os.path.exists(self.path("taken/metrics.jsonl")) and self.metrics("taken"), 30))
        for more in (["--overwrite"], ["--resume"]):
            result = self.run_program(*self.small("parallel.ranks=2", "--dir", "taken", "run.deadline=3", *more))
            self.assertEqual(result.returncode, 75, result.stderr)  # EX_TEMPFAIL: the same call, later
            waits, fails = result.stderr.splitlines()
            self.assertRegex(waits, "taken/metrics.jsonl: waiting up to 2 s for it to end$")
            self.assertRegex(fails, "^quadrille: run.dir: another run is writing taken/metrics.jsonl: try again when it has ended")
        self.one_line(self.run_program(*self.small("parallel.ranks=2", "--dir", "taken")), 2, "taken holds another run")
        _, errors = self.end(run)
        self.assertEqual(run.returncode, 75, errors)
        self.assertEqual([line["step"] for line in self.metrics("taken")], list(range(1, len(self.metrics("taken")) + 1)))
        self.ok(self.run_program(*self.small("train.steps=2", "--dir", "taken", "--overwrite")))

    def test_a_folder_that_a_dying_run_still_holds(self):
        """Killed ranks hold the lock until the system has released their memory."""
        self.ok(self.run_program(*self.small("train.steps=2", "--dir", "run", "--save-every", "2")))
        for seconds, more in ((0.3, []), (1.5, ["--ranks", "2"])):
            with open(self.path("run/metrics.jsonl"), "a", encoding="utf-8") as held:
                fcntl.flock(held, fcntl.LOCK_EX)
                timer = threading.Timer(seconds, lambda file=held: fcntl.flock(file, fcntl.LOCK_UN))
                timer.start()
                self.addCleanup(timer.cancel)
                self.ok(self.run_program("train", "--dir", "run", "--resume", f"train.steps={4 if not more else 6}", *more))
                timer.join()

    def test_of_two_that_begin_together_one_gets_the_folder(self):
        runs = [self.start("--dir", "one") for _ in range(2)]
        self.assertTrue(program.wait_until(lambda: any(run.poll() is not None for run in runs), 60))
        time.sleep(0.1)
        ended = [run for run in runs if run.poll() is not None]
        self.assertEqual(len(ended), 1)
        self.assertIn(ended[0].returncode, (2, 75))  # it holds a run, or is just being created
        self.assertRegex(ended[0].communicate()[1], "^quadrille: run.dir: .*one.*\n$")

    def test_the_last_checkpoint_cannot_be_written(self):
        os.mkdir(self.path("kept"))
        self.write("kept/checkpoints", "a file where the folder should be")
        result = self.run_program(*self.small("train.steps=4", "parallel.ranks=2", "--dir", "kept", "--save-every", "2"))
        self.one_line(result, 1, "all 4 steps are done", "kept/checkpoints", "rank 0")
        self.assertIn("no checkpoint after step 2", result.stdout)
        self.assertNotIn("after step 4:", result.stdout)
        self.assertNotIn("\nsaved ", result.stdout)
        self.assertEqual(len(self.metrics("kept")), 4)

    def test_a_failure_during_a_run_is_reported_as_it_is(self):
        """Without the peers' own errors; of several ranks, with the one that failed."""
        os.mkdir(self.path("run"))
        os.symlink(program.TAKES_NO_TEXT, self.path("run/metrics.jsonl"))
        for ranks, begin in ((1, "quadrille: run/metrics.jsonl: "), (2, "quadrille: rank 0: run/metrics.jsonl: ")):
            result = self.run_program(*self.small(f"parallel.ranks={ranks}", "--dir", "run", "--overwrite"))
            self.one_line(result, 1, begin, "Invalid argument")

    @unittest.skipIf(program.SANITIZED, "sanitizers end a program that asks for so much")
    def test_more_memory_than_the_machine_has(self):
        """Refused before the plan is printed, with settings that would fit."""
        wide = ["train", f"data.path={self.corpus}", "model.layers=1000", "model.hidden=65536", "model.heads=512", "data.seq=32",
                "train.global_batch=1", "train.steps=1"]
        result = self.run_program(*wide)
        self.one_line(result, 1, "the ranks take up to", "TiB of memory together", "are free on this machine", "the plan needs",
                      "spread it over more machines", "run.memory_check=false")
        self.assertEqual(result.stdout, "")
        free = float(re.search(r", ([0-9.]+) GiB are available", result.stderr)[1]) * 2**30
        # In any case: parameters alone exceed the address space.
        result = self.run_program(*wide, "run.memory_check=false")
        self.one_line(result, 1, "rank 0, parameters", "no memory", "GiB")
        self.assertRegex(result.stdout, r"\nnote     the ranks take up to .* TiB of memory together, and .* are free on this machine\n")
        self.assertNotIn("are free on this machine", self.ok(self.run_program(*self.small("train.steps=1"))).stdout)
        # The copy that checkpoints are written from (12 bytes per parameter) is one too many.
        blocks = ["model.hidden=512", "model.heads=8", "data.seq=8", "train.global_batch=1"]
        one, two = (json.loads(self.ok(self.run_program("check", *blocks, f"model.layers={n}", "--json")).stdout)["memory_bytes_per_rank"]
                    for n in (1, 2))
        layers = int(0.75 * free / (two - one))
        result = self.run_program("train", f"data.path={self.corpus}", *blocks, f"model.layers={layers}", "train.steps=1", "--dir", "run",
                                  "--save-every", "1")
        self.one_line(result, 1, "; run.async_save=false makes it fit: no copy of ")
        self.assertEqual(result.stdout, "")
        # Activations of a batch that is too large; smaller micro-batches would do.
        per_sequence = json.loads(self.ok(self.run_program("check", *program.SMALL, "train.global_batch=1024", "--json")).stdout)
        with open("/proc/meminfo", encoding="ascii") as file:
            there = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file}
        batch = 1024
        while batch * per_sequence["memory_bytes_per_rank"] // 1024 < 2 * (there["MemTotal"] + there["SwapTotal"]):
            batch *= 2
        result = self.run_program(*self.small("train.steps=1", f"train.global_batch={batch}"))
        self.one_line(result, 1, "activations", "; train.micro_batch=")
        self.assertEqual(result.stdout, "")

    def test_what_cannot_start_here_is_said_before_the_plan(self):
        for more, status, parts in ((["--ranks", "1000", "train.global_batch=1000"], 2, ["parallel.ranks is 1000", "at most 64", "mpirun"]),
                                    (["--device", "cuda", "run.gpu=1000"], None, [])):
            result = self.run_program(*self.small(*more))
            self.one_line(result, status if status is not None else result.returncode, *parts)
            self.assertNotEqual(result.returncode, 0)
            self.assertEqual(result.stdout, "")

    def test_what_was_saved_is_reported(self):
        result = self.ok(self.run_program(*self.small("train.steps=4", "--dir", "kept", "--save-every", "3")))
        self.assertIn("\nsaved    kept/checkpoints, the newest after step 4\n", result.stdout)

    def test_json_of_a_run_is_its_metrics(self):
        result = self.ok(self.run_program(*self.small("train.steps=3", "parallel.ranks=2", "--dir", "run", "--save-every", "3", "--json")))
        lines = [json.loads(line) for line in result.stdout.splitlines()]
        self.assertEqual(lines[:3], self.metrics("run"))
        end = lines[3]
        self.assertEqual((end["steps"], end["loss"], end["saved"], end["interrupted"]), (3, lines[2]["loss"], 3, False))
        self.assertEqual(len(lines), 4)

    def test_measurements_refuse_what_they_would_pass_over(self):
        cases = [(["step", "--smallest", "16"], "--smallest is for collectives"), (["machine", "--json"], "--json is for collectives, "),
                 (["simulator", "model.layers=3"], "model.layers has no effect here"), (["collectives", "--tp", "2"], "parallel.tp"),
                 (["plans", "run.yaml"], "'run.yaml' is one argument too many"), (["step", "a.yaml", "b.yaml"], "'b.yaml'"),
                 (["collectives", "--smallest", "4096", "--largest", "16"], "sizes are 4096 to 16")]
        for arguments, part in cases:
            with self.subTest(arguments):
                self.one_line(self.run_program("bench", *arguments), 2, f"bench {arguments[0]}: ", part)

    def test_ways_of_collectives(self):
        """A damaged file of ways is reported in one line; the choice is part of the output. Another
        file, named by mistake, stays as it is."""
        damaged = self.write("ways", "quadrille collectives 1\nno ways\n")
        bench = ["bench", "collectives", "--operation", "barrier", "--seconds", "0.001", "--json"]
        built_in = self.run_program(*bench, "run.collectives=none")
        self.assertEqual((built_in.returncode, built_in.stderr, json.loads(built_in.stdout)["ways"]), (0, "", ""))
        again = self.run_program(*bench, f"run.collectives={damaged}")
        self.assertEqual(again.returncode, 0, again.stderr)
        self.assertRegex(again.stderr, r"^(quadrille: collectives: .*ways is damaged: measuring again\n)+$")  # for 2 and 4 ranks
        ways = json.loads(again.stdout)["ways"]  # "" on a busy machine
        with open(damaged, encoding="ascii") as file:
            kept = file.read()
        self.assertTrue(ways == "" or kept.endswith(f": {ways}\n"), kept)
        other = self.write("letter", "Dear quadrille\n")
        self.ok(self.run_program(*bench, f"run.collectives={other}"))
        with open(other, encoding="ascii") as file:
            self.assertEqual(file.read(), "Dear quadrille\n")

    def test_measurements_show_progress(self):
        slow = ["bench", "step", "run.threads=1", "--warm-up", "0", "--repeat", "3"]  # seconds; faster ones show nothing
        shown = self.on_terminal(*slow, TERM="xterm")
        self.assertRegex(shown, r"^\rmeasuring steps, 0\.\d s\x1b\[K(\r.*\x1b\[K)*\r\x1b\[Kcpu ")
        quick = ["bench", "step", *program.SMALL, "--warm-up", "0", "--repeat", "1"]
        self.assertNotIn("\033", self.on_terminal(*quick, TERM="dumb"))
        self.assertEqual(self.ok(self.run_program(*quick)).stderr, "")

    def test_no_mpi(self):
        result = self.run_program("bench", "collectives", "--against", "mpi", "--largest", "64", environment={"PATH": self.folder})
        if "no MPI" not in result.stderr:  # a build without
            self.one_line(result, 1, "there is no mpirun in the PATH", "only --against mpi needs one")

    def test_a_measurement_that_is_ended_leaves_nobody_behind(self):
        mark = str(10_000_000 + os.getpid())  # an argument of the ranks too
        run = subprocess.Popen([program.PROGRAM, "bench", "collectives", "--ranks", "2", "--largest", mark], stdout=subprocess.DEVNULL)
        self.addCleanup(run.wait)
        self.assertTrue(program.wait_until(lambda: len(program.processes(mark)) == 3, 30))
        run.kill()
        self.assertTrue(program.wait_until(lambda: len(program.processes(mark)) <= 1, 10))

    def test_a_schedule_over_its_own_file(self):
        pipeline = ["schedule", "model.layers=4", "train.global_batch=4", "train.micro_batch=1", "parallel.ranks=2", "parallel.pp=2"]
        self.ok(self.run_program(*pipeline, "--csv", "--out", "own.csv"))
        with open(self.path("own.csv"), encoding="ascii") as file:
            before = file.read()
        self.ok(self.run_program(*pipeline, "parallel.schedule_file=own.csv", "--csv", "--out", "own.csv"))
        result = self.run_program(*pipeline, "train.global_batch=3", "parallel.schedule_file=own.csv", "--csv", "--out", "own.csv")
        self.assertEqual(result.returncode, 2, result.stderr)
        with open(self.path("own.csv"), encoding="ascii") as file:
            self.assertEqual(file.read(), before)
        self.one_line(self.run_program(*pipeline, "--svg", "--out", "no/such/folder.svg"), 1, "no/such/folder.svg")


if __name__ == "__main__":
    unittest.main()
