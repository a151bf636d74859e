#!/usr/bin/env python3
"""Measures how quickly the planner's page follows a slider: from its movement to the figures, and to
the drawn timeline, in headless Chromium.

  python3 bench/serve/planner.py [--quadrille PROGRAM] [--repeats 15] [--json FILE]

Bar: 200 ms on 1,024 GPUs. The table has the median and the fastest of the repeats, and in which part
the fastest was spent: the server (simulation, timeline), transfer with parsing, and drawing.
"""
import argparse
import json
import os
import statistics
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

COMMON = {"parallel.ranks": "1024", "data.seq": "8192", "train.precision": "bf16", "train.micro_batch": "1"}
# All have 64 micro-batches. The slider to move, and the two positions between which it moves.
LARGE = {"model.preset": "llama3.1-405b", "train.global_batch": "512", "parallel.tp": "8", "parallel.pp": "16"}
CASES = {
    "llama3.1-405b, tp 8, pp 16": (LARGE, "ZeRO stage", (0, 1)),
    "llama3.1-405b, tp 8, pp 16, ZeRO 2": ({**LARGE, "parallel.zero": "2"}, "recompute", (0, 1)),
    "llama3.1-70b, tp 8, pp 8": ({"model.preset": "llama3.1-70b", "train.global_batch": "1024", "parallel.tp": "8", "parallel.pp": "8"}, "ZeRO stage", (0, 1)),
    "llama3.1-8b, pp 16": ({"model.preset": "llama3.1-8b", "train.global_batch": "4096", "parallel.pp": "16"}, "ZeRO stage", (0, 1)),
    "llama3.1-8b, ZeRO 3": ({"model.preset": "llama3.1-8b", "train.global_batch": "65536", "parallel.zero": "3"}, "recompute", (0, 1)),
}
# Times of the parts of the last answer, and one movement.
WATCH = """(() => {
  live.api.ask = async function (path, options = {}) {
    const began = performance.now();
    const answer = await fetch(`/api/${path}`, { ...options, headers: { Authorization: `Bearer ${live.api.token}` }, cache: "no-store" });
    const head = performance.now(), data = JSON.parse(await answer.text());
    if (path === "step") {
      window.parts.server += head - began;
      window.parts.transfer += performance.now() - head;
    }
    if (!answer.ok)
      throw Object.assign(new Error(data.error), { status: answer.status });
    return data;
  };
})()"""
MOVE = """(async () => {
  const p = live.planner, before = p.answers, began = performance.now();
  window.parts = { server: 0, transfer: 0 };
  const control = [...document.querySelectorAll("#planner input[type=range]")].find(e => e.getAttribute("aria-label") === NAME);
  control.value = VALUE;
  control.dispatchEvent(new Event("input"));
  while (p.answers === before)
    await new Promise(done => setTimeout(done, 1));
  while (view.frame !== undefined) /* requested, not yet drawn */
    await new Promise(done => setTimeout(done, 1));
  return { figures: p.milliseconds, all: performance.now() - began, ...window.parts, events: p.step ? p.step.report.simulated.events : 0 };
})()"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quadrille", default=os.path.join(ROOT, "build", "release", "bin", "quadrille"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json")
    given = parser.parse_args()
    given.quadrille = os.path.abspath(given.quadrille)
    os.environ.update(QUADRILLE=given.quadrille, QUADRILLE_SOURCE=ROOT)
    sys.path.insert(0, os.path.join(ROOT, "tests", "support"))
    import browser  # pylint: disable=import-outside-toplevel
    import server  # pylint: disable=import-outside-toplevel
    rows = []
    with tempfile.TemporaryDirectory() as folder, server.Server(folder, ".") as s, browser.Browser(width=1280, height=900) as chrome:
        chrome.visit(s.url)
        chrome.until("typeof live !== 'undefined' && live?.polls > 0")
        chrome.value("document.querySelector('[data-page=planner]').click()")
        chrome.until("live.planner.answers > 0", 30)
        chrome.value(WATCH)
        for name, (keys, slider, positions) in CASES.items():
            state = json.dumps({**COMMON, **keys})
            chrome.value(f"window.parts = {{}}, live.planner.state = new Map(Object.entries({state})), live.planner.refresh(), live.planner.simulate()")
            chrome.until(f"live.planner.step?.simulation.model === '{keys['model.preset']}' && live.planner.step.report.simulated !== undefined", 60)
            moves = [chrome.value(MOVE.replace("NAME", json.dumps(slider)).replace("VALUE", str(positions[i % 2]))) for i in range(given.repeats)]
            fastest = min(moves, key=lambda move: move["all"])
            rows.append({"case": name, "events": fastest["events"], "figures": statistics.median(m["figures"] for m in moves),
                         "all": statistics.median(m["all"] for m in moves), "fastest": fastest})
    print(f"{'1,024 GPUs, 64 micro-batches':36} {'events':>8} {'figures':>8} {'all':>8} {'fastest':>8} {'server':>8} {'transfer':>8} {'drawing':>8}   ms")
    for row in rows:
        fast = row["fastest"]
        print(f"{row['case']:36} {row['events']:8,} {row['figures']:8.0f} {row['all']:8.0f} {fast['all']:8.0f} {fast['server']:8.0f} {fast['transfer']:8.0f} "
              f"{fast['all'] - fast['server'] - fast['transfer']:8.0f}")
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
