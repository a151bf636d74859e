"""Checks of a page for people with other eyes or without a mouse, in a real browser: contrast by the
formulas of WCAG 2.1 (AA), names of controls, the order of the Tab key, and a visible focus."""

# Functions on the page. Contrast ratios come from computed styles, composited over the grounds
# behind.
FUNCTIONS = r"""
window.accessible ??= (() => {
  const parse = text => {
    const list = text.match(/-?[\d.]+(e-?\d+)?/g).map(Number), unit = text.startsWith("color(") ? 255 : 1;
    return [...list.slice(0, 3).map(v => v * unit), list[3] ?? 1];
  };
  const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const bright = c => c.slice(0, 3).map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ratio = (a, b) => { const x = bright(a), y = bright(b); return (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05); };
  const ground = e => {
    const layers = [];
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      layers.push(c);
      if (c[3] === 1)
        break;
    }
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 1]);
  };
  const seen = e => e.checkVisibility({ checkOpacity: false, checkVisibilityCSS: true }) && e.getClientRects().length > 0;
  const text = e => (e.getAttribute("aria-label") || e.textContent || e.value || "").trim().slice(0, 30);
  const describe = e => `${e.tagName.toLowerCase()}${e.id ? "#" + e.id : ""} ${text(e)}`;
  const nameOf = e => e.getAttribute("aria-label") || e.getAttribute("title") || (e.labels && [...e.labels].map(l => l.textContent).join(" ").trim())
    || e.textContent.trim() || (e.getAttribute("aria-labelledby") && "labelled") || "";
  return { parse, over, ratio, ground, seen, describe, nameOf,
    /* Texts with too little contrast: [ratio, needed, element]. */
    texts() {
      const bad = [];
      for (const e of document.body.querySelectorAll("*")) {
        const drawn = e instanceof SVGElement, control = /^(INPUT|SELECT|TEXTAREA)$/.test(e.tagName) && !["range", "checkbox"].includes(e.type);
        const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
        if ((!own && !control) || e.disabled || e.closest(":disabled") || !seen(e) || /^(SCRIPT|STYLE|OPTION|TITLE|NOSCRIPT)$/.test(e.tagName))
          continue;
        const style = getComputedStyle(e), behind = ground(drawn ? e.closest("svg") : e), size = parseFloat(style.fontSize);
        const need = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? 3 : 4.5;
        const found = ratio(over(parse(drawn ? style.fill : style.color), behind), behind);
        if (found < need)
          bad.push([found, need, describe(e)]);
        const hint = control && e.placeholder ? ratio(over(parse(getComputedStyle(e, "::placeholder").color), behind), behind) : need;
        if (hint < need)
          bad.push([hint, need, `placeholder ${e.placeholder}`]);
      }
      return bad;
    },
    /* Edges of controls, against what surrounds them. */
    edges() {
      const bad = [];
      for (const e of document.querySelectorAll("input:not([type=range]):not([type=checkbox]), select, button:not(.link)"))
        if (seen(e) && !e.disabled) {
          const behind = ground(e.parentElement), found = ratio(over(parse(getComputedStyle(e).borderTopColor), behind), behind);
          if (found < 3)
            bad.push([found, 3, describe(e)]);
        }
      return bad;
    },
    /* Labels on the boxes of the timeline, which is a canvas. */
    boxes() {
      if (typeof view === "undefined" || !view?.paint)
        return [];
      const found = view.paint.map((colour, i) => [ratio(over(parse(view.ink[i]), parse(colour)), parse(colour)), 4.5, CLASSES[i].name]);
      return found.filter(([is, need]) => is < need);
    },
    stops() {
      const focusable = "a[href], button, input, select, textarea, summary, [tabindex]";
      /* Browsers stop at what scrolls, too, unless there are controls in it. */
      const larger = e => e.scrollHeight > e.clientHeight || e.scrollWidth > e.clientWidth;
      const scrolls = e => /auto|scroll/.test(getComputedStyle(e).overflow) && larger(e) && !e.querySelector(focusable);
      return [...document.body.querySelectorAll("*")].filter(e => seen(e) && !e.disabled && (e.matches(focusable) ? e.tabIndex >= 0 : scrolls(e)));
    },
    nameless() { return this.stops().filter(e => !nameOf(e)).map(describe); },
    /* Of the focused element: its description, and what is wrong with how its focus shows. */
    focus() {
      const e = document.activeElement, style = getComputedStyle(e), behind = ground(e.parentElement ?? e), wrong = [];
      if (!e.matches(":focus-visible"))
        wrong.push("not :focus-visible");
      if (style.outlineStyle === "none" || parseFloat(style.outlineWidth) < 2)
        wrong.push(`outline ${style.outlineStyle} ${style.outlineWidth}`);
      else if (ratio(over(parse(style.outlineColor), behind), behind) < 3)
        wrong.push(`outline ${style.outlineColor} on ${behind}`);
      return [describe(e), wrong.length ? `${describe(e)}: ${wrong.join(", ")}` : ""];
    },
  };
})()
"""


def contrast(chrome):
    """What has too little contrast, as [ratio, needed, what]."""
    chrome.value(FUNCTIONS + "; 0")
    return chrome.value("[...accessible.texts(), ...accessible.edges(), ...accessible.boxes()]")


def keyboard(chrome, most=200):
    """Walks through the page with the Tab key, and back by one. Returns what is wrong, and the number
    of stops."""
    chrome.value(FUNCTIONS + "; 0")
    chrome.frames()
    # By their descriptions: a live page may replace elements, and keeps the focus.
    stops = chrome.value("accessible.stops().map(accessible.describe)")
    wrong = [f"{what} has no name" for what in chrome.value("accessible.nameless()")]
    chrome.value("document.activeElement.blur(), accessible.stops()[0].focus()")
    chrome.press("Tab")  # from now on the browser shows the focus
    chrome.press("Tab", shift=True)
    for at, expected in enumerate(stops[:most]):
        found, problem = chrome.value("accessible.focus()")
        if found != expected:
            return wrong + [f"stop {at} of {len(stops)} is {found}, not {expected}"], len(stops)
        if problem:
            wrong.append(problem)
        if at + 1 < min(len(stops), most):
            chrome.press("Tab")
    chrome.press("Tab", shift=True)
    if chrome.value("accessible.focus()")[0] != stops[min(len(stops), most) - 2]:
        wrong.append("shift + Tab does not go back")
    return wrong, len(stops)
