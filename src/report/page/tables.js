/* Tables and bars. */

function row(cells, tag = "td", attributes = {}) {
  const made = element("tr", attributes);
  for (const cell of cells)
    made.append(cell instanceof Element && /^T[DH]$/.test(cell.tagName) ? cell : element(tag, {}, cell ?? ""));
  return made;
}

const SIDEWAYS = { tabindex: "0", role: "group", "aria-label": "a table that scrolls sideways" };

/* Tables that are wider than the page can be scrolled with the keyboard, and say that they
 * scroll. */
function watchWideTables() {
  for (const box of document.querySelectorAll(".wide"))
    if (!watchWideTables.seen.has(box)) {
      watchWideTables.seen.add(box);
      new ResizeObserver(() => {
        if (box.scrollWidth > box.clientWidth + 1)
          for (const [name, value] of Object.entries(SIDEWAYS))
            box.setAttribute(name, value);
        else
          for (const name of Object.keys(SIDEWAYS))
            box.removeAttribute(name);
      }).observe(box.firstElementChild);
    }
}
watchWideTables.seen = new WeakSet();

/* A longer text keeps its lines, and wraps. */
function textCell(text) {
  return typeof text === "string" && (text.length > 60 || text.includes("\n")) ? element("td", { class: "prose" }, text) : text;
}

/* Tables of texts. */
function drawTables(tables) {
  document.getElementById("tables").replaceChildren();
  for (const { title, lead, rows } of tables) {
    const [head, ...body] = rows, table = element("table", {}, element("thead", {}, row(head, "th")), element("tbody", {}, ...body.map(r => row(r.map(textCell)))));
    document.getElementById("tables").append(element("section", {}, element("h2", {}, title), element("p", { class: "lead" }, lead ?? ""),
                                                     ...(body.length > 0 ? [element("div", { class: "wide" }, table)] : [])));
  }
  check.tables = tables.length;
}

function key(colour) {
  return element("i", { class: "key", style: `background: ${colour}` });
}

/* Draws at most this many bars. */
const MOST_BARS = 96;

function firstOf(bars, count) {
  if (count > MOST_BARS)
    bars.append(element("span", { class: "muted" }, "…"), element("span", { class: "muted" }, `the first ${MOST_BARS} of ${count.toLocaleString("en-US")}`));
}

/* Persistent memory is blue, memory in transit orange, activations green. */
function memoryColour(kind, i) {
  const hue = /moment|master/.test(kind) ? "--weight" : /^parameters|in fp8/.test(kind) ? "--backward" : /tied gradients|^gradients$/.test(kind) ? "--forward"
    : /gathered|parts of|kept by|before their/.test(kind) ? "--gather" : /activations/.test(kind) ? "--update"
    : /gradients (until|between)/.test(kind) ? "--recompute" : /scratch|logits/.test(kind) ? "--exchange" : "--other";
  /* Neighbours of the same hue differ in strength. */
  return `color-mix(in srgb, var(${hue}) ${100 - 24 * (i % 3)}%, var(--panel))`;
}

function drawMemory(memory) {
  if (!memory || memory.ranks.length === 0)
    return;
  document.getElementById("memory").hidden = false;
  const hues = new Map(), colours = memory.kinds.map(kind => {
    const hue = memoryColour(kind, 0), seen = hues.get(hue) ?? 0;
    hues.set(hue, seen + 1);
    return memoryColour(kind, seen);
  });
  const totals = memory.ranks.map(r => r.planned.reduce((a, b) => a + b, 0));
  const most = Math.max(...totals, ...memory.ranks.map(r => Math.max(r.allocated ?? 0, r.resident ?? 0)));
  const scale = memory.capacity > 0 && memory.capacity < 8 * most ? Math.max(most, memory.capacity) : most;
  const bars = part("memory", ".bars"), over = i => memory.capacity > 0 && totals[i] > memory.capacity;
  memory.ranks.slice(0, MOST_BARS).forEach((rank, i) => {
    const bar = element("div", { class: "bar" });
    rank.planned.forEach((bytes, k) => {
      if (bytes > 0)
        bar.append(element("i", { style: `width: ${100 * bytes / scale}%; background: ${colours[k]}`, title: `${memory.kinds[k]}: ${bytesText(bytes)}` }));
    });
    const marks = [["allocated", rank.allocated, "allocated"], ["outside", rank.resident, "resident peak"], ["capacity", memory.capacity || null, "device memory"]];
    for (const [name, bytes, text] of marks)
      if (bytes !== null && bytes <= scale)
        bar.append(element("b", { class: name, style: `left: calc(${100 * bytes / scale}% - 2px)`, title: `${text}: ${bytesText(bytes)}` }));
    bars.append(element("span", {}, rank.label), bar, element("span", { class: over(i) ? "number over" : "number" }, bytesText(totals[i])));
  });
  firstOf(bars, memory.ranks.length);
  const measured = memory.ranks.some(r => r.allocated !== null);
  part("memory", ".lead").textContent = "The memory plan at each rank's peak, computed before the run."
    + (measured ? " A solid mark is what the trainer allocated on the device; a dotted one is the resident peak of the process, including program, libraries and staging buffers." : "")
    + (memory.capacity > 0 ? ` The device has ${bytesText(memory.capacity)}${totals.some((_, i) => over(i)) ? ": it does not fit" : ""}.` : "");
  memoryTable(memory, totals, colours);
}

function memoryTable(memory, totals, colours) {
  const table = part("memory", "table"), each = memory.ranks.length <= 8;
  const sum = list => list.reduce((a, b) => a + b, 0);
  const cells = values => {
    const known = values.filter(v => v !== null);
    if (each)
      return values.map(v => v === null ? "–" : bytesText(v));
    return known.length ? [Math.min(...known), sum(known) / known.length, Math.max(...known)].map(bytesText) : ["–", "–", "–"];
  };
  const heads = each ? memory.ranks.map(r => r.label) : ["least", "mean", "most"], head = element("thead"), body = element("tbody");
  head.append(row(["kind", ...heads, "share"], "th"));
  const all = sum(totals);
  memory.kinds.forEach((kind, k) => {
    const values = memory.ranks.map(r => r.planned[k]);
    if (sum(values) > 0)
      body.append(row([element("td", {}, key(colours[k]), kind), ...cells(values), percentText(sum(values) / all)]));
  });
  body.append(row(["planned", ...cells(totals), "100.0 %"], "td", { class: "sum gap" }));
  for (const [name, field] of [["allocated", "allocated"], ["resident peak of the process", "resident"]])
    if (memory.ranks.some(r => r[field] !== null)) {
      const values = memory.ranks.map(r => r[field]);
      body.append(row([name, ...cells(values), percentText(sum(values.map(v => v ?? 0)) / all)]));
    }
  table.append(head, body);
}

const SHARES = [["compute", "--backward"], ["exposed communication", "--scatter"], ["idle", "--idle"]];

function drawShares(timelines) {
  for (const timeline of timelines) {
    const steps = timeline.steps.length || 1, ranks = timeline.shares.map((s, i) => ({ ...s, ...timeline.ranks[i] }));
    const mean = field => ranks.reduce((sum, r) => sum + r[field] * r.stands_for, 0) / ranks.reduce((sum, r) => sum + r.seconds * r.stands_for, 0);
    const box = element("div", {}, element("h3", {}, `${timeline.name}: ${secondsText(ranks[0].seconds / steps)} per step`));
    box.append(element("p", { class: "muted" }, `${percentText(mean("compute"))} compute, ${percentText(mean("exposed"))} exposed communication, `
      + `${percentText(mean("idle"))} idle; ${percentText(mean("communication") - mean("exposed"))} of the time, communication overlaps with computation.`));
    const legend = element("ul", { class: "legend" });
    for (const [name, colour] of [...SHARES, ["hidden communication", "--gather"]])
      legend.append(element("li", {}, key(`var(${colour})`), name));
    const bars = element("div", { class: "bars", role: "group", "aria-label": "shares of ranks" });
    for (const r of ranks.slice(0, MOST_BARS)) {
      const bar = element("div", { class: "bar", title: `compute ${percentText(r.compute / r.seconds)}, exposed ${percentText(r.exposed / r.seconds)}, idle ${percentText(r.idle / r.seconds)}` });
      [r.compute, r.exposed, r.idle].forEach((s, i) => bar.append(element("i", { style: `width: ${100 * s / r.seconds}%; background: var(${SHARES[i][1]})` })));
      const thin = element("div", { class: "bar thin" }, element("i", { style: `width: ${100 * (r.communication - r.exposed) / r.seconds}%; background: var(--gather)` }));
      bars.append(element("span", { title: r.place ?? "" }, r.label), element("div", {}, bar, thin), element("span", { class: "number" }, percentText(r.compute / r.seconds)));
    }
    firstOf(bars, ranks.length);
    box.append(legend, bars);
    part("shares", ".parts").append(box);
  }
  const piped = timelines.some(t => t.traffic.some(row => ["send", "recv"].includes(row.kind)));
  part("shares", ".lead").textContent = "Shares of the time in which any rank executes a step. Communication is exposed while the same rank does not compute; "
    + "it includes waiting for later ranks. " + (piped ? "Waiting for a message from another stage counts as idle: the pipeline bubble. " : "")
    + "The figure on the right is the compute share.";
  document.getElementById("shares").hidden = timelines.length === 0;
}

function drawTraffic(timelines) {
  const busy = timelines.filter(t => t.traffic.length > 0);
  for (const timeline of busy) {
    const per = timeline.weight * (timeline.steps.length || 1), steps = timeline.steps.length || 1;
    const most = Math.max(...timeline.traffic.map(t => t.seconds)) || 1;
    const head = element("thead"), body = element("tbody");
    head.append(row(["axes", element("th", { class: "text" }, "kind"), "calls", "sent", "rate", "time", "exposed", ""], "th"));
    const groups = [...new Set(timeline.traffic.map(t => t.group))];
    for (const group of groups) {
      const lines = timeline.traffic.filter(t => t.group === group).sort((a, b) => b.seconds - a.seconds);
      const line = (t, name, kind, attributes) => {
        const meter = element("span", { class: "meter", title: `exposed ${secondsText(t.exposed / per)}, hidden ${secondsText(t.hidden / per)}` },
          element("i", { style: `width: ${100 * t.exposed / most}%; background: var(--scatter)` }),
          element("i", { style: `width: ${100 * t.hidden / most}%; background: var(--gather)` }));
        body.append(row([name, element("td", { class: "text" }, kind), short(t.count / per), bytesText(t.bytes / steps), t.seconds > 0 ? `${bytesText(t.bytes / t.seconds)}/s` : "–",
                         secondsText(t.seconds / per), secondsText(t.exposed / per), attributes ? "" : meter], "td", attributes));
      };
      lines.forEach((t, i) => line(t, i === 0 ? group : "", t.kind.replaceAll("_", "-")));
      const sum = lines.reduce((a, t) => ({ count: a.count + t.count, bytes: a.bytes + t.bytes, seconds: a.seconds + t.seconds, exposed: a.exposed + t.exposed,
                                        hidden: a.hidden + t.hidden }),
                               { count: 0, bytes: 0, seconds: 0, exposed: 0, hidden: 0 });
      if (lines.length > 1)
        line(sum, "", "together", { class: "sum" });
    }
    part("traffic", ".parts").append(element("div", { class: "wide" }, element("h3", {}, timeline.name), element("table", {}, head, body)));
  }
  part("traffic", ".lead").textContent = "Per step. Calls and times are averages per rank; sent is the total of all ranks; rate is what a rank sends while it communicates. "
    + "Bars: exposed time in the darker colour, time hidden by computation in the lighter; concurrent operations of a row count once.";
  document.getElementById("traffic").hidden = busy.length === 0;
}

class ActionTable {
  constructor(timelines) {
    this.both = timelines.length > 1;
    this.each = joinNames(timelines);
    this.layers = foldLayers(this.each);
    this.rows = this.each.length > 48 ? this.layers : this.each;
    this.sort = { field: "a", down: true };
    this.most = 24;
    this.words = "";
    document.getElementById("actions").hidden = this.rows.length === 0;
    const names = timelines.map(t => t.name);
    this.columns = [
      { text: "action", value: r => r.name, cell: r => element("td", {}, key(`var(${CLASSES[classOf(r.first)].colour})`), r.name) },
      { text: "calls", field: "calls", cell: r => short(r.calls) },
      { text: `${this.both ? names[0] + " " : "time "}per step`, field: "a", cell: r => r.a === null ? "–" : secondsText(r.a) },
    ];
    if (this.both)
      this.columns.push({ text: `${names[1]} per step`, field: "b", cell: r => r.b === null ? "–" : secondsText(r.b) },
                        { text: "difference", field: "gap", cell: r => r.gap === null ? "–" : `${r.gap < 0 ? "−" : "+"}${secondsText(Math.abs(r.gap))}` },
                        { text: `${names[1]} / ${names[0]}`, field: "ratio", cell: r => r.ratio === null ? "–" : short(r.ratio) });
    else
      this.columns.push({ text: "share", field: "share", cell: r => percentText(r.share) },
                        { text: "mean", field: "mean", cell: r => secondsText(r.mean) },
                        { text: "least", field: "least", cell: r => secondsText(r.least) },
                        { text: "most", field: "most", cell: r => secondsText(r.most) });
    this.columns.push({ text: "sent per step", field: "bytes", cell: r => r.bytes > 0 ? bytesText(r.bytes) : "" });
    part("actions", ".lead").textContent = `Calls and time are averages per rank.${this.both ? " An action that exists in only one of the two is marked –." : ""}`;
    this.tools();
    this.draw();
  }

  tools() {
    const input = element("input", { type: "search", placeholder: "find an action", "aria-label": "find an action" });
    input.addEventListener("input", () => {
      this.words = input.value.toLowerCase();
      this.draw();
    });
    this.all = element("button", { type: "button" });
    this.all.addEventListener("click", () => {
      this.most = this.most === Infinity ? 24 : Infinity;
      this.draw();
    });
    const fold = element("button", { type: "button", "aria-pressed": this.rows === this.layers }, "combine layers");
    fold.addEventListener("click", () => {
      this.rows = this.rows === this.layers ? this.each : this.layers;
      fold.setAttribute("aria-pressed", this.rows === this.layers);
      this.draw();
    });
    fold.hidden = this.layers.length === this.each.length;
    part("actions", ".tools").append(input, fold, this.all);
  }

  draw() {
    const { field, down } = this.sort, head = element("tr"), value = r => field ? r[field] ?? -Infinity : r.name;
    for (const column of this.columns) {
      const th = element("th", { "data-sort": column.field ?? "name", "aria-sort": column.field === field ? (down ? "descending" : "ascending") : null },
                         element("button", { type: "button", title: "sort" }, column.text));
      th.addEventListener("click", event => {
        this.sort = { field: column.field, down: column.field === field ? !down : column.field !== undefined };
        this.draw();
        if (event.detail === 0) /* by the keyboard, which stays there */
          part("actions", `th[data-sort=${column.field ?? "name"}] button`).focus();
      });
      head.append(th);
    }
    const found = this.rows.filter(r => r.name.toLowerCase().includes(this.words));
    found.sort((x, y) => (value(x) < value(y) ? -1 : value(x) > value(y) ? 1 : 0) * (down ? -1 : 1));
    const body = element("tbody");
    for (const r of found.slice(0, this.most))
      body.append(row(this.columns.map(column => column.cell(r))));
    part("actions", "table").replaceChildren(element("thead", {}, head), body);
    this.all.hidden = found.length <= 24;
    this.all.textContent = this.most === Infinity ? "show the first 24" : `show all ${found.length}`;
  }
}

/* Rows of one or two timelines by action name; times per step and rank. */
function joinNames(timelines) {
  const rows = new Map();
  timelines.forEach((timeline, i) => {
    const steps = timeline.steps.length || 1, per = timeline.weight * steps, all = timeline.names.reduce((sum, n) => sum + n.seconds, 0);
    for (const name of timeline.names) {
      if (!rows.has(name.name))
        rows.set(name.name, { name: name.name, first: { ...name, group: name.group ?? undefined }, calls: name.count / per, a: null, b: null, gap: null, ratio: null,
                              share: name.seconds / all, mean: name.seconds / name.count, least: name.least, most: name.most, bytes: name.bytes / steps });
      const r = rows.get(name.name);
      r[i === 0 ? "a" : "b"] = name.seconds / per;
      if (i === 1 && r.a !== null) {
        r.gap = r.b - r.a;
        r.ratio = r.a > 0 ? r.b / r.a : null;
      }
    }
  });
  return [...rows.values()];
}

/* Combines "forward block.7" and the like into one row, "forward block.*". */
function foldLayers(rows) {
  const folded = new Map(), sum = (a, b) => a === null || b === null ? a ?? b : a + b;
  for (const r of rows) {
    const name = r.name.replace(/\d+/g, "*"), old = folded.get(name);
    if (!old) {
      folded.set(name, { ...r, name });
      continue;
    }
    old.mean = (old.mean * old.calls + r.mean * r.calls) / (old.calls + r.calls);
    for (const field of ["calls", "a", "b", "share", "bytes"])
      old[field] = sum(old[field], r[field]);
    old.least = Math.min(old.least, r.least);
    old.most = Math.max(old.most, r.most);
    old.gap = old.a === null || old.b === null ? null : old.b - old.a;
    old.ratio = old.gap === null || !(old.a > 0) ? null : old.b / old.a;
  }
  return [...folded.values()];
}
