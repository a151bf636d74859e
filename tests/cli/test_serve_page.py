"""The pages of quadrille serve in a real browser: a run followed live, runs laid over each other, and
the planner against the command line.

ctest: timeout 300
ctest: processors 2
"""
import json
import os
import signal
import subprocess
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import browser  # noqa: E402
import program  # noqa: E402
import server  # noqa: E402

BUILT = json.loads(program.ProgramTest.run_anywhere("doctor", "--json").stdout)["serve_built"]
# QD_SERVE_PICTURES=folder: stores pictures of the pages there, for the documentation.
PICTURES = os.environ.get("QD_SERVE_PICTURES")
# QD_SERVE_SECONDS=120: how long the live run is followed.
SECONDS = float(os.environ.get("QD_SERVE_SECONDS", "3"))

LOSS = "Chart.all.find(c => c.name === 'loss')"
CONTRAST = """(() => {
    const parse = text => text.match(/[\\d.]+/g).map(Number);
    const bright = ([r, g, b]) => [r, g, b].map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const ground = e => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3] > 0) return c; }
        return [255, 255, 255]; };
    return [...document.querySelectorAll('h1, h2, p, td, th, button:not(:disabled), label, span, .name, .note, .value, output, legend')]
        .filter(e => e.offsetParent && e.textContent.trim() && [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()))
        .map(e => { const a = bright(parse(getComputedStyle(e).color)), b = bright(ground(e));
                    return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.tagName + ' ' + e.textContent.trim().slice(0, 30)]; })
        .filter(([ratio]) => ratio < 4.5);
})()"""


@unittest.skipUnless(BUILT, "built without libmicrohttpd")
@unittest.skipUnless(browser.find(), "chromium is not installed; tools/bootstrap.sh --if-possible chromium would do it")
class Page(program.ProgramTest):
    def start(self, *more):
        """A run that takes until it is stopped."""
        return subprocess.Popen([program.PROGRAM, *self.small("train.steps=200000", "data.seq=128", "train.global_batch=16", "run.dir=runs/live", *more)],
                                cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def end(self, run):
        run.send_signal(signal.SIGINT)
        run.wait(timeout=60)

    def lines(self, name="live"):
        try:
            with open(self.path(f"runs/{name}/metrics.jsonl"), "rb") as file:
                return file.read().count(b"\n")
        except OSError:
            return 0

    def shown(self, chrome):
        """Steps in the loss curve of the first run."""
        return chrome.value(f"{LOSS}?.list[0].x.length ?? 0")

    def followed(self, chrome, seconds):
        """Every line is on the page at most three seconds after it was written."""
        end, worst = time.monotonic() + seconds, 0.0
        while time.monotonic() < end:
            written, begin = self.lines(), time.monotonic()
            chrome.until(f"({LOSS}?.list[0].x.length ?? 0) >= {written}", 5)
            worst = max(worst, time.monotonic() - begin)
            time.sleep(0.1)
        self.assertLess(worst, 3.0)

    def picture(self, chrome, name):
        if PICTURES:
            chrome.ask("Emulation.setDeviceMetricsOverride", width=1280, height=1180, deviceScaleFactor=1, mobile=False)
            chrome.value("document.activeElement.blur(), new Promise(done => setTimeout(done, 500))")
            with open(os.path.join(PICTURES, name), "wb") as file:
                file.write(chrome.picture(whole=False))

    def test_live(self):
        os.makedirs(self.path("runs"))
        with server.Server(self.folder) as s, browser.Browser(width=1280, height=900) as chrome:
            chrome.visit(s.url)
            chrome.until("typeof live !== 'undefined' && live?.polls > 0")
            self.assertIn("No run", chrome.value("document.querySelector('#runs .lead').textContent"))
            self.assertEqual(chrome.value("location.hash"), "")
            chrome.value("window.loaded = 'once'")
            run = self.start()
            try:
                chrome.until(f"{LOSS}?.list[0].x.length > 3", 30)
                self.followed(chrome, SECONDS)
                self.assertEqual(chrome.value("document.querySelector('#runs .state').textContent"), "running")
                self.assertIn("200,000", chrome.value("document.querySelector('#runs tbody').textContent"))
            finally:
                self.end(run)
            chrome.until(f"{LOSS}.list[0].x.length === {self.lines()}", 5)
            kept = self.lines()
            self.other_run(chrome)
            run = self.start("--resume")
            try:
                program.wait_until(lambda: self.lines() > kept + 5, 30)
                self.followed(chrome, min(SECONDS, 3))
            finally:
                self.end(run)
            self.assertEqual(chrome.value("window.loaded"), "once")
            self.picture(chrome, "serve.png")
            self.looks(chrome)
            self.assertEqual((chrome.console, chrome.value("check.errors")), ([], []))
            chrome.value("location.reload()")
            chrome.until("typeof live !== 'undefined' && live?.polls > 0")  # the tab keeps the token

    def other_run(self, chrome):
        """A second run appears and is laid over the first, by keyboard."""
        self.ok(self.run_program(*self.small("train.steps=60", "train.lr=0.01", "run.dir=runs/other")))
        chrome.until("document.querySelectorAll('#runs tbody tr').length === 2")
        chrome.value("[...document.querySelectorAll('#runs input')].find(e => e.getAttribute('aria-label') === 'show other').focus()")
        chrome.press(" ", "Space", " ")
        chrome.until(f"{LOSS}.list.length === 2")
        self.assertEqual(chrome.value("document.activeElement.getAttribute('aria-label')"), "show other")
        series = chrome.value(f"{LOSS}.list.map(s => [s.name, s.x.length, s.colours[0]])")
        self.assertEqual(sorted(name for name, _, _ in series), ["live, training", "other, training"])
        self.assertEqual(len({colour for _, _, colour in series}), 2)
        wanted = [line["loss"] for line in self.metrics("runs/other")]
        self.assertEqual(chrome.value(f"[...{LOSS}.list.find(s => s.name.startsWith('other')).y]"), wanted)

    def looks(self, chrome):
        """Light and dark, wide and narrow: nothing overflows, and text has contrast."""
        grounds = set()
        for dark in (False, True):
            for width in (1280, 400):
                chrome.appearance(dark, width)
                chrome.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
                self.assertLessEqual(chrome.value("document.documentElement.scrollWidth"), width)
                self.assertEqual(chrome.value(CONTRAST), [], f"dark {dark}, {width} px")
                grounds.add(chrome.value("getComputedStyle(document.body).backgroundColor"))
        self.assertEqual(len(grounds), 2)
        chrome.appearance(False, 1280)

    def test_without_token(self):
        os.makedirs(self.path("runs"))
        with server.Server(self.folder) as s, browser.Browser() as chrome:
            chrome.visit(s.url.split("#")[0])
            self.assertIn("token", chrome.until("document.getElementById('notice')?.textContent"))
            chrome.visit(s.url.split("#")[0] + "#" + "0" * 32)
            chrome.value("location.reload()")
            self.assertIn("token", chrome.until("document.getElementById('notice')?.textContent"))
            self.assertEqual(chrome.value("document.querySelectorAll('#runs tbody tr').length"), 0)

    def slide(self, chrome, key, value):
        """Moves a slider, as a user does, and waits for the answer."""
        before = chrome.value("live.planner.answers")
        found = chrome.value(f"""(() => {{
            const slider = SLIDERS.find(([key]) => key === '{key}'), at = slider[2].indexOf('{value}');
            const control = [...document.querySelectorAll('#planner input[type=range]')].find(e => e.getAttribute('aria-label') === slider[1]);
            control.value = at;
            control.dispatchEvent(new Event('input'));
            return at;
        }})()""")
        self.assertGreaterEqual(found, 0, key)
        chrome.until(f"live.planner.answers > {before}", 30)

    def same(self, chrome):
        """The page shows the figures of the command line."""
        step = chrome.value("live.planner.step && {simulation: live.planner.step.simulation, yaml: live.planner.step.yaml}")
        if step is None:
            self.assertIn("This cannot run", chrome.value("document.querySelector('#planner .answer').textContent"))
            return False
        told = self.ok(self.run_program("simulate", self.write("run.yaml", step["yaml"]), "--cluster", "h100", "--json"))
        expected = json.loads(told.stdout)
        self.assertEqual({**step["simulation"], "wall_seconds": 0}, {**expected, "wall_seconds": 0})
        figures = dict(chrome.value("[...document.querySelectorAll('#summary .figure')].map(f => [f.querySelector('.name').textContent, "
                                    "f.querySelector('.value').textContent])"))
        self.assertEqual(figures["MFU"], f"{100 * expected['mfu']:.1f} %")
        return True

    def test_planner(self):
        os.makedirs(self.path("runs"))
        moves = [("parallel.tp", "2"), ("parallel.zero", "3"), ("train.micro_batch", "2"), ("train.recompute", "selective"), ("parallel.pp", "2"),
                 ("parallel.zero", "0"), ("parallel.cp", "2"), ("train.recompute", "full"), ("parallel.tp", "8"), ("parallel.ep", "2"), ("parallel.ep", "1"),
                 ("parallel.dp", "2"), ("parallel.dp", ""), ("parallel.pp", "4"), ("parallel.cp", "1")]
        with server.Server(self.folder) as s, browser.Browser(width=1280, height=900) as chrome:
            chrome.visit(s.url)
            chrome.until("typeof live !== 'undefined' && live?.polls > 0")
            chrome.value("document.querySelector('[data-page=planner]').click()")
            chrome.until("live.planner.answers > 0", 30)
            self.assertTrue(self.same(chrome))
            self.picture(chrome, "planner.png")
            possible = [self.slide(chrome, *move) or self.same(chrome) for move in moves]
            self.assertGreater(sum(possible), len(moves) // 2)
            self.assertLess(sum(possible), len(moves))  # ep of a model without experts
            for key in ("parallel.tp", "parallel.pp"):
                self.slide(chrome, key, "1")
            chrome.value("(() => { const e = document.querySelector('#planner select'); e.value = 'llama-small'; e.dispatchEvent(new Event('change')); })()")
            chrome.until("live.planner.step?.simulation.model === 'llama-small'")
            self.assertTrue(chrome.until("document.querySelectorAll('#timeline .legend li').length"))
            chrome.value("live.planner.why.click()")
            chrome.until("live.planner.found && !live.planner.why.disabled", 60)
            self.assertIn("first choice", chrome.value("document.querySelector('#planner .found').textContent"))
            before = chrome.value("live.planner.answers")
            chrome.value("document.querySelector('#planner .found button').click()")
            chrome.until(f"live.planner.answers > {before}", 30)
            self.assertTrue(self.same(chrome))
            self.assertEqual(chrome.value("live.planner.step.simulation.step_seconds"), chrome.value("live.planner.found.plan.choices[0].step_seconds"))
            self.looks(chrome)
            chrome.value("document.querySelector('[data-page=runs]').click()")
            self.assertTrue(chrome.value("document.getElementById('planner').hidden && !document.getElementById('runs').hidden"))
            self.assertEqual(([text for text in chrome.console if "422" not in text], chrome.value("check.errors")), ([], []))  # refused layouts


if __name__ == "__main__":
    unittest.main()
