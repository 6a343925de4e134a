"use strict";
// The timeline of one iteration: bars of the segments that the page carries. Python's timeline.py draws the same.

const HALF = 0.28; // of a bar's height, in lanes
const HOVER_POINTS = 40; // along a picture's width, so that long bars can be hovered over anywhere

// The bars of a rank in an iteration, in ms, from columns whose starts are differences.
function* barsOf(own) {
  let start = 0;
  for (let row = 0; row < own.start.length; row++) {
    start += own.start[row];
    yield { row, first: start / 1000, length: own.duration[row] / 1000, code: own.name[row] };
  }
}

// All bars of a kind are one polygon, which Plotly draws as one path: lines would be a path each, and zooming take 160 ms.
// It goes around the upper half of a bar and around the lower, then along the middle of the lane to the next bar, and from lane
// to lane far outside the picture, always there and back, so that nothing between the bars is filled.
function pictureOf(iteration, ranks) {
  const timeline = pageData.timeline;
  const picture = timeline.pictures[iteration] || {};
  const span = timeline.spans[iteration] / 1000;
  const outside = -100 * span;
  const traces = timeline.kinds.map((kind) => ({ kind, x: [], y: [], text: [], codes: [] }));
  const labels = [];
  const add = (trace, x, y, text = "", code = -1) => {
    trace.x.push(x);
    trace.y.push(y);
    trace.text.push(text);
    trace.codes.push(code);
  };
  const moveTo = (trace, lane) => {
    add(trace, outside, trace.y.at(-1));
    add(trace, outside, lane);
  };
  for (const rank of ranks) {
    const own = picture[rank];
    if (!own) continue;
    for (const { row, first, length, code } of barsOf(own)) {
      const more = own.count[row] > 1 ? ` and ${(own.count[row] - 1).toLocaleString("en")} more` : "";
      const text = `${timeline.names[code].slice(0, 120)}${more}${BREAK}${length.toFixed(3)} ms on rank ${rank}`;
      const steps = 1 + Math.min(Math.floor(length / (span / HOVER_POINTS)), HOVER_POINTS);
      const trace = traces[own.kind[row]];
      const lane = labels.length + own.lane[row];
      if (trace.y.length && trace.y.at(-1) !== lane) moveTo(trace, lane);
      // The points along the middle are hovered over.
      for (let step = 0; step <= steps; step++) add(trace, first + (length * step) / steps, lane, text, code);
      for (const side of [lane - HALF, lane + HALF]) {
        const [from, to] = side < lane ? [first + length, first] : [first, first + length];
        add(trace, from, side, text, code);
        add(trace, to, side, text, code);
      }
      add(trace, first + length, lane, text, code);
    }
    for (const lane of own.lanes) labels.push(ranks.length > 1 ? `rank ${rank} · ${lane}` : lane);
  }
  for (const trace of traces) if (trace.y.length) moveTo(trace, trace.y[0]);
  return { traces, labels, span };
}

function heightOf(lanes) {
  return 120 + Math.max(lanes, 2) * (lanes > 40 ? 15 : 24);
}

function timelineFigure(iteration, ranks, range) {
  const { traces, labels, span } = pictureOf(iteration, ranks);
  return {
    data: traces
      .filter((trace) => trace.x.length)
      .map((trace) => ({
        type: "scatter",
        mode: "none",
        fill: "toself",
        fillcolor: pageData.colors[trace.kind],
        hoveron: "points",
        name: pageData.kindNames[trace.kind],
        x: trace.x,
        y: trace.y,
        text: trace.text,
        customdata: trace.codes,
        hovertemplate: "%{text}<br>at %{x:.3f} ms<extra></extra>",
      })),
    layout: {
      height: heightOf(labels.length),
      margin: { l: 150, r: 20, t: 40, b: 45 },
      legend: { orientation: "h", x: 0, y: 1, xanchor: "left", yanchor: "bottom" },
      hovermode: "closest",
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      xaxis: { title: { text: "ms since the iteration began" }, range: range || [0, span], zeroline: false },
      yaxis: {
        tickvals: labels.map((_, place) => place),
        ticktext: labels,
        range: [labels.length - 0.4, -0.6],
        showgrid: false,
        zeroline: false,
        fixedrange: true,
        automargin: true,
      },
    },
  };
}

// The longest bar of a name: in the iteration shown, else in the first that has one; of all ranks shown, else of any.
function longestBar(name, iteration, ranks) {
  const timeline = pageData.timeline;
  const code = timeline.names.indexOf(name);
  const iterations = [iteration, ...Object.keys(timeline.pictures).filter((each) => each !== iteration)];
  for (const each of code < 0 ? [] : iterations) {
    const mine = Object.entries(timeline.pictures[each] || {}).flatMap(([rank, own]) =>
      [...barsOf(own)].filter((bar) => bar.code === code).map((bar) => ({ ...bar, rank, iteration: each })),
    );
    const shown = mine.filter((bar) => ranks.includes(bar.rank));
    const longest = (bars) => bars.reduce((one, other) => (other.length > one.length ? other : one));
    if (mine.length) return longest(shown.length ? shown : mine);
  }
  return null;
}

// The rows of tables that have a name of the timeline, by that name.
function rowsOfNames() {
  const known = new Set(pageData.timeline.names);
  const rows = new Map();
  for (const table of document.querySelectorAll("#table-kernels, #phases table, #table-operators")) {
    for (const row of rowsOf(table)) {
      const cell = row.querySelector("td.name") || row.querySelector("th[scope=row]");
      const name = cell?.textContent.trim();
      if (known.has(name) && !rows.has(name)) rows.set(name, { table, row, cell });
    }
  }
  return rows;
}

const MOST_NAMES = 60;

// Names by the time of their bars between two times in ms, the most first.
function namesInView(iteration, ranks, [first, last]) {
  const picture = pageData.timeline.pictures[iteration] || {};
  const times = new Map();
  for (const own of ranks.map((rank) => picture[rank]).filter(Boolean)) {
    for (const bar of barsOf(own)) {
      const seen = Math.min(bar.first + bar.length, last) - Math.max(bar.first, first);
      if (seen > 0) times.set(bar.code, (times.get(bar.code) || 0) + seen);
    }
  }
  return [...times].sort(([, one], [, other]) => other - one).map(([name]) => pageData.timeline.names[name]);
}

function connectTimeline() {
  const element = document.getElementById("figure-timeline");
  if (!element || !pageData.timeline) return;
  const iteration = document.getElementById("timeline-iteration");
  const rank = document.getElementById("timeline-rank");
  const chosen = () => rank.value.split(",");
  const inView = document.getElementById("timeline-in-view");
  const list = () => {
    const names = namesInView(iteration.value, chosen(), range()).slice(0, MOST_NAMES);
    inView.replaceChildren(new Option("choose a name", ""), ...names.map((name) => new Option(cut(name, 80), name)));
  };
  let connected = false;
  const show = async (range) => {
    await draw(element, timelineFigure(iteration.value, chosen(), range));
    list();
    if (connected) return;
    connected = true;
    element.on("plotly_relayout", list);
    element.on("plotly_click", (event) => choose(pageData.timeline.names[event.points[0].customdata]));
  };
  const range = () => element.layout?.xaxis.range;
  const move = async (scale, shift) => {
    if (pending.has(element)) await show();
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
  const rows = rowsOfNames();
  const chosenBar = document.getElementById("timeline-chosen");
  const back = chosenBar.querySelector("button");
  const choose = (name) => {
    chosenBar.hidden = false;
    chosenBar.querySelector("code").textContent = name;
    back.hidden = !rows.has(name);
    back.onclick = () => showRow(rows.get(name).table, rows.get(name).row);
  };
  inView.addEventListener("change", () => inView.value && choose(inView.value));
  const go = ({ iteration: number, rank: of, first, last, name }) => {
    iteration.value = number;
    rank.value = of;
    const margin = Math.max(2 * (last - first), 0.5);
    show([first - margin, last + margin]);
    document.getElementById("timeline").scrollIntoView();
    if (name) choose(name);
    (name && rows.has(name) ? back : iteration).focus({ preventScroll: true });
  };
  for (const button of document.querySelectorAll(".to-timeline")) {
    const { iteration: number, rank: of, start, end } = button.dataset;
    button.addEventListener("click", () => go({ iteration: number, rank: of, first: Number(start), last: Number(end) }));
  }
  for (const [name, { row, cell }] of rows) {
    if (row.querySelector(".to-timeline")) continue;
    const button = document.createElement("button");
    Object.assign(button, { type: "button", className: "quiet show-bar", textContent: "Show" });
    button.setAttribute("aria-label", `Show the longest ${name.slice(0, 80)} in the timeline`);
    button.addEventListener("click", () => {
      const bar = longestBar(name, iteration.value, chosen());
      if (bar) go({ ...bar, last: bar.first + bar.length, name });
    });
    cell.append(" ", button);
  }
  const lanes = chosen().map((of) => pageData.timeline.pictures[iteration.value]?.[of]?.lanes.length || 0);
  drawWhenNear(element, heightOf(lanes.reduce((one, other) => one + other, 0)), () => show());
}
