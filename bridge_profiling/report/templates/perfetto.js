"use strict";
// Opens a trace in a Perfetto tab: the file goes from this page to that tab by a message (perfetto.dev/docs/visualization/
// deep-linking-to-perfetto-ui), as a page may not read files by their path, nor may Perfetto. Nothing happens without a click.

const PERFETTO = "https://ui.perfetto.dev";

function connectPerfetto() {
  const chooser = document.getElementById("perfetto-file");
  if (!chooser) return;
  const button = document.getElementById("perfetto-open");
  const said = document.getElementById("perfetto-said");
  chooser.addEventListener("change", () => {
    button.disabled = !chooser.files.length;
    if (chooser.files.length) said.value = `${chooser.files[0].name} is ready.`;
  });
  button.addEventListener("click", async () => {
    const file = chooser.files[0];
    const tab = window.open(PERFETTO);
    if (!tab) {
      said.value = "The browser blocked the new tab: allow it, or drop the file on ui.perfetto.dev yourself.";
      return;
    }
    said.value = "Waiting for Perfetto to answer.";
    const buffer = await file.arrayBuffer();
    let tries = 0;
    const knock = setInterval(() => {
      if (++tries > 600) {
        clearInterval(knock);
        said.value = "Perfetto did not answer: check the network, or drop the file on ui.perfetto.dev yourself.";
        return;
      }
      tab.postMessage("PING", PERFETTO);
    }, 50);
    const answered = (event) => {
      if (event.source !== tab || event.origin !== PERFETTO || event.data !== "PONG") return;
      clearInterval(knock);
      window.removeEventListener("message", answered);
      tab.postMessage({ perfetto: { buffer, title: file.name, fileName: file.name } }, PERFETTO);
      said.value = `${file.name} is open in Perfetto.`;
    };
    window.addEventListener("message", answered);
  });
  for (const copy of document.querySelectorAll(".copy")) {
    copy.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(copy.dataset.copy);
        copy.textContent = "Copied";
      } catch {
        // Where pages may not copy, the user may.
        getSelection().selectAllChildren(copy.closest("tr, .python").querySelector("a, code"));
        copy.textContent = "Press Ctrl+C";
      }
    });
  }
}
