// DATA: {layers: [name], budgets: [bytes], budget, plans: {name: [an animation per budget]}}
//
// animation: {peak, seconds, again, moved, actions:
//   [[act, layer, signs, begin, computes, end, peak, after, transfer]]}
//
// signs: a character per layer: "=" saved, "-" its input waits, "." offloaded, or the action's
// letter (see nnmpi/memory/plan.py).

const names = Object.keys(DATA.plans);
const titles = DATA.layers.map((name, i) => (name === String(i) ? `layer ${i}` : name));
const settings = { name: names[0], budget: DATA.budgets.indexOf(DATA.budget) };
const animation = () => DATA.plans[settings.name][settings.budget];
const FILLS = {
  F: "var(--f)",
  K: "var(--f)",
  B: "var(--b)",
  O: "var(--step)",
  A: "var(--empty)",
  I: "var(--step)",
  D: "var(--empty)",
  "=": "var(--w)",
  "-": "color-mix(in oklab, var(--w) 35%, var(--empty))",
  ".": "var(--empty)",
};
const WORDS = {
  F: "forward; only the output stays",
  K: "forward; all tensors for the backward stay",
  B: "backward",
  D: "its input is dropped",
  O: "its offloading begins",
  A: "offloaded; its memory is free",
  I: "its memory is allocated; prefetch begins",
};
const lineColour = (name) => colour(names.indexOf(name), names.length);

// Draw a row per layer and a column per action; the first `at` actions are done.
function grid(width, { actions }, at) {
  const left = Math.min(130, 14 + 7 * Math.max(...titles.map((name) => name.length))),
    high = 22;
  const wide = Math.max(10, Math.min(28, (width - left) / actions.length)); // room for a letter
  const picture = draw("svg", {
    width: left + wide * actions.length,
    height: high * DATA.layers.length + 4,
    role: "img",
    "aria-label": "layers and actions",
  });
  titles.forEach((name, i) =>
    picture.append(
      draw("text", { x: 0, y: high * i + 15 }, name.length > 16 ? `${name.slice(0, 15)}…` : name),
    ),
  );
  actions.forEach(([act, layer, signs], column) =>
    [...signs].forEach((sign, i) => {
      const x = left + column * wide,
        letter = sign.toUpperCase();
      if (sign !== " ")
        picture.append(
          draw(
            "rect",
            {
              x,
              y: high * i + 2,
              width: wide - 1,
              height: high - 4,
              rx: 2,
              fill: FILLS[letter],
              opacity: column < at ? 1 : 0.3,
              stroke: column === at - 1 && i === layer ? "var(--ink)" : "none",
              "stroke-width": 2,
            },
            draw("title", {}, i === layer ? `${act}${layer}: ${WORDS[act]}` : titles[i]),
          ),
        );
      if (/[A-Za-z]/.test(sign))
        picture.append(
          draw(
            "text",
            {
              x: x + wide / 2 - 0.5,
              y: high * i + 15,
              "text-anchor": "middle",
              style: `font-size:11px${"DA".includes(letter) ? "" : ";fill:var(--on)"}`,
            },
            sign,
          ),
        );
    }),
  );
  return picture;
}

// Draw memory over time with the budget's line; below, computation and transfers.
function overTime(width, { actions, seconds: all }, now) {
  const left = 62,
    right = 10,
    high = 150,
    top = 8,
    rows = 44,
    budget = DATA.budgets[settings.budget];
  const most =
    1.05 * Math.max(budget, ...Object.values(DATA.plans).map((item) => item[settings.budget].peak));
  const end =
    Math.max(...Object.values(DATA.plans).map((item) => item[settings.budget].seconds)) || 1;
  const px = (time) => left + (time / end) * (width - left - right),
    py = (n) => top + high * (1 - n / most);
  const picture = draw("svg", {
    width,
    height: top + high + rows + 26,
    role: "img",
    "aria-label": "bytes over time",
  });
  const line = (y, stroke, more) =>
    draw("line", { x1: left, x2: width - right, y1: y, y2: y, stroke, ...more });
  for (const n of [0, most / 2.1, most / 1.05])
    picture.append(
      line(py(n), "var(--line)"),
      draw(
        "text",
        { x: left - 6, y: py(n) + 4, "text-anchor": "end", class: "soft" },
        n ? bytes(n) : "0 B",
      ),
    );
  let path = `M${px(0)} ${py(0)}`;
  for (const [, , , begin, , to, peak, after] of actions)
    path += `L${px(begin)} ${py(peak)}L${px(to)} ${py(peak)}L${px(to)} ${py(after)}`;
  picture.append(
    draw("path", {
      d: `${path}L${px(all)} ${py(0)}Z`,
      fill: FILLS["-"],
      stroke: "var(--w)",
      "stroke-width": 1.5,
    }),
  );
  picture.append(
    line(py(budget), "var(--step)", { "stroke-width": 1.5, "stroke-dasharray": "6 3" }),
  );
  const box = (from, to, row, fill, words) =>
    picture.append(
      draw(
        "rect",
        {
          x: px(from),
          y: top + high + 8 + row * 19,
          width: Math.max(1, px(to) - px(from) - 0.5),
          height: 15,
          fill,
          class: "time",
          opacity: from < now ? 1 : 0.3,
        },
        draw("title", {}, words),
      ),
    );
  for (const [act, layer, , , computes, to, , , transfer] of actions) {
    if (to > computes)
      box(computes, to, 0, FILLS[act], `${act}${layer}, ${seconds(to - computes)}`);
    if (transfer)
      box(...transfer, 1, FILLS[act], `${act}${layer}, ${seconds(transfer[1] - transfer[0])}`);
  }
  for (const [row, text] of ["computes", "transfers"].entries())
    picture.append(draw("text", { x: 0, y: top + high + 20 + row * 19, class: "soft" }, text));
  picture.append(
    draw("line", {
      x1: px(now),
      x2: px(now),
      y1: top,
      y2: top + high + rows,
      stroke: "var(--ink)",
      "stroke-width": 1.5,
    }),
  );
  for (const [time, anchor] of [
    [0, "start"],
    [end, "end"],
  ])
    picture.append(
      draw(
        "text",
        { x: px(time), y: top + high + rows + 18, "text-anchor": anchor, class: "soft" },
        seconds(time),
      ),
    );
  return picture;
}

const figures = el("p", { class: "figures" }),
  caption = el("p", { class: "caption soft", "aria-live": "polite" });
const view = el("div", { class: "wide" }),
  memory = el("div", {}),
  costs = el("div", {});
const control = stepper(
  () => animation().actions.length,
  (at) => {
    const plan = animation(),
      action = plan.actions[at - 1],
      now = action ? action[5] : 0;
    figures.textContent =
      `${seconds(plan.seconds)}, at most ${bytes(plan.peak)} of ` +
      `${bytes(DATA.budgets[settings.budget])}; ` +
      `${several(plan.again, "layer")} recomputed` +
      (plan.moved ? `, ${bytes(plan.moved)} moved` : "");
    caption.textContent = !action
      ? "before the first action"
      : `action ${at} of ${plan.actions.length}, ${action[0]}${action[1]} ` +
        `(${titles[action[1]]}): ${WORDS[action[0]]}; clock ${seconds(now)}, ` +
        `${action[7] ? bytes(action[7]) : "0 B"} held`;
    view.replaceChildren(grid(view.clientWidth || 320, plan, at));
    memory.replaceChildren(overTime(memory.clientWidth || 320, plan, now));
  },
);
function refresh() {
  const lines = names.map((name) => ({
    name,
    colour: lineColour(name),
    points:
      name === "all kept"
        ? [[DATA.plans[name][0].peak, DATA.plans[name][0].seconds]]
        : DATA.budgets.map((budget, i) => [budget, DATA.plans[name][i].seconds]),
  }));
  costs.replaceChildren(
    chart(costs.clientWidth || 320, lines, {
      x: bytes,
      y: seconds,
      at: DATA.budgets[settings.budget],
      titleX: "budget",
      titleY: "seconds of a pass",
      height: 200,
      ticksX: [DATA.budgets[0], DATA.budgets.at(-1)],
    }),
    legend(lines),
  );
  control.go(Math.min(control.state.at, animation().actions.length));
}
const choose = choice("plan", names, settings.name, (chosen) => {
  settings.name = chosen;
  refresh();
});
PAGE.append(
  el(
    "p",
    {},
    "A forward and backward pass through a chain of layers, ending with the loss. A column is an " +
      "action, a row is a layer; pale actions are still to come. Small letters recompute.",
  ),
  legend(
    [
      ["forward (F, K)", FILLS.F],
      ["backward (B)", FILLS.B],
      ["saved for the backward", FILLS["="]],
      ["its input waits", FILLS["-"]],
      ["in transfer (O, I)", FILLS.O],
    ].map(([name, colour]) => ({ name, colour })),
  ),
  el(
    "div",
    { class: "card sliders" },
    el("label", {}, "plan: ", choose),
    slider("budget", DATA.budgets, settings.budget, bytes, (value) => {
      settings.budget = DATA.budgets.indexOf(value);
      refresh();
    }),
  ),
  control.bar,
  el("section", { class: "card" }, figures, view, caption),
  el(
    "div",
    { class: "cards" },
    el(
      "section",
      { class: "card" },
      el("h2", {}, "Memory over time, and the budget (dashed)"),
      memory,
    ),
    el("section", { class: "card" }, el("h2", {}, "Time of a pass by budget"), costs),
  ),
);
refresh();
control.go(animation().actions.length);
addEventListener("resize", refresh);
