"use strict";
// Unpacks what the page carries, and draws its figures in the colours of the theme. Computes nothing that it shows.

const drawn = new Map(); // element -> the figure in it, as it came
let pageData = null;

// What fits A4 and the indentation of a finding, in CSS pixels: before a page is printed, its elements are still as wide as the window.
const PAPER_WIDTH = 640;
let onPaper = false;

async function unpacked(id) {
  const text = document.getElementById(id).textContent;
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let place = 0; place < letters.length; place++) bytes[place] = letters.charCodeAt(place);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

async function loadPlotly() {
  const script = document.createElement("script");
  script.textContent = await unpacked("packed-plotly");
  document.head.append(script);
}

// Plotly reads markup in every text: it draws links, loads images, and applies styles. A figure's texts are names, so they become
// text here, where all figures enter Plotly. Our own markup is in templates, and a line break is BREAK.
const TEMPLATES = new Set(["hovertemplate", "texttemplate"]);
const BREAK = "\ue000";

// As printable.py has them: controls, marks of direction, invisible characters and line separators.
const UNPRINTABLE =
  /[\x00-\x1f\x7f-\x9f\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;

function asText(value, key) {
  if (typeof value === "number") return value;
  if (Array.isArray(value)) return value.map((each) => asText(each, key));
  if (typeof value === "string") return TEMPLATES.has(key) ? value : escaped(value);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, asText(each, name)]));
}

function escaped(text) {
  return text
    .replace(UNPRINTABLE, (found) => `\\u${found.charCodeAt(0).toString(16).padStart(4, "0")}`)
    .replaceAll("&", "&amp;")
    .replaceAll("<", "&lt;")
    .replaceAll(">", "&gt;")
    .replaceAll("$", "&#36;") // MathJax
    .replaceAll(BREAK, "<br>");
}

function themed(layout, data, width) {
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
  if (width < NARROW) fitNarrow(copy, data, width);
  return copy;
}

// On a phone: labels in lines, margins as wide as they need, and the legend below, a line for each entry.
const NARROW = 600;

function fitNarrow(layout, data, width) {
  const axis = layout.yaxis || {};
  const names = axis.ticktext || (axis.type === "category" ? [...new Set(data.flatMap((trace) => trace.y))] : []);
  if (names.some((name) => name.length > LINE)) {
    const labels = names.map(inLines);
    const lines = Math.max(...labels.map((label) => label.split(BREAK).length));
    Object.assign(axis, { tickmode: "array", tickvals: axis.tickvals || names, ticktext: labels, dtick: undefined });
    layout.height = Math.max(layout.height, layout.margin.t + layout.margin.b + (14 * lines + 4) * names.length);
  }
  axis.tickfont = { size: 10.5 };
  layout.margin = { ...layout.margin, l: 10, r: 36 };
  const entries = data.filter((trace) => trace.name && trace.showlegend !== false && trace.type !== "heatmap");
  if (layout.showlegend === false || entries.length < 2) return;
  for (const trace of entries) trace.name = cut(trace.name, Math.floor((width - 110) / 7));
  layout.legend = { ...layout.legend, font: { size: 11 } };
  if (layout.legend.orientation === "v") return; // it has its room below already
  const room = 19 * entries.length;
  const plot = layout.height - layout.margin.t - layout.margin.b;
  layout.margin = { ...layout.margin, t: 12, b: 60 + room };
  layout.height = plot + 72 + room;
  layout.legend = { ...layout.legend, orientation: "v", x: 0, y: -50 / plot, xanchor: "left", yanchor: "top" };
}

const LINE = 18;

function inLines(name) {
  const lines = [""];
  for (const word of name.split(" ")) {
    if (lines.at(-1) && lines.at(-1).length + word.length >= LINE) lines.push("");
    lines[lines.length - 1] += (lines.at(-1) ? " " : "") + word;
  }
  return lines.map((line) => cut(line, 2 * LINE)).join(BREAK);
}

function cut(text, length) {
  return text.length > length ? `${text.slice(0, length - 1)}…` : text;
}

function marked(data) {
  // What shows a finding is drawn in the strongest colour there is on this ground.
  const mark = getComputedStyle(document.documentElement).getPropertyValue("--mark").trim();
  return data.map((trace) => ({ ...trace, ...(trace.meta === "highlight" && { line: { ...trace.line, color: mark } }) }));
}

function draw(element, figure) {
  drawn.set(element, figure);
  pending.delete(element);
  element.style.minHeight = "";
  const width = onPaper ? PAPER_WIDTH : element.clientWidth || undefined;
  const config = { displaylogo: false, responsive: false, displayModeBar: false, doubleClick: "reset" };
  if (!element.querySelector(".plot-container")) element.replaceChildren();
  const data = marked(figure.data);
  const layout = themed(figure.layout, data, width);
  return Plotly.react(element, asText(data), asText(layout), config);
}

// A figure is drawn when it comes near the screen, one at a time, so that the page stays alive.

const pending = new Map(); // element -> what draws its figure
const near = new Set();
let drawing = null;

const nearScreen = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) near[entry.isIntersecting ? "add" : "delete"](entry.target);
    drawing ||= drawNear().finally(() => (drawing = null));
  },
  { rootMargin: "50% 0px" },
);

// Draws a figure later, in a place that is as high as the figure.
function drawWhenNear(element, height, act) {
  pending.set(element, act);
  element.style.minHeight = `${height}px`;
  nearScreen.observe(element);
}

async function drawNear() {
  for (let element; (element = [...near].find((each) => pending.has(each))); ) {
    await pending.get(element)();
    await new Promise((resume) => setTimeout(resume));
  }
}

function drawAll() {
  return Promise.all([...pending.values()].map((act) => act()));
}

function redrawAll() {
  for (const [element, figure] of drawn) draw(element, figure);
}

function variantOf(element) {
  const variants = pageData.figures[element.dataset.figure];
  return variants && (variants[element.dataset.variant] || Object.values(variants)[0]);
}

function chooseVariant(figure, variant) {
  const element = document.getElementById(`figure-${figure}`);
  element.dataset.variant = variant;
  draw(element, variantOf(element));
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
