"""Ranks on two machines made of namespaces, without MPI: bit-identical to local ranks, also while
strangers scan ports, replay recorded bytes, hold connections and send junk; ranks that die or stop.
Times of processes are checked, so it is left out of sanitizer builds.
ctest: not under address
ctest: not under thread
ctest: timeout 150
ctest: processors 2
"""
import os
import signal
import socket
import subprocess
import sys
import threading
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import hosts  # noqa: E402
import program  # noqa: E402
import worlds  # noqa: E402

SECRET = "0123456789abcdef0123456789abcdef"
PORT, PROXY = 29500, 29600
HELLO, GREETING = 24 + 32 + 32 + 32, 32
MANY = 1000
# QUADRILLE_STRANGERS=long: scans all ports of all machines, and loses ranks on layouts of four.
LONG = os.environ.get("QUADRILLE_STRANGERS") == "long"

# What a stranger does: address, port, number of connections. Prints how many were accepted and the
# most bytes that one of them received. A fourth of them keeps its connection and sends nothing.
STRANGER = r"""
import os, random, socket, sys
"loaded".encode("idna")  # before the files of Python cannot be read any more
if os.geteuid() == 0:
    try:
        os.setuid(65534)
    except OSError:
        pass
random.seed(3)
held, accepted, most = [], 0, 0
for i in range(int(sys.argv[3])):
    try:
        s = socket.create_connection((sys.argv[1], int(sys.argv[2])), 0.3)
    except OSError:
        continue
    accepted += 1
    text = [b"", random.randbytes(300), b"GET / HTTP/1.0\r\n\r\n", b"QDRANKS\0" + bytes([1, 0, 0, 0, 1, 0, 0, 0, 4] + 103 * [0])][i % 4]
    try:
        s.sendall(text)
        s.settimeout(0.2 if i < 8 else 0.001)
        got = b""
        while part := s.recv(4096):
            got += part
    except OSError:
        pass
    most = max(most, len(got))
    if i % 4 == 0 and len(held) < 200:
        held.append(s)
    else:
        s.close()
print(accepted, most)
"""

# Which ports of an address accept a connection.
SCAN = r"""
import select, socket, sys
found = []
ports = eval(sys.argv[2])
for first in range(0, len(ports), 512):
    waiting = {}
    for port in ports[first:first + 512]:
        s = socket.socket()
        s.setblocking(False)
        s.connect_ex((sys.argv[1], port))
        waiting[s] = port
    poll = select.poll()
    numbers = {s.fileno(): s for s in waiting}
    for s in waiting:
        poll.register(s, select.POLLOUT)
    while waiting:
        answers = poll.poll(50)
        if not answers:
            break
        for number, _event in answers:
            s = numbers[number]
            if s in waiting and s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                # A port of its own may reach itself.
                found += [waiting[s]] if s.getsockname() != s.getpeername() else []
            poll.unregister(number)
            waiting.pop(s, None)
    for s in numbers.values():
        s.close()
print(found)
"""


class Worlds(program.ProgramTest):
    def setUp(self):
        super().setUp()
        self.network = hosts.Hosts(["alpha", "beta"], self.folder)
        self.addCleanup(self.network.remove)
        self.alpha, self.beta = self.network.hosts
        subprocess.run(["ip", "address", "add", "10.77.0.200/24", "dev", "lan"], check=True)
        self.secret = self.write("secret", SECRET + "\n")
        os.chmod(self.secret, 0o600)
        self.runs = []

    def start(self, rank, size, *more, host=None, address="10.77.0.1", port=PORT, secret=SECRET):
        """Starts a rank, on alpha if it is in the first half."""
        host = host or (self.alpha if 2 * rank < size else self.beta)
        variables = worlds.named(size, MASTER_ADDR=address, MASTER_PORT=str(port), **({"QUADRILLE_SECRET": secret} if secret else {}))
        command = host.enter(program.PROGRAM, *self.small("run.join_deadline=20", *more))
        with open(self.path(f"out{rank}"), "w", encoding="utf-8") as out, open(self.path(f"err{rank}"), "w", encoding="utf-8") as err:
            run = subprocess.Popen(command, cwd=self.folder, stdout=out, stderr=err,
                                   env=worlds.environment(variables, rank))
        self.addCleanup(lambda: (run.kill(), run.wait()))
        self.runs.append(run)
        return run

    def text(self, name):
        with open(self.path(name), encoding="utf-8") as file:
            return file.read()

    def end(self, seconds=60):
        return [run.wait(timeout=seconds) for run in self.runs]

    def good_end(self):
        self.assertEqual(self.end(), [0] * len(self.runs), "".join(self.text(f"err{r}") for r in range(len(self.runs))))

    def listening(self, host, port=None):
        """Ports on which a machine listens."""
        found = []
        for name in ("tcp", "tcp6"):
            lines = subprocess.run(host.enter("cat", f"/proc/net/{name}"), capture_output=True, text=True, check=True).stdout.splitlines()
            found += [int(line.split()[1].rsplit(":", 1)[1], 16) for line in lines[1:] if line.split()[3] == "0A"]
        return port in found if port else found

    def stranger(self, host, port, count=MANY, address="10.77.0.1"):
        command = host.enter("python3", "-c", STRANGER, address, str(port), str(count))
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return [int(word) for word in result.stdout.split()]

    def local(self, name, size, *more):
        self.ok(self.run_program(*self.small(f"run.dir={self.path(name)}", "--ranks", str(size), *more)))
        return self.numbers(name)

    def test_same_as_local(self):
        layouts = {"stages": ["parallel.tp=2", "parallel.pp=2", "train.micro_batch=2"], "sharded": ["parallel.zero=3", "run.save_every=2"]}
        for name, more in layouts.items():
            self.runs = []
            for rank in range(4):
                secret = {"secret": None} if rank % 2 else {}
                file = [f"run.secret_file={self.secret}"] if rank % 2 else []
                self.start(rank, 4, f"run.dir={self.path(name)}", "train.steps=4", *more, *file, **secret)
            self.good_end()
            self.assertIn("ranks    processes on 2 machines: alpha 0 to 1, beta 2 to 3; backend ucx", self.text("out0"))
            self.assertEqual(self.numbers(name), self.local(name + "-local", 4, "train.steps=4", *more))

    def test_settings(self):
        self.start(0, 2, secret=None)
        self.assertEqual(self.end(), [2])
        self.assertIn("there is no secret that keeps strangers out", self.text("err0"))
        self.runs = []
        self.start(0, 2, secret="short")
        self.start(1, 2, secret="short")
        self.assertEqual(self.end(), [2, 2])
        self.assertIn("needs at least 16", self.text("err0"))
        self.runs = []
        for rank, size in ((0, 2), (1, 3)):
            self.start(rank, size, f"run.dir={self.path('one')}", "train.global_batch=12")
        self.assertEqual(self.end(), [2, 1])
        self.assertIn("rank 1 was started as one of 3 ranks, and rank 0 as one of 2", self.text("err0"))

    def test_strangers_at_the_start(self):
        """Junk, silence, the wrong secret and a recorded hello, while rank 0 waits for rank 2."""
        run = [f"run.dir={self.path('run')}", "train.steps=3", "train.global_batch=12"]
        self.start(0, 3, *run)
        self.assertTrue(program.wait_until(lambda: self.listening(self.alpha, PORT), 20))
        self.assertEqual(self.listening(self.alpha), [PORT])
        recorded = bytearray()
        proxy = socket.create_server(("10.77.0.200", PROXY))
        self.addCleanup(proxy.close)

        def relay(source, sink, kept):
            try:
                while part := source.recv(65536):
                    kept += part
                    sink.sendall(part)
            except OSError:
                pass

        def serve():
            one, _ = proxy.accept()
            two = socket.create_connection(("10.77.0.1", PORT))
            threading.Thread(target=relay, args=(two, one, bytearray()), daemon=True).start()
            relay(one, two, recorded)
            one.close()
            two.close()

        threading.Thread(target=serve, daemon=True).start()
        self.start(1, 3, *run, address="10.77.0.200", port=PROXY, host=self.beta)
        self.assertTrue(program.wait_until(lambda: len(recorded) >= HELLO, 20))
        with socket.create_connection(("10.77.0.1", PORT), 2) as again:
            again.sendall(recorded[:HELLO])
            got = b""
            try:
                while part := again.recv(4096):
                    got += part
            except OSError:
                pass
        self.assertEqual(len(got), GREETING, "a recorded hello was answered")
        wrong = self.start(2, 3, *run, secret="another secret of the world", host=self.beta)
        for host in (self.alpha, self.beta):
            accepted, most = self.stranger(host, PORT)
            self.assertGreater(accepted, MANY // 2)
            self.assertLessEqual(most, GREETING)
        self.assertEqual(wrong.wait(timeout=30), 2)
        self.assertIn("it refuses this rank", self.text("err2"))
        self.runs.remove(wrong)
        self.start(2, 3, *run)
        self.good_end()
        self.assertEqual(self.numbers("run"), self.local("alone", 3, *run[1:]))

    def begin_long(self, size=4):
        for rank in range(size):
            self.start(rank, size, f"run.dir={self.path('run')}", "train.steps=100M", "train.schedule=constant", "run.deadline=3")
        self.assertTrue(program.wait_until(lambda: os.path.exists(self.path("run/metrics.jsonl")) and len(self.metrics("run")) > 2, 40))

    def test_strangers_while_it_runs(self):
        self.begin_long()
        ports = {host: self.listening(host) for host in (self.alpha, self.beta)}
        self.assertNotIn(PORT, ports[self.alpha])
        for host, address in ((self.alpha, "10.77.0.1"), (self.beta, "10.77.0.2"))[:2 if LONG else 1]:
            which = range(1, 65536) if LONG else sorted({PORT, PORT + 1, *ports[host], *range(1, 1024), *range(32768, 36000)})
            result = subprocess.run(self.beta.enter("python3", "-c", SCAN, address, repr(which)), capture_output=True, text=True, check=True,
                                    timeout=100)
            self.assertEqual(result.stdout.strip(), "[]", ports)
            self.assertEqual(self.stranger(self.beta, ports[host][0], 4, address), [0, 0])
        self.assertEqual(self.stranger(self.beta, PORT, MANY), [0, 0])
        before = len(self.metrics("run"))
        self.assertTrue(program.wait_until(lambda: len(self.metrics("run")) > before + 2, 20))
        for run in self.runs:
            os.kill(self.process_of(run), signal.SIGTERM)
        self.assertEqual(self.end(), [75] * 4, self.text("err0"))

    def process_of(self, run):
        """nsenter runs the program as a child where it enters a PID namespace."""
        with open(f"/proc/{run.pid}/task/{run.pid}/children", encoding="ascii") as file:
            children = file.read().split()
        return int(children[0]) if children else run.pid

    def test_lost_ranks(self):
        """Alone on its machine, a rank is known to be gone by its connection; otherwise a neighbour sees how it ended."""
        last = (" at 'step ", "operation ")
        cases = [(signal.SIGKILL, 2, ("its process has ended (killed, or its machine is gone); it was last heard of", *last)),
                 (signal.SIGSTOP, 2, ("on host beta", "did not arrive within 3 s", *last)),
                 (signal.SIGKILL, 4, ("was killed", *last)), (signal.SIGSTOP, 4, ("has been stopped by a signal for", *last))]
        for number, size, parts in cases if LONG else cases[:3]:
            self.runs = []
            self.begin_long(size)
            victim = self.runs[-1]
            os.kill(self.process_of(victim), number)
            self.assertEqual([run.wait(timeout=30) for run in self.runs[:-1]], [1] * (size - 1))
            messages = "".join(self.text(f"err{rank}") for rank in range(size - 1))
            self.assertEqual(messages.count("quadrille: "), 1, messages)
            for part in (f"rank {size - 1} ", *parts):
                self.assertIn(part, messages)
            self.assertRegex(messages, r" (in|after) [a-z].*operation \d+")  # it may be between two operations
            if victim.poll() is None:
                os.kill(self.process_of(victim), signal.SIGKILL)
            victim.kill()  # nsenter, which stops with it
            self.assertTrue(program.wait_until(lambda: not self.alpha.processes() + self.beta.processes(), 20), "processes are left")
            subprocess.run(["rm", "-r", self.path("run")], check=True)

    def test_lost_machine(self):
        """All ranks of the machine of rank 0 are killed: one of the others reports it."""
        self.begin_long()
        for victim in self.runs[:2]:
            os.kill(self.process_of(victim), signal.SIGKILL)
        self.assertEqual([run.wait(timeout=30) for run in self.runs[2:]], [1, 1])
        self.assertIn("rank 0 failed: its process has ended (killed, or its machine is gone)", self.text("err2"))
        self.assertEqual(self.text("err3"), "")


if __name__ == "__main__":
    hosts.enter()
    unittest.main()
