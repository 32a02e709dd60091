// Sampled completions with filters, and the answers to the same held-out questions before and after.
function samplesOf(runs) {
  return runs.flatMap((run) => {
    const tokens = new Map(run.tokens.map((line) => [`${line.stage} ${line.step} ${line.id}`, line]));
    return run.samples.map((line) => {
      const traced = tokens.get(`${line.stage} ${line.step} ${line.id}`);
      const ratios = (traced?.ratio || []).filter(known);
      return { ...line, run, traced, teacher: traced?.teacher || "", worst: ratios.length ? Math.max(...ratios) : null };
    });
  });
}
const ANY = "any";
const SORTS = { "worst token first": (a, b) => (b.worst ?? -1e9) - (a.worst ?? -1e9), "newest first": (a, b) => b.order - a.order, "oldest first": (a, b) => a.order - b.order };

const kept = {}; // what the reader has chosen, which outlives a live page's news
function samples(runs) {
  const all = samplesOf(runs).map((line, order) => ({ ...line, order }));
  if (!all.length) return null;
  const state = (kept.samples ||= { run: ANY, stage: ANY, domain: ANY, teacher: ANY, reward: ANY, step: ANY, text: "", sort: "worst token first", measure: "ratio", chosen: null, token: null, byHand: false });
  if (!state.byHand) state.chosen = state.token = null; // nobody has chosen: the worst of all is shown
  const list = el("div", { className: "list" }), viewer = el("div", { className: "card viewer" }), filters = el("div", { className: "filters" }), count = el("span", { className: "count" });
  const pick = (label, key, values) => (state[key] !== ANY && !values.includes(state[key]) && (state[key] = ANY), values.length > 1 ? choose(label, [ANY, ...values], state[key], (value) => { state[key] = value; fill(); }) : null);
  filters.append(...[
    pick("run", "run", unique(all.map((line) => line.run.label))), pick("stage", "stage", unique(all.map((line) => line.stage))), pick("domain", "domain", unique(all.map((line) => line.domain))),
    pick("teacher", "teacher", unique(all.map((line) => line.teacher).filter(Boolean))), choose("reward", [ANY, "right", "wrong", "none"], state.reward, (value) => { state.reward = value; fill(); }),
    pick("step", "step", unique(all.map((line) => String(line.step)))), choose("sort", Object.keys(SORTS), state.sort, (value) => { state.sort = value; fill(); }),
    el("input", { type: "search", placeholder: "text", "aria-label": "text", value: state.text, oninput: (event) => { state.text = event.target.value.toLowerCase(); fill(); } }), count].filter(Boolean));
  const fits = (line) => (state.run === ANY || line.run.label === state.run) && (state.stage === ANY || line.stage === state.stage) && (state.domain === ANY || line.domain === state.domain) &&
    (state.teacher === ANY || line.teacher === state.teacher) && (state.step === ANY || String(line.step) === state.step) &&
    (state.reward === ANY || (state.reward === "none" ? right(line.reward) === null : right(line.reward) === (state.reward === "right"))) &&
    (!state.text || (line.prompt + line.response).toLowerCase().includes(state.text));
  const named = (line) => line && `${line.run.label} ${line.stage} ${line.step} ${line.id}`;
  const show = (line) => {
    if (state.chosen !== named(line)) state.token = null;
    state.chosen = named(line);
    for (const node of list.children) node.setAttribute("aria-current", String(node.line === line));
    state.again = () => show(line);
    replace(viewer, line ? sampleView(line, state, runs.length > 1) : el("p", { className: "muted" }, "No completion fits these filters."));
  };
  const fill = () => {
    const found = all.filter(fits).sort(SORTS[state.sort]);
    count.textContent = `${number(found.length)} of ${number(all.length)}`;
    replace(list, found.slice(0, 400).map((line) => sampleItem(line, show, runs.length > 1)));
    show(found.find((line) => named(line) === state.chosen) || found[0] || null);
  };
  fill();
  return section("samples", "Token by token", "What the student wrote, coloured by where the teacher disagreed. Hover or tap a token; n and p jump between the worst.", filters, el("div", { className: "split" }, list, viewer));
}
const asked = (prompt) => { // the end of a prompt, without the template's marks
  const text = oneLine(prompt.replace(/<\|[^|>]{1,40}\|>\w*/g, " ").trim()).replace(/( ⏎ )+$/, "");
  return text.length > 46 ? "…" + text.slice(-46) : text;
};
function sampleItem(line, show, many) {
  const node = el("button", { className: "item", onclick: () => { kept.samples.byHand = true; show(line); } },
    el("div", { className: "row" }, el("span", { className: "chip" }, visible(line.domain)), `step ${line.step}`, many ? el("span", { className: "chip" }, visible(line.run.label)) : null, rewardMark(line.reward),
      known(line.worst) ? el("span", { className: "right", title: "largest log-ratio" }, number(line.worst, 2)) : null),
    el("div", { className: "text" }, visible(shorten(oneLine(line.response), 80) || "∅")),
    el("div", { className: "text faint" }, visible(asked(line.prompt))),
    line.traced ? strip(line.traced) : null);
  node.line = line;
  return node;
}
function sampleView(line, state, many) {
  const head = el("div", { className: "tools" }, el("span", { className: "chip" }, visible(line.domain)), many ? el("span", { className: "chip" }, visible(line.run.label)) : null, el("span", {}, `step ${line.step}`), line.run.stages.length > 1 ? el("span", {}, `stage ${line.stage}`) : null,
    line.teacher ? el("span", {}, "teacher ", visible(line.teacher)) : null, line.source !== "student" ? el("span", {}, "by ", visible(line.source)) : null, line.stop === "length" ? el("span", { className: "bad" }, "cut off") : null, rewardMark(line.reward));
  const prompt = el("div", { className: "prompt" }, visible(line.prompt));
  if (!line.traced) return [head, prompt, el("div", { className: "answer" }, visible(line.response)), el("p", { className: "faint" }, "This completion was not written down token by token.")];
  return [head, prompt, ...heat(line.traced, state)];
}

function answers(runs) {
  const lines = runs.flatMap((run) => run.answers.map((line) => ({ ...line, run })));
  if (!lines.length) return null;
  const groups = new Map();
  for (const line of lines) {
    const key = `${line.domain}\u0000${line.prompt_id}`;
    if (!groups.has(key)) groups.set(key, { domain: line.domain, prompt: line.prompt, lines: new Map() });
    groups.get(key).lines.set(`${line.run.label}\u0000${line.stage}\u0000${line.who}\u0000${line.step}`, line); // evaluated again after a restart: the newest counts
  }
  const state = (kept.answers ||= { domain: ANY, what: ANY });
  const body = el("div", { className: "questions" }), filters = el("div", { className: "filters" }), count = el("span", { className: "count" });
  const ends = (group) => { const own = [...group.lines.values()].filter((line) => line.who === "student"); return [own[0], own[own.length - 1]]; };
  const kinds = { mended: (a, b) => a?.right === false && b?.right === true, broken: (a, b) => a?.right === true && b?.right === false, "still wrong": (a, b) => a?.right === false && b?.right === false };
  const fill = () => {
    const found = [...groups.values()].filter((group) => (state.domain === ANY || group.domain === state.domain) && (state.what === ANY || kinds[state.what](...ends(group))));
    count.textContent = `${found.length} of ${groups.size}`;
    replace(body, found.length ? found.map((group) => question(group, runs.length > 1)) : el("p", { className: "muted" }, "No question fits."));
  };
  filters.append(choose("domain", [ANY, ...unique(lines.map((line) => line.domain))], state.domain, (value) => { state.domain = value; fill(); }), choose("what became of it", [ANY, ...Object.keys(kinds)], state.what, (value) => { state.what = value; fill(); }), count);
  fill();
  return section("answers", "Before and after", "The same held-out questions, every time the student was measured; and what its teachers say.", filters, body);
}
function question(group, many) {
  const shown = [...group.lines.values()].filter((line) => line.who === "student" || line.who === "teacher:" + ownTeacher(line.run, group.domain));
  const lines = el("div", { className: "lines" });
  const staged = unique(shown.map((line) => line.stage)).length > 1;
  const name = (line) => (staged ? `${line.stage}: ` : "") + (line.who !== "student" ? "teacher" : line.step === 0 ? "before" : `step ${line.step}`);
  const told = [];
  for (const line of shown.sort((a, b) => (a.who === "student" ? 0 : 1) - (b.who === "student" ? 0 : 1))) {
    const last = told[told.length - 1]; // the same answer again is one line
    if (last && last.run === line.run && last.who === line.who && last.stage === line.stage && last.response === line.response && line.step > 0 && last.from > 0) last.to = line.step;
    else told.push({ ...line, from: line.step, to: line.step });
  }
  for (const line of told)
    lines.append(el("span", { className: "muted" }, visible(line.from === line.to ? name(line) : `${name(line)}–${line.to}`), visible(many ? ` · ${line.run.label}` : "")), el("span", { className: line.right ? "good" : "bad" }, line.right === null ? "" : line.right ? "✓" : "✗"), el("span", { className: "answer" }, visible(line.response || "∅")));
  return el("div", { className: "card question" }, el("div", { className: "row" }, el("span", { className: "chip" }, visible(group.domain)), " ", el("span", { className: "answer" }, visible(shorten(group.prompt.replace(/<\|[^|>]{1,40}\|>/g, " ").trim(), 600)))), lines);
}
function ownTeacher(run, domain) {
  const names = unique(run.stages.flatMap((stage) => Object.keys(stage.models)));
  return names.includes(domain) ? domain : names[0];
}
