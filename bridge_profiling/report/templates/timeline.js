"use strict";
// The timeline of one iteration: bars of the segments that the page carries. Python's timeline.py draws the same.

const HOVER_POINTS = 40; // along a picture's width, so that long bars can be hovered over anywhere

function pictureOf(iteration, ranks) {
  const timeline = pageData.timeline;
  const picture = timeline.pictures[iteration] || {};
  const span = timeline.spans[iteration] / 1000;
  const traces = timeline.kinds.map((kind) => ({ kind, x: [], y: [], text: [] }));
  const labels = [];
  for (const rank of ranks) {
    const own = picture[rank];
    if (!own) continue;
    let start = 0;
    for (let row = 0; row < own.start.length; row++) {
      start += own.start[row];
      const first = start / 1000;
      const length = own.duration[row] / 1000;
      const more = own.count[row] > 1 ? ` and ${(own.count[row] - 1).toLocaleString("en")} more` : "";
      const text = `${escaped(timeline.names[own.name[row]].slice(0, 120))}${more}<br>${length.toFixed(3)} ms on rank ${rank}`;
      const steps = 1 + Math.min(Math.floor(length / (span / HOVER_POINTS)), HOVER_POINTS);
      const trace = traces[own.kind[row]];
      const lane = labels.length + own.lane[row];
      for (let step = 0; step <= steps; step++) {
        trace.x.push(first + (length * step) / steps);
        trace.y.push(lane);
        trace.text.push(text);
      }
      trace.x.push(null);
      trace.y.push(null);
      trace.text.push("");
    }
    for (const lane of own.lanes) labels.push(ranks.length > 1 ? `rank ${rank} · ${lane}` : lane);
  }
  return { traces, labels, span };
}

function escaped(text) {
  // Plotly takes a few tags in texts for markup: names are names.
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

function timelineFigure(iteration, ranks, range) {
  const { traces, labels, span } = pictureOf(iteration, ranks);
  const lane = labels.length > 40 ? 15 : 24;
  return {
    data: traces
      .filter((trace) => trace.x.length)
      .map((trace) => ({
        type: "scatter",
        mode: "lines",
        name: pageData.kindNames[trace.kind],
        x: trace.x,
        y: trace.y,
        text: trace.text,
        line: { width: lane > 20 ? 14 : 8, color: pageData.colors[trace.kind] },
        hovertemplate: "%{text}<br>at %{x:.3f} ms<extra></extra>",
      })),
    layout: {
      height: 120 + Math.max(labels.length, 2) * lane,
      margin: { l: 150, r: 20, t: 40, b: 45 },
      legend: { orientation: "h", x: 0, y: 1, xanchor: "left", yanchor: "bottom" },
      hovermode: "closest",
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      xaxis: { title: { text: "ms since the iteration began" }, range: range || [0, span], zeroline: false },
      yaxis: {
        tickvals: labels.map((_, place) => place),
        ticktext: labels.map(escaped),
        range: [labels.length - 0.4, -0.6],
        showgrid: false,
        zeroline: false,
        fixedrange: true,
        automargin: true,
      },
    },
  };
}

function connectTimeline() {
  const element = document.getElementById("figure-timeline");
  if (!element || !pageData.timeline) return;
  const iteration = document.getElementById("timeline-iteration");
  const rank = document.getElementById("timeline-rank");
  const chosen = () => rank.value.split(",");
  const show = (range) => draw(element, timelineFigure(iteration.value, chosen(), range));
  const range = () => element.layout.xaxis.range;
  const move = (scale, shift) => {
    const [first, last] = range();
    const middle = (first + last) / 2 + shift * (last - first);
    const half = ((last - first) / 2) * scale;
    Plotly.relayout(element, { "xaxis.range": [middle - half, middle + half] });
  };
  iteration.addEventListener("change", () => show());
  rank.addEventListener("change", () => show(range()));
  document.getElementById("timeline-earlier").addEventListener("click", () => move(1, -0.4));
  document.getElementById("timeline-later").addEventListener("click", () => move(1, 0.4));
  document.getElementById("timeline-in").addEventListener("click", () => move(0.5, 0));
  document.getElementById("timeline-out").addEventListener("click", () => move(2, 0));
  document.getElementById("timeline-all").addEventListener("click", () => show());
  for (const button of document.querySelectorAll(".to-timeline")) {
    button.addEventListener("click", () => {
      iteration.value = button.dataset.iteration;
      rank.value = button.dataset.rank;
      const first = Number(button.dataset.start);
      const last = Number(button.dataset.end);
      const margin = Math.max(2 * (last - first), 0.5);
      show([first - margin, last + margin]);
      document.getElementById("timeline").scrollIntoView();
      iteration.focus({ preventScroll: true });
    });
  }
  return show();
}
