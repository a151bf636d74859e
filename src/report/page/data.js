/* Decodes the data of the page and formats amounts for people. */
"use strict";

/* Columns of little-endian numbers as typed arrays; every platform with a browser is
 * little-endian. */
function column(text, Type) {
  if (Uint8Array.fromBase64)
    return new Type(Uint8Array.fromBase64(text).buffer);
  const binary = atob(text), bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++)
    bytes[i] = binary.charCodeAt(i);
  return new Type(bytes.buffer);
}

function readSeries(list) {
  for (const series of list) {
    series.x = series.x_of === undefined ? column(series.x, Float64Array) : list[series.x_of].x;
    series.y = column(series.y, Float64Array);
  }
}

function readData(data) {
  readSeries(data.series);
  for (const timeline of [data.measured, data.simulated])
    if (timeline) {
      timeline.begin = column(timeline.begin, Float64Array);
      timeline.seconds = column(timeline.seconds, Float32Array);
      timeline.waited = timeline.waited === undefined ? null : column(timeline.waited, Float32Array);
      timeline.action = column(timeline.action, Uint32Array);
      timeline.merged = timeline.merged === undefined ? null : column(timeline.merged, Uint32Array);
      timeline.share = timeline.share === undefined ? null : column(timeline.share, Float32Array);
      timeline.microbatch = timeline.microbatch === undefined ? null : column(timeline.microbatch, Int32Array);
      timeline.step = timeline.step === undefined ? new Uint32Array(timeline.action.length) : column(timeline.step, Uint32Array);
      for (const rank of timeline.ranks)
        rank.label = rank.label ?? `rank ${rank.rank}`;
    }
  return data;
}

/* Three significant digits, without an exponent where that is readable. */
function short(value, digits = 3) {
  if (value === 0)
    return "0";
  const size = Math.abs(value);
  if (size >= 1e7 || size < 1e-4)
    return value.toExponential(digits - 1).replace("e+", "e");
  const places = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  return size >= 10 ** digits ? Math.round(value).toLocaleString("en-US") : value.toFixed(Math.min(places, 12));
}

function scaled(value, units, base) {
  let i = 0;
  while (i + 1 < units.length && Math.abs(value) >= base * (1 - 5e-4)) {
    value /= base;
    i++;
  }
  return [value, units[i]];
}

function bytesText(bytes) {
  const [value, unit] = scaled(bytes, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 1024);
  return `${unit === "B" ? Math.round(value) : short(value)} ${unit}`;
}

function countText(count) {
  const [value, unit] = scaled(count, ["", "k", "M", "G", "T", "P", "E"], 1000);
  return `${Number.isInteger(value) && value < 1000 ? value : short(value)}${unit ? " " + unit : ""}`;
}

function secondsText(seconds) {
  if (seconds >= 120)
    return `${Math.floor(seconds / 60)} min ${String(Math.floor(seconds % 60)).padStart(2, "0")} s`;
  if (seconds >= 1 || seconds === 0)
    return `${short(seconds)} s`;
  const [value, unit] = scaled(seconds * 1e9, ["ns", "µs", "ms"], 1000);
  return `${short(value)} ${unit}`;
}

function percentText(share) {
  return Number.isFinite(share) ? `${(100 * share).toFixed(1)} %` : "–";
}

function valueText(value, unit) {
  if (!Number.isFinite(value))
    return "–";
  if (unit === "B")
    return bytesText(value);
  if (unit === "s")
    return secondsText(value);
  if (unit === "tokens/s")
    return `${countText(value)} ${unit}`;
  return short(value, 4) + (unit ? ` ${unit}` : "");
}

/* About n round numbers between low and high. */
function ticks(low, high, n) {
  if (!(high > low))
    return [low];
  const raw = (high - low) / n, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(f => f * power).find(s => s >= raw * (1 - 1e-9));
  const list = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++)
    list.push(i * step);
  return list;
}

/* Powers of ten, with 2 and 5 between them if there are few. */
function logTicks(low, high, n) {
  const list = [], decades = Math.log10(high / low), every = Math.max(1, Math.ceil(decades / n));
  const between = decades < n / 3 ? [1, 2, 5] : [1];
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e += every)
    for (const f of between) {
      const value = f * 10 ** e;
      if (value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9))
        list.push(value);
    }
  return list.length > 1 ? list : ticks(low, high, n).filter(v => v > 0);
}

/* Styles are set through the object model: a served page refuses style attributes. */
function attribute(made, key, value) {
  if (key === "style")
    made.style.cssText = value;
  else
    made.setAttribute(key, value);
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes))
    if (value !== undefined && value !== null)
      attribute(made, key, value);
  made.append(...children.filter(child => child !== null && child !== undefined));
  return made;
}

function drawn(tag, attributes = {}) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes))
    attribute(made, key, value);
  return made;
}

function part(section, selector) {
  return document.querySelector(`#${section} ${selector}`);
}

/* Counters of what happened on the page, for the self-check. */
const check = { errors: [], charts: 0, points: 0, draws: 0, events: 0 };
