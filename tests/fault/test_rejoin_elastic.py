"""run.elastic in worlds without MPI: the run continues with fewer ranks while some are missing, and
with more when they return. QUADRILLE_REJOINS=50 for random trials.
ctest: not under thread
ctest: timeout 240
ctest: processors 2
"""
import os
import random
import subprocess
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import meetings  # noqa: E402
import program  # noqa: E402

LONG = int(os.environ.get("QUADRILLE_REJOINS", "0"))
BATCH, ENDLESS = meetings.BATCH, meetings.ENDLESS


# A model that learns slowly: rounding, which depends on the number of ranks, does not grow over
# thousands of steps.
SLOW = "train.lr=1e-5"


class ElasticRejoins(meetings.Meetings):
    def start(self, *arguments, **more):
        super().start(*arguments, SLOW, **more)

    def stop(self, *whole):
        """Stops the run with a checkpoint; as many steps undisturbed have the same samples and losses."""
        self.stop_and_repeat(*whole, SLOW)
        a, b = self.metrics("run"), self.metrics("whole")
        self.assertEqual([(line["step"], line["tokens"]) for line in a], [(line["step"], line["tokens"]) for line in b])
        self.assertLess(worst := max(abs(x["loss"] - y["loss"]) / y["loss"] for x, y in zip(a, b)), 1e-6)
        return worst

    def resized(self, *members):
        return [tuple(line[name] for name in members) for line in self.events("resize")]

    def test_shrinks_and_grows(self):
        """A rank is lost for a while: no step is repeated, and the processes of the others stay."""
        self.start(BATCH, "run.save_every=1000", "run.elastic=1..3", "run.rejoin_wait=1", *ENDLESS)
        first = list(self.runs)
        self.kill(1)
        self.recovered(1)
        self.replace(1)
        self.recovered(2)
        self.assertEqual([first[rank].poll() for rank in (0, 2)], [None, None])
        self.assertEqual(self.resized("from", "ranks", "places", "in_memory", "reason"),
                         [(3, 2, "0 2", True, "ranks that were lost did not return within 1 s"), (2, 3, "0 1 2", True, "ranks have returned")])
        self.assertEqual([(line["surviving"], line["in_memory"]) for line in self.events("restart")], [(2, True)])
        self.kill(2)
        self.kill(1)
        self.recovered(3)
        self.assertEqual(self.resized("from", "ranks", "places", "in_memory")[2:], [(3, 1, "0", True)])
        self.replace(1)
        self.replace(2)
        self.wait(lambda: self.resized("ranks")[-1] == (3,))
        self.stop(BATCH, "--ranks", "3")
        self.assertIn("the run continues with 2 ranks instead of 3, which are the processes with RANK 0 2", self.text(first[0].output))

    def test_spare(self):
        """A rank that no layout uses waits. It outlives all others, takes the configuration of those that resume the run, and then the
        place of a lost one: the mesh is the same, and so are all bits."""
        self.start("train.global_batch=8", "run.save_every=10", "run.elastic=2..3", "run.rejoin_wait=1", *ENDLESS)
        spare = self.runs[2]
        self.wait(lambda: self.steps_done() >= 25)
        for rank in (0, 1):
            self.kill(rank)
        done = self.steps_done()
        for rank in (0, 1):
            self.replace(rank, "--resume")
        self.wait(lambda: self.steps_done() >= done + 5 or any(run.poll() is not None for run in self.runs))
        self.kill(1)
        self.recovered(1)
        self.assertIsNone(spare.poll())
        self.assertEqual(self.resized("from"), [])
        self.assertEqual([(line["surviving"], line["in_memory"], line["resumes"]) for line in self.events("restart")], [(1, True, True)])
        self.replace(1)
        time.sleep(1)
        self.assertEqual(self.stop("train.global_batch=8", "--ranks", "2"), 0)
        self.assertEqual(self.weights("run"), self.weights("whole"))

    def test_state_of_those_chosen(self):
        """tp 2 × dp 2 without rank 1: of the others, 0 and 3 have the state, and 2 waits. All ends when the run does."""
        layout = [BATCH, "parallel.tp=2", "train.schedule=constant", "train.steps=60"]
        self.start(*layout, "run.save_every=1000", "run.elastic=2..4", "run.rejoin_wait=1", size=4)
        self.kill(1)
        self.wait(lambda: self.resized("ranks"))
        self.assertEqual(self.resized("from", "ranks", "places", "in_memory"), [(4, 2, "0 3", True)])
        del self.runs[1]
        self.size = 3
        self.assertEqual(self.end(0), "")
        self.ok(self.run_program(*self.small("run.dir=whole", "--ranks", "4", *layout)))
        self.assertEqual([line["step"] for line in self.metrics("run")], [line["step"] for line in self.metrics("whole")])

    def test_shards(self):
        """What only the lost rank had comes from the checkpoint, and a smaller number that was asked for loses nothing."""
        self.start(BATCH, "parallel.zero=3", "run.save_every=10", "run.elastic=2..4", "run.rejoin_wait=1", *ENDLESS, size=4)
        self.ok(subprocess.run([program.PROGRAM, "resize", self.path("run"), "3"], capture_output=True, text=True, check=False))
        self.recovered(1)
        self.wait(lambda: self.steps_done() >= 20)
        self.ok(subprocess.run([program.PROGRAM, "resize", self.path("run"), "4"], capture_output=True, text=True, check=False))
        self.recovered(2)
        self.kill(3)
        self.recovered(3)
        self.assertEqual(self.resized("from", "ranks", "reason"), [(4, 3, "3 ranks are available"), (3, 4, "ranks have returned"),
                                                                   (4, 3, "ranks that were lost did not return within 1 s")])
        self.assertEqual([(line["surviving"], line["in_memory"], line["resumes"]) for line in self.events("restart")], [(3, False, True)])
        self.replace(3)
        self.recovered(4)
        self.stop(BATCH, "parallel.zero=3", "--ranks", "4")

    def test_rank_0_is_lost(self):
        """Only its replacement can listen: the others wait for that, and then go on without a rank that is missing."""
        self.start(BATCH, "run.save_every=2", "run.elastic=2..3", "run.rejoin_wait=1", *ENDLESS, wait=4)
        self.kill(0)
        self.kill(2)
        time.sleep(1)
        self.replace(0)
        self.recovered(1)
        # From memory, or from the checkpoint where the kills have spoilt a step of the survivor.
        self.assertEqual(self.resized("from", "ranks", "places"), [(3, 2, "0 1")])
        self.assertEqual([(line["surviving"], line["resumes"]) for line in self.events("restart")], [(1, True)])
        self.kill(0)
        self.runs = [self.runs[1]]
        self.size = 1
        errors = self.end(1)
        self.assertIn("rank 1 did not reach rank 0", errors)
        self.assertIn("the process that replaces rank 0 did not come", errors)

    def test_refused(self):
        for size, words, part in ((2, ["run.elastic=3..4"], "run.elastic allows 3 to 4 ranks, and WORLD_SIZE is 2"),
                                  (2, ["run.elastic=1..2", "train.lr=-1"], "train.lr")):
            self.arguments, self.size = [BATCH, "run.restarts=2", *words], size
            self.runs = [self.spawn(rank, *self.arguments, size=size) for rank in range(size)]
            self.assertIn(part, self.end(2))

    @unittest.skipUnless(LONG, "QUADRILLE_REJOINS is not set")
    def test_many(self):
        """Random ranks at random moments, which return after a random time: before the others continue, or much later."""
        self.start(BATCH, "run.save_every=20", "run.elastic=1..4", "run.rejoin_wait=1", *ENDLESS, size=4, restarts=20 * LONG, wait=60)
        self.wait(lambda: self.steps_done() >= 25)
        chance = random.Random(9)
        away = {}
        for _ in range(LONG):
            for rank in chance.sample(range(4), 1 + (chance.random() < 0.3)):
                if rank not in away:
                    self.kill(rank)
                    away[rank] = time.monotonic() + chance.choice((0.0, 0.3, 2.0, 4.0))
            limit = time.monotonic() + chance.uniform(0.5, 5.0)
            while time.monotonic() < limit:
                for rank in [rank for rank, at in away.items() if at <= time.monotonic()]:
                    del away[rank]
                    self.replace(rank, "--resume")  # all may be lost at once
                time.sleep(0.05)
            for rank, run in enumerate(self.runs):
                if rank not in away and run.poll() is not None:
                    self.fail((rank, run.returncode, run.communicate()[1], self.journal()[-5:]))
        for rank in away:
            self.replace(rank, "--resume")
        done = self.steps_done()
        self.wait(lambda: self.steps_done() >= done + 20)
        time.sleep(5)
        restarts, sizes = self.events("restart"), self.resized("ranks")
        worst = self.stop(BATCH, "--ranks", "4")
        print(f"{len(restarts)} restarts, {sum(line['in_memory'] for line in restarts)} in memory; {len(sizes)} changes of size; "
              f"largest relative difference of losses {worst:.1e}")


if __name__ == "__main__":
    unittest.main()
