"""Ranks that hang: a file system that does not answer while ranks read their data or write a
checkpoint. The run ends, says where, and stacks.txt has the stacks of the ranks.
ctest: timeout 120
ctest: processors 2
"""
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402

# Calls on files whose path contains HANG_PATH do not return once the file HANG_FROM exists; with
# HANG_AT from this call of a rank on, so that all ranks hang in the same step.
LIBRARY = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static void look(int fd)
{
    char link[64], path[4096];
    const char *part = getenv("HANG_PATH"), *from = getenv("HANG_FROM"), *rank = getenv("HANG_RANK"), *mine = getenv("QUADRILLE_RANK");
    if (!mine) mine = getenv("OMPI_COMM_WORLD_RANK");
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    path[n > 0 ? n : 0] = '\0';
    if (!part || !mine || !strstr(path, part) || (rank && strcmp(rank, mine) != 0)) return;
    static int calls;
    const char *at = getenv("HANG_AT");
    if (at ? ++calls < atoi(at) : access(from, F_OK) != 0) return;
    for (;;) sleep(1000);
}
ssize_t pread64(int fd, void *to, size_t bytes, off64_t at)
{
    static ssize_t (*next)(int, void *, size_t, off64_t);
    if (!next) next = (ssize_t (*)(int, void *, size_t, off64_t))dlsym(RTLD_NEXT, "pread64");
    look(fd);
    return next(fd, to, bytes, at);
}
ssize_t pread(int fd, void *to, size_t bytes, off_t at) { return pread64(fd, to, bytes, at); }
int fsync(int fd)
{
    static int (*next)(int);
    if (!next) next = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    look(fd);
    return next(fd);
}
"""
COMPILER = shutil.which("cc")


@unittest.skipIf(program.SANITIZED or not COMPILER, "needs a C compiler and a program without sanitizers")
class Hang(program.ProgramTest):
    def setUp(self):
        super().setUp()
        self.write("hang.c", LIBRARY)
        subprocess.run([COMPILER, "-shared", "-fPIC", "-o", self.path("hang.so"), self.path("hang.c"), "-ldl"], check=True)

    def hangs(self, part, *more, rank=None, at=None):
        """Standard error of a run whose ranks hang from their tenth step on, or a call on, and its seconds since then."""
        environment = {**os.environ, "LD_PRELOAD": self.path("hang.so"), "HANG_PATH": part, "HANG_FROM": self.path("now")}
        if rank is not None:
            environment["HANG_RANK"] = str(rank)
        if at is not None:
            environment["HANG_AT"] = str(at)
        arguments = self.small("train.steps=1000000", "parallel.ranks=2", "run.dir=run", "run.deadline=2", *more)
        with subprocess.Popen([program.PROGRAM, *arguments], cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                              env=environment) as run:
            self.addCleanup(run.kill)
            program.wait_until(lambda: os.path.exists(self.path("run/metrics.jsonl")) and len(self.metrics("run")) >= (3 if at else 10), 60)
            self.write("now", "")
            begin = time.monotonic()
            errors = run.communicate(timeout=60)[1]
        self.assertEqual(run.returncode, 1, errors)
        self.assertEqual(program.processes(self.corpus), [])
        return errors, time.monotonic() - begin

    def stacks(self):
        with open(self.path("run/stacks.txt"), encoding="utf-8") as file:
            return file.read()

    def test_all_ranks(self):
        errors, seconds = self.hangs("corpus", at=60)
        self.assertRegex(errors, r"no rank has advanced for \d+ s, although a step takes .* s; rank 0 is at '.*'")
        self.assertIn("stacks of the ranks: run/stacks.txt", errors)
        self.assertLess(seconds, 20)
        for rank in range(2):
            self.assertRegex(self.stacks(), rf"rank {rank}, thread \d+ \(.*\)\n")
        self.assertIn("hang.so", self.stacks())

    def test_one_rank(self):
        errors, seconds = self.hangs("corpus", rank=1)
        self.assertIn("rank 1 (last in ", errors)
        self.assertIn("did not arrive within 2 s", errors)
        self.assertIn("stacks of the ranks: run/stacks.txt", errors)
        self.assertLess(seconds, 20)
        self.assertRegex(self.stacks(), r"rank 1, thread \d+ \(.*\)\n(?:.*\n)*?.*hang\.so")

    def test_checkpoint(self):
        errors, _ = self.hangs("checkpoints/", "run.save_every=5", "run.deadline=0.5", rank=1)
        self.assertRegex(errors, r"the checkpoint of step \d+ has not advanced for 5 s \(\d+ tensors written\): .*checkpoints does not answer")
        self.assertIn("hang.so", self.stacks())

    @unittest.skipUnless(program.MPIRUN, "there is no mpirun")
    def test_lost_while_others_are_busy(self):
        """mpirun ends all ranks one second after it has lost one: the one that knows says so although it is busy with a disk."""
        for number, (part, more) in enumerate((("checkpoints/", ["run.save_every=5"]), ("corpus", []))):
            folder = f"busy{number}"
            environment = {**os.environ, "LD_PRELOAD": self.path("hang.so"), "HANG_PATH": part, "HANG_FROM": self.path("now"), "HANG_RANK": "0"}
            arguments = self.small("train.steps=1000000", f"run.dir={folder}", *more)
            if os.path.exists(self.path("now")):
                os.remove(self.path("now"))
            with subprocess.Popen([program.MPIRUN, "--oversubscribe", "-n", "2", program.PROGRAM, *arguments], cwd=self.folder,
                                  stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment) as run:
                self.addCleanup(run.kill)
                program.wait_until(lambda: os.path.exists(self.path(f"{folder}/metrics.jsonl")) and len(self.metrics(folder)) >= 10, 60)
                self.write("now", "")
                time.sleep(1.5)
                victim = [pid for pid in program.processes(self.corpus) if program.variable_of(pid, "OMPI_COMM_WORLD_RANK") == "1"]
                os.kill(victim[0], signal.SIGKILL)
                errors = run.communicate(timeout=60)[1]
            self.assertEqual(len(re.findall(r"quadrille: rank 1 was killed .* at 'step \d+, .*', (?:in|after) .*, (?:operation|message) \d+", errors)),
                             1, errors)


if __name__ == "__main__":
    unittest.main()
