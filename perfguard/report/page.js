"use strict";
// The table sorts and filters, and Plotly draws the charts once the page is there. All numbers come from the JSON in #data.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const escaped = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

// ---- the table of verdicts

function setUpTable() {
  const body = byId("trials").tBodies[0];
  const rows = [...body.rows];
  const texts = new Map();
  const textOf = (row) => texts.get(row) ?? texts.set(row, row.textContent.toLowerCase()).get(row);
  const words = byId("words"), outcome = byId("outcome"), shown = byId("shown");
  const filter = () => {
    const wanted = words.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const row of rows) {
      const kind = outcome.value === "" || row.dataset.outcome === outcome.value || (outcome.value === "doubt" && "doubt" in row.dataset);
      row.hidden = !(kind && wanted.every((word) => textOf(row).includes(word)));
      count += !row.hidden;
    }
    shown.textContent = `${count} of ${rows.length} trials shown`;
  };
  words.addEventListener("input", filter);
  outcome.addEventListener("change", filter);
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("filters").addEventListener("reset", () => setTimeout(filter));
  for (const [column, button] of [...byId("trials").querySelectorAll("thead button")].entries()) {
    const head = button.parentElement;
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of head.parentElement.cells) if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const keys = new Map(rows.map((row) => [row, keyOf(row.cells[column])]));
      rows.sort((a, b) => compare(keys.get(a), keys.get(b), down));
      body.append(...rows);
    });
  }
  byId("filters").hidden = false;
  filter();
}

function keyOf(cell) {
  if (!("value" in cell.dataset)) return cell.textContent;
  return cell.dataset.value === "" ? null : Number(cell.dataset.value);
}

function compare(a, b, down) { // what is not known stays at the end
  if (a === null || b === null) return (a === null) - (b === null);
  const order = typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });
  return down ? -order : order;
}

// ---- the charts

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const outcomeNames = ["launched", "repaired", "over", "failed", "unmeasured", "unguarded", "pruned"];
const symbols = ["circle", "triangle-up", "x", "cross", "square", "star", "diamond"];
const short = (value) => (Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3))));

function layout(x, y, more = {}) {
  const axis = { gridcolor: color("line"), linecolor: color("muted"), zeroline: false, tickangle: 0, automargin: true, tickcolor: color("muted") };
  return {
    paper_bgcolor: color("bg"), plot_bgcolor: color("bg"), font: { family: "system-ui, sans-serif", size: 13, color: color("fg") },
    margin: { l: 60, r: 16, t: 12, b: 48 }, hovermode: "closest", hoverlabel: { align: "left" },
    legend: { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", font: { color: color("muted") } }, dragmode: false,
    ...more, xaxis: { ...axis, ...x }, yaxis: { ...axis, ...y },
  };
}

function ticks(low, high) { // round numbers on a logarithmic axis
  const found = [];
  const steps = high / low > 300 ? [1] : high / low > 30 ? [1, 3] : high / low > 4 ? [1, 2, 5] : [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8];
  for (let decade = Math.floor(Math.log10(low)); decade <= Math.log10(high); decade++)
    for (const step of steps) {
      const value = Number(`${step}e${decade}`);
      if (value >= low && value <= high) found.push(value);
    }
  return found;
}

function logAxis(low, high, title) {
  const values = ticks(low, high);
  return { type: "log", range: [Math.log10(low), Math.log10(high)], tickvals: values, ticktext: values.map(short), title: { text: title } };
}

function about(series, index) {
  const amount = (value) => `${short(value / series.size)} ${series.unit}`;
  const lines = [`<b>trial ${escaped(data.names[index])}</b>, ${data.labels[data.outcomes[index]]}`];
  if (series.predicted[index] !== null)
    lines.push(`predicted ${amount(series.predicted[index])}` +
      (series.low[index] === null ? "" : ` (${amount(series.low[index])} to ${amount(series.high[index])})`));
  if (series.measured[index] !== null) lines.push(`measured ${amount(series.measured[index])}`);
  if (series.limit[index] !== null) lines.push(`budget ${amount(series.limit[index])}`);
  for (const param of data.params.slice(0, 12))
    if (param.values[index] !== null) {
      const value = param.choices ? param.values[index] : short(param.values[index]);
      lines.push(`${escaped(param.name)}: ${escaped(value).slice(0, 60)}`);
    }
  return lines.join("<br>");
}

function groups(indices, trace) { // one trace for each outcome, so that the legend names it
  return outcomeNames.flatMap((name, number) => {
    const members = indices.filter((index) => data.outcomes[index] === number);
    if (!members.length) return [];
    const marker = { symbol: symbols[number], color: color(name), size: 8, line: { width: 0.5, color: color("bg") } };
    return [{ type: "scatter", mode: "markers", marker, name: `${data.labels[number]} (${members.length})`, hoverinfo: "text", ...trace(members, name) }];
  });
}

function faint(hex) { return `${hex}66`; }

// Predicted (up, with its interval) against measured (right). What was not measured stands in the margin on the left.
function drawFit(element) {
  const series = data.quantities[element.dataset.quantity];
  const indices = series.predicted.flatMap((value, index) => (value === null ? [] : [index]));
  const scale = (value) => value / series.size;
  const near = (index) => [series.predicted[index], series.measured[index] ?? series.predicted[index],
    Math.max(series.low[index] ?? Infinity, series.predicted[index] / 3), Math.min(series.high[index] ?? 0, series.predicted[index] * 3)];
  const limits = [...new Set(series.limit.filter((value) => value !== null))].sort((a, b) => a - b);
  const values = [...indices.flatMap(near), ...(limits.length <= 3 ? limits : [])].filter((value) => value > 0 && value < Infinity).map(scale);
  const low = Math.min(...values) / 1.2, high = Math.max(...values) * 1.2;
  const left = low / (high / low) ** 0.14;
  const x = (index) => series.measured[index] === null
    ? left * (low / left) ** (0.2 + 0.6 * ((index * 1.618034) % 1)) : scale(series.measured[index]);
  const traces = groups(indices, (members, name) => ({
    x: members.map(x), y: members.map((index) => scale(series.predicted[index])), hovertext: members.map((index) => about(series, index)),
    error_y: {
      array: members.map((index) => scale((series.high[index] ?? series.predicted[index]) - series.predicted[index])),
      arrayminus: members.map((index) => scale(series.predicted[index] - (series.low[index] ?? series.predicted[index]))),
      color: faint(color(name)), thickness: 1.2, width: 0,
    },
  }));
  const line = (x0, y0, x1, y1, style) => ({ type: "line", x0, y0, x1, y1, layer: "below", line: { width: 1.3, ...style } });
  const shapes = [
    { type: "rect", x0: left, x1: low, y0: low, y1: high, fillcolor: color("band"), line: { width: 0 }, layer: "below" },
    line(low, low, high, high, { color: color("muted") }),
  ];
  const over = { color: color("over"), dash: "dash" };
  for (const limit of limits.length <= 3 ? limits.map(scale) : [])
    shapes.push(line(left, limit, high, limit, over), line(limit, low, limit, high, { ...over, dash: "dot" }));
  if (limits.length && limits.length <= 3)
    traces.push({ type: "scatter", mode: "lines", x: [null], y: [null], line: { ...over, width: 1.5 }, name: `budget, ${limits.map(scale).map(short).join(", ")} ${series.unit}` });
  const xAxis = logAxis(low, high, `measured ${series.noun} (${series.unit})`);
  xAxis.range[0] = Math.log10(left);
  xAxis.tickvals.unshift(Math.sqrt(left * low));
  xAxis.ticktext.unshift("not<br>measured");
  return [traces, layout(xAxis, logAxis(low, high, `predicted ${series.noun} (${series.unit})`), { shapes })];
}

// Trials over two hyperparameters. The colour is the share of the budget, and the line is where the fit says that all of it is used.
function drawBorder() {
  const quantity = byId("budget").value, series = data.quantities[quantity], border = data.borders[quantity];
  const xParam = data.params[byId("x").value], yParam = data.params[byId("y").value];
  const share = series.predicted.map((value, index) => (value === null || series.limit[index] === null ? null : value / series.limit[index]));
  const known = (param, index) => !param || param.values[index] !== null;
  const indices = share.flatMap((value, index) => (value !== null && known(xParam, index) && known(yParam, index) ? [index] : []));
  const shares = indices.map((index) => share[index]);
  const along = (param, index) => (!param ? share[index] : param.choices ? escaped(param.values[index]) : param.values[index]);
  const widest = Math.min(3, Math.max(0.5, ...shares.map((value) => Math.abs(Math.log2(value)))));
  const steps = [-2, -1, 0, 1, 2].map((step) => (step * widest) / 2);
  const marker = {
    color: shares.map(Math.log2), cmin: -widest, cmax: widest, size: 10, line: { width: 1, color: color("fg") },
    colorscale: [[0, color("launched")], [0.5, color("bg")], [1, color("over")]],
    symbol: indices.map((index) => symbols[data.outcomes[index]]),
    colorbar: { title: { text: "share of the<br>budget", side: "top" }, thickness: 12, outlinewidth: 0, tickvals: steps, ticktext: steps.map((step) => `${short(100 * 2 ** step)}%`) },
  };
  const traces = [{
    type: "scatter", mode: "markers", marker, hoverinfo: "text", showlegend: false, x: indices.map((index) => along(xParam, index)),
    y: indices.map((index) => along(yParam, index)), hovertext: indices.map((index) => about(series, index)),
  }];
  const axis = (param, values) => {
    if (!param) {
      const low = Math.min(0.8, ...values) / 1.15, high = Math.max(1.2, ...values) * 1.15;
      return { ...logAxis(low, high, "predicted, as a share of the budget"), ticktext: ticks(low, high).map((value) => `${short(100 * value)}%`) };
    }
    if (param.choices) return { type: "category", categoryorder: "array", categoryarray: param.choices.map(escaped), title: { text: escaped(param.name) } };
    const pad = param.log ? (param.high / param.low) ** 0.04 : (param.high - param.low) * 0.04;
    return param.log ? logAxis(param.low / pad, param.high * pad, escaped(param.name))
      : { range: [param.low - pad, param.high + pad], title: { text: escaped(param.name) } };
  };
  const points = !yParam ? [] : border && border.drawn ? borderLine(border, xParam, yParam) : [];
  if (points.length) traces.push({
    type: "scatter", mode: "lines", x: points.map(([x]) => x), y: points.map(([, y]) => y), hoverinfo: "skip",
    line: { color: color("over"), width: 2, dash: "dash" }, name: "border of the budget, other parameters as is typical",
  });
  const shapes = yParam ? [] : [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: 1, y1: 1, line: { color: color("over"), dash: "dash", width: 1.5 } }];
  return [traces, layout(axis(xParam, shares), axis(yParam, shares), { shapes })];
}

function borderLine(border, xParam, yParam) {
  const slopeX = border.slopes[xParam.name], slopeY = border.slopes[yParam.name];
  if (slopeX === undefined || !slopeY || xParam === yParam) return [];
  let rest = border.intercept;
  for (const [name, added] of Object.entries(border.typical)) if (name !== xParam.name && name !== yParam.name) rest += added;
  const value = (param, place) => (param.log ? param.low * (param.high / param.low) ** place : param.low + place * (param.high - param.low));
  const points = [];
  for (let place = 0; place <= 1.0001; place += 0.01) {
    const other = -(rest + slopeX * place) / slopeY;
    if (other >= 0 && other <= 1) points.push([value(xParam, place), value(yParam, other)]);
  }
  return points;
}

// Measured as a factor of what was predicted, in the order of the trials, on the interval that was predicted.
function drawLearning(element) {
  const series = data.quantities[element.dataset.quantity];
  const indices = series.measured.flatMap((value, index) => (value !== null && series.predicted[index] !== null ? [index] : []));
  const ratio = (values, index) => (values[index] === null ? 1 : values[index] / series.predicted[index]);
  const measured = indices.map((index) => ratio(series.measured, index));
  const inside = indices.map((index) => series.measured[index] >= (series.low[index] ?? 0) && series.measured[index] <= (series.high[index] ?? Infinity));
  const ends = [...measured, ...indices.map((index) => Math.max(ratio(series.low, index), 0.2)), ...indices.map((index) => Math.min(ratio(series.high, index), 5))];
  const low = Math.min(0.8, ...ends) / 1.05, high = Math.max(1.25, ...ends) * 1.05;
  const dots = (keep, name, label, symbol) => {
    const members = indices.filter((_, place) => inside[place] === keep);
    return { type: "scatter", mode: "markers", x: members, y: members.map((index) => ratio(series.measured, index)), hoverinfo: "text",
      hovertext: members.map((index) => about(series, index)), marker: { color: color(name), symbol, size: 7 }, name: `${label} (${members.length})`, showlegend: members.length > 0 };
  };
  const traces = [
    { type: "scatter", mode: "markers", x: indices, y: indices.map(() => 1), marker: { size: 0.1, color: color("middle") }, hoverinfo: "skip", name: "90% interval", showlegend: false,
      error_y: { array: indices.map((index) => ratio(series.high, index) - 1), arrayminus: indices.map((index) => 1 - ratio(series.low, index)), color: color("middle"), thickness: 2.5, width: 0 } },
    dots(true, "launched", "inside its 90% interval", "circle"), dots(false, "over", "outside", "x"),
  ];
  const shapes = [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: 1, y1: 1, line: { color: color("muted"), width: 1 } }];
  for (const [index] of data.drifts) shapes.push({ type: "line", x0: index - 0.5, x1: index - 0.5, yref: "paper", y0: 0, y1: 1, line: { color: color("over"), dash: "dot", width: 1.5 } });
  const number = { title: { text: "trials, in their order" }, range: [Math.min(...indices) - 0.5, Math.max(...indices) + 0.5] };
  return [traces, layout(number, logAxis(low, high, "measured / predicted"), { shapes })];
}

const DRAW = { fit: drawFit, border: drawBorder, learning: drawLearning };
const drawn = new Set();

async function loadPlotly() { // packed, because it is larger than all else
  const packed = Uint8Array.from(atob(byId("plotly").textContent.trim()), (character) => character.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(unpacked).text();
  document.head.append(script);
}

function draw(element) {
  const [traces, plan] = DRAW[element.dataset.chart](element);
  Plotly.react(element, traces, plan, { displayModeBar: false, responsive: true });
  drawn.add(element);
}

async function setUpCharts() {
  const elements = [...document.querySelectorAll("[data-chart]")];
  if (!elements.length) return;
  try {
    await loadPlotly();
  } catch (error) {
    for (const element of elements) element.textContent = "This browser cannot unpack the charts. The tables have the same numbers.";
    return;
  }
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting && !drawn.has(entry.target)) draw(entry.target);
  }, { rootMargin: "400px" });
  for (const element of elements) seen.observe(element);
  const again = () => drawn.forEach(draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  for (const id of ["x", "y", "budget"]) byId(id)?.addEventListener("change", () => draw(byId("border-chart")));
  addEventListener("beforeprint", () => elements.forEach(draw));
  document.documentElement.dataset.charts = "ready";
}

if (byId("trials")) setUpTable();
addEventListener("load", () => setTimeout(setUpCharts));
