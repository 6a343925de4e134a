"use strict";
// The page itself: light and dark, where the reader is, printing; and the order in which things are drawn.

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  const button = document.getElementById("theme");
  button.setAttribute("aria-pressed", String(theme === "dark"));
  button.textContent = theme === "dark" ? "Light" : "Dark"; // what a click changes to
}

function connectTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  const follow = () => {
    setTheme(chosen || (system.matches ? "dark" : "light"));
    redrawAll();
  };
  follow();
  system.addEventListener("change", follow);
  document.getElementById("theme").addEventListener("click", () => {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    follow();
  });
  // Paper is white, and its width is not the window's.
  const printing = (on) => {
    onPaper = on;
    setTheme(on ? "light" : chosen || (system.matches ? "dark" : "light"));
    redrawAll();
    if (on) drawAll();
  };
  matchMedia("print").addEventListener("change", (event) => printing(event.matches));
  addEventListener("beforeprint", () => printing(true));
  addEventListener("afterprint", () => printing(false));
}

function connectNavigation() {
  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
  const seen = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        for (const link of links.values()) link.removeAttribute("aria-current");
        links.get(entry.target.id)?.setAttribute("aria-current", "true");
      }
    },
    { rootMargin: "-10% 0px -80% 0px" },
  );
  for (const section of document.querySelectorAll("main > section")) seen.observe(section);
}

function connectWidth() {
  let width = document.documentElement.clientWidth;
  let waiting = 0;
  addEventListener("resize", () => {
    if (document.documentElement.clientWidth === width) return;
    width = document.documentElement.clientWidth;
    clearTimeout(waiting);
    waiting = setTimeout(redrawAll, 150);
  });
}

async function start() {
  connectTheme();
  connectTables();
  connectNavigation();
  connectPerfetto();
  try {
    pageData = JSON.parse(await unpacked("packed-data"));
    await loadPlotly();
  } catch (error) {
    document.getElementById("no-pictures").hidden = false;
    for (const element of document.querySelectorAll(".figure")) element.closest("figure").hidden = true;
    document.documentElement.dataset.ready = "without pictures";
    throw error;
  }
  connectChoices();
  connectWidth();
  for (const element of document.querySelectorAll(".figure[data-figure]")) {
    const figure = variantOf(element);
    if (figure) drawWhenNear(element, figure.layout.height, () => draw(element, variantOf(element)));
  }
  connectTimeline();
  // What is near the screen is drawn once the browser has said what that is.
  await new Promise((resume) => requestAnimationFrame(() => setTimeout(resume)));
  await drawing;
  document.documentElement.dataset.ready = "yes";
}

start();
