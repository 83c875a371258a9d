"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const charts = document.getElementById("charts");
const DASHES = { solid: "", dashed: "6 4", dotted: "2 3" };

function add(parent, name, attributes, text) {
  const svg = "http://www.w3.org/2000/svg";
  const inside = name === "svg" || parent.namespaceURI === svg;
  const node = inside ? document.createElementNS(svg, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

const tip = add(document.body, "div", { id: "tip", role: "status" });

function say(event, text) {
  tip.textContent = text;
  tip.style.display = text ? "block" : "none";
  tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
}

const short = (value) => String(Number(value.toPrecision(4)));

/** Round numbers that cover [low, high], about `count` of them. */
function ticks(low, high, count) {
  const raw = (high - low || Math.abs(high) || 1) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw);
  const found = [];
  for (let at = Math.floor(low / step); at <= Math.ceil(high / step); at++) found.push(at * step);
  return found;
}

function lineChart(chart) {
  const names = chart.categories;
  const xs = chart.series.flatMap((line) => line.x);
  const ys = chart.series.flatMap((line) => line.y).filter((y) => y !== null);
  if (!xs.length || !ys.length) return;
  const section = add(charts, "section");
  if (chart.title) add(section, "h2", {}, chart.title);
  const legend = add(section, "div", { class: "legend" });
  const box = add(section, "div", { class: "scroll" });
  const letters = names ? Math.max(...names.map((name) => name.length)) : 0;
  const width = Math.max(900, names ? 22 * names.length + 110 : 0);
  const [left, right, top] = [70, 20, 12];
  const bottom = names ? Math.min(340, 6.6 * letters + 44) : 52;
  const height = 360 + bottom;
  const svg = add(box, "svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  add(svg, "title", {}, `${chart.title || data.title}: ${chart.ylabel} by ${chart.xlabel}`);
  const steps = ticks(chart.from_zero ? 0 : Math.min(...ys), Math.max(...ys), 6);
  const across = names ? null : ticks(Math.min(...xs), Math.max(...xs), 8);
  const [xLow, xHigh] = names ? [-0.5, names.length - 0.5] : [across[0], across.at(-1)];
  const [yLow, yHigh] = [steps[0], steps.at(-1)];
  const px = (x) => left + ((x - xLow) / (xHigh - xLow)) * (width - left - right);
  const py = (y) => height - bottom - ((y - yLow) / (yHigh - yLow)) * (height - top - bottom);
  const floor = height - bottom;
  for (const y of steps) {
    add(svg, "line", { class: "grid", x1: left, x2: width - right, y1: py(y), y2: py(y) });
    add(svg, "text", { x: left - 8, y: py(y) + 4, "text-anchor": "end" }, short(y));
  }
  for (const x of names ? names.keys() : across) {
    add(svg, "line", { class: "axis", x1: px(x), x2: px(x), y1: floor, y2: floor + 4 });
    if (names) {
      const place = { transform: `translate(${px(x) + 4} ${floor + 8}) rotate(-90)`, "text-anchor": "end" };
      const label = add(svg, "text", place, names[x]);
      if (names[x].length > 40) label.textContent = "…" + names[x].slice(-39);
    } else {
      add(svg, "text", { x: px(x), y: floor + 18, "text-anchor": "middle" }, short(x));
    }
  }
  add(svg, "path", { class: "axis", fill: "none", d: `M${left} ${top}V${floor}H${width - right}` });
  const middle = (left + width - right) / 2;
  add(svg, "text", { x: middle, y: height - 8, "text-anchor": "middle" }, chart.xlabel);
  const side = { transform: `translate(16 ${(top + floor) / 2}) rotate(-90)`, "text-anchor": "middle" };
  add(svg, "text", side, chart.ylabel);
  chart.series.forEach((line, at) => drawSeries(svg, legend, chart, line, at, px, py));
}

function drawSeries(svg, legend, chart, line, at, px, py) {
  const colour = data.colours[(line.colour ?? at) % data.colours.length];
  const group = add(svg, "g", { class: "series", "data-name": line.name });
  let path = "";
  line.x.forEach((x, n) => {
    if (line.y[n] === null) return;
    const joined = n > 0 && line.y[n - 1] !== null;
    path += `${joined ? "L" : "M"}${px(x).toFixed(1)} ${py(line.y[n]).toFixed(1)}`;
  });
  const stroke = { stroke: colour, "stroke-width": 2, "stroke-dasharray": DASHES[line.style] };
  add(group, "path", { d: path, fill: "none", ...stroke });
  line.x.forEach((x, n) => {
    if (line.y[n] === null) return;
    const dot = add(group, "circle", { cx: px(x), cy: py(line.y[n]), r: 3.5, fill: colour });
    const where = chart.categories ? chart.categories[x] : `${chart.xlabel} ${short(x)}`;
    dot.addEventListener("mousemove", (event) => say(event, `${where}\n${line.name}: ${short(line.y[n])}`));
    dot.addEventListener("mouseleave", (event) => say(event, ""));
  });
  const button = add(legend, "button", { type: "button", "aria-pressed": "true" });
  const key = add(button, "svg", { width: 30, height: 10 });
  add(key, "path", { d: "M0 5H30", ...stroke });
  button.append(line.name);
  button.addEventListener("click", () => {
    const hidden = group.style.display === "none";
    group.style.display = hidden ? "" : "none";
    button.setAttribute("aria-pressed", String(hidden));
  });
}

/** White to dark blue; readable in grey too. */
function blue(share) {
  const mix = (from, to) => Math.round(from + (to - from) * share);
  return `rgb(${mix(255, 8)},${mix(255, 48)},${mix(255, 107)})`;
}

function heatMap(chart, parent) {
  const top = Math.max(...chart.values.flat().filter((value) => value !== null), 0) || 1;
  if (chart.numbers) return matrix(chart, parent, top);
  const figure = add(parent, "figure");
  add(figure, "figcaption", {}, chart.title);
  const [rows, columns] = [chart.values.length, chart.values[0].length];
  const canvas = add(figure, "canvas", { width: columns, height: rows, role: "img", "aria-label": chart.title });
  const pen = canvas.getContext("2d");
  chart.values.forEach((row, y) =>
    row.forEach((value, x) => {
      if (!value) return;
      pen.fillStyle = blue(0.15 + (0.85 * value) / top);
      pen.fillRect(x, y, 1, 1);
    }),
  );
  const [across, down] = chart.extent;
  add(figure, "figcaption", {}, `→ ${chart.xlabel} (${across}), ↓ ${chart.ylabel} (${down})`);
  const span = (at, cells, units) => {
    const [from, to] = [Math.ceil((at * units) / cells), Math.ceil(((at + 1) * units) / cells) - 1];
    return to > from ? `${from} to ${to}` : `${from}`;
  };
  canvas.addEventListener("mousemove", (event) => {
    const area = canvas.getBoundingClientRect();
    const place = (part, size, cells) => Math.max(0, Math.min(cells - 1, Math.floor((part / size) * cells)));
    const x = place(event.clientX - area.left, area.width, columns);
    const y = place(event.clientY - area.top, area.height, rows);
    const text = `${chart.ylabel} ${span(y, rows, down)}\n${chart.xlabel} ${span(x, columns, across)}`;
    say(event, `${text}\n${short(chart.values[y][x] || 0)}`);
  });
  canvas.addEventListener("mouseleave", (event) => say(event, ""));
}

function matrix(chart, parent, top) {
  const figure = add(parent, "figure", { class: "wide" });
  add(figure, "figcaption", {}, `${chart.title} (rows: ${chart.ylabel}, columns: ${chart.xlabel})`);
  const table = add(figure, "table");
  const head = add(table, "tr");
  for (const name of ["", ...chart.columns]) add(head, "th", {}, name);
  chart.values.forEach((row, y) => {
    const line = add(table, "tr");
    add(line, "th", {}, chart.rows[y]);
    for (const value of row) {
      const cell = add(line, "td", { class: "cell" }, value === null ? "" : short(value));
      if (value === null) continue;
      cell.style.background = blue(value / top);
      cell.style.color = value > 0.5 * top ? "#fff" : "#222";
    }
  });
}

data.lines.forEach(lineChart);
if (data.maps.length) {
  const numbers = data.maps.filter((chart) => chart.numbers);
  const maps = data.maps.filter((chart) => !chart.numbers);
  numbers.forEach((chart) => heatMap(chart, charts));
  if (maps.length) {
    add(charts, "h2", {}, "Transport maps");
    const box = add(charts, "div", { class: "maps" });
    maps.forEach((chart) => heatMap(chart, box));
  }
}
document.body.dataset.drawn = "yes";
