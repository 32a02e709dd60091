// What `opd diagnose` found: the verdict, the four questions for every teacher, and where along an answer things happen.
const THEMES = { "": "dark", dark: "light", light: "" };
const signed = (value, digits = 2) => (known(value) ? (value >= 0 ? "+" : "−") + Math.abs(value).toFixed(digits) : "–");
const plusMinus = (value, spread) => (known(value) ? `${signed(value)} ± ${number(spread, 2)}` : "–");

function facts(rows) {
  const shown = rows.filter(([, value]) => value !== null && value !== undefined && value !== "–" && value !== "");
  return el("table", {}, el("tbody", {}, shown.map(([name, value]) => el("tr", {}, el("th", { scope: "row", style: { whiteSpace: "normal" } }, visible(name)), el("td", {}, visible(String(value)))))));
}
function question(title, rows) {
  return el("div", { className: "card" }, el("h3", {}, title), facts(rows));
}
function formRows(form) {
  if (!form) return [];
  const beside = (values, show) => `${show(values[0])}, the teacher's ${show(values[1])}`;
  return [["answers that begin alike", percent(form.opening, 0)], ["lines of an answer", beside(form.lines, (value) => number(value, 2))], ...Object.entries(form.marks).map(([name, shares]) => [`with ${name}`, beside(shares, (value) => percent(value, 0))])];
}
function pairCard(pair) {
  const answers = pair.answers || {}, stops = pair.stops;
  const words = Object.entries(pair.likelihood).map(([name, value]) => [name + ", nats", signed(value)]);
  const ids = pair.stop_ids && String(pair.stop_ids[0]) !== String(pair.stop_ids[1]) ? `${pair.stop_ids[1]}; the student ${pair.stop_ids[0]}: one event` : pair.stop_ids ? "same" : null;
  return el("div", {},
    el("h3", { style: { marginTop: "22px" } }, visible(`${pair.domain} · ${pair.teacher}`), " ", el("span", { className: "muted" }, visible(DATA.models[pair.teacher] || ""))),
    el("p", { style: { margin: "4px 0 12px", overflowWrap: "anywhere" } }, el("b", {}, visible(pair.verdict.toUpperCase())), visible(`: ${pair.because} (rule ${pair.rule.number}: ${pair.rule.when}; ${pair.rule.evidence}). ${pair.remedy}`)),
    pair.refined.map((one) => el("p", { style: { margin: "0 0 12px" } }, visible(`${one.because}: ${one.remedy} (rule ${one.number}; ${one.evidence})`))),
    el("div", { className: "grid four" },
      question("Is there a gap?", [["teacher right", percent(answers.accuracy)], ["gap", plusMinus(pair.gap, pair.gap_stderr)], ["within-prompt AUROC", number(pair.auroc)], ...words]),
      question("Do they think alike?", [[`overlap@${DATA.k}`, percent(pair.overlap)], ["overlap mass", percent(pair.overlap_mass)], ["KL", known(pair.kl) ? number(pair.kl) + " nats" + (pair.sampled ? ", estimated" : "") : null],
        ["entropy, student", number(pair.entropy)], ["entropy, teacher", number(pair.teacher_entropy)], ["tokens of an answer", number(answers.length)], ["cut off", percent(answers.truncated)], ...formRows(pair.form),
        ["ids that differ", pair.ids_differ], ["aligned text", percent(pair.aligned)], ["template", known(pair.template) ? number(pair.template) + " nats per token" : null], ["weights' cosine", number(pair.origin)]]),
      question("Is it reliable on the student's words?", [...pair.takeover.map((one) => [`taking over after ${one.depth} tokens`, plusMinus(one.advantage, one.stderr)]), ["advantage at forks", signed(pair.forks.here)], ["elsewhere", signed(pair.forks.elsewhere)],
        ["surprise after errors", number(pair.errors.here)], ["before them", number(pair.errors.elsewhere)]]),
      question("Does on-policy pay? Does it stop?", [["excess KL", percent(pair.excess, 0)], ["stop ids", ids], ["mass at its own ends", number(stops.own)], [stops.given === false ? "at the student's, on average" : "at the dataset's", number(stops.reference)], ["ends at the student's", stops.student === null ? null : `${percent(stops.student, 0)} of ${stops.ends}`],
        ["says there instead", stops.instead ? `id ${stops.instead[0]} (${stops.instead[1]})` : null]])));
}
function positions(holder, pair) {
  const at = pair.stretches.map((one) => one.start), column = (name) => pair.stretches.map((one) => one[name]);
  const line = (label, name, color) => ({ label, x: at, y: column(name), color });
  if (at.length < 2) return;
  const title = `${pair.domain} · ${pair.teacher}`;
  chart(holder, `${title}: KL by position, nats`, [line("after the student's words", "kl", 0), line("after the teacher's", "kl_teacher", 1)], { x: "token" });
  chart(holder, `${title}: surprise and advantage by position, nats`, [line("surprise", "surprise", 2), line("advantage", "advantage", 3)], { x: "token" });
  if (pair.stretches.some((one) => known(one.auroc))) chart(holder, `${title}: AUROC by position`, [line("AUROC", "auroc", 4)], { x: "token" });
}
function start() {
  const advice = DATA.recommendation;
  root.style.overflowWrap = "anywhere";
  const theme = el("button", { className: "theme", title: "light or dark", onclick: () => { document.documentElement.dataset.theme = THEMES[document.documentElement.dataset.theme || ""]; redraw(); } }, "◐");
  const students = Object.entries(DATA.students).map(([domain, one]) => [domain, `${percent(one.accuracy)} right, pass@${one.samples} ${percent(one.pass_at)}, ${number(one.length)} tokens, ${percent(one.truncated)} cut off; ${one.prompts} prompts`]);
  const ranks = Object.entries(DATA.ranking).map(([domain, list]) => [domain, list.map(([name, signal]) => `${name} ${signed(signal)}`).join(", ")]);
  const holder = el("div", { className: "grid" });
  root.append(el("div", { className: "top" }, el("span", { className: "mark" }, "opd"), theme),
    el("div", { className: "hero" }, el("h1", {}, visible(advice.verdict), el("span", { className: "faint" }, " · ", visible(DATA.student))), advice.reasons.map((reason) => el("p", { className: "words" }, visible(reason)))),
    section("student", "The student's answers", "", el("div", { className: "card" }, facts(students))),
    Object.values(DATA.ranking).some((list) => list.length > 1) ? section("ranking", "Teachers, best first", "Take-over advantage times AUROC on the student's answers.", el("div", { className: "card" }, facts(ranks))) : "",
    section("teachers", "The four questions", "", DATA.pairs.map(pairCard)),
    section("positions", "Along an answer", "Of the best teacher of each domain.", holder),
    advice.recipe ? section("plan", "The planned run", "", el("div", { className: "card" }, el("pre", { style: { whiteSpace: "pre-wrap" } }, visible(DATA.plan.join("\n"))), known(DATA.seconds) ? el("p", {}, `About ${duration(DATA.seconds)} of training on the machine that diagnosed it.`) : null)) : "",
    el("footer", {}, "One file, readable offline: it loads nothing and sends nothing."));
  const best = (pair) => DATA.ranking[pair.domain] === undefined || DATA.ranking[pair.domain][0][0] === pair.teacher;
  DATA.pairs.filter(best).forEach((pair) => positions(holder, pair));
}
start();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
let chosen = "";
addEventListener("beforeprint", () => { chosen = document.documentElement.dataset.theme || ""; document.documentElement.dataset.theme = "light"; redraw(); });
addEventListener("afterprint", () => { document.documentElement.dataset.theme = chosen; redraw(); });
