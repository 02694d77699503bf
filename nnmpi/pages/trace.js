// DATA: {ranks: [{name, tracks: [{name, kind, spans: [[name, category, begin, end, details]]}]}], parts: [[name, begin, end]],
// shares: [part][rank] {kind: seconds}}; times in seconds; a kind is "computing", "exchange" or "waiting"

const KINDS = { computing: "var(--f)", exchange: "var(--b)", waiting: "var(--step)" };
const spansOf = (rank) => DATA.ranks[rank].tracks.flatMap((track) => track.spans);
const all = DATA.ranks.flatMap((_, rank) => spansOf(rank).map((span) => ({ rank, span }))).sort((a, b) => a.span[2] - b.span[2]);
const counts = [1, 2, 5, 10, 20, 50].filter((count, i) => !i || count < DATA.parts.length);
if (DATA.parts.length > 1) counts.push(DATA.parts.length);
const given = { parts: 1, chosen: null, found: new Set() };
const percent = (part, whole) => `${seconds(part)}, ${(100 * part / whole || 0).toFixed(0)} %`;
const says = ({ rank, span: [name, category, begin, end, details] }) =>
  `${name} (${category}) on ${DATA.ranks[rank].name}: ${seconds(end - begin)}, from ${seconds(begin)}` +
  Object.entries(details || {}).map(([key, value]) => `, ${key} ${value}`).join("");

// The parts in view, from where to where.
function inView() {
  const first = Math.max(0, Math.min(control.state.at, DATA.parts.length - given.parts));
  const shown = DATA.parts.slice(first, first + given.parts);
  return { first, shown, from: Math.min(...shown.map((part) => part[1])), to: Math.max(...shown.map((part) => part[2])) };
}

function timeline(width, from, to) {
  const left = 84, high = 20, picture = draw("svg", { width, role: "group", "aria-label": "what each rank does" });
  const px = (time) => left + (time - from) / (to - from || 1) * (width - left - 2);
  let y = 0;
  DATA.ranks.forEach(({ name, tracks }, rank) => {
    picture.append(draw("text", { x: 0, y: y + 13, style: "font-weight:600" }, name));
    y += 18;
    for (const { name: track, kind, spans } of tracks) {
      picture.append(draw("text", { x: 8, y: y + 14, class: "soft" }, track),
        draw("rect", { x: left, y: y + 1, width: width - left - 2, height: high - 2, fill: "var(--empty)" }));
      for (const span of spans) {
        if (span[3] < from || span[2] > to) continue;
        const x = Math.max(left, px(span[2])), wide = Math.max(1, Math.min(width - 2, px(span[3])) - x - .5), one = { rank, span };
        const isChosen = given.chosen && given.chosen.span === span;
        picture.append(draw("rect", { x, y: y + 2, width: wide, height: high - 4, rx: 2, class: "span", "data-name": span[0],
          fill: KINDS[kind], opacity: span[1].startsWith("forward") ? .7 : 1, "stroke-width": isChosen ? 3 : 1.5,
          stroke: isChosen ? "var(--accent)" : given.found.has(span) ? "var(--ink)" : "none",
          onclick: () => { given.chosen = one; refresh(); } }, draw("title", {}, says(one))));
        if (wide > 7 * span[0].length + 6) picture.append(draw("text", { x: x + wide / 2, y: y + 14, "text-anchor": "middle",
          style: "fill:var(--on);font-size:11px;pointer-events:none" }, span[0]));
      }
      y += high;
    }
    y += 8;
  });
  for (const time of ticks(0, to - from)) picture.append(draw("text", { x: px(from + time), y: y + 8, class: "soft",
    "text-anchor": px(from + time) > width - 24 ? "end" : "middle" }, seconds(time)));
  picture.setAttribute("height", y + 14);
  return picture;
}

const view = el("div", { class: "wide" }), figures = el("p", { class: "figures" }), told = el("p", { class: "told soft", "aria-live": "polite" });
const table = el("table", { class: "numbers" });
function refresh() {
  const { first, shown, from, to } = inView();
  figures.textContent = shown[0][0] + (shown.length > 1 ? ` to ${shown.at(-1)[0]}` : "") +
    (DATA.parts.length > 1 ? ` of ${DATA.parts.length}` : "") + `: ${seconds(to - from)}`;
  told.textContent = given.chosen ? says(given.chosen) : "click an event, or find one, to read when it was";
  view.replaceChildren(timeline(Math.max(view.clientWidth, 480), from, to));
  table.replaceChildren(el("tr", {}, ...["", ...Object.keys(KINDS), "nothing of these"].map((text) => el("th", {}, text))),
    ...DATA.ranks.map(({ name }, rank) => {
      const sum = (kind) => DATA.shares.slice(first, first + shown.length).reduce((total, own) => total + own[rank][kind], 0);
      return el("tr", {}, el("td", {}, name), ...[...Object.keys(KINDS), "idle"].map((kind) =>
        el("td", { class: "number" }, percent(sum(kind), to - from))));
    }));
}
const control = stepper(() => DATA.parts.length - 1, refresh);

// Go to the next event whose name has the words in it, or to the step of that number.
function find() {
  const words = asked.value.trim().toLowerCase(), matches = all.filter(({ span }) => words && span[0].toLowerCase().includes(words));
  const step = DATA.parts.findIndex((part) => part[0] === `step ${words.replace("step ", "")}`);
  given.found = new Set(matches.map(({ span }) => span));
  if (step >= 0) return control.go(step);
  if (!matches.length) { told.textContent = `nothing is called ${asked.value}`; return; }
  const after = given.chosen ? matches.findIndex(({ span }) => span[2] > given.chosen.span[2]) : 0;
  given.chosen = matches[Math.max(0, after)];
  const at = DATA.parts.findIndex((part) => given.chosen.span[2] < part[2]);
  control.go(at < 0 ? DATA.parts.length - 1 : at);
}
const asked = el("input", { type: "search", "aria-label": "find", placeholder: "step 7, or an event", onkeydown: (event) => {
  if (event.key === "Enter") find();
} });
control.bar.append(asked, el("button", { type: "button", onclick: find }, "find next"));
PAGE.append(
  el("p", {}, "All times are those of the first rank's clock. A receive lasts until its message is here, so the wait for it is in it."),
  legend(Object.entries(KINDS).map(([name, colour]) => ({ name, colour }))),
  control.bar,
  counts.length > 1 ? el("div", { class: "card sliders" }, slider("shown at once", counts, 0, String,
    (value) => { given.parts = value; refresh(); })) : [],
  el("section", { class: "card" }, figures, view, told),
  el("section", { class: "card" }, el("h2", {}, "Where the time went, in what is shown"), el("div", { class: "wide" }, table)));
refresh();
addEventListener("resize", refresh);
