"""Runs the program in tests: small configurations, its output, and what it leaves behind."""
import fcntl
import json
import os
import pty
import random
import shutil
import struct
import subprocess
import tempfile
import termios
import time
import unittest

PROGRAM = os.environ["QUADRILLE"]
SOURCE = os.environ["QUADRILLE_SOURCE"]
SANITIZED = os.environ.get("QUADRILLE_SANITIZE", "none") != "none"
MPIRUN = shutil.which("mpirun")
# A file that anyone can open and that refuses every line of text (EINVAL): it accepts a number.
TAKES_NO_TEXT = "/proc/self/oom_score_adj"

# A model that takes milliseconds per step.
SMALL = ["model.layers=2", "model.hidden=32", "model.heads=2", "data.seq=32", "train.global_batch=8", "run.threads=1"]


class ProgramTest(unittest.TestCase):
    """A fresh folder per test, with a corpus."""

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="quadrille-test-")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.corpus = self.path("corpus.txt")
        words = random.Random(7)
        with open(self.corpus, "w", encoding="ascii") as file:
            file.write(" ".join(words.choice(["the", "quick", "brown", "fox", "jumps"]) for _ in range(4000)))

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, name, text):
        with open(self.path(name), "w", encoding="utf-8") as file:
            file.write(text)
        return self.path(name)

    def run_program(self, *arguments, launcher=(), environment=None, timeout=100):
        # MPI libraries leak memory.
        leaks = {"ASAN_OPTIONS": "detect_leaks=0"} if SANITIZED and (launcher or "run.backend=mpi" in arguments) else {}
        return subprocess.run([*launcher, PROGRAM, *arguments], cwd=self.folder, capture_output=True, text=True,
                              timeout=timeout, env={**os.environ, **leaks, **(environment or {})}, check=False)

    @staticmethod
    def run_anywhere(*arguments, timeout=100):
        """Runs the program without a folder or a corpus."""
        return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=timeout, check=False)

    def on_terminal(self, *arguments, columns=80, status=0, launcher=(), **environment):
        """The output of the program on a terminal."""
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        everything = {**os.environ, **environment}
        with subprocess.Popen([*launcher, PROGRAM, *arguments], cwd=self.folder, stdout=theirs, stderr=theirs, env=everything) as run:
            os.close(theirs)
            output = b""
            try:
                while part := os.read(ours, 65536):
                    output += part
            except OSError:  # the last process that had it open has exited
                pass
            os.close(ours)
        self.assertEqual(run.returncode, status, output.decode())
        return output.decode().replace("\r\n", "\n")

    def small(self, *more):
        """Arguments of a small run."""
        return ["train", f"data.path={self.corpus}", *SMALL, *more]

    def ok(self, result):
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result

    def one_line(self, result, status, *parts):
        """Checks the exit status, and that the error is exactly one line that contains the parts."""
        self.assertEqual(result.returncode, status, result.stdout + result.stderr)
        self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
        self.assertTrue(result.stderr.startswith("quadrille: "), result.stderr)
        for part in parts:
            self.assertIn(part, result.stderr)

    def metrics(self, folder):
        with open(os.path.join(self.folder, folder, "metrics.jsonl"), encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    def steps_done(self, folder="run"):
        """How many steps a run has reported so far; it may not have started."""
        try:
            with open(self.path(f"{folder}/metrics.jsonl"), "rb") as file:
                return file.read().count(b"\n")
        except OSError:
            return 0

    def journal(self, folder="run"):
        """What a run with run.restarts has noted so far."""
        try:
            with open(self.path(f"{folder}/restarts.jsonl"), encoding="utf-8") as file:
                return [json.loads(line) for line in file]
        except OSError:
            return []

    def numbers(self, folder):
        """The metrics that must not depend on the layout, as written: for bit-identical comparison."""
        kept = ("step", "loss", "grad_norm", "lr", "tokens")
        with open(os.path.join(self.folder, folder, "metrics.jsonl"), encoding="utf-8") as file:
            return [[json.loads(line, parse_float=str)[key] for key in kept] for line in file]


def processes(mark):
    """Ids of running processes (zombies too) with `mark` in their arguments, except this one."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                if mark.encode() in file.read():
                    found.append(int(name))
        except OSError:
            pass
    return found


def variable_of(pid, name):
    """A variable in the environment of a process; None: it is not set, or the process has exited."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            for item in file.read().split(b"\0"):
                if item.startswith(name.encode() + b"="):
                    return item.split(b"=", 1)[1].decode()
    except OSError:
        pass
    return None


def where_is(pid):
    """What a process that should have ended is doing: state, arguments and, with gdb, its stacks."""
    parts = []
    for name in ("stat", "wchan", "cmdline"):
        try:
            with open(f"/proc/{pid}/{name}", "rb") as file:
                parts.append(file.read().replace(b"\0", b" ").decode(errors="replace")[:300])
        except OSError as error:
            parts.append(str(error))
    if shutil.which("gdb"):
        command = ["gdb", "-p", str(pid), "-batch", "-ex", "thread apply all backtrace 12"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        parts += [line for line in result.stdout.splitlines() if line.startswith(("#", "Thread"))]
    return "\n".join(parts)


def rank_of(pid):
    """Rank of a local rank's process; None for a launcher or a process that has exited."""
    rank = variable_of(pid, "QUADRILLE_RANK")
    return None if rank is None else int(rank)


def is_mpi_rank(pid):
    """Whether mpirun started the process."""
    return variable_of(pid, "OMPI_COMM_WORLD_RANK") is not None or variable_of(pid, "PMI_RANK") is not None


def shared_files():
    """Names in the folders where shared memory and temporary files could be left behind."""
    names = set()
    for folder in ("/dev/shm", "/tmp", "/var/tmp"):
        if os.path.isdir(folder):
            names |= {os.path.join(folder, name) for name in os.listdir(folder) if "quadrille" in name.lower()
                      and not name.startswith("quadrille-test-")}
    return names


def unused_shared_memory():
    """Files of shared memory that no process maps."""
    mapped = ""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/maps", encoding="utf-8", errors="replace") as file:
                mapped += "".join(line for line in file if "/dev/shm/" in line)
        except OSError:
            pass
    return {name for name in os.listdir("/dev/shm") if name not in mapped}


def wait_until(condition, seconds):
    """The first true value of condition(), or the last one after the timeout."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value or time.monotonic() > end:
            return value
        time.sleep(0.02)
