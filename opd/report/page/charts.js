// Curves, by uPlot.
const drawn = [];
const sync = uPlot.sync("steps");

function chart(holder, title, series, options = {}) {
  const box = el("div", { className: "card chart" }, el("h3", {}, visible(title)));
  holder.append(box);
  const xs = unique(series.flatMap((one) => one.x)).sort((a, b) => a - b);
  const place = new Map(xs.map((x, index) => [x, index]));
  const data = [xs, ...series.map((one) => {
    const values = new Array(xs.length).fill(null);
    one.x.forEach((x, index) => { values[place.get(x)] = known(one.y[index]) ? one.y[index] : null; });
    return values;
  })];
  const make = () => {
    const ink = css("--soft"), grid = css("--line"), font = "11px system-ui, sans-serif";
    const axis = { stroke: ink, font, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1, size: 4 } };
    const format = options.percent ? (value) => percent(value, 0) : (value) => number(value);
    return new uPlot({
      width: Math.max(200, box.clientWidth - 40), height: 190, padding: [8, 8, 0, 0],
      cursor: { sync: { key: sync.key }, points: { size: 6 }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: { range: options.percent ? (_, low, high) => [Math.min(low, high - .05) - .02, Math.min(1.02, high + .03)] : undefined } },
      axes: [{ ...axis, size: 30 }, { ...axis, size: 48, values: (_, ticks) => ticks.map(format) }],
      series: [{ label: options.x || "step" }, ...series.map((one, index) => ({
        label: legible(one.label), stroke: css(`--c${(one.color ?? index) % 8}`), width: 1.75, dash: DASHES[Math.floor((one.color ?? index) / 4) % DASHES.length],
        spanGaps: true, points: { show: one.x.length < 25, size: 5 }, value: (_, value) => (options.percent ? percent(value) : number(value)),
      }))],
    }, data, box);
  };
  const entry = { box, make, title, plot: make() };
  entry.zoomed = () => xs.length > 1 && (entry.plot.scales.x.min > xs[0] || entry.plot.scales.x.max < xs[xs.length - 1]);
  drawn.push(entry);
  return entry;
}
const DASHES = [[], [6, 4], [2, 3]]; // beyond four colours, lines differ by dashes too
function redraw() {
  for (const entry of drawn) {
    if (!entry.box.isConnected) continue;
    entry.plot.destroy();
    entry.plot = entry.make();
  }
}
let resizing = 0;
addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(() => {
  for (const entry of drawn) if (entry.box.isConnected) entry.plot.setSize({ width: Math.max(200, entry.box.clientWidth - 40), height: 190 });
}, 120); });

const TITLES = {
  reverse_kl: "KL(student ‖ teacher), nats per token", reward: "Mean reward of what was sampled", entropy: "Entropy of the student, nats", entropy_sampled: "Entropy of the student, estimated from sampled tokens, nats",
  response_length: "Tokens per answer", loss: "Loss", truncated: "Share cut off at the limit", grad_norm: "Gradient norm", lr: "Learning rate", mismatch: "|log trainer − log sampler|",
};
const FIRST = ["reverse_kl", "reward", "entropy", "entropy_sampled", "response_length"];

function curves(runs) {
  const holder = el("div", { className: "grid" });
  const many = runs.length > 1;
  const fill = (extra) => {
    const close = new Map(drawn.filter((entry) => entry.zoomed()).map((entry) => [entry.title, entry.plot.scales.x])); // who looks closely goes on
    drawn.length = 0;
    replace(holder);
    evaluations(holder, runs);
    const domains = unique(runs.flatMap((run) => Object.keys(run.metrics))).filter((name) => name.startsWith("kl/"));
    if (!many && domains.length > 1)
      chart(holder, "KL(student ‖ teacher) by domain", domains.map((name) => line(runs[0], name, name.slice(3), domainColor(runs[0], name.slice(3)))));
    for (const name of [...FIRST.filter((item) => many || domains.length < 2 || item !== "reverse_kl"), ...extra]) {
      const series = runs.map((run, index) => line(run, name, many ? run.label : name, index)).filter((one) => one.x.length);
      if (series.length) chart(holder, TITLES[name] || name, series, { percent: name === "truncated" });
    }
    for (const entry of drawn) if (close.has(entry.title)) entry.plot.setScale("x", { min: close.get(entry.title).min, max: close.get(entry.title).max });
  };
  const others = unique(runs.flatMap((run) => Object.keys(run.metrics))).filter((name) => !["at", "step", "stage", ...FIRST].includes(name));
  const extra = [];
  const add = choose("add a curve", ["", ...others.sort()], "", (name) => { if (name && !extra.includes(name)) { extra.push(name); fill(extra); } });
  const made = section("curves", "Curves", "Drag to look closer, double-click to go back.", el("div", { className: "filters" }, add), holder);
  made.fill = () => fill(extra);
  return made;
}
function line(run, name, label, index) {
  const at = run.metrics.at || [], values = run.metrics[name] || [];
  const kept = at.map((_, number) => number).filter((number) => known(values[number]));
  return { label, x: kept.map((number) => at[number]), y: kept.map((number) => values[number]), color: index };
}
function domainColor(run, domain) { // the same in every chart
  const names = unique([...run.stages.flatMap((stage) => Object.keys(stage.evals)), ...Object.keys(run.metrics).filter((name) => name.startsWith("kl/")).map((name) => name.slice(3))]);
  return Math.max(0, names.indexOf(domain));
}
function evaluations(holder, runs) {
  const series = [];
  runs.forEach((run, which) => {
    let before = 0;
    const points = {};
    for (const stage of run.stages) {
      for (const [domain, found] of Object.entries(stage.evals)) if (known(found.before) && !points[domain]) points[domain] = [[before, found.before]];
      for (const moment of stage.history)
        for (const [domain, value] of Object.entries(moment)) if (domain !== "step") (points[domain] ||= []).push([before + moment.step, value]);
      before += stage.steps;
    }
    const domains = Object.entries(points);
    if (runs.length > 1 && domains.length) {
      const newest = (list, step) => list.filter((point) => point[0] <= step).pop()?.[1]; // a domain that was not asked about stays where it was
      const steps = unique(domains.flatMap(([, list]) => list.map((point) => point[0]))).sort((a, b) => a - b).filter((step) => domains.every(([, list]) => known(newest(list, step))));
      series.push({ label: run.label, x: steps, y: steps.map((step) => domains.reduce((sum, [, list]) => sum + newest(list, step), 0) / domains.length), color: which });
    } else for (const [domain, list] of domains) series.push({ label: domain, x: list.map((point) => point[0]), y: list.map((point) => point[1]), color: domainColor(run, domain) });
  });
  if (series.some((one) => one.x.length > 1)) chart(holder, runs.length > 1 ? "Held-out pass@1, mean over domains" : "Held-out pass@1", series, { percent: true });
}
