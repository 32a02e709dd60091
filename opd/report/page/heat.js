// One completion, token by token: where the teacher disagreed, and what both would have written.
const MEASURES = {
  ratio: { title: "log-ratio, student − teacher", both: true, full: 3, get: (line, index) => line.ratio?.[index], low: "teacher likes it more", high: "teacher likes it less" },
  reverse_kl: { title: "KL(student ‖ teacher)", full: 2, get: (line, index) => line.reverse_kl?.[index], low: "0", high: "2 nats" },
  advantage: { title: "advantage", both: true, sign: -1, full: 3, get: (line, index) => term(line, "advantage", index), low: "more of this", high: "less of this" },
  entropy: { title: "entropy of the student", full: 3, cold: true, get: (line, index) => line.entropy?.[index], low: "0", high: "3 nats" },
  surprise: { title: "surprise of the student, −log p", full: 5, cold: true, get: (line, index) => (known(line.student?.[index]) ? -line.student[index] : null), low: "0", high: "5 nats" },
};
function term(line, name, index) {
  const values = Object.values(line.terms || {}).map((one) => one[name]?.[index]).filter(known);
  return values.length ? values.reduce((sum, value) => sum + value, 0) : null;
}
function tint(measure, value) {
  if (!known(value)) return "transparent";
  const strength = Math.min(1, Math.abs(value) / measure.full);
  const warm = measure.both ? value * (measure.sign || 1) > 0 : !measure.cold;
  return `rgba(var(--${warm ? "warm" : "cold"}), ${(0.72 * Math.sqrt(strength)).toFixed(3)})`;
}
const measuresOf = (line) => Object.keys(MEASURES).filter((name) => line.ids.some((_, index) => known(MEASURES[name].get(line, index))));
const worstOf = (line) => line.ids.map((_, index) => index).filter((index) => known(line.ratio?.[index]) && line.ratio[index] > 0).sort((a, b) => line.ratio[b] - line.ratio[a]);
const closed = (line, index) => { const terms = Object.values(line.terms || {}); return terms.length > 0 && terms.every((one) => one.weight[index] === 0); };
const piece = (line, id) => line.texts[id] ?? `[${id}]`;
const pieceAt = (line, index) => (line.pieces?.[index] === "" ? [el("span", { className: "mark" }, "‥")] : tokenText(line.pieces?.[index] ?? piece(line, line.ids[index]))); // "": the character ends with a later token

function strip(line) {
  const cells = 48, box = el("div", { className: "strip", "aria-hidden": "true" });
  const per = Math.max(1, Math.ceil(line.ids.length / cells));
  for (let first = 0; first < line.ids.length; first += per) {
    const values = (line.ratio || []).slice(first, first + per).filter(known);
    const most = values.reduce((best, value) => (Math.abs(value) > Math.abs(best) ? value : best), 0);
    box.append(el("i", { style: { background: tint(MEASURES.ratio, most) } }));
  }
  return box;
}

function heat(line, state) {
  const names = measuresOf(line);
  if (!names.includes(state.measure)) state.measure = names[0] || "ratio";
  const measure = MEASURES[state.measure];
  const tokens = el("div", { className: "tokens", tabIndex: 0, role: "group", "aria-label": "tokens; arrow keys move, n and p jump between the worst" });
  const detail = el("div", { className: "detail" });
  const nodes = line.ids.map((_, index) => {
    const value = measure.get(line, index);
    const strong = known(value) && Math.abs(value) >= measure.full / 3 && (!measure.both || value * (measure.sign || 1) > 0);
    const node = el("span", { className: "token" + (strong ? " strong" : "") + (closed(line, index) ? " off" : ""), style: { backgroundColor: tint(measure, value) } }, pieceAt(line, index));
    node.dataset.index = index;
    return node;
  });
  tokens.append(...nodes);
  let pinned = -1;
  const show = (index, pin, moved = true) => {
    if (index < 0 || index >= nodes.length) return;
    if (pin) {
      if (pinned >= 0) nodes[pinned].removeAttribute("aria-current");
      pinned = index;
      nodes[index].setAttribute("aria-current", "true");
      if (moved) { state.token = index; state.byHand = true; nodes[index].scrollIntoView({ block: "nearest", inline: "nearest" }); }
    }
    replace(detail, tokenDetail(line, index));
  };
  const at = (event) => { const node = event.target.closest?.(".token"); return node ? Number(node.dataset.index) : -1; };
  tokens.addEventListener("mouseover", (event) => show(at(event), false));
  tokens.addEventListener("mouseleave", () => pinned >= 0 && show(pinned, false));
  tokens.addEventListener("click", (event) => show(at(event), true));
  const worst = worstOf(line);
  let next = -1;
  const jump = (by) => { if (worst.length) { next = (next + by + worst.length) % worst.length; show(worst[next], true); label.textContent = `${next + 1} of ${worst.length}`; } };
  tokens.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: () => show(pinned + 1, true), ArrowLeft: () => show(pinned - 1, true), n: () => jump(1), p: () => jump(-1) };
    if (moves[event.key]) { event.preventDefault(); moves[event.key](); }
  });
  const label = el("span", { className: "faint" }, worst.length ? `${worst.length} where the teacher disagrees` : "");
  const tools = el("div", { className: "tools" },
    names.length ? choose("colour", names, state.measure, (name) => { state.measure = name; state.again(); }, (name) => MEASURES[name].title) : null,
    names.length ? el("span", {}, measure.low, " ", el("span", { className: "scale", style: { background: scale(measure) } }), " ", measure.high) : null,
    el("span", { className: "spring" }), label,
    el("button", { onclick: () => jump(-1), disabled: !worst.length, title: "previous (p)" }, "‹"),
    el("button", { className: "worst", onclick: () => jump(1), disabled: !worst.length, title: "next (n)" }, "worst token ›"));
  if (worst.length) next = Math.max(0, worst.indexOf(state.token));
  show(state.token ?? worst[0] ?? 0, true, false);
  return [tools, tokens, line.left_out ? el("p", { className: "faint" }, `${number(line.left_out)} more tokens were not written down.`) : null, detail];
}
function scale(measure) {
  const steps = [0, 0.05, 0.2, 0.5, 1].map((part) => tint(measure, part * measure.full));
  const minus = measure.both ? [1, 0.5, 0.2, 0.05].map((part) => tint(measure, -part * measure.full)) : [];
  const all = measure.sign === -1 ? [...steps].reverse().concat([...minus].reverse()) : [...minus, ...steps];
  return `linear-gradient(90deg, ${all.join(", ")})`;
}
function tokenText(text) {
  if (text === "") return [el("span", { className: "mark" }, "∅")];
  const parts = [];
  for (const piece of text.split(/(\n|\t|^ +$)/)) {
    if (piece === "\n") parts.push(el("span", { className: "mark" }, "⏎"), "\n");
    else if (piece === "\t") parts.push(el("span", { className: "mark" }, "⇥"), "\t");
    else if (/^ +$/.test(piece)) parts.push(el("span", { className: "mark" }, "·".repeat(piece.length)));
    else if (piece) parts.push(...visible(piece));
  }
  return parts;
}
function tokenDetail(line, index) {
  const terms = Object.entries(line.terms || {}), fact = (name, value) => el("span", {}, name + " ", el("b", {}, value));
  const facts = [
    fact("token", ""), fact("student log p", number(line.student?.[index])), fact("teacher log p", number(line.teacher_logprob?.[index])), fact("log-ratio", number(line.ratio?.[index])),
    fact("KL", number(line.reverse_kl?.[index])), fact("entropy", number(line.entropy?.[index])), fact("teacher's entropy", number(line.teacher_entropy?.[index])),
  ];
  facts[0].querySelector("b").append(...pieceAt(line, index));
  for (const [name, one] of terms) {
    const label = terms.length > 1 ? ` (${name})` : "";
    facts.push(fact("weight" + label, number(one.weight?.[index])));
    facts.push(fact("advantage" + label, one.advantage ? number(one.advantage[index]) : "–"));
    for (const [gate, values] of Object.entries(one.gates || {})) facts.push(fact(`gate ${gate}`, number(values[index])));
    if (!Object.keys(one.gates || {}).length) facts.push(fact("gates", "none"));
  }
  return [el("div", { className: "numbers" }, facts), el("div", { className: "tops" },
    topList("student", line, index, line.student_top, "var(--after)"), topList(line.teacher ? `teacher: ${line.teacher}` : "teacher", line, index, line.teacher_top, "var(--teacher)"))];
}
function topList(title, line, index, tops, fill) {
  const found = tops?.[index] || [];
  const box = el("div", {}, el("h3", {}, visible(title)));
  if (!found.length) return el("div", {}, el("h3", {}, visible(title)), el("p", { className: "faint" }, "its likeliest tokens are not known"));
  const rows = el("div", { className: "top5" });
  for (const [id, logprob] of found) {
    const p = Math.exp(logprob);
    rows.append(el("span", { className: "tok" + (id === line.ids[index] ? " own" : "") }, tokenText(piece(line, id))),
      el("span", { className: "p" }, el("i", { style: { width: (100 * p).toFixed(2) + "%", background: fill } })), el("span", { className: "n" }, p < 0.0005 ? "<0.1%" : percent(p)));
  }
  box.append(rows);
  return box;
}
