// DATA: {head: [[name, text]], results, times: {part: seconds}, memory: {kind: bytes}, evaluation,
//   charts: [{title, accuracy, along, lines: [{name, points}]}], options: [[option, value]], commands,
//   names: of a step's parts, whose: the times are, parts: [[step, seconds of each]],
//   staleness: {heights: [worker][staleness], mean, max}}

const COLOURS = ["#4c78a8", "#d1495b", "#8aa83c", "#b07aa1"]; // legible in both themes
const PAINT = { other: "#6b7785" };
DATA.names.forEach((name, i) => (PAINT[name] = COLOURS[i]));
const number = (value) =>
  value === null || value === undefined ? "" : String(Number(Number(value).toPrecision(4)));
const card = (title, ...content) =>
  el("section", { class: "card" }, el("h2", {}, title), ...content);
const rows = (pairs) =>
  el(
    "table",
    {},
    ...pairs.map(([name, value]) => el("tr", {}, el("th", {}, name), el("td", {}, value))),
  );

// Draw a bar per entry of {name: value}, labelled by `words`.
function barsOf(values, words) {
  const entries = Object.entries(values),
    most = Math.max(...entries.map(([, value]) => value));
  return el(
    "table",
    { style: "width:100%" },
    ...entries.map(([name, value], i) =>
      el(
        "tr",
        {},
        el("th", { style: "width:9rem" }, name),
        el(
          "td",
          {},
          el("div", {
            class: "fill",
            style:
              `height:1rem;border-radius:.15rem;width:${(100 * value) / most || 0}%;` +
              `background:${PAINT[name] || colour(i, entries.length)}`,
          }),
        ),
        el("td", { class: "number", style: "width:8rem" }, words(value)),
      ),
    ),
  );
}

// Append a card with lines [{name, points}]; a point says its values under the pointer.
function curves(grid, title, lines, along, options = {}) {
  const drawn = lines.map((line, i) => ({
    ...line,
    colour: PAINT[line.name] || COLOURS[i % COLOURS.length],
  }));
  const place = el("div", { class: "chart" });
  const y = options.y || number;
  grid.append(card(title, place));
  place.append(
    chart(place.clientWidth || 320, drawn, {
      x: number,
      y,
      words: (line, point) => `${line.name}: ${y(point[1])}, ${number(point[0])} ${along}`,
      ...options,
    }),
    el("p", { class: "soft" }, `over ${along}`),
    drawn.length > 1 ? legend(drawn) : "",
  );
}

const percent = (share) => `${Number((100 * share).toPrecision(5))} %`;

// Return accuracies as 1 / error, whose logarithm grows with each error less: 97 and 99 % are far
// apart. A perfect one is drawn as half of the least error.
function byErrors({ along, lines }) {
  const errors = lines.flatMap((line) => line.points.map((point) => 1 - point[1]));
  const least = Math.min(1, ...errors.filter((error) => error > 0)) / 2;
  const value = (accuracy) => 1 / Math.max(1 - accuracy, least);
  const all = errors.map((error) => value(1 - error));
  const [low, high] = [Math.min(...all), Math.max(...all)];
  const round = [1, 10, 100, 1000, 10000].flatMap((n) => [n, 2 * n, 5 * n]);
  const inside = round.filter((n) => n >= low && n <= high);
  return [
    lines.map(({ name, points }) => ({ name, points: points.map(([x, a]) => [x, value(a), a]) })),
    {
      logY: true,
      ticksY: inside.length > 1 ? inside : [low, high],
      y: (n) => percent(1 - 1 / n),
      words: ({ name }, [x, , a]) => `${name}: ${percent(a)}, ${number(x)} ${along}`,
    },
  ];
}

// Return the table of a confusion matrix: true classes in rows, predicted ones in columns.
function confusionOf({ classes, confusion }) {
  const heads = ["true, predicted", ...classes].map((name) => el("th", {}, name));
  const cell = (n, share, title, right) =>
    el(
      "td",
      {
        class: "number",
        title,
        style:
          `background:color-mix(in srgb, ${COLOURS[right ? 0 : 1]} ` +
          `${n ? Math.round(25 + 45 * share) : 0}%, transparent)`,
      },
      n || "",
    );
  return el(
    "div",
    { class: "wide" },
    el(
      "table",
      {},
      el("tr", {}, ...heads),
      ...confusion.map((row, i) => {
        const all = row.reduce((sum, n) => sum + n, 0) || 1;
        const cells = row.map((n, j) =>
          cell(n, n / all, `${classes[i]} taken for ${classes[j]}: ${n} of ${all}`, i === j),
        );
        return el("tr", {}, el("th", {}, classes[i]), ...cells);
      }),
    ),
  );
}

function show() {
  const all = Object.values(DATA.times).reduce((sum, item) => sum + item, 0);
  const { peak, ...memory } = DATA.memory;
  const grid = el("div", { class: "cards" });
  const results = DATA.results.map((item) => [
    item.kind === "test" ? "at the end" : `after epoch ${number(item.epoch)}`,
    [
      `loss ${number(item.loss)}`,
      item.accuracy === null ? "" : `accuracy ${(100 * item.accuracy).toFixed(2)} %`,
      item.perplexity === null ? "" : `perplexity ${number(item.perplexity)}`,
      seconds(item.elapsed_s),
    ]
      .filter(Boolean)
      .join(", "),
  ]);
  PAGE.replaceChildren(
    card("The run", el("div", { class: "wide" }, rows(DATA.head.concat(results)))),
    grid,
  );
  if (all)
    grid.append(
      card(
        `Where a step's time went ${DATA.whose}`,
        barsOf(DATA.times, (value) => `${seconds(value)}, ${((100 * value) / all).toFixed(0)} %`),
      ),
    );
  if (peak)
    grid.append(
      card(
        `Memory of rank 0: at most ${bytes(peak)}`,
        barsOf(memory, (value) => (value ? bytes(value) : "0 B")),
      ),
    );
  const { heights, mean, max } = DATA.staleness,
    { part, data, step, samples } = DATA.evaluation;
  const parts = DATA.names.map((name, i) => ({
    name,
    points: DATA.parts.map((row) => [row[0], row[i + 1]]),
  }));
  const used = parts.filter((line) => line.points.some((point) => point[1]));
  if (used.length)
    curves(grid, "Where a step's time went, over the steps", used, "steps", { y: seconds });
  for (const item of DATA.charts) {
    const [drawn, options] = item.accuracy
      ? byErrors(item)
      : [item.lines, { zero: /speed/.test(item.title) }];
    curves(grid, item.title, drawn, item.along, options);
  }
  if (heights.length)
    curves(
      grid,
      `Staleness: ${number(mean)} on average, at most ${max}`,
      heights.map((local, worker) => ({
        name: `worker ${worker}`,
        points: local.map((gradients, n) => [n, gradients]),
      })),
      "updates that came between",
    );
  if (DATA.evaluation.confusion)
    grid.append(
      card(
        `Confusion: ${samples} ${part} samples of ${data}, after step ${step}`,
        confusionOf(DATA.evaluation),
      ),
    );
  if (DATA.options.length)
    PAGE.append(
      el(
        "section",
        { class: "card", style: "margin-top:1rem" },
        el("h2", {}, "Options that differ from their defaults"),
        el("div", { class: "wide" }, rows(DATA.options)),
      ),
    );
  PAGE.append(card("Commands", ...DATA.commands.map((item) => el("pre", {}, item))));
}
show();
addEventListener("theme", show);
