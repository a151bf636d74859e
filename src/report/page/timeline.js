/* All ranks and streams over time, on a canvas; only the visible part is drawn. */

const GUTTER = 138, AXIS = 24, HEAD = 22;
const palettes = new Map(); /* resolved colours by theme */

/* State of a timeline in addition to its data. */
class Model {
  constructor(timeline) {
    this.timeline = timeline;
    this.classes = Uint8Array.from(timeline.actions, classOf);
    this.tracks = timeline.ranks.map(() => []); /* per rank */
    for (const { rank, stream, lane, first, count } of timeline.tracks) {
      if (lane === 0)
        this.tracks[rank].push({ rank, stream, lanes: [] });
      this.tracks[rank].at(-1).lanes.push(new Lane(timeline, this.classes, first, count));
    }
    this.waits = timeline.waited ? this.tracks.map(tracks => tracks.flatMap(track => track.lanes.map(lane => waitsOf(timeline, lane)))) : null; /* per rank */
    this.several = timeline.microbatch?.some(microbatch => microbatch > 0) ?? false;
    this.end = timeline.steps.reduce((end, step) => Math.max(end, step.end), 0);
    this.chosen = timeline.steps.length > 1 ? timeline.steps.length - 1 : 0;
  }

  /* The zero of the shared time scale. */
  get origin() { return this.timeline.steps[this.chosen]?.begin ?? 0; }
  get length() {
    const step = this.timeline.steps[this.chosen];
    return step ? step.end - step.begin : this.end;
  }
}

/* Labels for the box of an event, the longest first: "backward block.3 · 2", where 2 is the
 * micro-batch, down to "2". */
function labelsOf(model, event) {
  const { timeline } = model, action = timeline.actions[timeline.action[event]], microbatch = timeline.microbatch?.[event] ?? -1;
  const names = action.module === undefined ? [action.name] : [action.name, action.module];
  return model.several && microbatch >= 0 ? [...names.map(name => `${name} · ${microbatch}`), String(microbatch)] : names;
}

/* When a rank's computation waited for the exchanges of one lane: [begin, end, begin, end, …] in
 * order. */
function waitsOf(timeline, { first, count }) {
  const list = [];
  for (let i = first; i < first + count; i++)
    if (timeline.waited[i] > 0) {
      const end = timeline.begin[i] + timeline.seconds[i];
      list.push(end - timeline.waited[i], end);
    }
  return list;
}

class TimelineView {
  constructor(data) {
    this.models = [data.measured, data.simulated].filter(t => t && t.begin.length > 0).map(t => new Model(t));
    this.section = document.getElementById("timeline");
    if (this.models.length === 0)
      return;
    this.section.hidden = false;
    this.canvas = part("timeline", ".rows");
    this.overview = part("timeline", ".overview");
    this.scroll = part("timeline", ".scroll");
    this.space = part("timeline", ".space");
    this.mixed = false;
    this.hover = null;
    this.lead();
    this.tools();
    this.legend();
    this.layout();
    this.showStep();
    this.listen();
    const observer = new ResizeObserver(() => this.scroll.isConnected ? this.resize(false) : observer.disconnect());
    observer.observe(this.scroll);
    this.resize();
  }

  /* Controls and legend. */

  lead() {
    const [m] = this.models, t = m.timeline;
    const ranks = t.ranks.length, all = t.weight;
    const texts = this.models.map(model => {
      const line = model.timeline, steps = line.steps.length;
      return `${line.events.toLocaleString("en-US")} ${line.name} actions of ${steps} step${steps === 1 ? "" : "s"}`;
    });
    const folded = all > ranks ? `; ${ranks} of ${all.toLocaleString("en-US")} ranks are drawn, each representing identical ones` : "";
    part("timeline", ".lead").textContent = `${texts.join(", ")}${folded}.`;
  }

  tools() {
    const box = part("timeline", ".tools");
    const button = (text, title, action) => {
      const made = element("button", { type: "button", title }, text);
      made.addEventListener("click", action);
      box.append(made);
      return made;
    };
    this.selects = this.models.map(model => {
      const select = element("select", { title: `step of the ${model.timeline.name} timeline` });
      model.timeline.steps.forEach((step, i) => select.append(element("option", { value: i },
        `${this.models.length > 1 ? model.timeline.name + " " : ""}step ${step.step}, ${secondsText(step.end - step.begin)}`)));
      select.value = model.chosen;
      select.addEventListener("change", () => {
        model.chosen = Number(select.value);
        this.showStep();
      });
      box.append(select);
      return select;
    });
    button("this step", "0", () => this.showStep());
    button("whole trace", "f", () => this.showAll());
    button("−", "zoom out", () => this.zoom(2));
    button("+", "zoom in", () => this.zoom(0.5));
    if (this.models.length > 1) {
      const mix = button("rank by rank", "show each rank's timelines next to each other", () => {
        this.mixed = !this.mixed;
        mix.setAttribute("aria-pressed", this.mixed);
        this.layout();
        this.resize();
      });
      mix.setAttribute("aria-pressed", false);
    }
    this.span = element("span", { class: "muted" });
    box.append(element("span", { class: "spring" }), this.span);
  }

  legend() {
    const used = new Set(this.models.flatMap(model => [...model.classes]));
    part("timeline", ".legend").append(...CLASSES.flatMap((c, i) =>
      used.has(i) ? [element("li", {}, element("i", { class: "key", style: `background: var(${c.colour})` }), c.name)] : []));
  }

  /* Rows. */

  layout() {
    const ranks = this.models.reduce((sum, model) => sum + model.timeline.ranks.length, 0);
    const tall = ranks <= 16 ? 20 : ranks <= 64 ? 13 : 8, gap = ranks <= 64 ? 8 : 3;
    this.rows = [];
    this.heads = [];
    let y = AXIS + 4;
    const add = (model, index, named) => {
      const tracks = model.tracks[index], top = y;
      for (const track of tracks) {
        const busy = model.timeline.actions[model.timeline.action[track.lanes[0].first]];
        const talks = busy?.group !== undefined, high = talks ? Math.max(4, Math.round(tall * 0.62)) : tall;
        for (const lane of track.lanes) {
          this.rows.push({ model, track, lane, y, height: high, talks });
          y += high + 1;
        }
      }
      const least = tall >= 13 ? 30 : 0;
      y = Math.max(y, tracks.length ? top + least : y);
      if (tracks.length)
        this.heads.push({ rank: model.timeline.ranks[index], y: top, height: y - top, tall, model, named });
      y += tracks.length ? gap : 0;
    };
    const head = model => {
      if (this.models.length > 1 && !this.mixed) {
        this.heads.push({ title: model.timeline.name, y });
        y += HEAD;
      }
    };
    if (this.mixed) {
      const most = Math.max(...this.models.map(model => model.timeline.ranks.length));
      for (let i = 0; i < most; i++)
        for (const model of this.models)
          if (i < model.timeline.ranks.length)
            add(model, i, true);
    } else {
      for (const model of this.models) {
        head(model);
        model.timeline.ranks.forEach((_, i) => add(model, i, false));
      }
    }
    this.content = y + 4;
  }

  /* redraw: even if the size is what it was. */
  resize(redraw = true) {
    this.space.style.height = `${this.content}px`;
    this.width = this.scroll.clientWidth;
    const most = parseFloat(getComputedStyle(this.scroll).maxHeight) || 700;
    this.height = Math.min(this.content, most - 2);
    const size = [this.width, this.height, this.section.clientWidth, window.devicePixelRatio].join();
    if (size === this.size)
      return redraw ? this.request() : undefined;
    this.size = size;
    for (const [canvas, height] of [[this.canvas, this.height], [this.overview, 34]]) {
      const ratio = window.devicePixelRatio || 1, width = canvas === this.overview ? this.section.clientWidth : this.width;
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.height = `${height}px`;
      canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    }
    this.colours();
    this.request();
  }

  /* A canvas does not resolve CSS variables: done once per theme. */
  colours() {
    const theme = `${document.documentElement.dataset.theme} ${matchMedia("(prefers-color-scheme: dark)").matches}`;
    if (!palettes.has(theme)) {
      const probe = element("i");
      document.body.append(probe);
      const resolve = name => {
        probe.style.color = `var(${name})`;
        return getComputedStyle(probe).color;
      };
      const paint = CLASSES.map(c => resolve(c.colour));
      /* Black or white, whichever has more contrast: they have the same at a luminance of 0.18. */
      const ink = paint.map(colour => luminance(colour) > 0.18 ? "rgb(0,0,0)" : "rgb(255,255,255)");
      const tone = Object.fromEntries(["ink", "muted", "line", "band", "panel", "accent", "ground"].map(name => [name, resolve(`--${name}`)]));
      palettes.set(theme, { paint, ink, tone });
      probe.remove();
    }
    Object.assign(this, palettes.get(theme));
  }

  /* The visible window, in seconds from each model's origin. */

  showStep() {
    const longest = Math.max(...this.models.map(model => model.length)) || 1e-6;
    this.set(-longest * 0.012, longest * 1.012);
  }

  showAll() {
    const from = Math.min(...this.models.map(model => -model.origin)), to = Math.max(...this.models.map(model => model.end - model.origin));
    this.set(from - (to - from) * 0.006, to + (to - from) * 0.006);
  }

  set(t0, t1) {
    const least = 1e-8;
    if (t1 - t0 < least) {
      const middle = (t0 + t1) / 2;
      [t0, t1] = [middle - least / 2, middle + least / 2];
    }
    this.t0 = t0;
    this.t1 = t1;
    this.request();
    this.askForDetail();
  }

  /* Where the visible part was merged for a coarser view, asks `refine(from, to, pixels)` for it,
   * with some of its surroundings, once the user has stopped moving. */
  askForDetail() {
    const [model] = this.models, { detail } = model.timeline;
    clearTimeout(this.asking);
    if (!this.refine || !detail)
      return;
    const from = Math.max(0, this.t0 + model.origin), to = Math.min(model.end, this.t1 + model.origin), ratio = window.devicePixelRatio || 1;
    const here = from >= detail.from && to <= detail.to ? detail.inside : detail.outside;
    if (to > from && here * this.plot * ratio > 2.1 * (this.t1 - this.t0)) {
      const length = to - from, wide = [Math.max(0, from - length / 2), Math.min(model.end, to + length / 2)];
      this.asking = setTimeout(() => this.refine(...wide, Math.ceil((wide[1] - wide[0]) / (this.t1 - this.t0) * this.plot * ratio)), 60);
    }
  }

  /* The same timeline in another detail: what is visible stays. */
  replace(timeline) {
    const model = new Model(timeline);
    model.chosen = this.models[0].chosen;
    this.models[0] = model;
    this.tip(null);
    this.layout();
    this.request();
  }

  /* Zooms around a position, as a share of the width. */
  zoom(factor, share = 0.5) {
    const whole = Math.max(...this.models.map(model => model.end)) * 1.5 || 1;
    const length = Math.min(whole, (this.t1 - this.t0) * factor), middle = this.t0 + (this.t1 - this.t0) * share;
    this.set(middle - length * share, middle + length * (1 - share));
  }

  pan(share) {
    const by = (this.t1 - this.t0) * share;
    this.set(this.t0 + by, this.t1 + by);
  }

  get plot() { return this.width - GUTTER - 10; }
  x(time) { return GUTTER + (time - this.t0) / (this.t1 - this.t0) * this.plot; }
  time(x) { return this.t0 + (x - GUTTER) / this.plot * (this.t1 - this.t0); }

  /* Drawing. */

  request() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = undefined;
      this.draw();
    });
  }

  draw() {
    if (!this.width || this.width < GUTTER + 60)
      return;
    const start = performance.now(), g = this.canvas.getContext("2d"), top = this.scroll.scrollTop;
    g.clearRect(0, 0, this.width, this.height);
    this.looked = 0;
    g.save();
    g.beginPath();
    g.rect(0, AXIS, this.width, this.height - AXIS);
    g.clip();
    this.drawHeads(g, top);
    this.drawGrid(g);
    g.beginPath();
    g.rect(GUTTER, AXIS, this.plot, this.height - AXIS);
    g.clip();
    for (const row of this.rows)
      if (row.y - top + row.height > AXIS && row.y - top < this.height) {
        this.drawRow(g, row, row.y - top);
        this.drawWaits(g, row, row.y - top);
      }
    g.restore();
    this.drawAxis(g);
    this.drawOverview();
    this.span.textContent = `${secondsText(this.t1 - this.t0)} across`;
    check.draws++;
    check.drawMs = performance.now() - start;
    check.looked = this.looked;
  }

  drawHeads(g, top) {
    g.textBaseline = "middle";
    for (const head of this.heads) {
      const y = head.y - top;
      if (y > this.height || y + (head.height ?? HEAD) < AXIS)
        continue;
      if (head.title) {
        g.font = "600 13px system-ui, sans-serif";
        g.fillStyle = this.tone.ink;
        g.fillText(head.title, 12, y + HEAD / 2);
        continue;
      }
      g.fillStyle = this.tone.band;
      g.fillRect(GUTTER, y, this.plot, head.height);
      const folded = head.rank.stands_for > 1 ? ` ×${head.rank.stands_for.toLocaleString("en-US")}` : "";
      const name = head.named && head.tall < 13 ? "" : head.named ? head.model.timeline.name : head.rank.place;
      const small = head.height < 12;
      if (small && head.y % 2 && this.heads.length > 200)
        continue;
      g.font = `${small ? 9 : 12}px system-ui, sans-serif`;
      g.fillStyle = this.tone.ink;
      g.fillText(clip(g, head.rank.label + folded, GUTTER - 20), 12, y + Math.min(head.height / 2, 9));
      if (name && head.height >= 26) {
        g.font = "11px system-ui, sans-serif";
        g.fillStyle = this.tone.muted;
        g.fillText(clip(g, name, GUTTER - 20), 12, y + 23);
      }
    }
  }

  ticks() {
    return ticks(this.t0, this.t1, Math.max(2, this.plot / 110)).filter(t => this.x(t) >= GUTTER && this.x(t) <= this.width - 12);
  }

  drawGrid(g) {
    g.fillStyle = this.tone.line;
    for (const t of this.ticks())
      g.fillRect(Math.round(this.x(t)), AXIS, 1, this.height);
    if (this.models.length > 1)
      return;
    g.fillStyle = this.tone.muted;
    for (const step of this.models[0].timeline.steps) {
      const x = this.x(step.begin - this.models[0].origin);
      if (x >= GUTTER && x < this.width - 10)
        g.fillRect(Math.round(x), AXIS - 6, 1, this.height);
    }
  }

  drawAxis(g) {
    g.fillStyle = this.tone.panel;
    g.fillRect(0, 0, this.width, AXIS);
    g.fillStyle = this.tone.line;
    g.fillRect(0, AXIS - 1, this.width, 1);
    g.font = "11px system-ui, sans-serif";
    g.textBaseline = "middle";
    g.fillStyle = this.tone.muted;
    const list = this.ticks(), step = list.length > 1 ? list[1] - list[0] : this.t1 - this.t0;
    for (const t of list) {
      const text = timeText(t, step);
      g.fillText(text, this.x(t) - g.measureText(text).width / 2, AXIS / 2);
    }
    if (this.models.length === 1) {
      const steps = this.models[0].timeline.steps, number = steps[this.models[0].chosen]?.step;
      g.fillText(`in step ${number}`, 12, AXIS / 2);
    }
  }

  drawRow(g, row, y) {
    const { lane, model } = row, origin = model.origin, scale = this.plot / (this.t1 - this.t0), left = GUTTER - this.t0 * scale;
    const { action, actions, microbatch } = model.timeline, pick = this.hover;
    let past = -1; /* blocks narrower than a pixel are drawn once per pixel */
    g.font = "11px system-ui, sans-serif";
    g.textBaseline = "middle";
    lane.visit(this.t0 + origin, this.t1 + origin, 1.4 / scale, (i, begin, end) => {
      const from = Math.max(GUTTER - 2, left + (begin - origin) * scale), to = Math.min(this.width, left + (end - origin) * scale);
      const kind = lane.classAt(i), at = lane.first + i, id = action[at];
      const width = Math.max(1, to - from - (to - from > 4 ? 0.7 : 0));
      const picked = pick && pick.name === actions[id].name && pick.microbatch === (microbatch?.[at] ?? -1);
      g.fillStyle = this.paint[kind];
      g.globalAlpha = pick && !picked ? 0.38 : 1;
      g.fillRect(from, y, width, row.height);
      const text = width > 11 && row.height >= 12 ? labelsOf(model, at).find(label => this.textWidth(g, label) <= width - 5) : undefined;
      if (text) {
        g.fillStyle = this.ink[kind];
        g.fillText(text, from + 3, y + row.height / 2 + 0.5);
      }
      if (picked && width > 2) {
        g.strokeStyle = this.tone.ink;
        g.strokeRect(from + 0.5, y + 0.5, width - 1, row.height - 1);
      }
      g.globalAlpha = 1;
      this.looked++;
    }, (begin, end, kind, share) => {
      const x = left + (begin - origin) * scale, pixel = Math.floor(x);
      this.looked++;
      if (pixel === past && end - begin < 0.5 / scale)
        return;
      past = pixel;
      g.fillStyle = this.paint[kind];
      g.globalAlpha = (pick ? 0.38 : 1) * (0.3 + 0.7 * share);
      g.fillRect(x, y, Math.max(1, (end - begin) * scale), row.height);
      g.globalAlpha = 1;
    });
  }

  /* Width in the font of actions; cached, because measuring is slow and there are few distinct
   * texts. */
  textWidth(g, text) {
    this.widths ??= new Map();
    if (!this.widths.has(text))
      this.widths.set(text, g.measureText(text).width);
    return this.widths.get(text);
  }

  /* Fades the parts of a rank's computation in which it waits; parts narrower than a pixel are not
   * visible. */
  drawWaits(g, row, y) {
    const origin = row.model.origin, scale = this.plot / (this.t1 - this.t0);
    if (!row.model.waits || row.talks)
      return;
    g.fillStyle = this.tone.panel;
    g.globalAlpha = 0.66;
    for (const list of row.model.waits[row.track.rank]) {
      let low = 0, high = list.length / 2;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (list[2 * middle + 1] < this.t0 + origin)
          low = middle + 1;
        else
          high = middle;
      }
      for (let i = low, drawn = 0; 2 * i < list.length && list[2 * i] < this.t1 + origin && drawn < 4 * this.plot; i++, drawn++)
        if ((list[2 * i + 1] - list[2 * i]) * scale >= 0.7)
          g.fillRect(this.x(list[2 * i] - origin), y + row.height * 0.72, (list[2 * i + 1] - list[2 * i]) * scale, row.height * 0.28);
    }
    g.globalAlpha = 1;
  }

  /* The first rank over the whole trace, with the visible window marked. */
  drawOverview() {
    const g = this.overview.getContext("2d"), width = this.overview.clientWidth, [model] = this.models;
    const scale = (width - GUTTER - 10) / (model.end || 1), x = t => GUTTER + t * scale;
    g.clearRect(0, 0, width, 34);
    g.fillStyle = this.tone.band;
    g.fillRect(GUTTER, 2, width - GUTTER - 10, 26);
    g.font = "11px system-ui, sans-serif";
    g.textBaseline = "middle";
    g.fillStyle = this.tone.muted;
    g.fillText("whole trace", 12, 15);
    let y = 4;
    for (const track of model.tracks[0].slice(0, 2)) {
      track.lanes[0]?.visit(0, model.end, 1.2 / scale, (i, begin, end) => {
        g.fillStyle = this.paint[track.lanes[0].classAt(i)];
        g.fillRect(x(begin), y, Math.max(1, (end - begin) * scale), 10);
      }, (begin, end, kind, share) => {
        g.fillStyle = this.paint[kind];
        g.globalAlpha = 0.3 + 0.7 * share;
        g.fillRect(x(begin), y, Math.max(1, (end - begin) * scale), 10);
        g.globalAlpha = 1;
      });
      y += 11;
    }
    const from = Math.max(GUTTER, x(this.t0 + model.origin)), to = Math.min(width - 10, x(this.t1 + model.origin));
    g.strokeStyle = this.tone.accent;
    g.lineWidth = 1.5;
    g.strokeRect(from, 1.5, Math.max(2, to - from), 28);
    g.lineWidth = 1;
  }

  /* Mouse, touch and keyboard. */

  listen() {
    const canvas = this.canvas;
    let drag = null;
    this.scroll.addEventListener("scroll", () => this.request());
    canvas.addEventListener("wheel", event => this.wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", event => {
      drag = { x: event.clientX, t0: this.t0, t1: this.t1 };
      canvas.setPointerCapture(event.pointerId);
      canvas.classList.add("moving");
      this.tip(null);
    });
    canvas.addEventListener("pointermove", event => {
      if (!drag)
        return this.point(event);
      const by = (drag.x - event.clientX) / this.plot * (drag.t1 - drag.t0);
      this.set(drag.t0 + by, drag.t1 + by);
    });
    for (const name of ["pointerup", "pointercancel"])
      canvas.addEventListener(name, () => {
        drag = null;
        canvas.classList.remove("moving");
      });
    canvas.addEventListener("pointerleave", () => this.tip(null));
    canvas.addEventListener("dblclick", event => this.zoom(0.4, this.shareOf(event)));
    this.scroll.addEventListener("keydown", event => this.key(event));
    const jump = event => {
      const [model] = this.models, box = this.overview.getBoundingClientRect();
      const t = (event.clientX - box.left - GUTTER) / (box.width - GUTTER - 10) * model.end - model.origin, half = (this.t1 - this.t0) / 2;
      this.set(t - half, t + half);
    };
    this.overview.addEventListener("pointerdown", event => {
      this.overview.setPointerCapture(event.pointerId);
      jump(event);
    });
    this.overview.addEventListener("pointermove", event => event.buttons && jump(event));
  }

  shareOf(event) {
    return (event.clientX - this.canvas.getBoundingClientRect().left - GUTTER) / this.plot;
  }

  /* A plain wheel event scrolls the page and the rows. */
  wheel(event) {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      this.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY * 0.004))), this.shareOf(event));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      this.pan((event.deltaX || event.deltaY) / this.plot);
    }
  }

  key(event) {
    const actions = {
      ArrowLeft: () => this.pan(-0.15), ArrowRight: () => this.pan(0.15), "+": () => this.zoom(0.6), "=": () => this.zoom(0.6),
      "-": () => this.zoom(1.6), 0: () => this.showStep(), f: () => this.showAll(),
    };
    if (!actions[event.key] || event.ctrlKey || event.metaKey)
      return;
    event.preventDefault();
    actions[event.key]();
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top + this.scroll.scrollTop;
    const row = x > GUTTER && y - this.scroll.scrollTop > AXIS ? this.rows.find(r => y >= r.y - 1 && y < r.y + r.height + 1) : undefined;
    const i = row ? row.lane.find(this.time(x) + row.model.origin, 3 * (this.t1 - this.t0) / this.plot) : -1;
    this.tip(i >= 0 ? { row, id: row.lane.first + i } : null, event);
  }

  tip(found, event) {
    const box = document.getElementById("tip");
    const t = found?.row.model.timeline;
    const hover = found ? { name: t.actions[t.action[found.id]].name, microbatch: t.microbatch?.[found.id] ?? -1 } : null;
    if (hover?.name !== this.hover?.name || hover?.microbatch !== this.hover?.microbatch) {
      this.hover = hover;
      this.request();
    }
    box.hidden = !found;
    if (!found)
      return;
    box.replaceChildren(...eventText(found.row.model, found.row.track, found.id));
    const { width, height } = box.getBoundingClientRect();
    box.style.left = `${Math.max(8, Math.min(window.innerWidth - width - 12, event.clientX + 14))}px`;
    box.style.top = `${event.clientY + 18 + height > window.innerHeight ? Math.max(8, event.clientY - height - 12) : event.clientY + 18}px`;
  }
}

/* Relative luminance of a colour such as rgb(0, 114, 178). */
function luminance(colour) {
  const [r, g, b] = colour.match(/[\d.]+/g).map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

/* Tooltip of an action. */
function eventText(model, track, id) {
  const t = model.timeline, action = t.actions[t.action[id]], rank = t.ranks[track.rank], seconds = t.seconds[id], step = t.steps[t.step[id]];
  const merged = t.merged?.[id] ?? 1;
  const rows = [
    ["rank", [rank.label, rank.place, rank.stands_for > 1 ? `represents ${rank.stands_for.toLocaleString("en-US")}` : ""].filter(Boolean).join(", ")],
    ["stream", t.streams[track.stream]],
    ["step", `${step.step}, ${secondsText(Math.max(0, t.begin[id] - step.begin))} after it began`],
    ["micro-batch", t.microbatch?.[id] >= 0 ? t.microbatch[id] : undefined],
    [merged > 1 ? "take" : "took", merged > 1 ? `${secondsText(seconds * t.share[id])} of ${secondsText(seconds)}` : secondsText(seconds)],
    ["waited for", t.waited?.[id] > 0 ? secondsText(t.waited[id]) : undefined],
    ["axes", action.group],
    ["sent", merged === 1 && action.bytes && action.group !== undefined ? `${bytesText(action.bytes / t.world)} per rank` : undefined],
    ["exchanged", merged === 1 && action.bytes && action.group === undefined ? `${bytesText(action.bytes / t.world)} per rank` : undefined],
    ["computed", merged === 1 && action.flops ? `${countText(action.flops)}FLOP, ${countText(action.flops / seconds)}FLOP/s` : undefined],
  ];
  const body = element("tbody");
  for (const [name, value] of rows)
    if (value !== undefined && value !== null && value !== "")
      body.append(element("tr", {}, element("td", {}, name), element("td", {}, String(value))));
  const key = element("i", { class: "key", style: `background: var(${CLASSES[model.classes[t.action[id]]].colour})` });
  const name = merged > 1 ? `${merged} short actions, mostly ${action.kind.replaceAll("_", "-")}` : action.name;
  return [element("strong", {}, key, name, document.createTextNode(t.name === "measured" ? "" : ` (${t.name})`)), element("table", {}, body)];
}

/* As much of a text as fits. */
function clip(g, text, width) {
  if (g.measureText(text).width <= width)
    return text;
  let length = text.length;
  while (length > 1 && g.measureText(text.slice(0, length) + "…").width > width)
    length--;
  return text.slice(0, length) + "…";
}

function timeText(seconds, step) {
  const [factor, unit] = step >= 0.5 ? [1, "s"] : step >= 5e-4 ? [1e3, "ms"] : step >= 5e-7 ? [1e6, "µs"] : [1e9, "ns"];
  const places = Math.max(0, -Math.floor(Math.log10(step * factor) + 1e-9));
  return `${(seconds * factor).toFixed(Math.min(3, places)).replace(/^-(0\.?0*)$/, "$1")} ${unit}`;
}
