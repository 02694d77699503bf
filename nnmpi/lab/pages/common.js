"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const PAGE = document.getElementById("page");

// ---- theme and height: of the system, or of the surrounding page ----

const dark = matchMedia("(prefers-color-scheme: dark)");
function setTheme(chosen) {
  const name = chosen || (dark.matches ? "dark" : "light"),
    { dataset } = document.documentElement;
  if (dataset.theme === name) return;
  dataset.theme = name;
  dispatchEvent(new Event("theme"));
}
setTheme();
dark.addEventListener("change", () => setTheme());
if (parent !== window) {
  addEventListener("message", ({ data }) => "theme" in Object(data) && setTheme(data.theme));
  new ResizeObserver(() =>
    parent.postMessage({ height: document.body.scrollHeight + 32 }, "*"),
  ).observe(document.body);
}

// ---- elements ----

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat());
  return node;
}
const el = (tag, attributes, ...children) =>
  build(document.createElement(tag), attributes, children);
const draw = (tag, attributes, ...children) =>
  build(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// ---- numbers ----

function short(value, units) {
  const [unit, size] = units.find(([, size]) => value >= size) || units[units.length - 1];
  return `${Number((value / size).toPrecision(3))} ${unit}`;
}
const number = (value) =>
  value === null || value === undefined ? "" : String(Number(Number(value).toPrecision(4)));
const seconds = (s) =>
  s === 0
    ? "0 s"
    : short(s, [
        ["s", 1],
        ["ms", 1e-3],
        ["us", 1e-6],
        ["ns", 1e-9],
      ]);
const bytes = (n) =>
  short(n, [
    ["GiB", 2 ** 30],
    ["MiB", 2 ** 20],
    ["KiB", 2 ** 10],
    ["B", 1],
  ]);
const bits = (n) =>
  short(n, [
    ["Tbit/s", 1e12],
    ["Gbit/s", 1e9],
    ["Mbit/s", 1e6],
    ["bit/s", 1],
  ]);
const several = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
const nextTo = (name, names) => names[(names.indexOf(name) + 1) % names.length];
const colour = (i, n) => `oklch(0.68 0.15 ${Math.round(25 + (360 * i) / n)})`;

// ---- controls ----

// Return a slider over `values`. `show` formats the value; `changed` is called with it.
function slider(name, values, at, show, changed) {
  const shown = el("output", {}, show(values[at]));
  const input = el("input", {
    type: "range",
    min: 0,
    max: values.length - 1,
    value: at,
    "aria-label": name,
  });
  input.addEventListener("input", () => {
    shown.textContent = show(values[input.value]);
    input.setAttribute("aria-valuetext", shown.textContent);
    changed(values[input.value]);
  });
  return el("label", {}, `${name}: `, shown, input);
}

// Return a select of names; `changed` is called with the new one.
function choice(name, items, chosen, changed) {
  const options = items.map((item) =>
    el("option", item === chosen ? { value: item, selected: "" } : { value: item }, item),
  );
  const select = el("select", { "aria-label": name }, ...options);
  select.addEventListener("change", () => changed(select.value));
  return select;
}
const logarithmic = (from, to, per) =>
  Array.from(
    { length: Math.round(Math.log10(to / from) * per) + 1 },
    (_, i) => from * 10 ** (i / per),
  );

// Return buttons for first, back, play, forward, last; arrow keys, Home, End and space do the same.
function stepper(steps, shown) {
  const state = { at: 0, playing: null };
  const go = (at, moves) => {
    const to = Math.max(0, Math.min(steps(), at));
    const was = state.at;
    state.at = to;
    shown(to, moves && to === was + 1);
    if (to >= steps()) stop();
  };
  const stop = () => {
    clearInterval(state.playing);
    state.playing = null;
    play.textContent = "play";
  };
  const toggle = () => {
    if (state.playing) return stop();
    if (state.at >= steps()) go(0);
    play.textContent = "stop";
    state.playing = setInterval(() => go(state.at + 1, true), 900);
  };
  const button = (text, label, act) =>
    el("button", { type: "button", "aria-label": label, onclick: act }, text);
  const play = button("play", "play or stop", toggle);
  const keys = {
    ArrowRight: () => go(state.at + 1, true),
    ArrowLeft: () => go(state.at - 1),
    " ": toggle,
    Home: () => go(0),
    End: () => go(steps()),
  };
  document.addEventListener("keydown", (event) => {
    if (!(event.key in keys) || event.target.closest("input, select, button")) return;
    event.preventDefault();
    keys[event.key]();
  });
  const bar = el(
    "div",
    { class: "bar" },
    button("|<", "first", keys.Home),
    button("<", "one back", keys.ArrowLeft),
    play,
    button(">", "one on", keys.ArrowRight),
    button(">|", "last", keys.End),
    el("span", { class: "soft" }, "or the arrow keys"),
  );
  return { bar, state, go };
}

// ---- charts ----

function ticks(from, to, log) {
  if (log) {
    const first = Math.ceil(Math.log10(from) - 1e-9),
      last = Math.floor(Math.log10(to) + 1e-9);
    const by = Math.max(1, Math.ceil((last - first) / 5));
    return Array.from(
      { length: Math.max(0, Math.floor((last - first) / by) + 1) },
      (_, i) => 10 ** (first + i * by),
    );
  }
  const rough = (to - from) / 5 || 1,
    unit = 10 ** Math.floor(Math.log10(rough));
  const by = [1, 2, 5, 10].find((item) => item * unit >= rough) * unit;
  const first = Math.ceil(from / by - 1e-9);
  return Array.from({ length: Math.floor(to / by + 1e-9) - first + 1 }, (_, i) => (first + i) * by);
}

// Draw lines [{name, colour, points: [[x, y]]}] over x; those behind the first are dashed, so that
// none hides another. `titleX` and `titleY` are the axes' titles, `marks` are [{x, y, text}], `at` is
// the x of a vertical line, `ticksX` and `ticksY` are the labelled x and y. `whole`: x is counted.
// `zero`: y begins at 0. `words` (line, point) is what a point says under the pointer.
function chart(
  width,
  lines,
  {
    x,
    y,
    logX = false,
    logY = false,
    marks = [],
    at = null,
    height = 260,
    ticksX = null,
    ticksY = null,
    titleX = "",
    titleY = "",
    whole = false,
    zero = false,
    words = null,
  },
) {
  const points = lines.flatMap((line) => line.points);
  if (!points.length) return el("p", { class: "soft" }, "nothing to draw");
  const range = (i, log) => {
    const all = points.map((point) => point[i]).filter((value) => !log || value > 0);
    const low = Math.min(...all),
      high = Math.max(...all);
    return log
      ? [low, high > low ? high : low * 10]
      : [i && low > 0 && (zero || low < high / 3) ? 0 : low, high > low ? high : low + 1];
  };
  const [x0, x1] = range(0, logX),
    [y0, y1] = range(1, logY);
  const left = 62,
    right = 10,
    top = titleY ? 26 : 8,
    bottom = titleX ? 44 : 34;
  const part = (value, from, to, log) =>
    log ? Math.log(value / from) / Math.log(to / from) : (value - from) / (to - from);
  const px = (value) => left + part(value, x0, x1, logX) * (width - left - right);
  const py = (value) => height - bottom - part(value, y0, y1, logY) * (height - top - bottom);
  const picture = draw(
    "svg",
    { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" },
    draw("text", { x: 0, y: 12, class: "soft axis" }, titleY),
    draw(
      "text",
      { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle", class: "soft axis" },
      titleX,
    ),
  );
  const labelled = ticksY && ticksY.filter((value) => value >= y0 && value <= y1);
  for (const value of labelled || ticks(y0, y1, logY)) {
    picture.append(
      draw("line", {
        x1: left,
        x2: width - right,
        y1: py(value),
        y2: py(value),
        stroke: "var(--line)",
      }),
      draw(
        "text",
        { x: left - 6, y: py(value) + 4, "text-anchor": "end", class: "soft" },
        y(value),
      ),
    );
  }
  let last = -Infinity;
  for (const value of ticksX || ticks(x0, x1, logX)) {
    if (px(value) - last < 60 || (whole && value % 1)) continue;
    last = px(value);
    picture.append(
      draw(
        "text",
        {
          x: px(value),
          y: height - bottom + 20,
          "text-anchor": px(value) > width - 40 ? "end" : "middle",
          class: "soft",
        },
        x(value),
      ),
    );
  }
  if (at !== null)
    picture.append(
      draw("line", {
        x1: px(at),
        x2: px(at),
        y1: top,
        y2: height - bottom,
        stroke: "var(--soft)",
        "stroke-dasharray": "4 3",
      }),
    );
  for (const [i, line] of lines.entries()) {
    const path = line.points
      .map(([a, b], i) => `${i ? "L" : "M"}${px(a).toFixed(1)} ${py(b).toFixed(1)}`)
      .join("");
    picture.append(
      draw("path", {
        d: path,
        fill: "none",
        stroke: line.colour,
        "stroke-width": 2,
        "stroke-dasharray": i ? `${4 + 3 * i} ${4 + i}` : null,
        "data-name": line.name,
      }),
    );
    if (line.points.length !== 1) continue;
    const [[a, b]] = line.points,
      isLeft = px(a) > width / 2;
    picture.append(
      draw("circle", { cx: px(a), cy: py(b), r: 3, fill: line.colour }),
      draw(
        "text",
        {
          x: px(a) + (isLeft ? -7 : 7),
          y: Math.max(py(b), top + 8) + 4,
          "text-anchor": isLeft ? "end" : "start",
        },
        y(b),
      ),
    );
  }
  for (const line of words ? lines : [])
    for (const point of line.points)
      picture.append(
        draw(
          "circle",
          { cx: px(point[0]), cy: py(point[1]), r: 6, fill: "transparent" },
          draw("title", {}, words(line, point)),
        ),
      );
  for (const mark of marks)
    picture.append(
      draw(
        "circle",
        {
          cx: px(mark.x),
          cy: py(mark.y),
          r: 4,
          fill: "var(--paper)",
          stroke: "var(--ink)",
          "stroke-width": 1.5,
        },
        draw("title", {}, mark.text),
      ),
    );
  return picture;
}
const legend = (lines) =>
  el(
    "p",
    { class: "soft" },
    ...lines.map((line) =>
      el(
        "span",
        { class: "entry" },
        el("span", { class: "key", style: `background:${line.colour}` }),
        line.name,
      ),
    ),
  );
