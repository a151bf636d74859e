/* Assembles the page. */

window.addEventListener("error", event => check.errors.push(String(event.message)));

/* The sections as they are before anything is drawn. */
const blank = new Map([...document.querySelectorAll("main > section")].map(section => [section.id, section.cloneNode(true)]));

function clear(...ids) {
  for (const id of ids)
    document.getElementById(id).replaceWith(blank.get(id).cloneNode(true));
}

function drawFigures(figures, notes) {
  clear("summary");
  for (const figure of figures) {
    const value = element("div", { class: (figure.value ?? "").length > 14 ? "value long" : "value" }, figure.value ?? "–");
    if (figure.unit)
      value.append(element("span", { class: "unit" }, ` ${figure.unit}`));
    part("summary", ".figures").append(element("div", { class: "figure" }, element("div", { class: "name" }, figure.name), value,
                                               figure.note ? element("div", { class: "note" }, figure.note) : null));
  }
  const count = figures.length; /* one line, or two of equal length */
  part("summary", ".figures").style.setProperty("--columns", count <= 6 ? count : Math.ceil(count / 2));
  part("summary", ".figures").hidden = count === 0;
  for (const note of notes)
    part("summary", ".notes").append(element("li", {}, note));
}

function drawSummary(shown) {
  document.getElementById("title").textContent = shown.title ?? "run";
  document.getElementById("subtitle").textContent = shown.subtitle ?? "";
  drawFigures(shown.figures, shown.notes);
  if (shown.config) {
    document.getElementById("config").hidden = false;
    part("config", "pre").textContent = shown.config;
  }
}

let data, view;

/* Draws a report in place of what was shown. curves: false if they are drawn separately. */
function drawReport(shown, curves) {
  data = shown;
  clear("memory", "timeline", "shares", "traffic", "actions", "config");
  const timelines = [data.measured, data.simulated].filter(t => t && t.begin.length > 0);
  drawSummary(data);
  if (curves)
    drawCurves(data);
  drawTables(data.tables ?? []);
  drawMemory(data.memory);
  view = new TimelineView(data);
  drawShares(timelines);
  drawTraffic(timelines);
  if (timelines.length > 0)
    new ActionTable(timelines);
  watchWideTables();
}

/* The theme of the system, or the user's choice; stored if the browser allows it. */
function setUpTheme(changed) {
  const button = document.getElementById("theme"), order = ["auto", "light", "dark"];
  let chosen = "auto";
  try {
    chosen = localStorage.getItem("quadrille-theme") ?? "auto";
  } catch { /* a page opened from a file may have no storage */ }
  const apply = () => {
    button.textContent = { auto: "◐ auto", light: "○ light", dark: "● dark" }[chosen];
    if (chosen === "auto")
      delete document.documentElement.dataset.theme;
    else
      document.documentElement.dataset.theme = chosen;
    changed();
  };
  button.addEventListener("click", () => {
    chosen = order[(order.indexOf(chosen) + 1) % order.length];
    try {
      localStorage.setItem("quadrille-theme", chosen);
    } catch { /* not stored */ }
    apply();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  apply();
}

/* Number of pixels of a canvas that were drawn on. */
function drawnPixels(canvas) {
  if (!canvas.width || !canvas.height)
    return 0;
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let count = 0;
  for (let i = 3; i < data.length; i += 4)
    count += data[i] > 0;
  return count;
}

/* A summary of what the page shows, for tests and for debugging. */
function selfCheck(view) {
  check.paths = document.querySelectorAll("#curves svg path").length;
  check.memoryBars = document.querySelectorAll("#memory .bar").length;
  check.rows = view.rows?.length ?? 0;
  check.events = view.models.reduce((sum, model) => sum + model.timeline.events, 0);
  check.pixels = view.canvas ? drawnPixels(view.canvas) : 0;
  check.overviewPixels = view.overview ? drawnPixels(view.overview) : 0;
  check.actionRows = document.querySelectorAll("#actions tbody tr").length;
  document.getElementById("self-check").textContent = JSON.stringify(check);
}

/* Runs the self-check once the timeline has its size and is drawn. */
function checkWhenDrawn() {
  if (view.canvas && check.draws === 0)
    requestAnimationFrame(checkWhenDrawn);
  else
    selfCheck(view);
}

const started = performance.now(), embedded = JSON.parse(document.getElementById("data").textContent);
let live = null;
if (embedded.live)
  live = startLive();
else
  drawReport(readData(embedded), true);
setUpTheme(() => view?.canvas && (view.colours(), view.request()));
check.readyMs = performance.now() - started;
if (!live)
  requestAnimationFrame(() => requestAnimationFrame(checkWhenDrawn));
