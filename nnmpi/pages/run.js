// DATA: {head: [[what, words]], results, charts: [{title, label, along, lines: [{name, points}]}], times: {what: seconds},
// memory: {what: bytes}, staleness: {heights: [worker][staleness], mean, max}, options: [[option, value]],
// commands}

const number = (value) => value === null || value === undefined ? "" : String(Number(Number(value).toPrecision(4)));
const card = (title, ...content) => el("section", { class: "card" }, el("h2", {}, title), ...content);
const rows = (pairs) => el("table", {}, ...pairs.map(([name, value]) => el("tr", {}, el("th", {}, name), el("td", {}, value))));

// A bar for each of {name: value}, with its words behind it.
function barsOf(values, words) {
  const entries = Object.entries(values), most = Math.max(...entries.map(([, value]) => value));
  return el("table", { style: "width:100%" }, ...entries.map(([name, value], i) => el("tr", {}, el("th", { style: "width:9rem" }, name),
    el("td", {}, el("div", { class: "fill", style: `height:1rem;border-radius:.15rem;width:${100 * value / most || 0}%;` +
      `background:${colour(i, entries.length)}` })), el("td", { class: "number", style: "width:8rem" }, words(value)))));
}

// How many gradients there were of each staleness, the workers' on top of one another.
function histogram(width, { heights }) {
  const count = heights[0].length, sums = heights[0].map((_, i) => heights.reduce((sum, own) => sum + own[i], 0));
  const high = 200, wide = (width - 10) / count, most = Math.max(...sums);
  const picture = draw("svg", { width, height: high + 22, role: "img", "aria-label": "gradients by staleness" });
  for (let i = 0; i < count; i++) {
    let top = high;
    heights.forEach((own, worker) => {
      const tall = own[i] / most * (high - 8);
      top -= tall;
      picture.append(draw("rect", { x: 5 + i * wide, y: top, width: Math.max(1, wide - 1), height: tall, fill: colour(worker, heights.length) }));
    });
    if (i % Math.ceil(count / 10) === 0) picture.append(
      draw("text", { x: 5 + (i + .5) * wide, y: high + 16, "text-anchor": "middle", class: "soft" }, i));
  }
  return picture;
}

function show() {
  const all = Object.values(DATA.times).reduce((sum, each) => sum + each, 0);
  const { peak, ...memory } = DATA.memory;
  const grid = el("div", { class: "cards" });
  const results = DATA.results.map((each) => [each.kind === "test" ? "at the end" : `after epoch ${number(each.epoch)}`,
    [`loss ${number(each.loss)}`, each.accuracy === null ? "" : `accuracy ${(100 * each.accuracy).toFixed(2)} %`,
      each.perplexity === null ? "" : `perplexity ${number(each.perplexity)}`, seconds(each.elapsed_s)].filter(Boolean).join(", ")]);
  PAGE.replaceChildren(card("What it was", el("div", { class: "wide" }, rows(DATA.head.concat(results)))), grid);
  const width = () => Math.max(280, grid.firstChild.clientWidth - 26);
  if (all) grid.append(card("Where a step's time went", barsOf(DATA.times,
    (value) => `${seconds(value)}, ${(100 * value / all).toFixed(0)} %`)));
  if (peak) grid.append(card(`Memory of rank 0: at most ${bytes(peak)}`, barsOf(memory, (value) => value ? bytes(value) : "0 B")));
  if (DATA.staleness.heights.length) {
    const place = card(`Staleness: ${number(DATA.staleness.mean)} on average, at most ${DATA.staleness.max}`);
    grid.append(place);
    place.append(histogram(width(), DATA.staleness));
  }
  for (const { title, label, along, lines } of DATA.charts) {
    const coloured = lines.map((line, i) => ({ ...line, colour: i ? "var(--step)" : "var(--f)" }));
    const place = card(title);
    grid.append(place);
    place.append(chart(width(), coloured, { x: number, y: number, height: 220 }), el("p", { class: "soft" }, `${label} over ${along}`));
    if (lines.length > 1) place.append(legend(coloured));
  }
  if (DATA.options.length) PAGE.append(el("section", { class: "card", style: "margin-top:1rem" },
    el("h2", {}, "Options that are no defaults"), el("div", { class: "wide" }, rows(DATA.options))));
  PAGE.append(card("Commands", ...DATA.commands.map((each) => el("pre", {}, each))));
}
show();
addEventListener("resize", show);
