// The pages that run inside these: as high as what they show, in the theme that was chosen here.
const themeOf = () => ["light", "dark"].find((name) => name === document.body.dataset.theme) || "";
addEventListener("message", ({ source, data }) => {
  const frame = [...document.querySelectorAll("iframe")].find((each) => each.contentWindow === source);
  if (!frame || !data.height) return;
  frame.style.height = `${data.height}px`;
  source.postMessage({ theme: themeOf() }, "*");
});
addEventListener("DOMContentLoaded", () => new MutationObserver(() => {
  for (const frame of document.querySelectorAll("iframe")) frame.contentWindow.postMessage({ theme: themeOf() }, "*");
}).observe(document.body, { attributeFilter: ["data-theme"] }));
