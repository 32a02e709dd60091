const THEMES = { "": "dark", dark: "light", light: "" };
let parts = {};
function label(runs) {
  const names = runs.map((run) => run.name);
  runs.forEach((run, index) => { run.label = names.indexOf(run.name) === index && names.lastIndexOf(run.name) === index ? run.name : `${run.name} (${index + 1})`; });
}
function build() {
  const runs = DATA.runs;
  label(runs);
  parts = { hero: hero(runs), results: results(runs), monitors: alarms(runs), diagnosis: diagnosis(runs), curves: curves(runs), pipeline: runs.length === 1 ? pipeline(runs[0]) : null, answers: answers(runs), samples: samples(runs), cost: cost(runs), rollouts: DATA.live ? browser() : null, recipe: recipeText(runs) };
  const order = ["results", "monitors", "diagnosis", "samples", "answers", "curves", "pipeline", "cost", "rollouts", "recipe"].filter((name) => parts[name]);
  const theme = el("button", { className: "theme", title: "light or dark", onclick: () => { document.documentElement.dataset.theme = THEMES[document.documentElement.dataset.theme || ""]; redraw(); } }, "◐");
  const nav = el("nav", {}, order.map((name) => el("a", { href: "#" + parts[name].id }, parts[name].querySelector("h2").textContent)));
  root.append(el("div", { className: "top" }, el("span", { className: "mark" }, "opd"), nav, theme), parts.hero, ...order.map((name) => parts[name]),
    el("footer", {}, DATA.live ? "Live; this page is served to this machine alone." : "One file, readable offline: it loads nothing and sends nothing."));
  parts.curves.fill();
}
function exchange(name, made) {
  if (!made && !parts[name]) return;
  if (made && parts[name]) { parts[name].replaceWith(made); parts[name] = made; } else if (made) { location.reload(); }
}
let stamp = DATA.stamp;
const mark = (name) => { const all = DATA.runs[0][name], last = all[all.length - 1]; return all.length + "/" + (last ? [last.stage, last.step, last.id] : ""); }; // thinned, there are as many as before, of later steps
const marks = { samples: mark("samples"), answers: mark("answers") };
const grown = (name) => mark(name) !== marks[name];
async function follow() {
  try {
    const reply = await fetch("api/run?since=" + encodeURIComponent(stamp || ""));
    if (reply.status === 200) {
      const news = await reply.json();
      stamp = news.stamp;
      DATA.runs.splice(0, DATA.runs.length, ...news.runs);
      label(DATA.runs);
      exchange("hero", hero(DATA.runs));
      exchange("results", results(DATA.runs));
      exchange("cost", cost(DATA.runs));
      exchange("monitors", alarms(DATA.runs));
      exchange("pipeline", pipeline(DATA.runs[0]));
      parts.curves.fill();
      parts.rollouts.refresh();
    }
    for (const [name, make] of [["samples", samples], ["answers", answers]]) // a reader at work is left alone, and so is what has not changed
      if (grown(name) && !parts[name]?.contains(document.activeElement) && !parts[name]?.matches(":hover")) { exchange(name, make(DATA.runs)); marks[name] = mark(name); }
  } catch (error) { /* the server has ended: what is shown stays */ }
  setTimeout(follow, 2000);
}
build();
if (DATA.live) follow();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
let chosen = "";
addEventListener("beforeprint", () => { chosen = document.documentElement.dataset.theme || ""; document.documentElement.dataset.theme = "light"; redraw(); });
addEventListener("afterprint", () => { document.documentElement.dataset.theme = chosen; redraw(); });
