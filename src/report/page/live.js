/* The page of `quadrille serve`: asks its server for runs and draws them with the code of the
 * report. The token comes from the address, behind '#', and is sent with every request. */

const POLL_MS = 1000;
const MOST_SHOWN = 8; /* runs laid over each other */

/* The token of the address, kept for reloads in this tab only, and removed from the address. */
function takeToken() {
  const given = location.hash.slice(1);
  try {
    if (/^[0-9a-f]{32}$/.test(given)) {
      sessionStorage.setItem("quadrille-token", given);
      history.replaceState(null, "", location.pathname);
    }
    return sessionStorage.getItem("quadrille-token") ?? "";
  } catch {
    return given;
  }
}

class Api {
  constructor() {
    this.token = takeToken();
  }

  async ask(path, options = {}) {
    const answer = await fetch(`/api/${path}`, { ...options, headers: { Authorization: `Bearer ${this.token}` }, cache: "no-store" });
    const data = await answer.json();
    if (!answer.ok)
      throw Object.assign(new Error(data.error ?? `the server answers ${answer.status}`), { status: answer.status });
    return data;
  }
}

/* A run that is shown: its curves so far. */
class Run {
  constructor(number) {
    this.number = number;
    this.restart();
  }

  restart() {
    this.epoch = "";
    this.rows = 0;
    this.version = -1;
    this.series = new Map();
    this.marks = [];
  }

  /* Adds an answer of the server; whether it contained points. */
  take(progress) {
    const fresh = progress.epoch !== this.epoch;
    if (fresh)
      this.series = new Map();
    readSeries(progress.series);
    for (const series of progress.series) {
      const key = `${series.chart}\n${series.name ?? ""}`, known = this.series.get(key);
      if (known && series.x.length === 0)
        continue;
      /* Rows by step are appended; curves with points of their own come whole. */
      if (known && known.x.length > 0 && series.x[0] > known.x[known.x.length - 1]) {
        series.x = joined(known.x, series.x);
        series.y = joined(known.y, series.y);
      }
      this.series.set(key, series);
    }
    const changed = fresh || progress.rows !== this.rows;
    Object.assign(this, { epoch: progress.epoch, rows: progress.rows, version: progress.version, figures: progress.figures, notes: progress.notes, marks: progress.marks ?? [] });
    return changed;
  }
}

function joined(a, b) {
  const all = new Float64Array(a.length + b.length);
  all.set(a);
  all.set(b, a.length);
  return all;
}

/* What a run is doing, from the age of its last line. */
function stateOf(entry) {
  if (entry.step === undefined)
    return "no step yet";
  if (entry.step >= entry.steps)
    return "finished";
  return entry.age < Math.max(15, 10 * (entry.step_seconds ?? 0)) ? "running" : "stopped";
}

function ageText(seconds) {
  if (seconds === undefined)
    return "–";
  if (seconds < 60)
    return `${Math.max(0, Math.round(seconds))} s ago`;
  if (seconds < 7200)
    return `${Math.round(seconds / 60)} min ago`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} days ago`;
}

class Live {
  constructor(api) {
    this.api = api;
    this.shown = new Map(); /* by number, in the order of their colours */
    this.current = null;    /* the number of the run whose figures, memory and timeline are shown */
    this.entries = [];
    this.polls = 0;
    this.active = true; /* not if another page is shown */
    this.drawnFigures = "";
    this.list = document.getElementById("runs");
    this.list.hidden = false;
    document.getElementById("title").textContent = "Runs";
  }

  async poll() {
    try {
      if (this.polls % 2 === 0)
        await this.readList();
      this.polls++;
      const changed = await Promise.all([...this.shown.values()].map(run => this.follow(run)));
      if (this.active && (changed.some(Boolean) || this.stale))
        this.drawCurves();
      if (this.active)
        await this.drawCurrent();
      this.say("");
    } catch (error) {
      this.say(error.status ? error.message : `no answer from the server: ${error.message}; trying again`);
    }
    check.polls = this.polls;
    setTimeout(() => this.poll(), document.hidden ? 5 * POLL_MS : POLL_MS);
  }

  /* Shows or hides the page. */
  activate(on) {
    this.active = on;
    this.list.hidden = !on;
    this.drawnReport = undefined;
    this.drawnFigures = "";
    updateCharts(new Map(), []);
    if (on) {
      drawReport({ title: "Runs", figures: [], notes: [], series: [] }, false);
      this.pollSoon();
    }
  }

  say(text) {
    const box = document.getElementById("notice");
    if (box.textContent !== text)
      box.textContent = text;
    box.hidden = text === "";
  }

  async readList() {
    this.entries = (await this.api.ask("runs")).runs;
    if (this.current === null && this.entries.length > 0) {
      const newest = this.entries.reduce((a, b) => (b.age ?? Infinity) < (a.age ?? Infinity) ? b : a);
      this.show(newest.run, true);
    }
    this.drawList();
  }

  /* Whether there is something new to draw. */
  async follow(run) {
    try {
      const changed = run.take(await this.api.ask(`progress?run=${run.number}&epoch=${run.epoch}&row=${run.rows}`));
      run.error = "";
      return changed;
    } catch (error) {
      if (error.status !== 422)
        throw error;
      run.error = error.message; /* its curves stay */
      return false;
    }
  }

  show(number, on) {
    if (on && !this.shown.has(number)) {
      if (this.shown.size >= MOST_SHOWN)
        return;
      const used = new Set([...this.shown.values()].map(run => run.colour)), run = new Run(number);
      run.colour = COLOURS.findIndex((_, i) => !used.has(i));
      this.shown.set(number, run);
    } else if (!on) {
      this.shown.delete(number);
    }
    if (!this.shown.has(this.current))
      this.current = on ? number : [...this.shown.keys()].pop() ?? null;
    this.stale = true;
  }

  select(number) {
    this.show(number, true);
    if (this.shown.has(number))
      this.current = number;
    this.drawnFigures = "";
    this.drawList();
    this.pollSoon();
  }

  /* Draws a selection without waiting for the next poll. */
  async pollSoon() {
    await Promise.all([...this.shown.values()].map(run => this.follow(run).catch(() => false)));
    if (!this.active)
      return;
    this.drawCurves();
    await this.drawCurrent().catch(() => {});
  }

  nameOf(number) {
    return this.entries.find(entry => entry.run === number)?.name ?? `run ${number}`;
  }

  drawList() {
    const head = element("thead"), body = element("tbody");
    head.append(row([element("th", {}, "run"), element("th", { class: "text" }, "state"), "step", "loss", "validation", "speed", "ranks", element("th", { class: "text" }, "model"), "written"], "th"));
    for (const entry of this.entries) {
      const shown = this.shown.get(entry.run), box = element("input", { type: "checkbox", "aria-label": `show ${entry.name}` });
      const name = element("button", { type: "button", class: "link", "aria-pressed": entry.run === this.current }, entry.name);
      box.checked = Boolean(shown);
      box.disabled = !shown && this.shown.size >= MOST_SHOWN;
      box.addEventListener("change", () => {
        this.show(entry.run, box.checked);
        this.drawnFigures = "";
        this.drawList();
        this.pollSoon();
      });
      name.addEventListener("click", () => this.select(entry.run));
      const colour = element("i", { class: "key", style: `background: var(${shown ? COLOURS[shown.colour][0] : "--idle"})` });
      const state = stateOf(entry);
      body.append(row([element("td", {}, element("label", {}, box, colour), name), element("td", { class: `text state ${state.split(" ")[0]}` }, shown?.error || state),
                       entry.step === undefined ? "–" : `${entry.step.toLocaleString("en-US")} of ${entry.steps.toLocaleString("en-US")}`,
                       entry.loss === undefined ? "–" : short(entry.loss, 4), entry.validation_loss === undefined ? "–" : short(entry.validation_loss, 4),
                       entry.tokens_per_second === undefined ? "–" : `${countText(entry.tokens_per_second)} tokens/s`,
                       entry.ranks > 0 ? String(entry.ranks) : "–", element("td", { class: "text" }, entry.model ?? ""), ageText(entry.age)]));
    }
    const focused = document.activeElement?.getAttribute("aria-label") ?? document.activeElement?.textContent;
    const table = this.list.querySelector("table"), kept = table.contains(document.activeElement);
    table.replaceChildren(head, body);
    if (kept) /* the keyboard stays where it was */
      [...table.querySelectorAll("input, button")].find(e => (e.getAttribute("aria-label") ?? e.textContent) === focused)?.focus();
    this.list.querySelector(".lead").textContent = this.entries.length > 0
      ? `Ticked runs are laid over each other, at most ${MOST_SHOWN}; click a name for its figures, memory and timeline.`
      : "No run has been found yet. It appears here when it starts.";
    check.runs = this.entries.length;
  }

  /* The curves of all shown runs, by chart. */
  drawCurves() {
    const charts = new Map(), several = this.shown.size > 1;
    this.stale = false;
    for (const run of this.shown.values()) {
      const name = this.nameOf(run.number), seen = new Map();
      for (const series of run.series.values()) {
        const nth = seen.get(series.chart) ?? 0;
        seen.set(series.chart, nth + 1);
        const label = several ? [name, series.name].filter(Boolean).join(", ") : series.name;
        const own = { ...series, name: label, colour: several ? run.colour : run.colour + nth, dashed: several && nth > 0 };
        charts.set(series.chart, [...(charts.get(series.chart) ?? []), own]);
      }
    }
    updateCharts(charts, [...this.shown.values()].flatMap(run => run.marks.map(mark => (
      { x: mark.x, text: several ? `${this.nameOf(run.number)} ${mark.text}` : mark.text }))).sort((p, q) => p.x - q.x));
  }

  /* Figures, memory and timeline of the current run. */
  async drawCurrent() {
    const run = this.shown.get(this.current);
    if (!run || run.error || run.figures === undefined) {
      if (this.drawnReport !== undefined && !run) {
        drawReport({ title: "Runs", figures: [], notes: [], series: [] }, false);
        this.drawnReport = undefined;
      }
      return;
    }
    const report = `${run.number} ${run.epoch.split("-")[0]} ${run.version}`;
    if (this.drawnReport !== report) {
      const fresh = await this.api.ask(`report?run=${run.number}`);
      if (this.current !== run.number || !this.active)
        return;
      this.drawnReport = report;
      this.drawnFigures = "";
      fresh.series = [];
      drawReport(readData(fresh), false);
    }
    const figures = JSON.stringify([run.number, run.figures, run.notes]);
    if (figures !== this.drawnFigures) {
      drawFigures(run.figures, run.notes);
      this.drawnFigures = figures;
    }
  }
}

/* The pages of the server. */
function startLive() {
  const api = new Api(), made = new Live(api), planner = new Planner(api), nav = document.getElementById("pages");
  made.planner = planner;
  if (!api.token) {
    made.say("The address lacks the token: open the one that quadrille serve has printed.");
    return made;
  }
  nav.hidden = false;
  for (const button of nav.querySelectorAll("button"))
    button.addEventListener("click", () => {
      for (const other of nav.querySelectorAll("button"))
        other.setAttribute("aria-pressed", other === button);
      const planning = button.dataset.page === "planner";
      made.activate(!planning);
      planner.activate(planning);
    });
  made.poll();
  return made;
}
