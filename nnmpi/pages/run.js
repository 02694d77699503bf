// DATA: {head: [[name, text]], results, charts: {title: bokeh's JSON}, times: {part: seconds},
//   paint: {part: colour}, memory: {kind: bytes}, evaluation, options: [[option, value]], commands,
//   staleness: {heights: [worker][staleness], mean, max}}

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
              `background:${DATA.paint[name] || colour(i, entries.length)}`,
          }),
        ),
        el("td", { class: "number", style: "width:8rem" }, words(value)),
      ),
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
    card("What it was", el("div", { class: "wide" }, rows(DATA.head.concat(results)))),
    grid,
  );
  if (all)
    grid.append(
      card(
        "Where a step's time went on rank 0",
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
  const words = {
    Staleness: heights.length ? `Staleness: ${number(mean)} on average, at most ${max}` : "",
    Confusion: data ? `Confusion: ${samples} ${part} samples of ${data}, after step ${step}` : "",
  };
  if (!window.Bokeh)
    grid.append(card("Curves", el("p", {}, "are drawn by bokeh: pip install bokeh")));
  else
    for (const [title, chart] of Object.entries(DATA.charts)) {
      const place = el("div", { class: "chart" });
      grid.append(card(words[title] || title, place));
      Bokeh.embed.embed_item(structuredClone(chart), place);
    }
  if (DATA.options.length)
    PAGE.append(
      el(
        "section",
        { class: "card", style: "margin-top:1rem" },
        el("h2", {}, "Options that are no defaults, given or chosen"),
        el("div", { class: "wide" }, rows(DATA.options)),
      ),
    );
  PAGE.append(card("Commands", ...DATA.commands.map((item) => el("pre", {}, item))));
}
show();
addEventListener("theme", show);
