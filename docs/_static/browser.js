// docs/browser.md: its two programs become fields that a reader changes and runs. Python comes from
// pages/python.js, which stands beside these pages, and is read at the first "run".
const HERE = document.currentScript.src;
const LEAST = { all_reduce: ["ranks", "network"], schedule: ["ranks", "microbatches", "network"] };
const FIRST = {
  all_reduce: { ranks: "4", network: "alpha_us=10,gbit=10" },
  schedule: { ranks: "4", microbatches: "8", network: "" },
};

const make = (tag, attributes, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
};
const bytesOf = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

let worker = null;
let waiting = []; // what takes the worker's next messages, in order

// Read pages/python.js once; it sets PYTHON.
const read = () =>
  self.PYTHON
    ? Promise.resolve()
    : new Promise((done, failed) => {
        const script = make("script", { src: new URL("../pages/python.js", HERE).href });
        script.onload = done;
        script.onerror = () => failed(new Error("these pages were built without Python"));
        document.head.append(script);
      });

const asked = (message) =>
  new Promise((done) => {
    waiting.push(done);
    worker.postMessage(message);
  });

async function start() {
  await read();
  const text = self.PYTHON.text;
  // of the kinds of workers with modules, a page from a disk may start this one only
  const code = `data:text/javascript,${encodeURIComponent(text["worker.js"])}`;
  worker = new Worker(code, { type: "module" });
  worker.onmessage = ({ data }) => waiting.shift()(data);
  worker.onerror = (event) => stop(event.message);
  const binary = Object.entries(self.PYTHON.binary).map(([name, item]) => [name, bytesOf(item)]);
  const result = await asked({ files: { ...text, ...Object.fromEntries(binary) } });
  if (!result.ready) throw new Error(result.text);
}

function stop(text) {
  if (worker) worker.terminate();
  worker = null;
  for (const done of waiting.splice(0)) done({ text, page: "", failed: true });
}

function field(kind, block) {
  const program = make("textarea", {
    "aria-label": `program of the ${kind.replace("_", "-")}`,
    spellcheck: "false",
    rows: block.textContent.trimEnd().split("\n").length + 2,
  });
  program.value = block.textContent.trimEnd() + "\n";
  const inputs = LEAST[kind].map((name) => {
    const input = make("input", { name, "aria-label": name, value: FIRST[kind][name] });
    return make("label", {}, `${name} `, input);
  });
  const run = make("button", { type: "submit" }, "run");
  const told = make("pre", { class: "told", "aria-live": "polite" });
  const page = make("iframe", { title: "what it does", style: "width:100%;border:0", hidden: "" });
  const form = make("form", { class: "try" }, program, ...inputs, run, told, page);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (run.textContent === "stop") return stop("stopped");
    run.textContent = "stop";
    form.dataset.state = "runs";
    let result;
    try {
      if (!worker) {
        told.textContent = "Python starts, some seconds ...";
        await start();
      }
      told.textContent = "it runs ...";
      const settings = Object.fromEntries(
        inputs.map((label) => [label.lastChild.name, label.lastChild.value.trim()]),
      );
      result = await asked({ kind, program: program.value, settings });
    } catch (error) {
      stop(error.message);
      result = { text: error.message, page: "", failed: true };
    }
    told.textContent = result.text;
    page.hidden = !result.page;
    page.srcdoc = result.page;
    run.textContent = "run";
    form.dataset.state = result.failed ? "failed" : "shown";
  });
  block.replaceWith(form);
}

for (const kind of Object.keys(LEAST)) {
  const block = document.querySelector(`.try-${kind.replace("_", "-")}`);
  if (block) field(kind, block);
}
