"""The report of a run: its data against the run's files, and the page in a real browser.

ctest: timeout 300
ctest: processors 2
"""
import base64
import csv
import json
import math
import os
import re
import struct
import sys
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import accessible  # noqa: E402
import browser  # noqa: E402
import program  # noqa: E402

# QD_REPORT_EVENTS=1000000: how many actions the large trace has.
LARGE = int(os.environ.get("QD_REPORT_EVENTS", "120000"))


def data_of(path):
    """The data of a page."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL).group(1))


def numbers(text, kind):
    raw = base64.b64decode(text)
    return list(struct.unpack(f"<{len(raw) // struct.calcsize(kind)}{kind}", raw))


def spans(timeline):
    """(rank, stream, name, step, micro-batch, bytes, axes, begin, seconds) of each event of a
    page's timeline."""
    begin, seconds = numbers(timeline["begin"], "d"), numbers(timeline["seconds"], "f")
    action = numbers(timeline["action"], "I")
    step, batch = (numbers(timeline[key], kind) if key in timeline else [fill] * len(action) for key, kind, fill in (("step", "I", 0), ("microbatch", "i", -1)))
    for track in timeline["tracks"]:
        rank = timeline["ranks"][track["rank"]]["rank"]
        for i in range(track["first"], track["first"] + track["count"]):
            a = timeline["actions"][action[i]]
            yield (rank, track["stream"], a["name"], timeline["steps"][step[i]]["step"], batch[i] if batch[i] >= 0 else None, a.get("bytes"),
                   a.get("group"), begin[i], seconds[i])


def covered(intervals):
    """Length of a union of intervals, by checking each gap between neighbouring ends."""
    cuts = sorted({t for pair in intervals for t in pair})
    return sum(b - a for a, b in zip(cuts, cuts[1:]) if any(begin <= a and b <= end for begin, end in intervals))


class RunTest(program.ProgramTest):
    """A small run with a trace, and its report."""

    def traced(self, *more):
        self.ok(self.run_program(*self.small("train.steps=12", "parallel.ranks=2", "parallel.zero=3", "train.micro_batch=2", "run.dir=run",
                                             "--trace", "run.trace_steps=2", *more)))
        with open(self.path("run/trace.json"), encoding="utf-8") as file:
            return [e for e in json.load(file)["traceEvents"] if e["ph"] == "X"]

    def report(self, *more):
        result = self.ok(self.run_program("report", "run", *more))
        return data_of(os.path.join(self.folder, result.stdout.strip()))


class Report(RunTest):
    def test_data(self):
        events = self.traced()
        data = self.report()
        self.curves(data)
        self.memory(data)
        timeline = data["measured"]
        self.events(timeline, events)
        self.sums(timeline, events)
        self.assertEqual([rank["place"] for rank in timeline["ranks"]], ["dp 0", "dp 1"])
        figures = {figure["name"]: figure for figure in data["figures"]}
        losses = [line["loss"] for line in self.metrics("run")]
        self.assertAlmostEqual(float(figures["final loss"]["value"]), sum(losses[-3:]) / 3, delta=1e-4)
        self.assertTrue(figures["final loss"]["note"].startswith("mean of the last 3 steps · "), figures["final loss"])
        self.assertIn("zero 3", figures["layout"]["value"])
        with open(self.path("run/config.yaml"), encoding="utf-8") as file:
            self.assertEqual(data["config"], file.read())

    def curves(self, data):
        """Bit by bit the values of metrics.jsonl."""
        metrics = self.metrics("run")
        keys = {"loss": "loss", "learning rate": "lr", "gradient norm": "grad_norm", "speed": "tokens_per_second",
                "memory": "memory_peak_bytes"}
        self.assertEqual([s["chart"] for s in data["series"]], list(keys))
        self.assertEqual(numbers(data["series"][0]["x"], "d"), [line["step"] for line in metrics])
        for series in data["series"]:
            self.assertEqual(numbers(series["y"], "d"), [line[keys[series["chart"]]] for line in metrics])

    def memory(self, data):
        """The accountant's lines, and what was measured."""
        plan = json.loads(self.ok(self.run_program("check", "run/config.yaml", "--json")).stdout)
        with open(self.path("run/memory.json"), encoding="utf-8") as file:
            measured = json.load(file)
        memory = data["memory"]
        self.assertEqual([r["label"] for r in memory["ranks"]], ["rank 0", "rank 1"])
        for rank, figures in zip(memory["ranks"], measured["ranks"]):
            lines = {kind: size for kind, size in zip(memory["kinds"], rank["planned"]) if size > 0}
            self.assertEqual(lines, plan["memory"])
            self.assertEqual(sum(rank["planned"]), plan["memory_bytes_per_rank"])
            self.assertEqual(rank["allocated"], plan["memory_bytes_per_rank"])
            self.assertGreater(figures["staging_bytes"], 0) # ranks are processes
            self.assertEqual((rank["allocated"], rank["resident"]), (figures["allocated_bytes"], figures["resident_peak_bytes"]))
            self.assertGreater(rank["resident"], rank["allocated"])
        self.assertFalse(measured["one_process"])

    def events(self, timeline, events):
        origin = min(e["ts"] for e in events)

        def order(item):
            return item[:2] + (item[7],)

        expected = sorted(((e["pid"], e["tid"], e["name"], e["args"]["step"], e["args"].get("microbatch"), e["args"].get("bytes"),
                            e["args"].get("axes"), (e["ts"] - origin) * 1e-6, e["dur"] * 1e-6) for e in events), key=order)
        drawn = sorted(spans(timeline), key=order)
        self.assertEqual([e[:7] for e in drawn], [e[:7] for e in expected])
        self.assertTrue(any(e[5] for e in drawn))
        for mine, theirs in zip(drawn, expected):
            self.assertAlmostEqual(mine[7], theirs[7], delta=1e-9)
            self.assertAlmostEqual(mine[8], theirs[8], delta=1e-9 + 1e-6 * theirs[8])

    def sums(self, timeline, events):
        """Tables against sums over the trace."""
        names = {row["name"]: row for row in timeline["names"]}
        self.assertEqual(set(names), {e["name"] for e in events})
        for name, row in names.items():
            mine = [e for e in events if e["name"] == name]
            self.assertEqual(row["count"], len(mine))
            self.assertAlmostEqual(row["seconds"], sum(e["dur"] for e in mine) * 1e-6, delta=1e-8)
        for row in timeline["traffic"]:
            mine = [e for e in events if e["cat"] == row["kind"] and e["args"].get("axes") == row["group"]]
            self.assertEqual(row["count"], len(mine))
            self.assertEqual(row["bytes"], sum(e["args"]["bytes"] for e in mine) / 2)
        self.assertEqual({row["kind"] for row in timeline["traffic"]}, {"gather", "reduce_scatter", "reduce"})
        windows = [(min(e["ts"] for e in mine), max(e["ts"] + e["dur"] for e in mine))
                   for mine in ([e for e in events if e["args"]["step"] == step] for step in (1, 2))]
        for rank, share in enumerate(timeline["shares"]):
            busy = {talks: [(e["ts"], e["ts"] + e["dur"]) for e in events if e["pid"] == rank and ("axes" in e["args"]) == talks]
                    for talks in (False, True)}
            compute, both = covered(busy[False]), covered(busy[False] + busy[True])
            for key, value in (("seconds", covered(windows)), ("compute", compute), ("communication", covered(busy[True])),
                               ("exposed", both - compute), ("idle", covered(windows) - both)):
                self.assertAlmostEqual(share[key], value * 1e-6, delta=1e-7, msg=key)

    def seen(self, *layout):
        """The timeline of two steps contains all traffic that check counts, on every axis."""
        self.ok(self.run_program(*self.small("train.steps=2", "run.dir=run", "--overwrite", "--trace", *layout)))
        plan = json.loads(self.ok(self.run_program("check", "run/config.yaml", "--json")).stdout)
        timeline = self.report()["measured"]
        self.assertEqual(sum(row["bytes"] for row in timeline["traffic"]), 2 * plan["communication_bytes_per_step"])
        for share in timeline["shares"]:
            self.assertAlmostEqual(share["compute"] + share["exposed"] + share["idle"], share["seconds"], delta=1e-6)
        return timeline

    def test_exchanges(self):
        """Communication inside modules, here of tensor parallelism, is shown next to that of
        actions."""
        timeline = self.seen("parallel.ranks=4", "parallel.tp=2", "parallel.zero=1")
        with open(self.path("run/trace.json"), encoding="utf-8") as file:
            inside = [e for e in json.load(file)["traceEvents"] if "op" in e.get("args", {})]
        self.assertEqual({e["args"]["axes"] for e in inside}, {"tp"})
        for rank, share in enumerate(timeline["shares"]):
            waited = sum(e["args"]["waited"] for e in inside if e["pid"] == rank) * 1e-6
            self.assertGreater(waited, 0)
            self.assertGreaterEqual(share["exposed"], 0.99 * waited)
        self.assertEqual([rank["place"] for rank in timeline["ranks"]], ["dp 0 · tp 0", "dp 0 · tp 1", "dp 1 · tp 0", "dp 1 · tp 1"])

    def test_axes(self):
        experts = ("model.experts=4", "model.experts_per_token=2", "model.expert_ffn=32")
        for axis, layout, kinds in (("cp", ("parallel.cp=2",), {"context.shift"}), ("ep", ("parallel.ep=2", *experts), {"dispatch", "return"})):
            with self.subTest(axis):
                timeline = self.seen("parallel.ranks=2", *layout)
                self.assertTrue(kinds <= {row["kind"] for row in timeline["traffic"]})

    def test_pipeline(self):
        """Waiting for messages between stages is idle time."""
        timeline = self.seen("parallel.ranks=2", "parallel.pp=2", "train.micro_batch=2")
        self.assertTrue({("pp", "send"), ("pp", "recv")} <= {(row["group"], row["kind"]) for row in timeline["traffic"]})
        self.assertEqual([rank["place"] for rank in timeline["ranks"]], ["pp 0", "pp 1"])
        for share in timeline["shares"]:
            self.assertGreater(share["idle"], 0)

    def test_simulator(self):
        """A simulated timeline has the names and, per step, the traffic of the measured one."""
        self.traced("train.steps=2", "train.global_batch=16")
        self.ok(self.run_program("simulate", "run/config.yaml", "--cluster", "h100", "--timeline", "simulated.json"))
        data = self.report("--simulated", "simulated.json")
        measured, simulated = data["measured"], data["simulated"]
        self.assertEqual({row["name"] for row in measured["names"]}, {row["name"] for row in simulated["names"]})
        self.assertEqual((simulated["world"], sum(rank["stands_for"] for rank in simulated["ranks"])), (2, 2))

        def per_step(timeline):
            return {(row["group"], row["kind"]): (row["count"] / len(timeline["steps"]), row["bytes"] / len(timeline["steps"]))
                    for row in timeline["traffic"]}
        self.assertEqual(per_step(measured), per_step(simulated))

    def test_evaluations(self):
        self.ok(self.run_program(*self.small("train.steps=4", "run.dir=run", "run.save_every=2", "data.validation=0.1")))
        with open(self.path("run/evaluations.jsonl"), "w", encoding="utf-8") as file:
            for step in (2, 4):
                file.write(self.ok(self.run_program("eval", f"run/checkpoints/step-{step:012}", "--json")).stdout)
        with open(self.path("run/evaluations.jsonl"), encoding="utf-8") as file:
            expected = [json.loads(line)["loss"] for line in file]
        found = [s for s in self.report()["series"] if s["chart"] == "loss"]
        self.assertEqual([s["name"] for s in found], ["training", "evaluation"])
        self.assertEqual((numbers(found[1]["x"], "d"), numbers(found[1]["y"], "d")), ([2, 4], expected))

    def test_without_trace(self):
        """A run with little to show, and one that is still being written."""
        self.ok(self.run_program(*self.small("train.steps=3", "run.dir=run")))
        with open(self.path("run/metrics.jsonl"), "a", encoding="utf-8") as file:
            file.write('{"step":4,"lo')
        os.remove(self.path("run/memory.json"))
        data = self.report("-o", "page.html")
        self.assertNotIn("measured", data)
        self.assertEqual(len(numbers(data["series"][0]["x"], "d")), 3)
        self.assertIsNone(data["memory"]["ranks"][0]["allocated"])
        self.assertTrue(any("--trace" in note for note in data["notes"]))

    def compared(self):
        """Two runs that differ in learning rate and layout, and their comparison."""
        for name, more in (("a", ["train.lr=1e-3"]), ("b", ["train.lr=1e-2", "parallel.ranks=2"])):
            self.ok(self.run_program(*self.small(f"run.dir=runs/{name}", "train.steps=9", "data.validation=0.1", "train.eval_every=4",
                                                 "run.csv=true", "run.tensorboard=true", *more)))

    def other_formats(self, name):
        """metrics.csv has the numbers of metrics.jsonl; the event file has a record per step, after its version and its start."""
        lines = self.metrics(f"runs/{name}")
        with open(self.path(f"runs/{name}/metrics.csv"), encoding="ascii", newline="") as file:
            rows = list(csv.DictReader(file))
        self.assertEqual([{key: float(value) for key, value in row.items() if value} for row in rows],
                         [{key: line[key] for key in rows[0] if line.get(key) is not None} for line in lines])
        (events,) = os.listdir(self.path(f"runs/{name}/tensorboard"))
        with open(self.path(f"runs/{name}/tensorboard/{events}"), "rb") as file:
            data, records = file.read(), []
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            records.append(data[12:12 + length])
            data = data[16 + length:]
        self.assertEqual(len(records), 2 + len(lines))
        self.assertIn(b"brain.Event:2", records[0])
        for line, record in zip(lines, records[2:]):
            self.assertIn(b"loss/training\x15" + struct.pack("<f", line["loss"]), record)
            self.assertEqual(b"loss/validation" in record, "validation_loss" in line)

    def test_runs_are_compared(self):
        self.compared()
        result = self.ok(self.run_program("report", "runs/a", "runs/b"))
        self.assertEqual(result.stdout.strip(), "runs/comparison.html")
        data = data_of(self.path("runs/comparison.html"))
        self.assertEqual([s["name"] for s in data["series"] if s["chart"] == "loss"], ["a", "a, validation", "b", "b, validation"])
        for name in ("a", "b"):
            lines = self.metrics(f"runs/{name}")
            losses = next(s for s in data["series"] if (s["chart"], s["name"]) == ("loss", name))
            self.assertEqual(numbers(losses["y"], "d"), [line["loss"] for line in lines])
            validation = next(s for s in data["series"] if s["name"] == f"{name}, validation")
            self.assertEqual(numbers(validation["y"], "d"), [line["validation_loss"] for line in lines if "validation_loss" in line])
        runs, differences = data["tables"]
        self.assertEqual([row[0] for row in runs["rows"]], ["run", "a", "b"])
        self.assertEqual([row[2] for row in runs["rows"]], ["layout", "dp 1", "dp 2"])
        # the degree of dp is left open in both; the layout is compared as it was resolved
        rows = {row[0]: row[1:] for row in differences["rows"]}
        self.assertEqual(rows["key"], ["a", "b"])
        self.assertEqual(rows["train.lr"], ["0.001", "0.01"])
        self.assertEqual((rows["parallel.ranks"], rows["parallel.dp"]), (["1", "2"], ["1", "2"]))
        self.assertNotIn("run.dir", rows)
        self.listed(data)
        for name in ("a", "b"):
            self.other_formats(name)

    def listed(self, data):
        runs = json.loads(self.ok(self.run_program("runs", "--json")).stdout)
        self.assertEqual([run["folder"] for run in runs], ["runs/a", "runs/b"])
        for run, row in zip(runs, data["tables"][0]["rows"][1:]):
            lines = self.metrics(run["folder"])
            self.assertAlmostEqual(run["loss"], sum(line["loss"] for line in lines[-2:]) / 2, delta=1e-12)
            best = min((line for line in lines if "validation_loss" in line), key=lambda line: line["validation_loss"])
            self.assertEqual((run["best"], run["best_loss"]), (best["step"], best["validation_loss"]))
            self.assertEqual((run["state"], run["steps"], run["steps_planned"]), ("done", 9, 9))
            self.assertEqual(row[4:7], [f"{run['loss']:.4f}", f"{run['best_loss']:.4f}", str(run["best"])])
        text = self.ok(self.run_program("runs", "runs", "--differences")).stdout
        self.assertRegex(text, r"runs/a +done +9/9 +\d\.\d{4}")
        self.assertRegex(text, r"\ntrain.lr\n +0.001 +runs/a\n +0.01 +runs/b\n")
        self.one_line(self.run_program("runs", "nowhere"), 2, "nowhere")
        self.one_line(self.run_program("runs", "runs/a/checkpoints"), 2, "no run folder")
        self.one_line(self.run_program("report", "runs/a", "runs/b", "--simulated", "x"), 2, "--simulated")
        self.one_line(self.run_program("report", "runs/a", "runs"), 2, "not a run folder")

    def test_errors(self):
        self.one_line(self.run_program("report"), 2, "RUN")
        self.one_line(self.run_program("report", "nowhere"), 2, "nowhere", "config.yaml")
        self.ok(self.run_program(*self.small("train.steps=1", "run.dir=run")))
        self.one_line(self.run_program("report", "run", "--simulated", "none.json"), 2, "none.json")
        for text, part in (("{}", "traceEvents"), ('{"traceEvents":[{"ph":"X","name":"a"}]}', "ts"), ('{"traceEvents":[{"ph":', "ends"),
                           ('{"traceEvents":[{"ph":"X","ts":0,"dur":-5,"name":"a","pid":0,"tid":0}]}', "ends at")):
            with self.subTest(text):
                self.one_line(self.run_program("report", "run", "--simulated", self.write("bad.json", text)), 2, part)
        self.assertFalse(os.path.exists(self.path("run/report.html")))


@unittest.skipUnless(browser.find(), "chromium is not installed; tools/bootstrap.sh --if-possible chromium would do it")
class Page(RunTest):
    """The same page as a reader sees it."""

    def test_browser(self):
        events = self.traced()
        self.report()
        with browser.Browser() as chrome:
            brightness = {}
            for dark in (False, True):
                found = chrome.open(self.path("run/report.html"), dark)
                self.assertEqual((chrome.console, found["errors"]), ([], []))
                self.assertEqual((found["charts"], found["memoryBars"], found["events"]), (5, 2, len(events)))
                self.assertGreaterEqual(found["paths"], 4)
                self.assertGreaterEqual(found["rows"], 4)
                self.assertGreater(found["pixels"], 10000)
                self.assertGreater(found["overviewPixels"], 1000)
                brightness[dark] = self.look(chrome)
                self.assertEqual(accessible.contrast(chrome), [], f"dark {dark}")
            self.assertEqual(accessible.keyboard(chrome)[0], [])
            self.assertGreater(brightness[False], 180)
            self.assertLess(brightness[True], 90)
            self.theme(chrome)
            self.read_off(chrome)
            self.hand(chrome)
            self.assertEqual(chrome.console, [])

    def test_heads_of_charts_are_whole(self):
        """A long run has more figures than fit next to the names in a narrow window: nothing is cut
        off or overflows."""
        self.ok(self.run_program(*self.small("run.dir=run", "train.steps=130")))
        self.report()
        with browser.Browser(width=1000) as chrome:
            chrome.open(self.path("run/report.html"))
            heads = chrome.value("""[...document.querySelectorAll('.chart')].map(chart => {
                const read = chart.querySelector('.read'), text = document.createRange();
                text.selectNodeContents(read);
                const [box, words, shown] = [chart, text, read].map(e => e.getBoundingClientRect());
                return {text: read.textContent, whole: words.right <= Math.min(box.right, shown.right) + 1 && words.left >= box.left - 1,
                        bottom: chart.querySelector('svg').getBoundingClientRect().bottom};
            })""")
            self.assertIn("mean of the last 3: ", heads[-2]["text"])  # of the speed
            self.running_mean(chrome)
            self.assertEqual([head for head in heads if not head["whole"]], [])
            self.assertEqual(len({round(head["bottom"]) for head in heads[1:]}), 2)  # two rows of two

    def test_narrow_screens_marks_and_validation(self):
        """A resumed run on another layout is marked; wide tables say that they scroll; axes are named."""
        self.ok(self.run_program(*self.small("run.dir=run", "train.steps=6", "data.validation=0.1", "train.eval_every=2", "parallel.ranks=2")))
        self.ok(self.run_program("train", "--dir", "run", "--resume", "--steps", "12", "--ranks", "2", "--tp", "2"))
        data = self.report()
        self.assertEqual([(mark["x"], mark["text"]) for mark in data["marks"]], [(6, "resumed on tp 2, before on dp 2")])
        lines = [line for line in self.metrics("run") if "validation_loss" in line]
        curve = next(s for s in data["series"] if s.get("name") == "validation")
        self.assertEqual(numbers(curve["x"], "d"), [line["step"] for line in lines])
        self.assertEqual(numbers(curve["y"], "d"), [line["validation_loss"] for line in lines])
        figure = next(f for f in data["figures"] if f["name"] == "best validation loss")
        self.assertEqual(figure["value"], f"{min(line['validation_loss'] for line in lines):.4f}")
        with browser.Browser(width=400) as chrome:
            found = chrome.open(self.path("run/report.html"))
            self.assertEqual((chrome.console, found["errors"], found["marks"]), ([], [], 1))
            self.assertEqual(chrome.value("document.querySelectorAll('svg line.mark').length"), 5)
            self.assertEqual(chrome.value("[...document.querySelectorAll('.chart.large svg text.title')].map(t => t.textContent)"),
                             ["step", "loss, nats/token"])
            self.assertTrue(chrome.value("document.documentElement.scrollWidth <= innerWidth"))
            wide = "document.querySelector('#memory .wide')"
            self.assertTrue(chrome.value(f"{wide}.scrollWidth > {wide}.clientWidth && {wide}.tabIndex === 0"))
            self.assertIn("scroll", chrome.value(f"getComputedStyle({wide}, '::before').content"))

    def test_comparison(self):
        for name, more in (("a", ["train.lr=1e-3"]), ("b", ["train.lr=1e-2"])):
            self.ok(self.run_program(*self.small(f"run.dir={name}", "train.steps=8", "data.validation=0.1", "train.eval_every=4", *more)))
        self.ok(self.run_program("report", "a", "b", "-o", "both.html"))
        with browser.Browser() as chrome:
            found = chrome.open(self.path("both.html"))
            self.assertEqual((chrome.console, found["errors"], found["charts"], found["tables"]), ([], [], 4, 2))
            strokes = chrome.value("[...document.querySelectorAll('.chart.large path')].map(p => [p.style.stroke, p.style.strokeDasharray])")
            (a, plain), (a_too, dashed), (b, _), _ = strokes
            self.assertEqual((a, plain, a_too != b, dashed), (a_too, "none", True, "6, 4"))

    def running_mean(self, chrome):
        """Of exactly so many values as the head says, everywhere: none before there are so many, and
        gaps are not counted."""
        x = [math.sin(i) for i in range(130)]
        x[40] = float("nan")
        values = json.dumps(x)
        for count in (1, 3, 4):
            mean = chrome.value(f"[...runningMean({values}, {count})].map(v => Number.isFinite(v) ? v : null)")
            for i, got in enumerate(mean):
                seen = [v for v in x[:i + 1] if v == v][-count:]
                if len(seen) < count:
                    self.assertIsNone(got)
                else:
                    self.assertAlmostEqual(got, sum(seen) / count, delta=1e-12)
        drawn = chrome.value("Chart.all.filter(c => c.list[0].mean).map(c => [[...c.list[0].y], [...c.list[0].mean].slice(2)])")
        self.assertTrue(drawn)
        for y, mean in drawn:
            for i, got in enumerate(mean):
                self.assertAlmostEqual(got, sum(y[i:i + 3]) / 3, delta=1e-9 * max(map(abs, y)))

    def look(self, chrome):
        """Not blank: many colours. Returns the mean brightness."""
        _, _, rows, size = browser.pixels(chrome.picture(scale=0.2))
        everything = b"".join(rows)
        self.assertGreater(len({everything[i:i + 3] for i in range(0, len(everything), size)}), 100)
        return sum(everything[1::size]) / (len(everything) / size)

    def theme(self, chrome):
        """The button cycles from the system's choice, dark here, to light, dark and back."""
        seen = []
        for _ in range(3):
            chrome.value("document.getElementById('theme').click()")
            seen.append(chrome.value("getComputedStyle(document.body).backgroundColor"))
        self.assertEqual(seen[1], seen[2])
        self.assertNotEqual(seen[0], seen[1])

    def read_off(self, chrome):
        """The head of each chart shows the value under the cursor."""
        x, y = chrome.value("(() => { scrollTo(0, 0); const b = document.querySelector('.chart svg').getBoundingClientRect(); "
                            "return [b.left + MARGIN.left + 1, b.top + 60]; })()")
        chrome.mouse("mouseMoved", x, y)
        texts = chrome.value("[...document.querySelectorAll('.chart .read')].map(e => e.textContent)")
        first = self.metrics("run")[0]
        self.assertEqual(len(texts), 5)
        for text in texts:
            self.assertIn("step 1:", text)
        self.assertIn(f"{first['loss']:.3f}", texts[0])

    def hand(self, chrome):
        """Hovering names an action with its facts; the wheel zooms, dragging moves, buttons and
        keys reset."""
        chrome.value("document.querySelector('#timeline .rows').scrollIntoView({block: 'center'})")
        place = chrome.value("""(() => {
            const box = view.canvas.getBoundingClientRect(), events = ({first, count}) => Array.from({length: count}, (_, i) => first + i);
            const row = view.rows.find(r => events(r.lane).some(e => r.model.timeline.actions[r.model.timeline.action[e]].group));
            const {timeline, origin} = row.model;
            const id = events(row.lane).filter(e => timeline.step[e] === row.model.chosen && timeline.actions[timeline.action[e]].bytes > 1000)
                .sort((a, b) => timeline.seconds[b] - timeline.seconds[a])[0];
            return {x: box.left + view.x(timeline.begin[id] + timeline.seconds[id] / 2 - origin), y: box.top + row.y + row.height / 2,
                    name: timeline.actions[timeline.action[id]].name, rank: timeline.ranks[row.track.rank].label};
        })()""")
        chrome.mouse("mouseMoved", place["x"], place["y"])
        text = chrome.value("document.getElementById('tip').hidden ? '' : document.getElementById('tip').innerText")
        for part in (place["name"], place["rank"], "took", "sent", "iB per rank", "dp"):
            self.assertIn(part, text)

        def window():
            return chrome.value("[view.t0, view.t1]")

        before = window()
        at = before[0] + (before[1] - before[0]) * chrome.value(f"({place['x']} - view.canvas.getBoundingClientRect().left - GUTTER) / view.plot")
        chrome.mouse("mouseWheel", place["x"], place["y"], deltaX=0, deltaY=-200, modifiers=2)
        zoomed = window()
        self.assertLess(zoomed[1] - zoomed[0], 0.7 * (before[1] - before[0]))
        self.assertTrue(zoomed[0] < at < zoomed[1])
        chrome.mouse("mousePressed", place["x"], place["y"], button="left", buttons=1, clickCount=1)
        chrome.mouse("mouseMoved", place["x"] - 100, place["y"], button="left", buttons=1)
        chrome.mouse("mouseReleased", place["x"] - 100, place["y"], button="left", clickCount=1)
        moved = window()
        self.assertAlmostEqual(moved[1] - moved[0], zoomed[1] - zoomed[0], delta=1e-6)
        self.assertAlmostEqual((moved[0] - zoomed[0]) / (zoomed[1] - zoomed[0]), 100 / chrome.value("view.plot"), delta=1e-3)
        chrome.value("document.querySelector('#timeline .scroll').dispatchEvent(new KeyboardEvent('keydown', {key: '0'}))")
        self.assertEqual(window(), before)
        chrome.value("[...document.querySelectorAll('#timeline button')].find(b => b.textContent === 'whole trace').click()")
        self.assertGreater(window()[1] - window()[0], before[1] - before[0])  # a loaded machine stretches either step

    def test_simulated(self):
        """A second trace in which everything takes half as long, with one additional action."""
        events = self.traced()
        for event in events:
            event["ts"] *= 0.5
            event["dur"] *= 0.5
        last = max(e["ts"] + e["dur"] for e in events)
        own = {"ph": "X", "name": "send block.1", "cat": "send", "pid": 0, "tid": 1, "ts": last, "dur": 10, "args": {"step": 2, "axes": "pp", "bytes": 64}}
        data = self.report("--simulated", self.write("simulated.json", json.dumps({"traceEvents": [*events, own]})))
        self.assertEqual([t["name"] for t in (data["measured"], data["simulated"])], ["measured", "simulated"])
        with browser.Browser() as chrome:
            found = chrome.open(self.path("run/report.html"))
            self.assertEqual(chrome.console, [])
            self.assertEqual(found["events"], 2 * len(events) + 1)
            table = chrome.value("joinNames([data.measured, data.simulated]).map(r => [r.name, r.a, r.b, r.ratio])")
            self.assertEqual({row[0] for row in table}, {e["name"] for e in events} | {"send block.1"})
            for name, measured, simulated, ratio in table:
                if name == "send block.1":
                    self.assertEqual((measured, ratio), (None, None))
                else:
                    self.assertAlmostEqual(ratio, 0.5, delta=1e-6)
                    self.assertAlmostEqual(simulated, measured / 2, delta=1e-8)
            # One above the other on one scale, both aligned to the start of their step.
            self.assertEqual(chrome.value("view.heads.filter(h => h.title).map(h => h.title)"), ["measured", "simulated"])
            edges = chrome.value("view.models.map(m => { const s = m.timeline.steps[m.chosen]; "
                                 "return [view.x(s.begin - m.origin), view.x(s.end - m.origin)]; })")
            self.assertAlmostEqual(edges[0][0], edges[1][0], delta=1e-6)
            self.assertAlmostEqual((edges[1][1] - edges[1][0]) / (edges[0][1] - edges[0][0]), 0.5, delta=0.05)
            self.assertGreater(chrome.value("document.querySelectorAll('#actions tbody tr').length"), 10)
            folded = {row[0]: row[1:] for row in chrome.value("foldLayers(joinNames([data.measured, data.simulated])).map(r => [r.name, r.a, r.ratio])")}
            self.assertAlmostEqual(folded["forward block.*"][0], sum(row[1] for row in table if row[0].startswith("forward block.")), delta=1e-9)
            self.assertAlmostEqual(folded["forward block.*"][1], 0.5, delta=1e-6)
            chrome.value("[...document.querySelectorAll('#timeline button')].find(b => b.textContent === 'rank by rank').click()")
            self.assertEqual(chrome.value("view.heads.map(h => h.rank.label)"), ["rank 0", "rank 0", "rank 1", "rank 1"])

    def test_large(self):
        """Many ranks and actions: the work to draw a frame does not grow with them. And a page
        without any."""
        self.ok(self.run_program(*self.small("train.steps=1", "run.dir=run")))
        ranks = 64
        with open(self.path("large.json"), "w", encoding="utf-8") as file:
            file.write('{"traceEvents":[')
            for i in range(LARGE):
                rank, at = i % ranks, i // ranks
                kind = ("forward", "backward", "gather")[at % 3]
                axes = '"axes":"dp","bytes":1024,' if kind == "gather" else ""
                file.write(f'{"," if i else ""}{{"ph":"X","name":"{kind} block.{at % 50}","cat":"{kind}","pid":{rank},"tid":{int(bool(axes))},'
                           f'"ts":{at * 10},"dur":{7 + at % 3},"args":{{{axes}"step":{at // 500},"microbatch":{at % 4}}}}}')
            file.write("]}")
        with browser.Browser() as chrome:
            self.report()
            plain = chrome.open(self.path("run/report.html"))
            self.assertEqual((chrome.console, plain["events"], plain["charts"], plain["rows"]), ([], 0, 5, 0))
            self.report("--simulated", self.path("large.json"))
            found = chrome.open(self.path("run/report.html"))
            self.assertEqual((chrome.console, found["events"]), ([], LARGE))
            chrome.value("view.showAll(); 0")
            chrome.frames()
            looked, rows, width, milliseconds = chrome.value("[check.looked, view.rows.length, view.plot, check.drawMs]")
            print(f"{LARGE} actions: ready in {found['readyMs']:.0f} ms, a frame in {milliseconds:.0f} ms looks at {looked}")
            self.assertLess(looked, rows * 2 * width)
            self.assertGreater(chrome.value("drawnPixels(view.canvas)"), 50000)


if __name__ == "__main__":
    unittest.main()
