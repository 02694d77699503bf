// DATA: {operation, ranks, bytes, first, alpha, beta, algorithms:
//   {name: {animations: {ranks: animation}, costs: {ranks: [latencies, parts]}}}}
//
// animation: {begins: [rank][chunk], rounds, messages:
//   [{round, from, to, chunks, reduce, after, clock: [latencies, parts]}]}
//
// A chunk's content is a hexadecimal number: digit r (from the right) counts the contributions of
// rank r. `parts` is a share of the buffer's M bytes: a message costs alpha + parts * M * beta.

const names = Object.keys(DATA.algorithms);
const sizes = [...new Set(names.flatMap((name) => Object.keys(DATA.algorithms[name].costs)))]
  .map(Number)
  .sort((a, b) => a - b);
const settings = { ranks: DATA.ranks, bytes: DATA.bytes, alpha: DATA.alpha, beta: DATA.beta };
const lineColour = (name) => colour(names.indexOf(name), names.length);
const price = ([latencies, parts]) =>
  latencies * settings.alpha + parts * settings.bytes * settings.beta;

function panel(name) {
  const self = { name, rounds: 0 };
  const choose = choice("algorithm", names, name, (chosen) => {
    self.name = chosen;
    refresh();
  });
  const figures = el("p", { class: "figures" }),
    view = el("div", {}),
    caption = el("p", { class: "caption soft", "aria-live": "polite" });
  self.card = el("section", { class: "card" }, choose, figures, view, caption);
  self.animation = () => DATA.algorithms[self.name].animations[settings.ranks];

  // Draw the state after `at` rounds; with `moves`, animate the messages of the last round.
  self.show = (at, moves) => {
    const animation = self.animation(),
      ranks = settings.ranks;
    self.rounds = animation ? animation.rounds : 0;
    view.replaceChildren();
    if (!animation) {
      const cost = DATA.algorithms[self.name].costs[ranks];
      figures.textContent = cost
        ? `${seconds(price(cost))} in all`
        : `not right on ${several(ranks, "rank")}`;
      caption.textContent = cost
        ? `${several(cost[0], "message")} one after another, ${number(cost[1])} buffers' bytes; ` +
          `steps are drawn for up to ${DATA.drawn} ranks`
        : "";
      return;
    }
    const done = Math.min(at, animation.rounds);
    const held = animation.begins.map((row) => row.slice());
    const sent = Array(ranks).fill(0);
    for (const message of animation.messages)
      if (message.round < done) {
        message.chunks.forEach((chunk, i) => {
          held[message.to][chunk] = message.after[i];
        });
        sent[message.from] += message.chunks.length;
      }
    const past = animation.messages.filter((message) => message.round < done);
    const clock = Math.max(0, ...past.map((message) => price(message.clock)));
    const all = Math.max(0, ...animation.messages.map((message) => price(message.clock)));
    figures.textContent =
      `after ${done} of ${animation.rounds} rounds, clock ${seconds(clock)} of ${seconds(all)}, ` +
      `${several(past.length, "message")}`;
    const last = past.filter((message) => message.round === done - 1);
    caption.textContent = done
      ? last
          .slice(0, 8)
          .map(
            (message) =>
              `${message.from} ${message.reduce ? "adds to" : "to"} ` +
              `${message.to}: ${named(message.chunks, animation.parts)}`,
          )
          .join("; ") + (last.length > 8 ? " ..." : "")
      : "before the first round";
    view.append(memory(view.clientWidth || 320, ranks, held, sent, animation.parts, moves ? last : []));
  };
  return self;
}

const named = (chunks, parts) => (chunks.length === parts ? "all" : `chunk ${chunks.join(", ")}`);
const parts = (text, rank) => (text ? parseInt(text[text.length - 1 - rank] || "0", 16) : 0);

// Draw each rank's memory: a row of chunks, each with a stripe per rank that has contributed.
function memory(width, ranks, held, sent, whole, moving) {
  const left = 52,
    right = 64,
    high = 34;
  const chunks = held[0].length,
    wide = Math.min(64, (width - left - right) / chunks),
    picture = draw("svg", {
      width,
      height: high * ranks + 24,
      viewBox: `0 0 ${width} ${high * ranks + 24}`,
      role: "img",
      "aria-label": "memory of each rank",
    });
  const place = (rank, chunk) => [left + chunk * wide, 20 + rank * high];
  const content = (text, x, y) =>
    draw(
      "g",
      {},
      draw("rect", {
        x: x + 2,
        y: y + 2,
        width: wide - 4,
        height: high - 6,
        rx: 3,
        fill: "var(--empty)",
        stroke: "var(--line)",
      }),
      ...Array.from({ length: ranks }, (_, rank) => rank)
        .filter((rank) => parts(text, rank))
        .map((rank) =>
          draw("rect", {
            x: x + 4 + (rank * (wide - 8)) / ranks,
            y: y + 4 + (parts(text, rank) > 1 ? 0 : 4),
            width: (wide - 8) / ranks - 0.5,
            height: high - 10 - (parts(text, rank) > 1 ? 0 : 4),
            fill: colour(rank, ranks),
            class: "part",
          }),
        ),
    );
  for (let chunk = 0; chunk < chunks; chunk++)
    picture.append(
      draw(
        "text",
        { x: left + (chunk + 0.5) * wide, y: 14, "text-anchor": "middle", class: "soft" },
        chunk,
      ),
    );
  picture.append(draw("text", { x: left + chunks * wide + 6, y: 14, class: "soft" }, "sent"));
  for (let rank = 0; rank < ranks; rank++) {
    const y = 20 + rank * high;
    picture.append(
      draw("rect", { x: 0, y: y + 8, width: 8, height: high - 18, fill: colour(rank, ranks) }),
      draw("text", { x: 12, y: y + high / 2 + 3 }, `rank ${rank}`),
      draw(
        "text",
        { x: left + chunks * wide + 6, y: y + high / 2 + 3 },
        bytes((sent[rank] * settings.bytes) / whole),
      ),
    );
    held[rank].forEach((text, chunk) => picture.append(content(text, ...place(rank, chunk))));
  }
  if (!matchMedia("(prefers-reduced-motion: reduce)").matches) {
    for (const message of moving)
      message.chunks.forEach((chunk) => {
        const [x, y] = place(message.from, chunk),
          [, to] = place(message.to, chunk);
        const box = draw("rect", {
          x: x + 2,
          y: y + 2,
          width: wide - 4,
          height: high - 6,
          rx: 3,
          fill: "none",
          stroke: "var(--accent)",
          "stroke-width": 3,
        });
        picture.append(box);
        box.animate(
          [
            { transform: "none" },
            { transform: `translateY(${to - y}px)` },
            { transform: `translateY(${to - y}px)`, opacity: 0 },
          ],
          { duration: 800, fill: "forwards", easing: "ease-in-out" },
        );
      });
  }
  return picture;
}

// ---- costs ----

const costs = el("div", {}),
  crossings = el("p", { class: "crossings" }),
  table = el("table", {});
function showCosts() {
  const over = logarithmic(16, 2 ** 30, 8),
    kept = settings.bytes;
  const known = names.filter((name) => DATA.algorithms[name].costs[settings.ranks]);
  const cost = (name, n) => {
    settings.bytes = n;
    return price(DATA.algorithms[name].costs[settings.ranks]);
  };
  const lines = known.map((name) => ({
    name,
    colour: lineColour(name),
    points: over.map((n) => [n, cost(name, n)]),
  }));
  const marks = [];
  known.forEach((one, i) =>
    known.slice(i + 1).forEach((other) => {
      const [a, b] = DATA.algorithms[one].costs[settings.ranks],
        [c, d] = DATA.algorithms[other].costs[settings.ranks];
      const n = ((a - c) * settings.alpha) / ((d - b) * settings.beta);
      if (n > 16 && n < 2 ** 30)
        marks.push({ x: n, y: cost(one, n), text: `${one} and ${other} cross at ${bytes(n)}` });
    }),
  );
  settings.bytes = kept;
  costs.replaceChildren(
    chart(costs.clientWidth || 320, lines, {
      x: bytes,
      y: seconds,
      logX: true,
      logY: true,
      titleX: "bytes of a buffer",
      titleY: "seconds of the collective, and where two cross",
      marks,
      at: settings.bytes,
      ticksX: [2 ** 6, 2 ** 12, 2 ** 18, 2 ** 24, 2 ** 29],
    }),
    legend(lines),
  );
  crossings.textContent =
    marks
      .sort((a, b) => a.x - b.x)
      .map((mark) => mark.text)
      .join("; ") || "no two of them cross";
  table.replaceChildren(
    el("tr", {}, ...["", "latencies", "buffers sent", "seconds"].map((text) => el("th", {}, text))),
    ...known
      .map((name) => [name, DATA.algorithms[name].costs[settings.ranks]])
      .sort((a, b) => price(a[1]) - price(b[1]))
      .map(([name, [latencies, part]]) =>
        el(
          "tr",
          {},
          el("td", {}, name),
          el("td", { class: "number" }, latencies),
          el("td", { class: "number" }, number(part)),
          el("td", { class: "number" }, seconds(price([latencies, part]))),
        ),
      ),
  );
}

const panels = [panel(DATA.first), panel(nextTo(DATA.first, Object.keys(DATA.algorithms)))];
const control = stepper(
  () => Math.max(...panels.map((item) => item.rounds)),
  (at, moves) => {
    for (const item of panels) item.show(at, moves);
  },
);
function refresh() {
  for (const item of panels) item.rounds = item.animation() ? item.animation().rounds : 0;
  control.go(Math.min(control.state.at, Math.max(...panels.map((item) => item.rounds))));
  showCosts();
}
const among = (values, value) =>
  [...values.filter((item) => Math.abs(item / value - 1) > 1e-9), value].sort((a, b) => a - b);
const rate = 8 / settings.beta,
  alphas = among(logarithmic(1e-7, 1e-2, 4), settings.alpha),
  rates = among(logarithmic(1e7, 1e12, 4), rate);
const lengths = Array.from({ length: 27 }, (_, i) => 2 ** (i + 4));
const near = (values, value) =>
  values.reduce(
    (best, item, i) =>
      Math.abs(Math.log(item / value)) < Math.abs(Math.log(values[best] / value)) ? i : best,
    0,
  );
PAGE.append(
  el(
    "p",
    {},
    `Each rank's buffer is cut into a chunk per rank. A stripe in a chunk is the contribution of ` +
      `the rank with that colour; a travelling frame is a message.`,
  ),
  el(
    "div",
    { class: "card sliders" },
    slider("ranks", sizes, sizes.indexOf(DATA.ranks), String, (value) => {
      settings.ranks = value;
      refresh();
    }),
    slider("buffer", lengths, near(lengths, settings.bytes), bytes, (value) => {
      settings.bytes = value;
      refresh();
    }),
    slider("latency of a message", alphas, alphas.indexOf(settings.alpha), seconds, (value) => {
      settings.alpha = value;
      refresh();
    }),
    slider("bandwidth", rates, rates.indexOf(rate), bits, (value) => {
      settings.beta = 8 / value;
      refresh();
    }),
  ),
  control.bar,
  el("div", { class: "cards" }, ...panels.map((item) => item.card)),
  el(
    "section",
    { class: "card", style: "margin-top:1rem" },
    el("h2", {}, "Cost by buffer size: formulas of messages above 4 KiB"),
    costs,
    crossings,
    table,
  ),
);
refresh();
control.go(1); // the first messages have arrived: a still picture shows what moves
addEventListener("resize", refresh);
