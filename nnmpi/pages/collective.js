// DATA: {operation, ranks, first, alpha, beta, algorithms: {name: {animations: {ranks: animation}, costs: {ranks: [latencies, parts]}}}}
// animation: {begins: [rank][chunk], rounds, messages: [{round, from, to, chunks, reduce, after, clock: [latencies, parts]}]}
// What is in a chunk is a hexadecimal number whose digit r (from the right) counts rank r's part. A part is one of
// the buffer's bytes: a message of `parts` costs alpha + parts * M * beta.

const names = Object.keys(DATA.algorithms);
const sizes = [...new Set(names.flatMap((name) => Object.keys(DATA.algorithms[name].costs)))].map(Number)
  .sort((a, b) => a - b);
const given = { ranks: DATA.ranks, bytes: 2 ** 20, alpha: DATA.alpha, beta: DATA.beta };
const lineColour = (name) => colour(names.indexOf(name), names.length);
const price = ([latencies, parts]) => latencies * given.alpha + parts * given.bytes * given.beta;

function panel(name) {
  const self = { name, rounds: 0 };
  const choose = el("select", { "aria-label": "algorithm", onchange: () => { self.name = choose.value; refresh(); } },
    ...names.map((each) => el("option", each === name ? { value: each, selected: "" } : { value: each }, each)));
  const figures = el("p", { class: "figures" }), view = el("div", {}), told = el("p", { class: "told soft", "aria-live": "polite" });
  self.card = el("section", { class: "card" }, choose, figures, view, told);
  self.animation = () => DATA.algorithms[self.name].animations[given.ranks];

  // Draw the state after so many rounds; with `moves`, let the chunks of the last one travel there first.
  self.show = (at, moves) => {
    const animation = self.animation(), ranks = given.ranks;
    self.rounds = animation ? animation.rounds : 0;
    view.replaceChildren();
    if (!animation) {
      const cost = DATA.algorithms[self.name].costs[ranks];
      figures.textContent = cost ? `${seconds(price(cost))} in all` : `not right on ${several(ranks, "rank")}`;
      told.textContent = cost ? `steps are drawn for up to ${DATA.drawn} ranks` : "";
      return;
    }
    const done = Math.min(at, animation.rounds);
    const held = animation.begins.map((row) => row.slice());
    const sent = Array(ranks).fill(0);
    for (const message of animation.messages) if (message.round < done) {
      message.chunks.forEach((chunk, i) => { held[message.to][chunk] = message.after[i]; });
      sent[message.from] += message.chunks.length;
    }
    const past = animation.messages.filter((message) => message.round < done);
    const clock = Math.max(0, ...past.map((message) => price(message.clock)));
    const all = Math.max(0, ...animation.messages.map((message) => price(message.clock)));
    figures.textContent = `round ${done} of ${animation.rounds}, clock ${seconds(clock)} of ${seconds(all)}, ` +
      `${several(past.length, "message")}`;
    const last = past.filter((message) => message.round === done - 1);
    told.textContent = done ? last.slice(0, 8).map((message) => `${message.from} ${message.reduce ? "adds to" : "to"} ` +
      `${message.to}: ${named(message.chunks, ranks)}`).join("; ") + (last.length > 8 ? " ..." : "") : "before the first round";
    view.append(memory(view.clientWidth || 320, ranks, held, sent, moves ? last : []));
  };
  return self;
}

const named = (chunks, ranks) => chunks.length === ranks ? "all" : `chunk ${chunks.join(", ")}`;
const parts = (text, rank) => text ? parseInt(text[text.length - 1 - rank] || "0", 16) : 0;

// Each rank's memory: a row of chunks, in each a stripe for each rank whose part is in it.
function memory(width, ranks, held, sent, moving) {
  const left = 52, right = 64, high = 34;
  const chunks = held[0].length, wide = Math.min(64, (width - left - right) / chunks), picture = draw("svg",
    { width, height: high * ranks + 24, viewBox: `0 0 ${width} ${high * ranks + 24}`, role: "img", "aria-label": "memory of each rank" });
  const place = (rank, chunk) => [left + chunk * wide, 20 + rank * high];
  const content = (text, x, y) => draw("g", {},
    draw("rect", { x: x + 2, y: y + 2, width: wide - 4, height: high - 6, rx: 3, fill: "var(--empty)", stroke: "var(--line)" }),
    ...Array.from({ length: ranks }, (_, rank) => rank).filter((rank) => parts(text, rank)).map((rank) =>
      draw("rect", { x: x + 4 + rank * (wide - 8) / ranks, y: y + 4 + (parts(text, rank) > 1 ? 0 : 4), width: (wide - 8) / ranks - .5,
        height: high - 10 - (parts(text, rank) > 1 ? 0 : 4), fill: colour(rank, ranks), class: "part" })));
  for (let chunk = 0; chunk < chunks; chunk++) picture.append(
    draw("text", { x: left + (chunk + .5) * wide, y: 14, "text-anchor": "middle", class: "soft" }, chunk));
  picture.append(draw("text", { x: left + chunks * wide + 6, y: 14, class: "soft" }, "sent"));
  for (let rank = 0; rank < ranks; rank++) {
    const y = 20 + rank * high;
    picture.append(draw("rect", { x: 0, y: y + 8, width: 8, height: high - 18, fill: colour(rank, ranks) }),
      draw("text", { x: 12, y: y + high / 2 + 3 }, `rank ${rank}`),
      draw("text", { x: left + chunks * wide + 6, y: y + high / 2 + 3 }, bytes(sent[rank] * given.bytes / ranks)));
    held[rank].forEach((text, chunk) => picture.append(content(text, ...place(rank, chunk))));
  }
  if (!matchMedia("(prefers-reduced-motion: reduce)").matches) {
    for (const message of moving) message.chunks.forEach((chunk) => {
      const [x, y] = place(message.from, chunk), [, to] = place(message.to, chunk);
      const box = draw("rect", { x: x + 2, y: y + 2, width: wide - 4, height: high - 6, rx: 3, fill: "none",
        stroke: "var(--accent)", "stroke-width": 3 });
      picture.append(box);
      box.animate([{ transform: "none" }, { transform: `translateY(${to - y}px)` }, { transform: `translateY(${to - y}px)`,
        opacity: 0 }], { duration: 800, fill: "forwards", easing: "ease-in-out" });
    });
  }
  return picture;
}

// ---- what it costs ----

const costs = el("div", {}), crossings = el("p", { class: "crossings" }), table = el("table", {});
function showCosts() {
  const over = logarithmic(16, 2 ** 30, 8), kept = given.bytes;
  const known = names.filter((name) => DATA.algorithms[name].costs[given.ranks]);
  const cost = (name, n) => { given.bytes = n; return price(DATA.algorithms[name].costs[given.ranks]); };
  const lines = known.map((name) => ({ name, colour: lineColour(name), points: over.map((n) => [n, cost(name, n)]) }));
  const marks = [];
  known.forEach((one, i) => known.slice(i + 1).forEach((other) => {
    const [a, b] = DATA.algorithms[one].costs[given.ranks], [c, d] = DATA.algorithms[other].costs[given.ranks];
    const n = (a - c) * given.alpha / ((d - b) * given.beta);
    if (n > 16 && n < 2 ** 30) marks.push({ x: n, y: cost(one, n), text: `${one} and ${other} cross at ${bytes(n)}` });
  }));
  given.bytes = kept;
  costs.replaceChildren(chart(costs.clientWidth || 320, lines,
    { x: bytes, y: seconds, logX: true, logY: true, marks, at: given.bytes, ticksX: [2 ** 6, 2 ** 12, 2 ** 18, 2 ** 24, 2 ** 29] }), legend(lines));
  crossings.textContent = marks.sort((a, b) => a.x - b.x).map((mark) => mark.text).join("; ") || "no two of them cross";
  table.replaceChildren(el("tr", {}, ...["", "latencies", "of the buffer", "seconds"].map((text) => el("th", {}, text))),
    ...known.map((name) => [name, DATA.algorithms[name].costs[given.ranks]]).sort((a, b) => price(a[1]) - price(b[1]))
      .map(([name, [latencies, part]]) => el("tr", {}, el("td", {}, name), el("td", { class: "number" }, latencies),
        el("td", { class: "number" }, Number(part.toPrecision(4))), el("td", { class: "number" }, seconds(price([latencies, part]))))));
}

const panels = [panel(DATA.first), panel(nextTo(DATA.first, Object.keys(DATA.algorithms)))];
const control = stepper(() => Math.max(...panels.map((each) => each.rounds)), (at, moves) => {
  for (const each of panels) each.show(at, moves);
});
function refresh() {
  for (const each of panels) each.rounds = each.animation() ? each.animation().rounds : 0;
  control.go(Math.min(control.state.at, Math.max(...panels.map((each) => each.rounds))));
  showCosts();
}
const among = (values, value) => [...values.filter((each) => Math.abs(each / value - 1) > 1e-9), value].sort((a, b) => a - b);
const rate = 8 / given.beta, alphas = among(logarithmic(1e-7, 1e-2, 4), given.alpha), rates = among(logarithmic(1e7, 1e12, 4), rate);
const lengths = Array.from({ length: 27 }, (_, i) => 2 ** (i + 4));
const near = (values, value) => values.reduce((best, each, i) =>
  Math.abs(Math.log(each / value)) < Math.abs(Math.log(values[best] / value)) ? i : best, 0);
PAGE.append(
  el("p", {}, `Each rank's buffer is cut into as many chunks as there are ranks. A stripe in a chunk is the part of the rank with ` +
    `that colour; a frame that travels is a chunk under way.`),
  el("div", { class: "card sliders" },
    slider("ranks", sizes, sizes.indexOf(DATA.ranks), String, (value) => { given.ranks = value; refresh(); }),
    slider("buffer", lengths, near(lengths, given.bytes), bytes, (value) => { given.bytes = value; refresh(); }),
    slider("latency of a message", alphas, alphas.indexOf(given.alpha), seconds, (value) => { given.alpha = value; refresh(); }),
    slider("bandwidth", rates, rates.indexOf(rate), bits, (value) => { given.beta = 8 / value; refresh(); })),
  control.bar, el("div", { class: "cards" }, ...panels.map((each) => each.card)),
  el("section", { class: "card", style: "margin-top:1rem" }, el("h2", {}, "What it costs, by the length of the buffer"), costs, crossings,
    table));
refresh();
addEventListener("resize", refresh);
