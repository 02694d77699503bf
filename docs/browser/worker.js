// The worker of docs/browser.md: starts Python from the files that it is given, loads nothing, and
// answers {kind, program, settings} by what run.py shows.

const files = {};
self.fetch = async (url) => {
  const name = String(url).split("/").pop();
  if (!(name in files)) throw new Error(`${name} is not part of this page`);
  return new Response(files[name], { headers: { "Content-Type": "application/wasm" } });
};

let started = null;

async function start(given) {
  Object.assign(files, given);
  const load = (name) =>
    import(URL.createObjectURL(new Blob([files[name]], { type: "text/javascript" })));
  const { loadPyodide } = await load("pyodide.mjs");
  const python = await loadPyodide({
    indexURL: "https://nothing.invalid/", // `fetch` answers for it
    createPyodideModule: (await load("pyodide.asm.mjs")).default,
    lockFileContents: files["pyodide-lock.json"],
  });
  python.unpackArchive(files["nnmpi.zip"], "zip");
  python.runPython(files["run.py"]);
  return python.globals.get("show");
}

addEventListener("message", async ({ data }) => {
  try {
    if (data.files) {
      started = start(data.files);
      await started;
      postMessage({ ready: true });
    } else {
      const show = await started;
      postMessage(JSON.parse(show(data.kind, data.program, JSON.stringify(data.settings))));
    }
  } catch (error) {
    postMessage({ text: String(error), page: "", failed: true });
  }
});
