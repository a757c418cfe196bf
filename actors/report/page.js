"use strict";
// Builds the page from the data in it. Texts of runs enter the page only as text nodes and attributes, never as HTML.
const data = JSON.parse(document.getElementById("data").textContent), runs = data.runs, main = document.querySelector("main");
const COLOURS = ["#3b82d6", "#d9730d", "#1a9a6c", "#c2418f", "#8a63d2", "#b08900", "#d1493f", "#5d7f94"], SOLVED = 0.5, ROWS = 40;
const KEY = "slimefsdp report " + location.pathname;
const seen = {smooth: 8, hidden: [], set: 0, score: 0, filter: "all", text: "", page: 0, step: 0, refresh: true, y: 0}; // kept over reloads
try { Object.assign(seen, JSON.parse(sessionStorage.getItem(KEY))); } catch { /* the browser keeps nothing for this page */ }
const keep = () => { try { sessionStorage.setItem(KEY, JSON.stringify({...seen, y: scrollY})); } catch { /* as above */ } };

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {}))
    if (name in element) element[name] = value; else element.setAttribute(name, value);
  element.append(...children.filter(child => child != null));
  return element;
}
const button = (text, action, attributes) => make("button", {type: "button", onclick: action, ...attributes}, text);
const select = (label, names, chosen, action) => {
  const box = make("select", {onchange: event => action(Number(event.target.value))});
  names.forEach((name, index) => box.append(make("option", {value: index, selected: index === chosen}, name)));
  return make("label", {}, label + " ", box);
};
const table = (head, rows) => make("div", {className: "wide", tabIndex: 0}, make("table", {},
  make("thead", {}, make("tr", {}, ...head.map(text => make("th", {scope: "col"}, text)))),
  make("tbody", {}, ...rows.map(row => make("tr", {}, ...row.map(cell => cell instanceof Node ? cell : make("td", {}, cell)))))));
function section(heading, ...children) {
  const id = heading.toLowerCase().replaceAll(" ", "-");
  document.querySelector("nav").append(make("a", {href: "#" + id}, heading));
  return main.appendChild(make("section", {id}, make("h2", {}, heading), ...children));
}
const swatch = colour => { const box = make("span", {className: "swatch"}); box.style.background = colour; return box; };
const many = runs.length > 1, of = run => many ? `${run.name}: ` : "";
function number(value, chart) {
  if (value == null) return "-";
  if (chart && chart.is_share) return (100 * value).toFixed(1) + " %";
  if (chart && chart.unit === "bytes")
    for (const [size, name] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]])
      if (Math.abs(value) >= size) return (value / size).toPrecision(3) + " " + name;
  return Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-3) ? value.toExponential(2) : String(+value.toPrecision(4));
}

// ---------------------------------------------------------------- findings
const found = section("Findings"), texts = runs.flatMap(run => run.findings.map(finding => [run, finding]));
const shownAt = finding => {
  const index = data.charts.findIndex(chart => chart.heading.startsWith(finding.target));
  return index < 0 ? "#held-out-prompts" : `#chart-${index}`;
};
found.append(texts.length ? make("ul", {className: "findings"}, ...texts.map(([run, finding]) => make("li", {},
  of(run) + finding.text + " ", make("a", {href: shownAt(finding)}, "Show"))))
  : make("p", {}, "Nothing conspicuous: no held-out score falls, and no length, cut or entropy runs away, while the reward rises; " +
    "no jump of a KL or the mismatch; no text that most responses share."));
found.prepend(...runs.map((run, index) => {
  const steps = run.steps_planned ? `step ${run.step} of ${run.steps_planned}` : `step ${run.step}`;
  const box = make("input", {type: "checkbox", checked: !seen.hidden.includes(index), onchange: event => {
    seen.hidden = seen.hidden.filter(one => one !== index).concat(event.target.checked ? [] : [index]);
    drawCharts();
  }});
  const parts = [swatch(COLOURS[index % COLOURS.length]), `${run.title}: ${run.state}, ${steps}`];
  return make("p", {}, many ? make("label", {}, box, " ", ...parts) : parts[1]);
}));
if (data.refresh_s) {
  const box = make("input", {type: "checkbox", checked: seen.refresh, onchange: event => { seen.refresh = event.target.checked; }});
  found.prepend(make("label", {className: "soft"}, box, ` load again every ${data.refresh_s} s while a run goes on`));
  setInterval(() => { if (seen.refresh && !document.querySelector("dialog").open) location.reload(); }, 1000 * data.refresh_s);
}
found.append(make("p", {className: "soft"}, `Made on ${new Date(1000 * data.made_at).toLocaleString()}.`,
  ...runs.flatMap(run => run.left_out.length ? [` ${of(run)}Left out: ${run.left_out.join("; ")}.`] : [])));

// ---------------------------------------------------------------- charts
const grid = make("div", {className: "charts"}), plots = [];
const smoothing = make("input", {type: "range", min: 0, max: 30, value: seen.smooth,
  oninput: event => { seen.smooth = Number(event.target.value); drawCharts(); }});
section("Charts", make("div", {className: "tools"}, make("label", {}, "Smoothing ", smoothing), make("span", {className: "soft"},
  "Thin: each step; bold: running mean. Drag to zoom, double-click to see all. With the keyboard: Tab to a chart, then arrow keys.")), grid);
function smooth(values, share) {
  const reach = Math.floor(Math.max(1, values.length * share) / 2);
  return reach ? values.map((_, at) => {
    const near = values.slice(Math.max(0, at - reach), at + reach + 1);
    return near.reduce((sum, value) => sum + value, 0) / near.length;
  }) : values;
}
/** Returns uPlot's columns and series of a chart, and what its readout shows: [name, colour, column]. */
function columnsOf(chart) {
  const lines = chart.lines.filter(line => !seen.hidden.includes(line.run));
  const steps = [...new Set(lines.flatMap(line => line.steps))].sort((one, other) => one - other);
  const columns = [steps], series = [{}], bands = [], readout = [], below = steps.map(() => 0);
  const add = (line, values, look) => {
    const at = new Map(line.steps.map((step, index) => [step, values[index]]));
    columns.push(steps.map(step => at.get(step) ?? null));
    return series.push({spanGaps: true, points: {show: false}, ...look}) - 1;
  };
  lines.forEach((line, index) => {
    const colour = COLOURS[(many && chart.kind !== "stacked" ? line.run : index) % COLOURS.length];
    const dash = many && chart.kind !== "stacked" ? [[], [6, 3], [2, 3], [9, 3, 2, 3]][lines.filter(one => one.run === line.run).indexOf(line) % 4] : [];
    const name = [many && chart.kind !== "stacked" ? runs[line.run].name : "", line.label].filter(Boolean).join(" ");
    let column;
    if (chart.kind === "stacked") {
      line.values.forEach((value, at) => { below[at] += value; });
      column = add(line, [...below], {stroke: colour, fill: colour + (index ? "00" : "66"), width: 1});
      if (index) bands.push({series: [column, column - 1], fill: colour + "66"});
    } else if (chart.kind === "evaluations") {
      if (line.low) bands.push({series: [add(line, line.high, {width: 0}), add(line, line.low, {width: 0})], fill: colour + "30"});
      column = add(line, line.values, {stroke: colour, dash, width: 2, points: {show: true, size: 6, fill: colour}});
    } else {
      const bold = smooth(line.values, seen.smooth / 100), single = line.values.length === 1;
      if (bold !== line.values) add(line, line.values, {stroke: colour + "60", width: 1});
      column = add(line, bold, {stroke: colour, dash, width: 2, points: {show: single, size: 6, fill: colour}});
    }
    readout.push([name, colour, columns[column].map((value, at) => chart.kind === "stacked" ? line.values[at] : value)]);
  });
  return {columns, series, bands, readout};
}
function drawChart(chart, index) {
  const {columns, series, bands, readout} = columnsOf(chart), plot = make("div", {className: "plot"});
  const card = make("div", {className: "chart", id: `chart-${index}`, tabIndex: 0, role: "group",
    "aria-label": `${chart.heading}, ${chart.unit}; arrow keys move along the steps`});
  const values = make("ul", {"aria-live": "polite"}), colour = name => getComputedStyle(document.documentElement).getPropertyValue(name);
  const show = at => values.replaceChildren(make("li", {}, at == null ? "last" : `step ${columns[0][at]}`),
    ...readout.map(([name, line, column]) => make("li", {}, swatch(line), `${name} `.trimStart() +
      number(at == null ? column.findLast(value => value != null) : column[at], chart))));
  card.append(make("h3", {}, chart.heading), make("p", {className: "soft"}, chart.unit), plot, values);
  grid.append(card);
  if (!readout.length) return show(null);
  let top = null; // a slow first step would flatten all other steps of a stack
  if (chart.kind === "stacked") {
    const sums = [...columns[columns.length - 1]].sort((one, other) => one - other);
    top = 1.3 * sums[Math.floor(0.95 * (sums.length - 1))] || 1;
  }
  const axis = {stroke: colour("--soft"), grid: {stroke: colour("--line"), width: 1}, ticks: {show: false}};
  const marks = u => runs.forEach((run, at) => seen.hidden.includes(at) || run.events.forEach(event => {
    if (event.kind === "start" && event.step === 0) return;
    const x = Math.round(u.valToPos(event.step, "x", true));
    if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) return;
    u.ctx.fillStyle = colour(event.kind === "recovery" ? "--alarm" : "--soft");
    u.ctx.fillRect(x, u.bbox.top, devicePixelRatio, event.kind === "warning" ? u.bbox.height / 12 : u.bbox.height);
  }));
  const u = new uPlot({
    width: plot.clientWidth, height: 190, series, bands, legend: {show: false}, hooks: {setCursor: [u => show(u.cursor.idx)], draw: [marks]},
    cursor: {sync: {key: "steps", scales: ["x", null]}, y: false},
    scales: {x: {time: false, range: (_, low, high) => low === high ? [low - 1, high + 1] : [low, high]},
      y: chart.has_symmetric_log ? {distr: 4, asinh: 1e-8} : top ? {range: [0, top]} : {}},
    axes: [{...axis, size: 30}, {...axis, size: 62, values: (_, splits) => splits.map(value => value == null ? "" : number(value, chart))}],
  }, columns, plot);
  card.onkeydown = event => {
    const last = columns[0].length - 1, now = u.cursor.idx ?? (event.key === "ArrowLeft" ? last + 1 : -1);
    const to = {ArrowLeft: Math.max(0, now - 1), ArrowRight: Math.min(last, now + 1), Home: 0, End: last}[event.key];
    if (to === undefined) return;
    event.preventDefault();
    u.setCursor({left: u.valToPos(columns[0][to], "x"), top: 10});
    show(to);
  };
  show(null);
  plots.push([u, plot]);
}
function drawCharts() {
  plots.splice(0).forEach(([u]) => u.destroy());
  grid.replaceChildren();
  data.charts.forEach(drawChart);
  keep();
}
drawCharts();
let width = innerWidth;
addEventListener("resize", () => { if (width !== innerWidth) { width = innerWidth; plots.forEach(([u, plot]) => u.setSize({width: plot.clientWidth, height: 190})); } });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);

// ---------------------------------------------------------------- held-out prompts by evaluations
const sets = runs.flatMap(run => run.held_out.map(set => ({...set, title: of(run) + (set.name || "held-out set")})));
const dialog = document.querySelector("dialog"), ends = prompt => prompt.cells.filter(Boolean), last = prompt => ends(prompt).at(-1);
const mean = cell => cell[0][seen.score] ?? null, solved = cell => cell[1][seen.score] ?? 0; // of the chosen score
const FILTERS = {
  "all": () => true,
  "became right": prompt => solved(ends(prompt)[0]) < SOLVED && solved(last(prompt)) >= SOLVED,
  "became wrong": prompt => solved(ends(prompt)[0]) >= SOLVED && solved(last(prompt)) < SOLVED,
  "never right": prompt => ends(prompt).every(cell => solved(cell) === 0),
  "cut": prompt => last(prompt)[3] > 0,
  "longest": prompt => ends(prompt).length > 0,
};
function colourOf(reward, [low, high]) { // from orange to blue, both light enough for dark text
  const share = high > low ? (reward - low) / (high - low) : 1;
  return reward == null ? "#c9ced4" : `hsl(${share < 0.5 ? 28 : 205} ${Math.round(170 * Math.abs(share - 0.5))}% ${Math.round(90 - 40 * Math.abs(share - 0.5))}%)`;
}
function open(set, prompt, at) {
  const responses = prompt.responses[at], cell = prompt.cells[at];
  const move = by => button(by < 0 ? "Earlier" : "Later", () => open(set, prompt, at + by), {disabled: !(at + by in set.steps)});
  dialog.replaceChildren(make("h2", {}, prompt.place), make("pre", {}, prompt.text), make("p", {className: "soft"}, prompt.record),
    make("div", {className: "tools"}, move(-1), make("strong", {}, `step ${set.steps[at]}`), move(1),
      cell ? `mean ${set.scores[seen.score]} ${number(mean(cell))}, ${number(100 * solved(cell))} % at least 1, ${cell[3]} cut` : "not evaluated", button("Close", () => dialog.close())),
    ...(responses || []).flatMap(([text, tokens, finished, scores]) => [
      make("p", {}, `${Object.entries(scores).map(([name, value]) => `${name} ${number(value)}`).join(", ")}; ${tokens} tokens, ${finished ? "ended" : "cut"}`),
      make("pre", {}, text)]),
    ...responses ? [] : [make("p", {}, "This page has no responses of this evaluation; the run's folder has them in evaluations/.")]);
  if (!dialog.open) dialog.showModal();
}
const heldOut = section("Held-out prompts");
function drawHeldOut() {
  const set = sets[seen.set] || sets[0], heading = heldOut.firstChild;
  seen.score = set && seen.score in set.scores ? seen.score : 0;
  if (!set) return heldOut.replaceChildren(heading, make("p", {}, "The run has no responses of evaluations."));
  const change = (name, value) => { Object.assign(seen, {page: 0, [name]: value}); drawHeldOut(); };
  const isFound = prompt => !seen.text || (prompt.text + JSON.stringify(prompt.responses)).toLowerCase().includes(seen.text.toLowerCase());
  const rewards = set.prompts.flatMap(ends).map(mean).filter(value => value != null);
  const range = rewards.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
  let prompts = set.prompts.filter(FILTERS[seen.filter] || FILTERS.all).filter(isFound);
  if (seen.filter === "longest") prompts = prompts.sort((one, other) => last(other)[2] - last(one)[2]);
  const pages = Math.max(1, Math.ceil(prompts.length / ROWS));
  seen.page = Math.min(seen.page, pages - 1);
  const turn = by => button(by < 0 ? "Previous" : "Next", () => { seen.page += by; drawHeldOut(); }, {disabled: !(seen.page + by >= 0 && seen.page + by < pages)});
  const search = make("input", {type: "search", value: seen.text, onchange: event => change("text", event.target.value)});
  const rows = prompts.slice(seen.page * ROWS, (seen.page + 1) * ROWS).map(prompt => [
    make("td", {className: "prompt"}, button(prompt.text.slice(-120) || prompt.place, () => open(set, prompt, set.steps.length - 1), {title: prompt.place})),
    ...prompt.cells.map((cell, at) => {
      if (!cell) return make("td");
      const box = button((mean(cell) == null ? "-" : String(+mean(cell).toFixed(2))) + (cell[3] ? " ✂" : ""), () => open(set, prompt, at), {tabIndex: -1,
        "aria-label": `step ${set.steps[at]}: ${number(mean(cell))}${cell[3] ? ", cut" : ""}`});
      box.style.background = colourOf(mean(cell), range);
      return make("td", {className: "number"}, box);
    })]);
  heldOut.replaceChildren(heading,
    make("p", {className: "soft"}, "Cells: mean score of a prompt's responses; blue is high, ✂ marks responses that were cut. Right: at least half of " +
      "the responses have a score of 1 or more. Choose a prompt or a cell to read responses." + (set.left_out.length ? ` Left out: ${set.left_out.join("; ")}.` : "")),
    make("div", {className: "tools"}, sets.length > 1 ? select("Set", sets.map(one => one.title), sets.indexOf(set), index => change("set", index)) : null,
      select("Score", set.scores, seen.score, index => change("score", index)),
      ...Object.entries(FILTERS).map(([name, test]) => button(`${name} (${set.prompts.filter(test).length})`, () => change("filter", name), {"aria-pressed": String(seen.filter === name)})),
      make("label", {}, "Search ", search)),
    table(["prompt", ...set.steps.map(step => `step ${step}`)], rows),
    make("div", {className: "tools"}, turn(-1), `page ${seen.page + 1} of ${pages}, ${prompts.length} prompts`, turn(1)));
  keep();
}
drawHeldOut();

// ---------------------------------------------------------------- training groups, events, settings
const groups = runs.flatMap(run => run.training.map(([step, text]) => [`${of(run)}step ${step}`, text]));
if (groups.length) {
  const text = make("pre", {tabIndex: 0}), show = index => { seen.step = index; text.textContent = groups[index][1]; keep(); };
  section("Training groups", select("Step", groups.map(([name]) => name), seen.step, show), text);
  show(Math.min(seen.step, groups.length - 1));
}
const events = runs.flatMap(run => run.events.map(event => [`${of(run)}${event.step}`, event.kind, event.text]));
section("Events", events.length ? table(["step", "kind", "what"], events) : make("p", {}, "No recovery and no warning."));
const names = [...new Set(runs.flatMap(run => Object.keys(run.settings)))], heads = runs.map(run => run.name);
const rows = (names, values) => names.map(name => [name, ...runs.map(run => values(run)[name] ?? "-")]);
const differs = name => new Set(runs.map(run => run.settings[name])).size > 1, isGiven = name => runs.some(run => run.given.includes(name));
const settings = section("Settings");
if (many) settings.append(make("h3", {}, "Settings that differ"), table(["setting", ...heads], rows(names.filter(differs), run => run.settings)));
for (const [title, part] of [["Given settings", names.filter(isGiven)], ["Defaults", names.filter(name => !isGiven(name))]])
  settings.append(make("details", {open: !many && title === "Given settings"}, make("summary", {}, `${title} (${part.length})`), table(["setting", ...heads], rows(part, run => run.settings))));
section("Environment", table(["", ...heads], rows([...new Set(runs.flatMap(run => Object.keys(run.environment)))], run => run.environment)));
scrollTo(0, seen.y);
addEventListener("pagehide", keep);
document.body.dataset.ready = Math.round(performance.now());
