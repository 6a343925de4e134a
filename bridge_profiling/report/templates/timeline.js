"use strict";
// The timeline of one iteration: bars of the segments that the page carries. Python's timeline.py draws the same.

const HOVER_POINTS = 40; // along a picture's width, so that long bars can be hovered over anywhere

function pictureOf(iteration, ranks) {
  const timeline = pageData.timeline;
  const picture = timeline.pictures[iteration] || {};
  const span = timeline.spans[iteration] / 1000;
  const traces = timeline.kinds.map((kind) => ({ kind, x: [], y: [], text: [], name: [] }));
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
        trace.name.push(own.name[row]);
      }
      trace.x.push(null);
      trace.y.push(null);
      trace.text.push("");
      trace.name.push(null);
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
        customdata: trace.name,
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

// The way back: from a bar of the timeline to the row of its name in a table.

function rowsByName() {
  const found = new Map();
  for (const row of document.querySelectorAll("#table-kernels tbody tr, #table-phases tbody tr")) {
    const name = row.lastElementChild.textContent;
    found.set(name, [...(found.get(name) || []), row]);
  }
  return found;
}

const MOST_NAMES = 60;

function namesInView(iteration, ranks, [first, last]) {
  // Names by the time of their bars between two times in ms, the most first.
  const picture = pageData.timeline.pictures[iteration] || {};
  const times = new Map();
  for (const own of ranks.map((rank) => picture[rank]).filter(Boolean)) {
    let start = 0;
    for (let row = 0; row < own.start.length; row++) {
      start += own.start[row];
      const seen = Math.min((start + own.duration[row]) / 1000, last) - Math.max(start / 1000, first);
      if (seen > 0) times.set(own.name[row], (times.get(own.name[row]) || 0) + seen);
    }
  }
  return [...times].sort((one, other) => other[1] - one[1]).map(([name]) => pageData.timeline.names[name]);
}

function rankAt(iteration, ranks, lane) {
  const picture = pageData.timeline.pictures[iteration] || {};
  for (const rank of ranks) {
    lane -= picture[rank]?.lanes.length || 0;
    if (lane < 0) return rank;
  }
  return null;
}

function connectTimeline() {
  const element = document.getElementById("figure-timeline");
  if (!element || !pageData.timeline) return;
  const iteration = document.getElementById("timeline-iteration");
  const rank = document.getElementById("timeline-rank");
  const chosen = () => rank.value.split(",");
  const event = document.getElementById("timeline-event");
  const toRow = document.getElementById("timeline-row");
  const rows = rowsByName();
  const list = () => {
    const names = namesInView(iteration.value, chosen(), range()).filter((name) => rows.has(name));
    event.replaceChildren(...names.slice(0, MOST_NAMES).map((name) => new Option(cut(name, 80), name)));
    event.disabled = toRow.disabled = !names.length;
  };
  const show = async (range) => {
    await draw(element, timelineFigure(iteration.value, chosen(), range));
    list();
  };
  const lead = (name, ofRank) => {
    const found = rows.get(name);
    if (found) showRow(found.find((row) => row.cells[1].textContent === ofRank) || found[0]);
  };
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
  toRow.addEventListener("click", () => lead(event.value, chosen().length === 1 ? chosen()[0] : null));
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
  return show().then(() => {
    element.on("plotly_relayout", list);
    element.on("plotly_click", ({ points: [point] }) => {
      lead(pageData.timeline.names[point.customdata], rankAt(iteration.value, chosen(), point.y));
    });
  });
}
