// DATA: {ranks, microbatches, all_ranks, all_microbatches, first, animations:
//   {name: {"ranks,microbatches": animation}}}
//
// animation: {spans: [[rank, kind, stage, microbatch, begin, end]], makespan, bubble, peaks,
//   held: [[rank, what, stage, microbatch, begin, end]], kept: [rank][[time, number of activations
//   from then on]]}

const settings = { ranks: DATA.ranks, microbatches: DATA.microbatches };
const names = Object.keys(DATA.animations);
const WORDS = {
  F: "forward",
  B: "backward",
  I: "backward to the input",
  W: "backward to the weights",
  STEP: "update",
};
const FILLS = { F: "var(--f)", B: "var(--b)", I: "var(--b)", W: "var(--w)", STEP: "var(--step)" };
const HELD = {
  "weights gathered": { fill: "var(--w)", at: 25, words: "gathered weights of stage" },
  "saved, away": { fill: "var(--step)", at: 1, words: "in the store: what was saved by stage" },
};
const ms = (value) => `${Number(value.toPrecision(4))} ms`;

function panel(name) {
  const self = { name };
  const choose = choice("schedule", names, name, (chosen) => {
    self.name = chosen;
    refresh();
  });
  const figures = el("p", { class: "figures" }),
    view = el("div", { class: "wide" });
  self.card = el("section", { class: "card" }, choose, figures, view);
  self.animation = () => DATA.animations[self.name][`${settings.ranks},${settings.microbatches}`];
  self.show = (now, end) => {
    const animation = self.animation();
    figures.textContent =
      `${ms(animation.makespan)}, bubble ${(100 * animation.bubble).toFixed(1)} %, keeps at most ` +
      `${animation.peaks.join(" ")} activations`;
    view.replaceChildren(grid(Math.max(view.clientWidth, 300), animation, now, end));
  };
  return self;
}

// Return a rank's stages, the first one of its data first.
const stagesOf = (animation, rank) =>
  [...new Set(animation.spans.filter((span) => span[0] === rank).map((span) => span[2]))]
    .filter((stage) => stage !== null)
    .sort((a, b) => a - b);

// Draw a row per rank: its computation over time, and its number of live activations at `now`. It is
// so wide that each pass has room for its number; a rank's later stages are darker.
function grid(room, animation, now, end) {
  const left = 52,
    right = 58,
    high = 30,
    rows = animation.kept.length;
  const needs = animation.spans.map(
    ([, , , microbatch, from, to]) =>
      (7 * String(microbatch ?? "").length + 5) / (to - from || end),
  );
  const width = Math.min(
    Math.max(room, left + right + end * Math.max(...needs)),
    Math.max(room, 2400),
  );
  const stages = animation.kept.map((_, rank) => stagesOf(animation, rank));
  const fill = (rank, kind, stage) => {
    const later = Math.max(0, stages[rank].indexOf(stage)) / stages[rank].length;
    return `color-mix(in oklab, ${FILLS[kind]}, var(--shade) ${Math.round(70 * later)}%)`;
  };
  const px = (time) => left + (time / end) * (width - left - right);
  const picture = draw("svg", {
    width,
    height: rows * high + 26,
    role: "img",
    "aria-label": "what each rank computes",
  });
  animation.kept.forEach((curve, rank) => {
    const kept = curve.filter(([from]) => from <= now + 1e-9).at(-1)[1];
    picture.append(
      draw("text", { x: 0, y: rank * high + 19 }, `rank ${rank}`),
      draw("rect", {
        x: left,
        y: rank * high + 3,
        width: width - left - right,
        height: high - 6,
        fill: "var(--empty)",
      }),
      draw("text", { x: width - right + 6, y: rank * high + 19, class: "kept" }, `keeps ${kept}`),
    );
  });
  for (const [rank, kind, stage, microbatch, from, to] of animation.spans) {
    const wide = px(to) - px(from),
      text = microbatch === null ? "" : String(microbatch);
    const going = from <= now + 1e-9 && now < to - 1e-9;
    picture.append(
      draw(
        "rect",
        {
          x: px(from),
          y: rank * high + 3,
          width: Math.max(1, wide - 1),
          height: high - 6,
          rx: 2,
          fill: fill(rank, kind, stage),
          opacity: from > now + 1e-9 ? 0.35 : 1,
          stroke: going ? "var(--ink)" : "none",
          "stroke-width": 2,
        },
        draw(
          "title",
          {},
          `${WORDS[kind]} of stage ${stage}${text && ` on microbatch ${text}`}, ` +
            `${ms(from)} to ${ms(to)}`,
        ),
      ),
    );
    if (wide > 7 * text.length + 3)
      picture.append(
        draw(
          "text",
          {
            x: px(from) + wide / 2,
            y: rank * high + 19,
            "text-anchor": "middle",
            style: "fill:var(--on);font-size:11px",
          },
          text,
        ),
      );
  }
  for (const [rank, what, stage, microbatch, from, to] of animation.held) {
    const { fill: colour, at, words } = HELD[what];
    const batch = at === 1 ? ` on microbatch ${microbatch}` : "";
    picture.append(
      draw(
        "rect",
        {
          x: px(from),
          y: rank * high + at,
          width: Math.max(1, px(to) - px(from) - 1),
          height: 4,
          class: "held",
          fill: colour,
          opacity: from > now + 1e-9 ? 0.35 : 1,
        },
        draw("title", {}, `${words} ${stage}${batch}, ${ms(from)} to ${ms(to)}`),
      ),
    );
  }
  picture.append(
    draw("line", {
      x1: px(now),
      x2: px(now),
      y1: 0,
      y2: rows * high,
      stroke: "var(--ink)",
      "stroke-width": 1.5,
    }),
  );
  picture.append(
    draw("text", { x: left - 6, y: rows * high + 16, "text-anchor": "end", class: "soft" }, "ms"),
  );
  for (const value of ticks(0, end))
    picture.append(
      draw(
        "text",
        { x: px(value), y: rows * high + 16, "text-anchor": "middle", class: "soft" },
        Number(value.toPrecision(4)),
      ),
    );
  return picture;
}

const panels = [panel(DATA.first), panel(nextTo(DATA.first, Object.keys(DATA.animations)))];
let moments = [0];
const clock = el("span", { class: "clock" });
const control = stepper(
  () => moments.length - 1,
  (at) => {
    const end = Math.max(...panels.map((item) => item.animation().makespan));
    clock.textContent = ms(moments[at]);
    for (const item of panels) item.show(moments[at], end);
  },
);
function refresh() {
  const all = panels.flatMap((item) =>
    item.animation().spans.flatMap((span) => [span[4], span[5]]),
  );
  moments = [...new Set([0, ...all])].sort((a, b) => a - b);
  control.go(Math.min(control.state.at, moments.length - 1));
}
control.bar.append(clock);
PAGE.append(
  el(
    "p",
    {},
    "A number is a microbatch. Pale passes are still to come; a rank's later stages are darker. A " +
      "rank keeps an activation from a microbatch's forward to the end of its backward.",
  ),
  legend(
    Object.entries({
      forward: FILLS.F,
      "backward (to the input)": FILLS.B,
      "backward to the weights": FILLS.W,
    }).map(([name, colour]) => ({ name, colour })),
  ),
  el(
    "div",
    { class: "card sliders" },
    slider("ranks", DATA.all_ranks, DATA.all_ranks.indexOf(settings.ranks), String, (value) => {
      settings.ranks = value;
      refresh();
    }),
    slider(
      "microbatches",
      DATA.all_microbatches,
      DATA.all_microbatches.indexOf(settings.microbatches),
      String,
      (value) => {
        settings.microbatches = value;
        refresh();
      },
    ),
  ),
  control.bar,
  ...panels.map((item) => item.card),
);
refresh();
control.go(moments.length - 1);
addEventListener("resize", refresh);
