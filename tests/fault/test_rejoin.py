"""run.restarts in worlds without MPI: ranks keep their processes when another one is lost, and meet
again with the process that replaces it. QUADRILLE_REJOINS=50 for the long form.
ctest: not under thread
ctest: timeout 240
ctest: processors 2
"""
import os
import random
import signal
import socket
import subprocess
import sys
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import inject  # noqa: E402
import meetings  # noqa: E402
import program  # noqa: E402

LONG = int(os.environ.get("QUADRILLE_REJOINS", "0"))
BATCH, ENDLESS = meetings.BATCH, meetings.ENDLESS


class Rejoins(meetings.Meetings):
    def connect(self):
        """A connection to rank 0; None: it does not listen."""
        try:
            return socket.create_connection(("127.0.0.1", self.port), 2)
        except OSError:
            return None

    def connected(self):
        """Connections of rank 0 at its port with messages that it has not read yet."""
        with open("/proc/net/tcp", encoding="ascii") as table:
            rows = [line.split() for line in list(table)[1:]]
        port = f":{self.port:04X}"
        return sum(row[1].endswith(port) and row[3] == "01" and int(row[4].split(":")[1], 16) > 0 for row in rows)

    def test_replicas(self):
        """Rank 1, which others reach over TCP, then rank 0, are lost and return: no step is repeated, and the others stay."""
        self.apart = (1,)
        self.start(BATCH, "run.save_every=1000", *ENDLESS)
        first = list(self.runs)
        for count, rank in enumerate((1, 0), 1):
            self.kill(rank)
            self.replace(rank)
            self.recovered(count)
        self.assertIsNone(first[2].poll())
        steps = [(line["attempt"], line["surviving"], line["in_memory"], line["resumes"]) for line in self.events("restart")]
        self.assertEqual(steps, [(2, 2, True, True), (3, 2, True, True)])
        self.assertEqual([line["event"] for line in self.journal()], 2 * ["failure", "restart", "recovered"])
        for line, rank in zip(self.events("failure"), (1, 0)):
            self.assertEqual(line["cause"], "rank lost")
            self.assertRegex(line["message"], f"^rank {rank} (was killed|failed: its process has ended)")
        self.assertIn("waiting up to 20 s until all ranks are back", self.text(first[0].output))
        self.stop(BATCH)

    def test_shards(self):
        """What only the lost rank had comes from the newest checkpoint. The new process resumes or not: it learns that the run goes on."""
        layout = [BATCH, "parallel.zero=3", "run.save_every=10"]
        self.start(*layout, *ENDLESS)
        self.wait(lambda: self.steps_done() >= 12)
        self.kill(2)
        self.replace(2, "--overwrite")
        self.recovered(1)
        self.kill(1)
        self.replace(1, "--resume")
        self.recovered(2)
        self.assertEqual([(line["surviving"], line["in_memory"], line["resumes"]) for line in self.events("restart")],
                         2 * [(2, False, True)])
        self.stop(*layout)

    @unittest.skipUnless(inject.POSSIBLE, inject.MISSING)
    def test_lost_before_they_agree(self):
        """A new rank 0 whose first world fails at once knows nothing: the run continues, and its folder stays."""
        source, library = self.path("die.c"), self.path("die.so")
        with open(source, "w", encoding="utf-8") as file:  # when this rank has joined, and describes its machine to the others
            file.write("""
#include <signal.h>
#include <string.h>
#include <unistd.h>
int gethostname(char *name, size_t bytes)
{
    if (bytes == 256) kill(getpid(), SIGKILL); /* of find_host(), in train/ranks/common.c */
    strncpy(name, "localhost", bytes);
    return 0;
}
""")
        subprocess.run([inject.COMPILER, "-shared", "-fPIC", "-o", library, source], check=True)
        self.start(BATCH, "run.save_every=1", "run.overwrite=true", *ENDLESS)
        self.kill(0)
        self.kill(2)
        done = self.steps_done()
        self.replace(0)
        self.runs[2] = self.spawn(2, *self.arguments, LD_PRELOAD=library)
        self.assertEqual(self.runs[2].wait(timeout=30), -signal.SIGKILL)
        self.wait(lambda: "waiting up to" in self.text(self.runs[0].output))
        self.replace(2)
        self.recovered(1)
        # From memory, or from the checkpoint where the kills have spoilt a step of the survivor.
        self.assertEqual([(line["surviving"], line["resumes"]) for line in self.events("restart")], [(1, True)])
        self.wait(lambda: self.steps_done() >= done)
        self.stop(BATCH)

    def away(self, run, message):
        """The process is turned away, with one line."""
        errors = run.communicate(timeout=30)[1]
        self.assertEqual(run.returncode, 2, errors)
        self.assertRegex(errors, f"^quadrille: [^\n]*{message}[^\n]*\n$")

    def unanswered(self):
        """A server that accepts connections and greets, and a rank that takes it for rank 0."""
        server = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(server.close)
        run, self.port = self.port, server.getsockname()[1]
        rank = self.spawn(1, BATCH, "run.join_deadline=3")
        self.port = run
        server.settimeout(30)
        connection, _ = server.accept()
        self.addCleanup(connection.close)
        connection.sendall(os.urandom(32))
        return rank

    def test_others(self):
        """A stranger cannot take the place of a lost rank, nor end the run; the port is open only while ranks meet. A process whose rank
        is there, also as rank 0, or whose world is another one, ends alone. All take 5 s, at the same time."""
        unanswered = self.unanswered()
        self.start(BATCH, "run.save_every=1000", *ENDLESS)
        self.assertRaises(OSError, socket.create_connection, ("127.0.0.1", self.port), 2)
        false = self.spawn(0, *self.arguments)
        self.wait(lambda: self.steps_done() > 10)
        self.kill(2)
        self.wait(lambda: "waiting up to" in self.text(self.runs[0].output))
        wrong = self.spawn(2, *self.arguments, secret="another secret of the world")
        second = [self.spawn(1, *self.arguments), self.spawn(2, *self.arguments, size=4)]
        strangers = []
        for junk in (b"", b"GET / HTTP/1.0\r\n\r\n", 300 * b"x", b"QDRANKS\0" + bytes(112)):
            self.wait(lambda: strangers.append(self.connect()) or strangers[-1])
            strangers[-1].sendall(junk)
        self.away(wrong, "it refuses this rank")
        self.away(second[1], "rank 2 was started as one of 4 ranks, and rank 0 as one of 3: WORLD_SIZE differs")
        self.away(second[0], "another process is rank 1 of 3, and has not ended: every process needs a RANK of its own")
        self.away(false, "another process does, which may be a second one with RANK 0")
        self.assertEqual(len(self.events("recovered")), 0)
        self.replace(2)
        self.recovered(1)
        self.assertRaises(OSError, socket.create_connection, ("127.0.0.1", self.port), 2)
        for stranger in strangers:
            if stranger:
                stranger.close()
        self.stop(BATCH)
        errors = unanswered.communicate(timeout=30)[1]  # a rank 0 that has no time is not a wrong secret
        self.assertEqual(unanswered.returncode, 1, errors)
        self.assertIn("it has accepted the connection, but does not answer within 5 s: check whether the process of rank 0 is stopped", errors)
        self.assertNotIn("secret", errors)

    def test_folder_of_another_run(self):
        """Whatever happens before the ranks have looked into the folder, it is not theirs."""
        self.ok(self.run_program(*self.small("train.steps=3", "run.dir=run")))
        before = {name: self.text(f"run/{name}") for name in ("metrics.jsonl", "config.yaml")}
        self.arguments, self.size = [BATCH, "train.steps=4", "run.restarts=3", "run.join_deadline=20"], 3
        self.runs = [self.spawn(0, *self.arguments), self.spawn(1, *self.arguments)]
        self.assertFalse(program.wait_until(lambda: any(run.poll() is not None for run in self.runs), 1))
        self.kill(1)
        self.replace(1)
        self.runs.append(self.spawn(2, *self.arguments))
        errors = self.end(2)
        self.assertRegex(errors, "^quadrille: run.dir: run holds another run.*\n$")
        self.assertEqual({name: self.text(f"run/{name}") for name in before}, before)
        self.assertEqual(self.journal(), [])

    def test_lost_for_good(self):
        """The run ends on all ranks, and says why."""
        self.start(BATCH, "run.save_every=10", *ENDLESS, wait=3)
        self.kill(1)
        del self.runs[1]
        self.size = 2
        errors = self.end(1)
        self.assertRegex(errors, r"^quadrille: rank 0, at 127.0.0.1 port \d+, waited 3 s in vain for rank 1.*, see run/restarts.jsonl: rank 1 was")
        self.assertEqual(errors.count("quadrille: "), 1, errors)
        self.assertEqual([line["event"] for line in self.journal()], ["failure", "given up"])

    def test_stopped_while_it_waits(self):
        self.start(BATCH, "run.save_every=10", *ENDLESS)
        self.kill(1)
        del self.runs[1]
        self.size = 2
        self.wait(lambda: "waiting up to" in self.text(self.runs[0].output))
        for run in self.runs:
            run.send_signal(signal.SIGTERM)
        self.assertIn("stopped while ranks were missing, after step", self.end(75))

    def test_one_is_stopped_while_it_waits(self):
        """It has reached rank 0, which waits for another one."""
        self.start(BATCH, "run.save_every=10", *ENDLESS, wait=40)
        self.kill(2)
        self.wait(lambda: "waiting up to" in self.text(self.runs[0].output))
        self.wait(lambda: self.connected() == 1)
        self.runs[1].send_signal(signal.SIGTERM)
        self.assertEqual(self.runs[1].wait(timeout=10), 75)
        self.assertIsNone(self.runs[0].poll())
        self.runs[0].send_signal(signal.SIGTERM)
        self.assertEqual(self.runs[0].wait(timeout=10), 75)

    def test_other_configuration(self):
        """A process with another configuration ends alone, also as rank 0; the one after it is let in."""
        self.start(BATCH, "run.save_every=1000", *ENDLESS)
        for count, rank in enumerate((2, 0), 1):
            self.kill(rank)
            self.away(self.spawn(rank, *self.arguments, "train.lr=0.5"), f"train.lr: rank {rank} .*was given 0.5, rank {0 if rank else 1} nothing")
            self.replace(rank)
            self.recovered(count)
        self.assertEqual([line["surviving"] for line in self.events("restart")], [2, 2])
        self.stop(BATCH)

    def test_same_failure_again(self):
        """A failure of all ranks: they meet again as they are, until it is clear that nothing changes."""
        self.start(BATCH, "run.save_every=5", "train.steps=100M", "train.lr=1000", "train.warmup=20", "train.schedule=constant",
                   "train.clip=0", size=2, steps=0)
        errors = self.end(1)
        self.assertIn("2 equal failures in a row", errors)
        self.assertEqual([line["cause"] for line in self.events("failure")], 2 * ["not finite"])
        self.assertEqual([line["surviving"] for line in self.events("restart")], [2])

    @unittest.skipUnless(LONG, "QUADRILLE_REJOINS is not set")
    def test_many(self):
        self.lose_many()

    @unittest.skipUnless(LONG, "QUADRILLE_REJOINS is not set")
    def test_many_apart(self):
        """The same where odd ranks are reached over TCP."""
        self.apart = (1, 3)
        self.lose_many()

    def lose_many(self):
        """Random ranks, one or two at a time, at any moment; rank 3 stays, and its memory and open files with it."""
        self.start(BATCH, "run.save_every=20", *ENDLESS, size=4, restarts=10 * LONG, wait=60)
        chance = random.Random(4)
        last = self.runs[3]
        use = []
        for i in range(LONG):
            before, done = len(self.events("recovered")), self.steps_done() + chance.randrange(30)
            self.wait(lambda n=done: self.steps_done() >= n)
            for rank in chance.sample(range(3), 1 + (i % 3 == 0)):
                self.kill(rank)
                self.replace(rank)
            self.wait(lambda n=before: len(self.events("recovered")) > n)
            use.append((len(os.listdir(f"/proc/{last.pid}/fd")), self.resident(last.pid)))
        self.assertLessEqual(use[-1][0], use[1][0] + 4, use)
        self.assertLess(use[-1][1], use[1][1] + (64 << 20), use)
        restarts, lost = self.events("restart"), [line["seconds"] for line in self.events("recovered")]
        self.stop(BATCH)
        print(f"{len(restarts)} restarts, {sum(line['in_memory'] for line in restarts)} in memory; "
              f"{sum(lost) / len(lost):.2f} s lost on average, at most {max(lost):.2f} s")


if __name__ == "__main__":
    unittest.main()
