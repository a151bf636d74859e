/* The planner's page: a run and a layout as controls; the server simulates every change with the
 * code of `simulate` and searches with that of `plan`. */

const POWERS = Array.from({ length: 17 }, (_, i) => String(2 ** i));
/* Controls of the layout: [key, name, values]; "" leaves the key at its default. */
const SLIDERS = [
  ["parallel.dp", "data parallel", ["", ...POWERS.slice(0, 11)], "the rest"],
  ["parallel.tp", "tensor parallel", POWERS.slice(0, 7)],
  ["parallel.pp", "pipeline parallel", POWERS.slice(0, 8)],
  ["parallel.cp", "context parallel", POWERS.slice(0, 8)],
  ["parallel.ep", "expert parallel", POWERS.slice(0, 9)],
  ["parallel.zero", "ZeRO stage", ["0", "1", "2", "3"]],
  ["train.micro_batch", "micro-batch", ["", ...POWERS.slice(0, 8)], "whole batch"],
  ["train.recompute", "recompute", ["none", "selective", "full"]],
];
const NUMBERS = [["parallel.ranks", "GPUs"], ["train.global_batch", "global batch"], ["data.seq", "sequence length"]];
const START = [["model.preset", "llama3.1-8b"], ["parallel.ranks", "64"], ["train.global_batch", "128"], ["data.seq", "8192"], ["train.precision", "bf16"],
               ["parallel.zero", "1"], ["train.micro_batch", "1"]];

class Planner {
  constructor(api) {
    this.api = api;
    this.state = new Map(START);
    this.cluster = "h100";
    this.controls = new Map();
    this.section = document.getElementById("planner");
    this.answers = 0; /* simulated steps that were drawn */
  }

  async activate(on) {
    this.active = on;
    this.section.hidden = !on;
    if (!on)
      return;
    document.getElementById("title").textContent = "Planner";
    document.getElementById("subtitle").textContent = "";
    try {
      if (!this.keys)
        this.build(await this.api.ask("choices"));
      await this.simulate();
    } catch (error) {
      this.say(error.message, true);
    }
  }

  say(text, wrong = false) {
    const box = this.section.querySelector(".answer");
    box.textContent = text;
    box.classList.toggle("wrong", wrong);
  }

  /* Building the controls. */

  build(choices) {
    this.keys = new Map(choices.keys.map(key => [key.key, key]));
    const run = this.section.querySelector(".run"), layout = this.section.querySelector(".layout"), tools = this.section.querySelector(".tools");
    const presets = choices.presets.map(p => [p.name, `${p.name}: ${countText(p.parameters)} parameters`]);
    run.append(this.select("model.preset", "model", presets));
    const dimensions = element("details", {}, element("summary", {}, "dimensions that differ from the preset"));
    for (const key of choices.keys.filter(k => k.key.startsWith("model.")))
      dimensions.append(this.number(key.key, key.key.slice(6)));
    const cluster = this.choose("cluster", choices.clusters.map(name => [name, name]), value => { this.cluster = value; });
    cluster.control.value = this.cluster;
    run.append(dimensions, cluster.field, ...NUMBERS.map(([key, name]) => this.number(key, name)), this.enumerated("train.precision", "precision"),
               this.enumerated("train.optimizer", "optimizer"));
    layout.append(...SLIDERS.map(slider => this.slider(...slider)));
    const more = element("details", {}, element("summary", {}, "more"));
    for (const key of choices.keys.filter(k => k.layout && !SLIDERS.some(([name]) => name === k.key)))
      more.append(key.choices ? this.enumerated(key.key, key.key.split(".")[1].replaceAll("_", " ")) : this.number(key.key, key.key.split(".")[1].replaceAll("_", " ")));
    layout.append(more);
    this.find = this.button("find the best", () => this.search(false));
    this.why = this.button("why not this?", () => this.search(true));
    this.halt = this.button("stop", () => this.api.ask("stop", { method: "POST" }).catch(error => this.say(error.message, true)));
    this.copy = this.button("copy run.yaml", () => this.copyYaml());
    this.halt.disabled = true;
    tools.append(this.find, this.why, this.halt, this.copy);
    this.section.querySelector("form").addEventListener("submit", event => event.preventDefault());
    this.refresh();
  }

  button(text, action) {
    const made = element("button", { type: "button" }, text);
    made.addEventListener("click", action);
    return made;
  }

  field(name, control, help, output) {
    const label = element("label", { class: "field", title: help }, element("span", {}, name), control);
    if (output)
      label.append(output);
    return label;
  }

  choose(name, values, changed, help) {
    const control = element("select");
    control.append(...values.map(([value, text]) => element("option", { value }, text)));
    control.addEventListener("change", () => {
      changed(control.value);
      this.changed();
    });
    return { control, field: this.field(name, control, help) };
  }

  select(key, name, values) {
    const made = this.choose(name, values, value => this.set(key, value), this.keys.get(key)?.help);
    this.controls.set(key, () => { made.control.value = this.value(key); });
    return made.field;
  }

  enumerated(key, name) {
    return this.select(key, name, this.keys.get(key).choices.split("|").filter(word => word !== "file").map(word => [word, word]));
  }

  number(key, name) {
    const control = element("input", { type: "text", inputmode: "numeric", placeholder: key.startsWith("model.") ? "as the preset" : this.keys.get(key)?.default });
    control.addEventListener("change", () => {
      this.set(key, control.value.trim());
      this.changed();
    });
    this.controls.set(key, () => { control.value = this.state.get(key) ?? ""; });
    return this.field(name, control, this.keys.get(key)?.help);
  }

  slider(key, name, values, none) {
    const control = element("input", { type: "range", min: 0, max: values.length - 1, step: 1, "aria-label": name }), output = element("output");
    const show = () => {
      const value = this.value(key), text = value === "" || (value === "-1" && none) ? none : value;
      output.textContent = text;
      control.setAttribute("aria-valuetext", text);
    };
    control.addEventListener("input", () => {
      this.set(key, values[control.value]);
      show();
      this.changed();
    });
    this.controls.set(key, () => {
      control.value = Math.max(0, values.indexOf(this.value(key)));
      show();
    });
    return this.field(name, control, this.keys.get(key)?.help, output);
  }

  value(key) {
    const slider = SLIDERS.find(([name]) => name === key);
    return this.state.get(key) ?? (slider && slider[2][0] === "" ? "" : this.keys.get(key)?.default ?? "");
  }

  set(key, value) {
    if (value === "")
      this.state.delete(key);
    else
      this.state.set(key, value);
  }

  refresh() {
    for (const show of this.controls.values())
      show();
  }

  /* Asking the server. */

  request(layout = true) {
    const lines = [`cluster ${this.cluster}`];
    for (const [key, value] of this.state)
      if (layout || !this.keys.get(key)?.layout)
        lines.push(`${this.keys.get(key)?.layout ? "layout" : "set"} ${key}=${value}`);
    return lines.join("\n");
  }

  /* A control has been moved. While its predecessor is being answered, only the last change
   * waits. */
  changed() {
    if (this.asking)
      this.again = true;
    else
      this.simulate();
  }

  /* Figures and memory first; then the timeline, which may be large, unless there is a new
   * change. */
  async simulate() {
    const began = performance.now();
    this.abort?.abort(); /* the timeline of an earlier layout */
    const abort = this.abort = new AbortController(), body = this.request();
    this.asking = true;
    this.again = false;
    try {
      const step = await this.api.ask("step", { method: "POST", body, signal: abort.signal });
      const timeline = this.again ? null : this.askTimeline(body, this.pixels(), abort); /* computed while the figures are drawn */
      timeline?.catch(() => {}); /* handled below, where it is awaited */
      this.asking = false;
      this.draw(step, false);
      this.milliseconds = performance.now() - began;
      if (!timeline)
        return this.simulate();
      this.draw(await timeline, true);
      view.refine = (from, to, pixels) => this.refine(body, `${pixels} ${from} ${to}`, abort);
      this.wholeMilliseconds = performance.now() - began;
      this.answers++;
    } catch (error) {
      if (error.name === "AbortError")
        return; /* by a newer call, which is asking now */
      this.asking = false;
      if (this.again)
        return this.simulate();
      this.refused(error.message);
    }
  }

  /* The width of the timeline, for which the server merges what is narrower than a pixel. */
  pixels() {
    return Math.ceil((view?.plot > 0 ? view.plot : document.documentElement.clientWidth) * (window.devicePixelRatio || 1));
  }

  askTimeline(body, words, abort) {
    return this.api.ask("step", { method: "POST", body: `${body}\ntimeline ${words}`, signal: abort.signal });
  }

  /* A part of the timeline that is drawn, in more detail. */
  async refine(body, words, abort) {
    try {
      const step = await this.askTimeline(body, words, abort);
      if (this.active && this.abort === abort)
        view.replace(readData(step.report).simulated);
    } catch (error) {
      if (error.name !== "AbortError")
        this.say(error.message, true);
    }
  }

  /* whole: with its timeline; otherwise the previous one stays until that arrives. */
  draw(step, whole) {
    if (!this.active)
      return;
    this.step = step;
    if (whole) {
      drawReport(readData(step.report), false);
    } else {
      clear("memory");
      drawSummary(step.report);
      drawMemory(step.report.memory);
    }
    document.getElementById("title").textContent = "Planner";
    this.section.querySelector(".yaml pre").textContent = step.yaml;
    this.say(step.simulation.fits ? "" : "This layout does not fit into the memory of the accelerator.", !step.simulation.fits);
  }

  refused(message) {
    if (!this.active)
      return;
    this.step = null;
    drawReport({ title: "Planner", figures: [], notes: [], series: [] }, false);
    this.section.querySelector(".yaml pre").textContent = "";
    this.say(`This cannot run: ${message}`, true);
    this.answers++;
  }

  async copyYaml() {
    const text = this.step?.yaml ?? "";
    try {
      await navigator.clipboard.writeText(text);
      this.say("run.yaml is in the clipboard.");
    } catch { /* the browser does not allow it */
      this.section.querySelector(".yaml").open = true;
      getSelection().selectAllChildren(this.section.querySelector(".yaml pre"));
      this.say("The text below is selected: copy it.");
    }
  }

  /* Search. */

  async search(compared) {
    try {
      this.find.disabled = this.why.disabled = true;
      this.halt.disabled = false;
      this.section.querySelector(".found").replaceChildren();
      let state = await this.api.ask("search", { method: "POST", body: this.request(compared) });
      while (state.phase === "running") {
        const best = state.best ? `; the best so far takes ${secondsText(state.best_seconds)}: ${state.best}` : "";
        this.say(`Searching for ${short(state.seconds, 2)} s: ${state.tried} layouts fit, ${state.too_large} do not, ${state.refused} cannot be built${best}`);
        await new Promise(done => setTimeout(done, 300));
        state = await this.api.ask("search");
      }
      this.found = state;
      if (state.phase === "done")
        this.drawFound(state, compared);
      else
        this.say(state.error ?? "The search ended.", true);
    } catch (error) {
      this.say(error.message, true);
    }
    this.find.disabled = this.why.disabled = false;
    this.halt.disabled = true;
  }

  drawFound(state, compared) {
    const { plan, keys } = state, box = this.section.querySelector(".found"), head = element("thead"), body = element("tbody");
    head.append(row([element("th", {}, "layout"), "step", "MFU", "memory", element("th", { class: "text" }, "compared with the first it"), ""], "th"));
    plan.choices.slice(0, 10).forEach((choice, i) => {
      const use = this.button("use", () => this.use(keys[i]));
      body.append(row([element("td", { class: "text" }, choice.layout), secondsText(choice.step_seconds), percentText(choice.mfu), bytesText(choice.memory_bytes),
                       element("td", { class: "text" }, choice.loses), element("td", {}, use)]));
    });
    const reasons = element("ul", { class: "notes" }), against = compared ? plan.against : undefined;
    if (against)
      for (const text of against.possible ? [`This layout is ${percentText(Math.abs(against.behind))} ${against.behind < 0 ? "faster than" : "behind"} the first choice.`, ...against.why]
        : [`This layout cannot be built: ${against.refusal}`])
        reasons.append(element("li", {}, text));
    else
      for (const text of [...plan.reasons, plan.next])
        reasons.append(element("li", {}, text));
    box.replaceChildren(reasons, element("div", { class: "wide" }, element("table", {}, head, body)));
    this.say(`${plan.tried} layouts fit, ${plan.too_large} do not, ${plan.refused} cannot be built (${short(plan.wall_seconds, 2)} s)${plan.stopped ? "; not all were considered" : ""}.`);
  }

  /* Sets the layout to a choice of the search. */
  use(keys) {
    for (const [key, description] of this.keys)
      if (description.layout)
        this.state.delete(key);
    for (const [key, value] of Object.entries(keys))
      this.state.set(key, value);
    this.refresh();
    this.simulate();
  }
}
