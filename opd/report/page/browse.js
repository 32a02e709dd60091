// The rollout store of a live page: the server filters and pages, the page asks for what it shows.
const PAGE = 50;
function browser() {
  const state = { offset: 0, sort: "newest", found: null, told: "", asked: 0 };
  const filters = el("div", { className: "filters" }), body = el("div", { className: "card scroll table" }), foot = el("div", { className: "filters", style: { marginTop: "10px" } }), detail = el("div", {}), count = el("span", { className: "count" });
  const given = {};
  const ask = async (again = false) => {
    const number_ = ++state.asked;
    const query = new URLSearchParams({ ...Object.fromEntries(Object.entries(given).filter(([, value]) => value !== "" && value !== ANY)), offset: state.offset, limit: PAGE, sort: state.sort });
    const reply = await fetch("api/rollouts?" + query);
    if (!reply.ok || number_ !== state.asked) return; // a newer question is on its way
    const told = await reply.text();
    if (number_ !== state.asked || (again && told === state.told)) return; // rows that a reader is about to click stay
    state.told = told;
    state.found = JSON.parse(told);
    draw();
  };
  const set = (key, value) => { given[key] = value; state.offset = 0; return ask(); };
  let made = "";
  const makeFilters = (found) => {
    const key = JSON.stringify(found.values);
    if (key === made) return;
    made = key;
    const pick = (name) => (found.values[name].length > 1 || given[name] ? choose(name, [ANY, ...found.values[name]], given[name] || ANY, (value) => set(name, value)) : null);
    const input = (label, name, width) => el("label", {}, label, el("input", { type: "number", value: given[name] ?? "", style: { width }, onchange: (event) => set(name, event.target.value) }));
    replace(filters, pick("domain"), pick("teacher"), pick("source"), pick("stop"), choose("reward", [ANY, "right", "wrong", "none"], given.reward || ANY, (value) => set("reward", value)), input("version from", "version_from", "72px"), input("length from", "length_from", "72px"),
      choose("sort", ["newest", "oldest", "length", "shortest", "reward", "worst", "kl", "log_ratio", "largest_ratio"], state.sort, (value) => { state.sort = value; state.offset = 0; ask(); }), count);
  };
  const draw = () => {
    const found = state.found;
    makeFilters(found);
    count.textContent = `${found.total.toLocaleString("en")} of ${found.all.toLocaleString("en")} rollouts`;
    const told = found.values.teacher.length > 0; // the store knows teachers of what was scored into it alone
    const heads = ["version", "domain", "by", ...(told ? ["teacher"] : []), "reward", "tokens", "stop", "prompt", "answer"];
    replace(body, el("table", { className: "rows" }, el("thead", {}, el("tr", {}, heads.map((name) => el("th", {}, name)))), el("tbody", {}, found.rows.map((row) => {
      const line = el("tr", { onclick: () => open(row.row, line), tabIndex: 0, onkeydown: (event) => event.key === "Enter" && open(row.row, line) },
        el("td", {}, String(row.version)), el("td", {}, visible(row.domain)), el("td", {}, visible(row.source)), told ? el("td", {}, visible(row.teacher)) : null, el("td", {}, rewardMark(row.reward)), el("td", {}, String(row.length)), el("td", {}, row.stop),
        el("td", { className: "text" }, visible(shorten(oneLine(row.prompt), 60))), el("td", { className: "text" }, visible(shorten(oneLine(row.response), 80))));
      return line;
    }))));
    const last = Math.max(0, Math.floor((found.total - 1) / PAGE) * PAGE), go = (offset) => { state.offset = Math.max(0, Math.min(last, offset)); ask(); };
    replace(foot, el("button", { onclick: () => go(0), disabled: state.offset === 0 }, "first"), el("button", { onclick: () => go(state.offset - PAGE), disabled: state.offset === 0 }, "‹ previous"),
      el("span", { className: "muted" }, found.total ? `${state.offset + 1}–${Math.min(state.offset + PAGE, found.total)}` : "none"), el("button", { onclick: () => go(state.offset + PAGE), disabled: state.offset >= last }, "next ›"), el("button", { onclick: () => go(last), disabled: state.offset >= last }, "last"));
  };
  const view = { measure: "ratio", token: null };
  const open = async (row, line) => {
    for (const other of body.querySelectorAll("tr[aria-current]")) other.removeAttribute("aria-current");
    line.setAttribute("aria-current", "true");
    const reply = await fetch("api/rollout?row=" + row);
    if (!reply.ok) return;
    const found = await reply.json();
    view.token = null;
    const show = () => replace(detail, el("div", { className: "card", style: { marginTop: "16px" } }, el("div", { className: "tools" }, el("span", { className: "chip" }, visible(found.domain)), visible(found.id), rewardMark(found.reward)), el("div", { className: "prompt" }, visible(found.prompt)), ...heat(found.tokens, view)));
    view.again = show;
    show();
    detail.scrollIntoView({ block: "nearest" });
  };
  const made_ = section("rollouts", "Every rollout", "The whole store of this run.", filters, body, foot, detail);
  made_.refresh = () => { if (state.offset === 0 && state.sort === "newest") ask(true); };
  ask();
  return made_;
}
