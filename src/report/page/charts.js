/* Curves as SVG. A curve with more points than pixels is drawn as the value range of each pixel. */

const MARGIN = { left: 64, right: 10, top: 12, bottom: 38 };
/* Curves with twice as many points get a running mean over 1/RUNNING of them, see meanOf. */
const RUNNING = 60;
const COLOURS = [["--accent", "--accent-soft"], ["--second", "--second-soft"], ["--third", "--third-soft"], ["--fourth", "--fourth-soft"],
                 ["--fifth", "--fifth-soft"], ["--sixth", "--sixth-soft"], ["--seventh", "--seventh-soft"], ["--muted", "--other"]];

/* The validation losses of a run are dashed, in the colour of the run. */
const VALIDATION = /, validation$/;

class Chart {
  constructor(name, list, size, marks) {
    this.name = name;
    this.read = element("span", { class: "read" });
    this.svg = drawn("svg", { role: "img", "aria-label": name });
    this.head = element("div", { class: "head" }, element("h3", {}, name), this.read);
    this.box = element("div", { class: `chart ${size}` }, this.head, this.svg);
    this.take(list, marks);
    this.svg.addEventListener("pointermove", event => this.point(event));
    this.svg.addEventListener("pointerleave", () => Chart.show(null, null));
    new ResizeObserver(() => this.draw()).observe(this.svg);
    Chart.all.push(this);
    this.say(null);
  }

  take(list, marks) {
    this.list = list;
    this.marks = list[0].x_name === "step" ? marks : [];
    this.unit = list[0].unit ?? "";
    const runs = [...new Set(list.map(series => (series.name ?? "").replace(VALIDATION, "")))];
    for (const series of list) {
      series.mean = meanOf(series);
      series.colours = COLOURS[(series.colour ?? runs.indexOf((series.name ?? "").replace(VALIDATION, ""))) % COLOURS.length];
      series.dashes = series.dashed || VALIDATION.test(series.name ?? "") ? "6 4" : "none";
    }
    this.range();
  }

  /* Replaces the curves; the cursor stays where it is. */
  update(list, marks) {
    this.take(list, marks);
    this.draw();
    this.say(Chart.at?.name === list[0].x_name ? Chart.at.x : null);
  }

  range() {
    const [first] = this.list;
    this.logX = first.log_x;
    this.x = extent(this.list.map(s => s.x), this.logX);
    const y = extent(this.list.map(s => s.y), first.log_y);
    this.logY = first.log_y && y[0] > 0 && y[1] / y[0] > 4; /* a narrow range is clearer on a linear scale */
    /* The axes of speeds and sizes start at 0, so that lengths can be compared. */
    this.y = this.logY ? y : ["tokens/s", "B", "s"].includes(this.unit) && y[0] > 0 ? [0, y[1]] : y;
    if (this.y[0] === this.y[1])
      this.y = [this.y[0] - Math.abs(this.y[0] || 1) * 0.5, this.y[1] + Math.abs(this.y[1] || 1) * 0.5];
    if (this.x[0] === this.x[1])
      this.x = [this.x[0] - 0.5, this.x[1] + 0.5];
    if (!this.logY) {
      const space = (this.y[1] - this.y[0]) * 0.05;
      this.y = [this.y[0] === 0 ? 0 : this.y[0] - space, this.y[1] + space];
    }
  }

  px(value) {
    const [low, high] = this.x;
    const share = this.logX ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
    return MARGIN.left + share * (this.width - MARGIN.left - MARGIN.right);
  }

  py(value) {
    const [low, high] = this.y;
    const share = this.logY ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
    return this.height - MARGIN.bottom - share * (this.height - MARGIN.top - MARGIN.bottom);
  }

  draw() {
    const { width, height } = this.svg.getBoundingClientRect();
    if (width < 80 || height < 60)
      return;
    this.width = width;
    this.height = height;
    this.head.style.minHeight = "";
    this.svg.replaceChildren();
    this.axes();
    this.mark();
    this.list.forEach(series => {
      const [strong, soft] = series.colours;
      this.path(series.x, series.y, "raw", series.mean ? soft : strong, series.mean ? 1 : 1.8, series.dashes);
      if (series.mean)
        this.path(series.x, series.mean, "curve", strong, 1.8, series.dashes);
      if (series.y.length <= 40)
        for (let k = 0; k < series.y.length; k++)
          if (Number.isFinite(series.y[k]))
            this.svg.append(drawn("circle", { cx: this.px(series.x[k]), cy: this.py(series.y[k]), r: 2.5, style: `fill: var(${strong})` }));
    });
    this.rule = drawn("g");
    this.svg.append(this.rule);
  }

  axes() {
    const wide = this.width - MARGIN.left - MARGIN.right, high = this.height - MARGIN.top - MARGIN.bottom;
    const xs = this.logX ? logTicks(...this.x, wide / 70) : ticks(...this.x, Math.max(2, wide / 90));
    const ys = this.logY ? logTicks(...this.y, high / 26) : ticks(...this.y, Math.max(2, high / 40));
    for (const value of ys) {
      const y = Math.round(this.py(value)) + 0.5;
      this.svg.append(drawn("line", { class: "grid", x1: MARGIN.left, x2: this.width - MARGIN.right, y1: y, y2: y }));
      this.text(MARGIN.left - 8, y + 4, axisText(value, this.unit, ys), "end");
    }
    const steps = this.list[0].x_name === "step", shown = steps ? xs.filter(Number.isInteger) : xs;
    for (const value of shown)
      this.text(this.px(value), this.height - 21, axisText(value, "", shown), "middle");
    if (this.list[0].x_name)
      this.text(MARGIN.left + wide / 2, this.height - 5, this.list[0].x_name, "middle", "title");
    const middle = MARGIN.top + high / 2, words = this.unit ? `${this.name}, ${this.unit}` : this.name;
    this.text(11, middle, words, "middle", "title").setAttribute("transform", `rotate(-90 11 ${middle})`);
  }

  /* Where the run was resumed. A mark that would cover the text before it keeps only its line. */
  mark() {
    let free = -Infinity;
    for (const { x, text } of this.marks.filter(m => m.x >= this.x[0] && m.x <= this.x[1])) {
      const px = Math.round(this.px(x)) + 0.5, space = this.width - px;
      const line = drawn("line", { class: "mark", x1: px, x2: px, y1: MARGIN.top, y2: this.height - MARGIN.bottom });
      const title = drawn("title");
      title.textContent = `step ${x}: ${text}`;
      line.append(title);
      this.svg.append(line);
      if (px < free)
        continue;
      const made = this.text(space > 90 ? px + 4 : px - 4, MARGIN.top + 9, text.split(",")[0], space > 90 ? "start" : "end", "marked");
      free = px + 4 + made.getComputedTextLength();
    }
  }

  text(x, y, text, anchor, kind = "") {
    const made = drawn("text", { x, y, "text-anchor": anchor, class: kind });
    made.textContent = text;
    this.svg.append(made);
    return made;
  }

  path(x, y, kind, colour, width, dashes) {
    const d = curvePath(x, y, v => this.px(v), v => this.py(v), this.width, this.logY);
    if (d)
      this.svg.append(drawn("path", { class: kind, d, style: `stroke: var(${colour}); stroke-width: ${width}; stroke-dasharray: ${dashes}` }));
  }

  /* Shows the point below the cursor, here and on all charts with the same x. */
  point(event) {
    const box = this.svg.getBoundingClientRect(), [low, high] = this.x;
    const share = (event.clientX - box.left - MARGIN.left) / (box.width - MARGIN.left - MARGIN.right);
    Chart.show(this.list[0].x_name, this.logX ? low * (high / low) ** share : low + share * (high - low));
  }

  static show(name, x) {
    Chart.at = x === null ? null : { name, x };
    for (const chart of Chart.all)
      chart.say(x !== null && chart.list[0].x_name === name ? x : null);
  }

  /* Before there are as many values as the mean is of, there is none. */
  meanText(series, at) {
    if (!Number.isFinite(series.mean[at]))
      return "";
    return `, mean of the last ${windowOf(series)}: ${valueText(series.mean[at], this.unit).replace(` ${this.unit}`, "")}`;
  }

  say(x) {
    this.rule?.replaceChildren();
    const named = this.list.length > 1 || this.list[0].mean;
    const pieces = this.list.map(series => {
      const at = x === null ? series.y.length - 1 : nearest(series.x, x);
      if (at < 0)
        return [];
      if (x !== null && this.rule && Number.isFinite(series.y[at])) {
        const px = this.px(series.x[at]), [strong] = series.colours;
        this.rule.append(drawn("line", { class: "rule", x1: px, x2: px, y1: MARGIN.top, y2: this.height - MARGIN.bottom }),
                         drawn("circle", { cx: px, cy: this.py(series.y[at]), r: 3.2, style: `fill: var(${strong})` }));
      }
      const where = `${series.x_name ?? ""} ${series.x[at].toLocaleString("en-US")}`.trim();
      const mean = series.mean ? this.meanText(series, at) : "";
      return [element("span", {}, element("i", { class: "key", style: `background: var(${series.colours[0]})` }),
                      `${named && series.name ? series.name + ", " : ""}${where}: ${valueText(series.y[at], this.unit)}${mean} `)];
    });
    this.head.style.minHeight = `${this.head.offsetHeight}px`; /* keeps the curve in place when the text gets shorter */
    this.read.replaceChildren(...pieces.flat());
  }
}
Chart.all = [];
Chart.at = null; /* where the cursor is, on which x */

function extent(arrays, positive) {
  let low = Infinity, high = -Infinity;
  for (const values of arrays)
    for (const value of values)
      if (Number.isFinite(value) && (!positive || value > 0)) {
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
  return low <= high ? [low, high] : [0, 1];
}

/* How many values the running mean of a curve is of. */
function windowOf(series) {
  return Math.ceil(series.y.length / RUNNING);
}

/* The running mean of a curve that is long enough and has noise; null: the curve speaks for
 * itself. */
function meanOf(series) {
  if (series.y.length < 2 * RUNNING || series.log_x)
    return null;
  const mean = runningMean(series.y, windowOf(series)), [low, high] = extent([series.y], false);
  let away = 0, count = 0;
  series.y.forEach((value, i) => {
    if (Number.isFinite(value) && Number.isFinite(mean[i])) {
      away += Math.abs(value - mean[i]);
      count++;
    }
  });
  return away > 2e-3 * (high - low) * count ? mean : null;
}

/* At each place the mean of exactly the last `count` values up to there; NaN before there are so
 * many. Gaps are no values. */
function runningMean(values, count) {
  /* Of the first so many values. Plain sums: their differences lose nothing that a curve shows. */
  const sums = [0];
  return Float64Array.from(values, value => {
    if (Number.isFinite(value))
      sums.push(sums[sums.length - 1] + value);
    const last = sums.length - 1;
    return last >= count ? (sums[last] - sums[last - count]) / count : NaN;
  });
}

function nearest(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value)
      low = middle + 1;
    else
      high = middle;
  }
  return low > 0 && value - sorted[low - 1] < sorted[low] - value ? low - 1 : low;
}

/* At most four points per pixel: first, minimum, maximum, last. */
function curvePath(x, y, px, py, width, positive) {
  let d = "", pen = false, at = 0;
  const add = i => {
    d += `${pen ? "L" : "M"}${px(x[i]).toFixed(1)},${py(y[i]).toFixed(1)}`;
    pen = true;
    check.points++;
  };
  const dense = x.length > 2 * width;
  while (at < x.length) {
    if (!Number.isFinite(y[at]) || (positive && y[at] <= 0)) {
      pen = false;
      at++;
      continue;
    }
    const first = at, pixel = Math.floor(px(x[at]));
    let least = at, most = at;
    while (dense && at + 1 < x.length && Number.isFinite(y[at + 1]) && Math.floor(px(x[at + 1])) === pixel) {
      at++;
      if (y[at] < y[least])
        least = at;
      if (y[at] > y[most])
        most = at;
    }
    [...new Set([first, Math.min(least, most), Math.max(least, most), at])].forEach(add);
    at++;
  }
  return d;
}

function axisText(value, unit, all) {
  if (unit === "B" || unit === "s")
    return valueText(value, unit);
  const largest = Math.max(...all.map(Math.abs));
  if (value === 0)
    return "0";
  if (largest >= 1e4)
    return countText(value);
  if (largest < 1e-3)
    return value.toExponential(0);
  const step = all.length > 1 ? Math.abs(all[1] - all[0]) : Math.abs(value);
  return value.toFixed(Math.max(0, Math.min(6, -Math.floor(Math.log10(step) + 1e-9))));
}

/* Lists of curves by chart: draws what is new and updates what there is. */
function updateCharts(charts, marks) {
  const names = [...charts.keys()], same = Chart.all.length === names.length && Chart.all.every((chart, i) => chart.name === names[i]);
  if (same) {
    for (const chart of Chart.all)
      chart.update(charts.get(chart.name), marks);
    check.marks = marks.length;
    return;
  }
  clear("curves");
  Chart.all = [];
  const box = part("curves", ".charts"), rest = charts.size - 1;
  let i = 0;
  for (const [name, list] of charts) {
    const size = i === 0 ? "large" : rest % 3 === 0 || rest > 4 ? "" : "half";
    box.append(new Chart(name, list, size, marks).box);
    i++;
  }
  check.charts = charts.size;
  check.marks = marks.length;
  document.getElementById("curves").hidden = charts.size === 0;
}

function drawCurves(shown) {
  const charts = new Map();
  for (const series of shown.series)
    if (series.y.length > 0)
      charts.set(series.chart, [...(charts.get(series.chart) ?? []), series]);
  updateCharts(charts, shown.marks);
}
