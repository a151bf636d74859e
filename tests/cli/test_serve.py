"""quadrille serve: who gets what, hostile requests, how a run is followed, and the planner.

ctest: timeout 200
ctest: processors 2
"""
import array
import base64
import json
import os
import random
import shutil
import socket
import struct
import sys
import threading
import time
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402
import server  # noqa: E402

BUILT = json.loads(program.ProgramTest.run_anywhere("doctor", "--json").stdout)["serve_built"]
SECRET = "not to be served"


def numbers(text):
    raw = base64.b64decode(text)
    return list(struct.unpack(f"<{len(raw) // 8}d", raw))


def curve(progress, chart):
    """x and y of a chart's first curve."""
    series = next(s for s in progress["series"] if s["chart"] == chart)
    x = series["x"] if "x" in series else progress["series"][series["x_of"]]["x"]
    return numbers(x), numbers(series["y"])


def rows_of(timeline):
    """(begin, seconds, action, merged, share) of the events of each row of a timeline."""
    def column(key, kind, missing):
        return array.array(kind, base64.b64decode(timeline[key])) if key in timeline else [missing] * len(begin)

    begin = array.array("d", base64.b64decode(timeline["begin"]))
    events = list(zip(begin, column("seconds", "f", 0), column("action", "I", 0), column("merged", "I", 1), column("share", "f", 1)))
    return {(row["rank"], row["stream"], row["lane"]): events[row["first"]:row["first"] + row["count"]] for row in timeline["tracks"]}


@unittest.skipUnless(BUILT, "built without libmicrohttpd")
class Serve(program.ProgramTest):
    def setUp(self):
        super().setUp()
        self.ok(self.run_program(*self.small("train.steps=5", "run.dir=runs/one")))
        self.write("secret", SECRET)
        self.write("runs/secret", SECRET)
        self.write("runs/one/secret", SECRET)

    def line(self, step, loss=1.0):
        return json.dumps({"step": step, "loss": loss, "grad_norm": 1.0, "lr": 0.1, "tokens": 8, "step_seconds": 0.1,
                           "tokens_per_second": 80.0, "mfu": None, "memory_peak_bytes": 1024}) + "\n"

    def append(self, text, run="runs/one", mode="a"):
        with open(self.path(f"{run}/metrics.jsonl"), mode, encoding="utf-8") as file:
            file.write(text)

    def test_access(self):
        """Only requests with the token, to an address of this machine, and not from another site's
        page."""
        with server.Server(self.folder) as s:
            self.assertTrue(s.url.startswith("http://127.0.0.1:"))
            self.assertEqual([run["name"] for run in s.get("/api/runs")["runs"]], ["one"])
            for path in ("/api/runs", "/api/progress?run=1", "/api/report?run=1"):
                for headers in ({}, {"Authorization": "Bearer " + "0" * 32}, {"Authorization": f"Bearer {s.token[:-1]}"},
                                {"Authorization": f"Bearer {s.token}0"}, {"Authorization": f"Basic {s.token}"}, {"Authorization": "Bearer"},
                                {"Cookie": f"token={s.token}"}):
                    self.assertEqual(s.ask(path, token=False, headers=headers)[0], 401, headers)
                self.assertEqual(s.ask(f"{path}{'&' if '?' in path else '?'}token={s.token}", token=False)[0], 401)
            for host in ("evil.example", f"evil.example:{s.port}", "", "localhost.evil.example", "127.0.0.1.evil.example", "[::1", "[evil]:80", "127.0.0.1:x",
                         "127.0.0.1:123456"):
                for path in ("/", "/api/runs"):
                    self.assertEqual(s.ask(path, headers={"Host": host})[0], 403, host)
            for host in ("127.0.0.1", f"localhost:{s.port}", "localhost:9999", f"[::1]:{s.port}"):
                self.assertEqual(s.ask("/api/runs", headers={"Host": host})[0], 200, host)
            for headers in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": f"https://{s.host}"},
                            {"Origin": "http://127.0.0.1:1"}, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}):
                self.assertEqual(s.ask("/api/runs", headers=headers)[0], 403, headers)
            self.assertEqual(s.ask("/api/runs", headers={"Origin": f"http://{s.host}", "Sec-Fetch-Site": "same-origin"})[0], 200)
            status, headers, text = s.ask("/", token=False)
            self.assertEqual(status, 200)
            self.assertNotIn(s.token, text)
            self.assertNotIn("one", text.split('id="data">')[1].split("</script>")[0])
            for part in ("default-src 'none'", "script-src 'nonce-", "frame-ancestors 'none'", "connect-src 'self'"):
                self.assertIn(part, headers["Content-Security-Policy"])
            self.assertNotIn("unsafe", headers["Content-Security-Policy"])
            self.assertEqual((headers["X-Content-Type-Options"], headers["Cache-Control"]), ("nosniff", "no-store"))
            for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"):
                self.assertEqual(s.ask("/api/runs", method=method)[0], 405, method)
        self.assertEqual(s.process.returncode, 0)
        with server.Server(self.folder) as other:
            self.assertNotEqual(other.token, s.token)

    def test_paths(self):
        """No request reaches a file that is not of a run, and no link leads out of the folders."""
        os.symlink(self.path("runs/one"), self.path("runs/link"))
        os.makedirs(self.path("elsewhere/two"))
        os.symlink(self.path("elsewhere"), self.path("runs/outside"))
        os.makedirs(self.path("runs/three"))
        os.symlink(self.path("secret"), self.path("runs/three/config.yaml"))
        self.write("elsewhere/two/config.yaml", SECRET)
        self.ok(self.run_program(*self.small("train.steps=2", "run.dir=runs/four")))
        for name in ("metrics.jsonl", "trace.json"):
            if os.path.exists(self.path(f"runs/four/{name}")):
                os.remove(self.path(f"runs/four/{name}"))
            os.symlink(self.path("secret"), self.path(f"runs/four/{name}"))
        with server.Server(self.folder, "runs") as s:
            self.assertEqual([run["name"] for run in s.get("/api/runs")["runs"]], ["four", "one"])
            seen = [s.ask(f"/api/{kind}?run={run}")[2] for kind in ("progress", "report") for run in range(-1, 8)]
            for path in ("/secret", "/runs/secret", "/../secret", "/%2e%2e/secret", "/..%2fsecret", "//secret", "/api/../secret", "/one/secret",
                         "/api/progress?run=../secret", "/api/progress?run=one", "/api/progress?run=1%00", "/api/report?run=%2e%2e",
                         "/api/progress?run=1&file=secret", "/api/progress?run=99999999999999999999", f"/{'a/' * 3000}", "/api/runs%00", "/\u00e9"):
                answer = s.raw(f"GET {path} HTTP/1.1\r\nHost: {s.host}\r\nAuthorization: Bearer {s.token}\r\nConnection: close\r\n\r\n".encode())
                self.assertNotIn(SECRET, answer.decode(errors="replace"))
                seen.append(path)
            self.assertNotIn(SECRET, "".join(seen))
            self.assertEqual(s.ask("/api/report?run=3")[0], 422)
            linked = next(run["run"] for run in s.get("/api/runs")["runs"] if run["name"] == "four")
            self.assertIn("symbolic link", s.ask(f"/api/report?run={linked}")[2])

    def test_hostile(self):
        """Junk, oversized and slow requests; others are served meanwhile."""
        junk = random.Random(3)
        with server.Server(self.folder) as s:
            slow = []
            for _ in range(40):
                plug = socket.create_connection(("127.0.0.1", s.port))
                plug.sendall(b"GET /api/runs HTTP/1.1\r\nHo")
                slow.append(plug)
            for _ in range(60):
                s.raw(bytes(junk.randrange(256) for _ in range(junk.randrange(1, 3000))), 1.0)
            start = f"GET /api/runs HTTP/1.1\r\nHost: {s.host}\r\nAuthorization: Bearer {s.token}\r\n"
            for data in (start + "X: " + "a" * 100000 + "\r\n\r\n", start + "".join(f"H{i}: {i}\r\n" for i in range(5000)) + "\r\n",
                         "GET /" + "a" * 200000 + " HTTP/1.1\r\n\r\n", start.replace("\r\n", "\n") + "\n", "\r\n" * 20000, "GET\r\n\r\n",
                         start + "Content-Length: 99999999999999999999\r\n\r\n", start + "Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
                         start + "Host: evil.example\r\n\r\n", "GET /api/runs HTTP/1.0\r\n\r\n"):
                answer = s.raw(data.encode(), 2.0)
                self.assertNotIn(b'"runs":', answer if "Host: evil" in data or "HTTP/1.0" in data or "a" * 1000 in data else b"")
            base = s.ask("/api/progress?run=1")[2]
            for _ in range(200):
                text = bytearray((start + "\r\n").replace("/api/runs", "/api/progress?run=1&row=0&epoch=").encode())
                for _ in range(junk.randrange(1, 6)):
                    text[junk.randrange(len(text))] = junk.randrange(256)
                s.raw(bytes(text), 1.0)
            before = time.monotonic()
            again = s.get("/api/progress?run=1")
            self.assertLess(time.monotonic() - before, 2.0)
            self.assertEqual(again["series"], json.loads(base)["series"])
            self.clients(s, 50)
            for plug in slow:
                plug.close()
        self.assertEqual(s.process.returncode, 0)

    def clients(self, s, count):
        """Clients that ask at the same time all get the answer."""
        answers = []

        def client():
            for _ in range(4):
                answers.append(s.ask("/api/progress?run=1")[0])

        threads = [threading.Thread(target=client) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(answers, [200] * (4 * count))

    def test_follows(self):
        """What a run appends arrives once; rewound, replaced and removed runs are noticed."""
        with server.Server(self.folder) as s:
            self.assertEqual(len(s.get("/api/runs")["runs"]), 1)
            first = s.get("/api/progress?run=1")
            written = self.metrics("runs/one")
            self.assertEqual(curve(first, "loss"), ([line["step"] for line in written], [line["loss"] for line in written]))
            self.assertEqual((first["from"], first["rows"]), (0, 5))

            def more(last):
                return s.get(f"/api/progress?run=1&epoch={last['epoch']}&row={last['rows']}")

            self.append(self.line(6, 2.5) + self.line(7, 2.25)[:30])
            second = more(first)
            self.assertEqual((second["from"], second["epoch"], curve(second, "loss")), (5, first["epoch"], ([6], [2.5])))
            self.append(self.line(7, 2.25)[30:])
            third = more(second)
            self.assertEqual(curve(third, "loss"), ([7], [2.25]))
            self.assertEqual(curve(more(third), "loss"), ([], []))
            self.append("junk\n" + self.line(8))
            fourth = more(third)
            self.assertEqual(curve(fourth, "loss"), ([8], [1.0]))
            self.assertTrue(any("cannot be read" in note for note in fourth["notes"]))
            # A resume: fewer lines, then more than there were.
            self.append("".join(self.line(i, 3.0) for i in range(1, 20)), mode="w")
            fifth = more(fourth)
            self.assertNotEqual(fifth["epoch"], fourth["epoch"])
            self.assertEqual((fifth["from"], curve(fifth, "loss")), (0, (list(range(1, 20)), [3.0] * 19)))
            self.append(self.line(10, 0.5))
            sixth = more(fifth)
            self.assertEqual(curve(sixth, "loss")[0], list(range(1, 11)))
            with open(self.path("runs/one/config.yaml"), encoding="utf-8") as file:
                self.assertEqual(s.get("/api/report?run=1")["config"], file.read())
            os.rename(self.path("runs/one"), self.path("hidden"))
            self.assertEqual(s.ask("/api/progress?run=1")[0], 422)
            os.rename(self.path("hidden"), self.path("runs/one"))
            self.assertEqual(s.get("/api/progress?run=1")["rows"], 10)
            self.ok(self.run_program(*self.small("train.steps=3", "run.dir=runs/two")))
            self.assertTrue(program.wait_until(lambda: len(s.get("/api/runs")["runs"]) == 2, 10))

    def test_removed_runs_make_room(self):
        """The list is limited to 2,000 runs that exist, not to those that ever did."""
        def names(s):
            return {run["name"] for run in s.get("/api/runs")["runs"]}

        for number in range(2100):
            os.makedirs(self.path(f"many/old{number}"))
            self.write(f"many/old{number}/config.yaml", "")
        with server.Server(self.folder, "many") as s:
            self.assertEqual(len(names(s)), 2000)
        os.makedirs(self.path("more/deep"))
        with server.Server(self.folder, "more") as s:
            self.assertEqual(names(s), set())
            for generation in range(2):
                for number in range(1500):
                    os.makedirs(self.path(f"more/deep/{generation}-{number}"))
                    self.write(f"more/deep/{generation}-{number}/config.yaml", "")
                self.assertTrue(program.wait_until(lambda: f"deep/{generation}-7" in names(s) and len(names(s)) == 1500, 30))
                shutil.rmtree(self.path("more/deep"))
            self.assertTrue(program.wait_until(lambda: names(s) == set(), 10))
            self.assertEqual(s.ask("/api/progress?run=1")[0], 422)

    def test_usage(self):
        self.one_line(self.run_program("serve", "nowhere"), 2, "nowhere")
        self.one_line(self.run_program("serve", "--bind", "elsewhere.example", "runs"), 2, "elsewhere.example", "127.0.0.1")
        os.makedirs(self.path("bare"))
        with server.Server(self.folder, "--bind", "0.0.0.0", "runs/one") as s:
            self.assertEqual([run["name"] for run in s.get("/api/runs")["runs"]], ["one"])
            busy = self.run_program("serve", "--port", str(s.port), "runs")
            self.one_line(busy, 75, str(s.port))
        self.assertIn("warning", s.errors)


@unittest.skipUnless(BUILT, "built without libmicrohttpd")
class Planner(program.ProgramTest):
    RUN = ["model.preset=llama3-70b", "parallel.ranks=1024", "data.seq=8192", "train.global_batch=1024", "train.precision=bf16"]

    @staticmethod
    def body(run, layout=(), cluster="h100", more=()):
        return "\n".join([f"cluster {cluster}", *(f"set {word}" for word in run), *(f"layout {word}" for word in layout), *more])

    def step(self, s, *more, **request):
        status, _, text = s.ask("/api/step", method="POST", body=self.body(*more, **request))
        return status, json.loads(text)

    def test_steps(self):
        """Every figure is that of the command line, also for the copied run.yaml."""
        os.makedirs(self.path("runs"))
        draw = random.Random(5)
        with server.Server(self.folder) as s:
            choices = s.get("/api/choices")
            self.assertIn("llama3-70b", [preset["name"] for preset in choices["presets"]])
            self.assertIn("h100", choices["clusters"])
            took = []
            for number in range(10):
                layout = [f"parallel.tp={draw.choice([1, 2, 4, 8])}", f"parallel.pp={draw.choice([1, 2, 4, 8])}",
                          f"parallel.zero={draw.choice([0, 1, 3])}", f"train.recompute={draw.choice(['none', 'selective', 'full'])}",
                          f"train.micro_batch={draw.choice([1, 2])}"]
                cluster = draw.choice(["h100", "a100", "b200"])
                begin = time.monotonic()
                status, answer = self.step(s, self.RUN, layout, cluster)
                took.append(time.monotonic() - begin)
                told = self.run_program("simulate", "--cluster", cluster, *self.RUN, *layout, "--json")
                if status != 200:
                    self.one_line(told, 2, answer["error"])
                    continue
                expected = json.loads(self.ok(told).stdout)
                self.assertEqual({**answer["simulation"], "wall_seconds": 0}, {**expected, "wall_seconds": 0}, layout)
                self.assertEqual(dict(zip(answer["report"]["memory"]["kinds"], answer["report"]["memory"]["ranks"][0]["planned"])), expected["memory"])
                if number < 2:
                    again = self.run_program("simulate", self.write("run.yaml", answer["yaml"]), "--cluster", cluster, "--json")
                    self.assertEqual({**json.loads(self.ok(again).stdout), "wall_seconds": 0}, {**expected, "wall_seconds": 0})
            print(f"a step of 1,024 GPUs: {1000 * sorted(took)[len(took) // 2]:.0f} ms", flush=True)
            drawn = self.step(s, ["model.preset=llama-tiny", "parallel.ranks=4", "train.global_batch=8", "data.seq=64"], ["parallel.pp=2"],
                              more=["timeline"])[1]
            self.assertEqual(len(drawn["report"]["simulated"]["ranks"]), 2)

    def test_search(self):
        """The result of `plan`, with progress; a search can be stopped; a layout is compared."""
        os.makedirs(self.path("runs"))
        run = ["model.preset=llama-small", "parallel.ranks=8", "train.global_batch=32", "data.seq=1024", "train.precision=bf16"]

        def wait(s):
            self.assertTrue(program.wait_until(lambda: s.get("/api/search")["phase"] != "running", 60))
            return s.get("/api/search")

        with server.Server(self.folder) as s:
            self.assertEqual(s.get("/api/search")["phase"], "none")
            self.assertEqual(s.ask("/api/search", method="POST", body=self.body(run, ["parallel.tp=8"]))[0], 200)
            state = wait(s)
            expected = json.loads(self.ok(self.run_program("plan", *run, "--cluster", "h100", "--against", "tp=8", "--json")).stdout)
            self.assertEqual({**state["plan"], "wall_seconds": 0}, {**expected, "wall_seconds": 0})
            best = [f"{key}={value}" for key, value in state["keys"][0].items()]
            self.assertEqual(self.step(s, run, best)[1]["simulation"]["step_seconds"], expected["choices"][0]["step_seconds"])
            self.assertEqual(s.ask("/api/search", method="POST", body=self.body(self.RUN))[0], 200)
            self.assertEqual(s.ask("/api/stop", method="POST", body="")[0], 200)
            begin = time.monotonic()
            state = wait(s)
            self.assertLess(time.monotonic() - begin, 10)
            self.assertTrue("stopped" in state["error"] if state["phase"] == "failed" else state["plan"]["stopped"], state)
            self.assertEqual(s.ask("/api/search", method="POST", body=self.body(["model.preset=llama3-70b", "parallel.ranks=1"]))[0], 200)
            self.assertIn("no layout fits", wait(s)["error"])

    def test_searches_replace_each_other(self):
        """A new search does not wait for the end of the one before, and only the last is shown."""
        os.makedirs(self.path("runs"))
        large = ["model.preset=deepseek-v3", "parallel.ranks=2048", "data.seq=4096", "train.global_batch=8192", "train.precision=bf16"]
        small = ["model.preset=llama-small", "parallel.ranks=8", "train.global_batch=32", "data.seq=1024"]
        with server.Server(self.folder) as s:
            for run in (large, large, small, large, large, large, large):
                begin = time.monotonic()
                self.assertIn(s.ask("/api/search", method="POST", body=self.body(run))[0], (200, 503))
                self.assertLess(time.monotonic() - begin, 1.0)
            self.assertTrue(program.wait_until(lambda: s.ask("/api/search", method="POST", body=self.body(small))[0] == 200, 30))
            self.assertTrue(program.wait_until(lambda: s.get("/api/search")["phase"] == "done", 30))
            self.assertEqual(s.get("/api/search")["plan"]["model"], "llama-small")

    def test_one_step_twice(self):
        """The timeline, which follows the figures, belongs to the same step, whoever else asks."""
        os.makedirs(self.path("runs"))
        run, layouts = ["model.preset=llama-tiny", "parallel.ranks=4", "train.global_batch=8", "data.seq=64"], (["parallel.pp=2"], ["parallel.tp=2"])
        with server.Server(self.folder) as s:
            for order in ((0, 0), (0, 1), (1, 0)):
                for layout in order:
                    self.assertEqual(self.step(s, run, layouts[layout])[0], 200)
                for layout in order:
                    status, answer = self.step(s, run, layouts[layout], more=["timeline"])
                    self.assertEqual((status, len(answer["report"]["simulated"]["ranks"])), (200, 2 - layout))
            self.assertEqual(self.step(s, run, more=["timeline", "junk"])[0], 422)

    def test_detail(self):
        """A timeline for a drawing: neighbours that it could not show apart are one event, the sums are those of all."""
        os.makedirs(self.path("runs"))
        run = ["model.preset=llama3.1-8b", "parallel.ranks=16", "train.global_batch=64", "data.seq=4096", "train.precision=bf16",
               "parallel.pp=2", "parallel.tp=4", "parallel.zero=2", "train.micro_batch=1"]
        with server.Server(self.folder) as s:
            def timeline(*words):
                return self.step(s, run, more=[" ".join(("timeline", *words))])[1]["report"]["simulated"]

            everything = timeline()
            end = everything["steps"][0]["end"]
            self.assertNotIn("merged", everything)
            exact = rows_of(everything)
            counts = []
            for words, inside in (((), None), (("200",), 1.4 * end / 200), (("200", str(0.5 * end), str(0.52 * end)), 1.4 * 0.02 * end / 200)):
                drawn = timeline(*words)
                for key in ("shares", "traffic", "names", "events", "steps", "ranks", "actions"):
                    self.assertEqual(drawn[key], everything[key], (words, key))
                rows = rows_of(drawn)
                self.assertEqual(rows.keys(), exact.keys())
                for row, events in rows.items():
                    rest = iter(exact[row])
                    for begin, seconds, _, merged, share in events:
                        parts = [next(rest) for _ in range(merged)]
                        self.assertAlmostEqual(begin, parts[0][0], delta=1e-7)
                        self.assertAlmostEqual(begin + seconds, parts[-1][0] + parts[-1][1], delta=1e-6)
                        self.assertAlmostEqual(seconds * share, sum(part[1] for part in parts), delta=1e-6)
                        if merged > 1:
                            self.assertLess(seconds, 1.4 * end / 200)
                    self.assertEqual(list(rest), [])
                counts.append(sum(map(len, rows.values())))
                if words:
                    self.assertAlmostEqual(drawn["detail"]["inside"], inside, places=9)
                    merged = [seconds for events in rows.values() for begin, seconds, _, merged, _ in events
                              if merged > 1 and 0.501 * end < begin < 0.519 * end]
                    self.assertLess(max(merged, default=0), inside)
            self.assertEqual(counts[0], everything["events"])
            self.assertLess(counts[1], 2 * 200 * len(exact))
            self.assertLess(5 * counts[1], counts[0])
            self.assertLess(counts[1], counts[2])
            for words in ("0", "x", "-5", "1e9", "100 1", "100 2 1", "100 nan 1", "100 0 inf", "100 1 2 3", "100000"):
                self.assertEqual(self.step(s, run, more=[f"timeline {words}"])[0], 422, words)

    def test_refused(self):
        """Keys that could name files, unknown clusters and presets, and junk."""
        os.makedirs(self.path("runs"))
        secret = self.write("secret", SECRET)
        with server.Server(self.folder) as s:
            for body in (f"set data.path={secret}", f"set parallel.schedule_file={secret}", f"cluster {secret}", f"set model.preset={secret}", "set run.dir=x",
                         f"set data.tokenizer={secret}", "set model.layers", "set model.layers=x", "set nothing=1", "junk",
                         "\0", "set =", "layout parallel.tp=3",
                         "set parallel.schedule=file"):
                status, _, text = s.ask("/api/step", method="POST", body=body)
                self.assertEqual((status, SECRET in text), (422, False), body)
                self.assertTrue(json.loads(text)["error"])
            self.assertEqual(s.ask("/api/step", method="POST", body="set x" * 50000)[0], 413)
            self.assertEqual(s.ask("/api/step", method="POST", body="", token=False)[0], 401)
            self.assertEqual(s.ask("/api/step")[0], 405)
            self.assertEqual(os.listdir(self.path("runs")), [])


class Absent(program.ProgramTest):
    def test_without_runs(self):
        result = self.run_program("serve")
        self.one_line(result, 2, "runs" if BUILT else "libmicrohttpd")


if __name__ == "__main__":
    unittest.main()
