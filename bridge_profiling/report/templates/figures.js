"use strict";
// Unpacks what the page carries, and draws its figures in the colours of the theme. Computes nothing that it shows.

const drawn = new Map(); // element -> the figure in it, as it came
let pageData = null;

// What fits A4 and the indentation of a finding, in CSS pixels: before a page is printed, its elements are still as wide as the window.
const PAPER_WIDTH = 640;
let onPaper = false;

async function unpacked(id) {
  const text = document.getElementById(id).textContent;
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

async function loadPlotly() {
  const script = document.createElement("script");
  script.textContent = await unpacked("packed-plotly");
  document.head.append(script);
}

function themed(layout, width) {
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--ink").trim();
  const line = style.getPropertyValue("--line").trim();
  const paper = style.getPropertyValue("--paper").trim();
  const family = getComputedStyle(document.body).fontFamily;
  const copy = structuredClone(layout);
  copy.font = { family, size: 12.5, color: ink };
  copy.hoverlabel = { bgcolor: paper, bordercolor: ink, font: { color: ink, family, size: 12.5 }, align: "left" };
  for (const name of ["xaxis", "yaxis"]) {
    if (!copy[name]) continue;
    Object.assign(copy[name], { gridcolor: line, linecolor: line, tickcolor: line });
    copy[name].title = { standoff: 10, ...copy[name].title, font: { size: 12.5, color: ink } };
  }
  if (width) copy.width = width;
  return copy;
}

function marked(data) {
  // What shows a finding is drawn in the strongest colour there is on this ground.
  const mark = getComputedStyle(document.documentElement).getPropertyValue("--mark").trim();
  return data.map((trace) => (trace.meta === "highlight" ? { ...trace, line: { ...trace.line, color: mark } } : trace));
}

function draw(element, figure) {
  drawn.set(element, figure);
  const width = onPaper ? PAPER_WIDTH : element.clientWidth || undefined;
  const config = { displaylogo: false, responsive: false, displayModeBar: false, doubleClick: "reset" };
  if (!element.querySelector(".plot-container")) element.replaceChildren();
  return Plotly.react(element, marked(figure.data), themed(figure.layout, width), config);
}

function redrawAll() {
  for (const [element, figure] of drawn) draw(element, figure);
}

function drawVariant(element) {
  const variants = pageData.figures[element.dataset.figure];
  if (!variants) return Promise.resolve();
  const name = element.dataset.variant in variants ? element.dataset.variant : Object.keys(variants)[0];
  return draw(element, variants[name]);
}

function chooseVariant(figure, variant) {
  const element = document.getElementById(`figure-${figure}`);
  element.dataset.variant = variant;
  drawVariant(element);
}

function connectChoices() {
  for (const group of document.querySelectorAll(".switch")) {
    group.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      for (const each of group.querySelectorAll("button")) each.setAttribute("aria-pressed", String(each === button));
      chooseVariant(group.dataset.for, button.dataset.variant);
    });
  }
  for (const select of document.querySelectorAll("select[data-for]")) {
    select.addEventListener("change", () => chooseVariant(select.dataset.for, select.value));
  }
}
