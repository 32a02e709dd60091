// What ran, what came of it, the pipeline's graph and what it cost.
function hero(runs) {
  if (runs.length > 1) return el("div", { className: "hero" }, el("h1", {}, `${runs.length} runs compared`), el("div", {}, runs.map((run, index) => el("p", { className: "words" }, el("span", { className: "dot", style: { background: color(index) } }), " ", el("b", {}, visible(run.label)), ": ", visible(run.words)))));
  const run = runs[0], stages = run.stages, steps = stages.reduce((sum, stage) => sum + stage.steps, 0), planned = stages.reduce((sum, stage) => sum + (stage.planned || 0), 0);
  const fact = (name, ...value) => el("span", {}, name + " ", el("b", {}, ...value));
  const teachers = unique(stages.flatMap((stage) => Object.values(stage.models)));
  return el("div", { className: "hero" },
    el("h1", {}, visible(run.recipe), run.name !== run.recipe ? el("span", { className: "faint" }, " · ", visible(run.name)) : null),
    el("p", { className: "words" }, visible(run.words)),
    el("div", { className: "facts" },
      el("span", { className: "chip" }, el("span", { className: "dot", style: { background: run.status === "done" ? "var(--good)" : run.status === "running" ? "var(--after)" : "var(--bad)" } }), run.status),
      fact("student", visible(stages[0].student)), fact(teachers.length > 1 ? `${teachers.length} teachers` : "teacher", visible(shorten(teachers.join(", ") || "none", 120))),
      fact("objective", visible(unique(stages.flatMap((stage) => stage.objective)).join(" + ") || "–")), fact("steps", `${number(steps)}${run.status === "done" ? "" : " of " + number(planned)}`),
      fact("tokens", number(stages.reduce((sum, stage) => sum + stage.tokens, 0))), fact("time", duration(stages.reduce((sum, stage) => sum + stage.seconds, 0))), stages.length > 1 ? fact("stages", String(stages.length)) : null));
}

function bar(who, kind, value, error, fill, goal) {
  const width = known(value) ? Math.max(0, Math.min(1, value)) * 100 : 0;
  const whisker = known(error) && error > 0 ? el("span", { className: "whisker", style: { left: Math.max(0, width - 100 * error) + "%", width: Math.min(200 * error, 100 - Math.max(0, width - 100 * error)) + "%" } }) : null;
  return el("div", { className: "bar " + kind, title: known(error) ? `${percent(value)} ± ${percent(error)}` : "" }, el("span", { className: "who", title: legible(who) }, visible(who)),
    el("span", { className: "track" }, el("span", { className: "fill " + kind, style: { width: width + "%", ...(fill ? { background: fill } : {}) } }), whisker, known(goal) ? el("span", { className: "goal", title: `its teacher ${percent(goal)}`, style: { left: `calc(${100 * Math.max(0, Math.min(1, goal))}% - 1px)` } }) : null), el("span", { className: "value" }, percent(value)));
}
const errorOf = (found, side) => { const one = found.details?.[side] || {}; return one.greedy_stderr ?? one.sampled_stderr; };

function results(runs) {
  const measured = runs.filter((run) => run.stages.some((stage) => Object.keys(stage.evals).length));
  if (!measured.length) return null;
  if (runs.length > 1) return compared(measured);
  const stages = measured[0].stages.filter((stage) => Object.keys(stage.evals).length);
  const body = el("div", {}), last = stages[stages.length - 1], show = (name) => {
    const stage = stages.find((one) => one.name === name) || last;
    kept.stage = stage === last ? null : stage.name;
    replace(body, el("div", { className: "card bars" }, Object.entries(stage.evals).map(([domain, found]) => domainBars(domain, found))), teacherTable(stage));
  };
  show(kept.stage);
  const n = Object.values(last.evals)[0].n;
  return section("results", "Results", `pass@1 on ${number(n)} held-out prompts per domain; the line at a bar's end is one standard error each way.`,
    stages.length > 1 ? el("div", { className: "filters" }, choose("stage", stages.map((stage) => stage.name), kept.stage || last.name, show)) : null, body);
}
function domainBars(domain, found) {
  const gain = known(found.normalised) ? el("span", { className: "muted", title: "0: as before; 1: as its teacher" }, `${percent(found.normalised, 0)} of the gap`) : null;
  const flips = found.flips ? el("span", { className: "muted", title: "held-out prompts that were answered right only now, and only before; p of McNemar's exact test" }, `+${found.flips.gained} −${found.flips.lost}, p ${number(found.flips.p, 2)}`) : null;
  return el("div", {}, el("div", { className: "domain" }, el("span", {}, visible(domain)), gain, flips), bar("before", "before", found.before, errorOf(found, "before")), known(found.after) ? bar(found.at ? `step ${found.at}` : "after", "after", found.after, errorOf(found, "after")) : null,
    known(found.teacher) ? bar("teacher", "teacher", found.teacher, errorOf(found, "teacher")) : null, known(found.weight_average) ? bar("average", "average", found.weight_average) : null);
}
function teacherTable(stage) {
  const names = Object.keys(stage.teachers || {});
  if (names.length < 2) return null;
  const domains = Object.keys(stage.evals);
  return el("details", {}, el("summary", {}, "Every teacher on every domain: what each has forgotten"), el("div", { className: "scroll card" }, el("table", {},
    el("thead", {}, el("tr", {}, el("th", {}, "domain"), names.map((name) => el("th", { className: "number" }, visible(name))), el("th", { className: "number" }, "student after"))),
    el("tbody", {}, domains.map((domain) => el("tr", {}, el("td", {}, visible(domain)), names.map((name) => el("td", { className: "number" }, percent(stage.teachers[name][domain]))), el("td", { className: "number" }, el("b", {}, percent(stage.evals[domain].after)))))))));
}
function compared(runs) {
  const last = (run) => run.stages.filter((stage) => Object.keys(stage.evals).length).pop();
  const domains = unique(runs.flatMap((run) => Object.keys(last(run).evals)));
  const goals = (domain) => unique(runs.map((run) => last(run).evals[domain]?.teacher).filter(known)); // runs may have teachers of their own
  const own = domains.some((domain) => goals(domain).length > 1) ? " Where runs have different teachers, a tick is each run's own." : "";
  const cards = domains.map((domain) => el("div", {}, el("div", { className: "domain" }, visible(domain)), runs.map((run, index) => {
    const found = last(run).evals[domain];
    return found ? bar(run.label, "run", found.after, errorOf(found, "after"), color(DATA.runs.indexOf(run)), goals(domain).length > 1 ? found.teacher : null) : null;
  }), goals(domain).length === 1 ? bar("teacher", "teacher", goals(domain)[0]) : null));
  const table = el("table", {}, el("thead", {}, el("tr", {}, ["run", "before", "after", "teacher", "of the gap", "steps", "tokens", "time"].map((name, index) => el("th", { className: index ? "number" : "" }, name)))),
    el("tbody", {}, runs.map((run, index) => {
      const mean = (side) => (run.gains.length && run.gains.every((found) => known(found[side])) ? run.gains.reduce((sum, found) => sum + found[side], 0) / run.gains.length : null), sum = (key) => run.stages.reduce((total, stage) => total + stage[key], 0);
      const before = mean("before"), after = mean("after"), goal = mean("teacher"), gap = known(goal) && goal > before ? (after - before) / (goal - before) : null;
      return el("tr", {}, el("td", {}, el("span", { className: "dot", style: { background: color(DATA.runs.indexOf(run)) } }), " ", visible(run.label)), [percent(before), percent(after), percent(goal), known(gap) ? percent(gap, 0) : "–", number(sum("steps")), number(sum("tokens")), duration(sum("seconds"))].map((text) => el("td", { className: "number" }, text)));
    })));
  return section("results", "Results", "Held-out pass@1, before the first stage and after the last; above, the mean over domains." + own, el("div", { className: "card scroll" }, table), el("div", { className: "card bars named", style: { marginTop: "16px" } }, cards));
}
function pipeline(run) {
  const { nodes, edges } = run.graph;
  if (nodes.length < 2) return null;
  const width = 190, height = 62, gapX = 70, gapY = 20, rows = {}, places = {};
  for (const node of nodes) { rows[node.column] = (rows[node.column] || 0) + 1; places[node.name] = [node.column * (width + gapX) + 8, (rows[node.column] - 1) * (height + gapY) + 8]; }
  const column = Object.fromEntries(nodes.map((node) => [node.name, node.column])), bow = (edge) => { const span = column[edge.to] - column[edge.from]; return span > 1 ? 14 + 18 * Math.min(span, 6) : 0; };
  const across = (1 + Math.max(...nodes.map((node) => node.column))) * (width + gapX) - gapX + 16, down = Math.max(...Object.values(rows)) * (height + gapY) - gapY + 16 + 0.75 * Math.max(0, ...edges.map(bow));
  const drawing = el("svg", { viewBox: `0 0 ${across} ${down}`, style: { display: "block", width: "100%", maxWidth: across + "px", minWidth: 0.6 * across + "px" }, role: "img", "aria-label": "stages and the models between them" });
  for (const edge of edges) {
    const [x0, y0] = places[edge.from], [x1, y1] = places[edge.to], ax = x0 + width, ay = y0 + height / 2, by = y1 + height / 2, bend = Math.max(30, (x1 - ax) / 2), under = bow(edge);
    const cx = x0 + width * 0.7, dx = x1 + width * 0.3, from = y0 + height, to = y1 + height; // past other stages: in a bow below them
    drawing.append(el("path", { class: edge.as === "student" ? "edge student-edge" : "edge teacher", d: under ? `M${cx},${from} C${cx + 40},${Math.max(from, to) + under} ${dx - 40},${Math.max(from, to) + under} ${dx},${to + 4}` : `M${ax},${ay} C${ax + bend},${ay} ${x1 - bend},${by} ${x1 - 4},${by}` }, el("title", {}, legible(`${edge.from} is the ${edge.as} of ${edge.to}`))),
      el("path", { class: "edge", d: under ? `M${dx - 4},${to + 9} L${dx},${to + 3} L${dx + 4},${to + 9}` : `M${x1 - 9},${by - 4} L${x1 - 3},${by} L${x1 - 9},${by + 4}` }));
  }
  for (const node of nodes) {
    const [x, y] = places[node.name], stage = run.stages.find((one) => one.name === node.name);
    drawing.append(el("g", {}, el("rect", { class: "node", x, y, width, height, rx: 10 }), el("text", { x: x + 12, y: y + 25, "font-weight": 600 }, legible(shorten(node.name, 24))),
      el("text", { class: "sub", x: x + 12, y: y + 45 }, shorten(stage ? `${number(stage.steps)} steps · ${stage.objective.join(" + ")}` : "", 30))));
  }
  return section("pipeline", "Pipeline", "A solid line hands on the student, a dashed one a teacher.", el("div", { className: "card scroll" }, drawing));
}

function cost(runs) {
  const rows = runs.flatMap((run) => run.stages.filter((stage) => stage.seconds > 0).map((stage) => {
    const phases = Object.entries(stage.phases), inside = phases.reduce((sum, [, value]) => sum + value, 0);
    return { title: [runs.length > 1 ? run.label : "", run.stages.length > 1 ? stage.name : ""].filter(Boolean).join(" · ") || "whole run", stage, parts: [...phases, ["evaluate, load, save", Math.max(0, stage.seconds - inside)]] };
  }));
  if (!rows.length) return null;
  const names = unique(rows.flatMap((row) => row.parts.map(([name]) => name)));
  const body = rows.map((row) => el("div", { style: { marginBottom: "14px" } }, el("div", { className: "domain muted", style: { display: "flex", justifyContent: "space-between", fontSize: "13px", marginBottom: "4px" } }, el("span", {}, visible(row.title)),
    el("span", {}, `${duration(row.stage.seconds)} · ${number(row.stage.tokens / Math.max(row.stage.seconds, 1e-9))} tokens/s overall`)),
    el("div", { className: "stack" }, row.parts.filter(([, value]) => value > 0).map(([name, value]) => el("span", { style: { flexGrow: String(value), background: color(names.indexOf(name)) }, title: `${name}: ${duration(value)}` })))));
  const total = (name) => rows.reduce((sum, row) => sum + (row.parts.find(([other]) => other === name)?.[1] || 0), 0);
  return section("cost", "Where the time went", "", el("div", { className: "card" }, body, el("div", { className: "key" }, names.filter((name) => total(name) > 0).map((name) => el("span", {}, el("i", { className: "dot", style: { background: color(names.indexOf(name)) } }), `${name} ${duration(total(name))}`)))));
}

function alarms(runs) {
  const lines = runs.flatMap((run) => run.monitors.map((line) => ({ line, run })));
  const unread = Object.assign({}, ...runs.map((run) => run.unread));
  const watched = unique(runs.flatMap((run) => run.watched)).filter((name) => !(name in unread));
  const blind = Object.entries(unread).map(([name, what]) => `${name} (${what})`), count = watched.length + blind.length;
  if (!lines.length && !count) return null;
  const where = (name) => (runs.length === 1 && runs[0].partly[name] ? `${name} (in ${runs[0].partly[name].join(", ")})` : name);
  const seen = lines.length ? "What went out of bounds while it trained." : `${watched.length} of ${count} ways in which runs fail were watched, and none was seen${watched.length ? ": " : ""}${legible(watched.map(where).join(", "))}.`;
  const note = blind.length ? `${seen} Monitors that had not all they read: ${legible(blind.join(", "))}.` : seen;
  return section("monitors", "Monitors", note, lines.map(({ line, run }) => el("div", { className: "alarm" },
    el("div", {}, el("b", {}, visible(`${runs.length > 1 ? run.label + ", " : ""}${line.stage}, step ${line.step}: ${line.monitor}`)), el("span", { className: "muted" }, ` ${number(line.value)}, threshold ${number(line.threshold)}`)),
    el("p", {}, visible(`${line.words}.`)), el("p", { className: "muted" }, visible(`What helps: ${line.remedy}.`)),
    line.recipe ? el("p", { className: "muted" }, visible(line.changes ? `To go on with ${line.changes.join("; ")}: ` : "The recipe that goes on with it: "), el("code", {}, visible(line.command || line.recipe))) : null)));
}
function diagnosis(runs) {
  const shown = runs.filter((run) => Object.keys(run.diagnose).length);
  if (!shown.length) return null;
  return section("diagnosis", "Diagnosis", "Before the first step.", shown.map((run) => el("details", { className: "card", open: true }, el("summary", {}, visible(run.label)), el("pre", {}, visible(JSON.stringify(run.diagnose, null, 1))))));
}
function recipeText(runs) {
  const shown = runs.filter((run) => run.text);
  if (!shown.length) return null;
  return section("recipe", "Recipe", "", shown.map((run) => el("details", { className: "card", open: runs.length === 1 && run.text.length < 2500 }, el("summary", {}, visible(runs.length > 1 ? run.label : "as it was written")), el("pre", {}, visible(run.text)))));
}
