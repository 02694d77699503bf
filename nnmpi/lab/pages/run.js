// DATA: {head: [[name, text]], times: {part: seconds}, memory: {kind: bytes}, evaluation,
//   results: [{kind, epoch, elapsed_s, shown: [text]}],
//   charts: [{title, is_share, lines: [{name, points: [[step, seconds, value]]}]}],
//   options: [[option, value]], commands; of several runs many is true, head has their results,
//   and options a value for each;
//   names: of a step's parts, whose: the times are, parts: [[step, seconds of each]],
//   staleness: {heights: [worker][staleness], mean, max}}

const COLOURS = ["#4c78a8", "#d1495b", "#8aa83c", "#b07aa1"]; // legible in both themes
const PAINT = { other: "#6b7785" };
DATA.names.forEach((name, i) => (PAINT[name] = COLOURS[i]));
const card = (title, ...content) =>
  el("section", { class: "card" }, el("h2", {}, title), ...content);
const rows = (pairs) =>
  el(
    "table",
    {},
    ...pairs.map(([name, ...values]) =>
      el("tr", {}, el("th", {}, name), ...values.map((value) => el("td", {}, value))),
    ),
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

const settings = { along: "steps" };

// Append a card with lines [{name, points}]; a point says its values under the pointer.
function curves(grid, title, lines, along, options = {}) {
  const drawn = lines.map((line, i) => ({
    ...line,
    colour:
      PAINT[line.name] ||
      (lines.length > COLOURS.length ? colour(i, lines.length) : COLOURS[i]),
  }));
  const place = el("div", { class: "chart" });
  const y = options.y || number;
  grid.append(card(title, place));
  place.append(
    chart(place.clientWidth || 320, drawn, {
      x: number,
      y,
      titleX: along,
      titleY: title.split(":")[0].toLowerCase(),
      whole: along !== "seconds",
      words: (line, point) => `${line.name}: ${y(point[1])}, ${number(point[0])} ${along}`,
      ...options,
    }),
    drawn.length > 1 ? legend(drawn) : "",
  );
}

const percent = (share) => `${Number((100 * share).toPrecision(5))} %`;

// Return shares as 1 / error, whose logarithm grows with each error less: 97 and 99 % are far
// apart. A perfect one is drawn as half of the least error.
function byErrors(lines, along) {
  const errors = lines.flatMap((line) => line.points.map((point) => 1 - point[1]));
  const least = Math.min(1, ...errors.filter((error) => error > 0)) / 2;
  const value = (share) => 1 / Math.max(1 - share, least);
  const all = errors.map((error) => value(1 - error));
  const [low, high] = [Math.min(...all), Math.max(...all)];
  const round = [1, 10, 100, 1000, 10000].flatMap((n) => [n, 2 * n, 5 * n]);
  const inside = round.filter((n) => n >= low && n <= high);
  return [
    lines.map(({ name, points }) => ({ name, points: points.map(([x, a]) => [x, value(a), a]) })),
    {
      logY: true,
      ticksY: inside.length > 1 ? inside : ticks(1 - 1 / low, 1 - 1 / high).map(value),
      y: (n) => percent(1 - 1 / n),
      words: ({ name }, [x, , a]) => `${name}: ${percent(a)}, ${number(x)} ${along}`,
    },
  ];
}

// Return the table of each class's metrics.
function classesOf({ classes, each_class }) {
  const names = Object.keys(each_class);
  return el(
    "div",
    { class: "wide" },
    el(
      "table",
      {},
      el("tr", {}, ...["class", ...names].map((name) => el("th", {}, name))),
      ...classes.map((name, i) =>
        el(
          "tr",
          {},
          el("th", {}, name),
          ...names.map((item) => el("td", { class: "number" }, number(each_class[item][i]))),
        ),
      ),
    ),
  );
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

// Draw bars of counts [kind][value] over the values 0, 1, ..., stacked by kind.
function histogram(width, heights, titleX, titleY) {
  const [left, right, top, height] = [62, 10, 26, 260];
  const values = heights[0].map((_, value) => value);
  const sums = values.map((value) => heights.reduce((sum, counts) => sum + counts[value], 0));
  const most = Math.max(...sums, 1),
    bottom = height - 44;
  const wide = (width - left - right) / values.length,
    py = (n) => bottom - (n / most) * (bottom - top);
  const text = (x, y, words, anchor) =>
    draw("text", { x, y, "text-anchor": anchor, class: "soft" }, words);
  const picture = draw(
    "svg",
    { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" },
    text(0, 12, titleY, "start"),
    text((left + width - right) / 2, height - 6, titleX, "middle"),
    ...ticks(0, most)
      .filter((n) => n % 1 === 0)
      .map((n) => text(left - 6, py(n) + 4, n, "end")),
  );
  const every = Math.ceil(24 / wide);
  values.forEach((value) => {
    const x = left + value * wide;
    let under = 0;
    if (value % every === 0) picture.append(text(x + wide / 2, bottom + 20, value, "middle"));
    heights.forEach((counts, kind) => {
      if (!counts[value]) return;
      picture.append(
        draw(
          "rect",
          {
            x: x + wide * 0.1,
            y: py(under + counts[value]),
            width: wide * 0.8,
            height: py(under) - py(under + counts[value]),
            fill: colour(kind, heights.length),
            class: "counted",
          },
          draw("title", {}, `worker ${kind}: ${several(counts[value], "update")} of age ${value}`),
        ),
      );
      under += counts[value];
    });
  });
  return picture;
}

function show() {
  const all = Object.values(DATA.times).reduce((sum, item) => sum + item, 0);
  const { peak, ...memory } = DATA.memory;
  const grid = el("div", { class: "cards", style: "margin-bottom:1rem" });
  const [last, ...earlier] = DATA.results.toReversed();
  const said = (item) =>
    `${item.kind === "test" ? "at the end" : `after epoch ${number(item.epoch)}`}, ` +
    `${seconds(item.elapsed_s)}`;
  PAGE.replaceChildren(
    ...(last ? [el("h2", { class: "result" }, `test ${last.shown[0] ?? ""}`)] : []),
    ...(last ? [el("p", { class: "soft" }, [...last.shown.slice(1), said(last)].join(", "))] : []),
    ...earlier
      .filter((item) => item.shown.join() !== last.shown.join())
      .map((item) => el("p", { class: "soft" }, `${said(item)}: test ${item.shown.join(", ")}`)),
    ...(DATA.charts.length
      ? [
          el(
            "label",
            { class: "bar" },
            "curves over",
            choice("curves over", ["steps", "seconds"], settings.along, (along) => {
              settings.along = along;
              show();
            }),
          ),
        ]
      : []),
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
    curves(grid, "Where a step's time went, over the steps", used, "steps", {
      y: seconds,
      titleY: "time of a step",
    });
  const { along } = settings;
  for (const item of DATA.charts) {
    const lines = item.lines.map(({ name, points }) => ({
      name,
      points: points
        .map(([step, elapsed, value]) => [along === "steps" ? step : elapsed, value])
        .filter(([x]) => x !== null),
    }));
    const [drawn, options] = item.is_share ? byErrors(lines, along) : [lines, {}];
    curves(grid, item.title, drawn, along, options);
  }
  if (heights.length) {
    const workers = heights.map((_, i) => ({
      name: `worker ${i}`,
      colour: colour(i, heights.length),
    }));
    const place = el("div", { class: "chart" });
    grid.append(card(`Staleness: ${number(mean)} on average, at most ${max}`, place));
    place.append(
      histogram(place.clientWidth || 320, heights, "updates that came between", "gradients"),
      heights.length > 1 ? legend(workers) : "",
    );
  }
  if (DATA.evaluation.confusion)
    grid.append(
      card(
        `Confusion: ${samples} ${part} samples of ${data}, after step ${step}`,
        confusionOf(DATA.evaluation),
        classesOf(DATA.evaluation),
      ),
    );
  if (DATA.head.length) PAGE.append(card(`The run${DATA.many ? "s" : ""}`, el("div", { class: "wide" }, rows(DATA.head))));
  if (DATA.options.length)
    PAGE.append(
      el(
        "section",
        { class: "card" },
        el("h2", {}, `Options that differ${DATA.many ? "" : " from their defaults"}`),
        el("div", { class: "wide" }, rows(DATA.options)),
      ),
    );
  if (DATA.commands.length)
    PAGE.append(card("Commands", ...DATA.commands.map((item) => el("pre", {}, item))));
}
show();
addEventListener("theme", show);
