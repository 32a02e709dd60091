"use strict";
// Everything on the page is made by `el`, which only ever sets text, never markup: what a model wrote stays text.
const DATA = JSON.parse(document.getElementById("data").textContent);
const root = document.getElementById("page");

function el(tag, props, ...children) {
  const svg = ["svg", "g", "rect", "path", "text", "title", "line"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(props || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") Object.assign(node.style, value);
    else if (key in node && !svg && key !== "list") node[key] = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}
const replace = (node, ...children) => { node.replaceChildren(...children.flat().filter((child) => child)); return node; };

// Control characters, escape sequences, bidirectional and other marks that act on text, lone surrogates and what looks like nothing, shown by their number.
const HIDDEN = /[\p{Cf}\p{Cs}\p{Zl}\p{Zp}\u0000-\u0008\u000b-\u001f\u007f-\u009f\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\u{e0100}-\u{e01ef}]/gu;
const escaped = (code) => (code < 256 ? "\\x" + code.toString(16).padStart(2, "0") : code < 65536 ? "\\u" + code.toString(16).padStart(4, "0") : "\\U" + code.toString(16).padStart(8, "0"));
function visible(text) {
  const parts = [];
  let rest = 0;
  for (const found of text.matchAll(HIDDEN)) {
    if (found.index > rest) parts.push(text.slice(rest, found.index));
    parts.push(el("span", { className: "escape" }, escaped(found[0].codePointAt(0))));
    rest = found.index + found[0].length;
  }
  if (rest < text.length) parts.push(text.slice(rest));
  return parts;
}
const legible = (text) => visible(String(text)).map((part) => (typeof part === "string" ? part : part.textContent)).join(""); // where only a string will do
const shorten = (text, count) => (text.length > count ? text.slice(0, count) + "…" : text);
const oneLine = (text) => text.replace(/[\n\r\t]+/g, " ⏎ ");

const known = (value) => typeof value === "number" && Number.isFinite(value);
const percent = (value, digits = 1) => (known(value) ? (100 * value).toFixed(digits) + "%" : "–");
function number(value, digits = 3) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e15)) return value.toExponential(1);
  return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(digits)));
}
function duration(seconds) {
  const total = Math.round(seconds);
  if (total < 60) return total + " s";
  const hours = Math.floor(total / 3600), minutes = Math.floor(total / 60) % 60;
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${total % 60} s`;
}
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const color = (index) => `var(--c${index % 8})`;
const unique = (values) => [...new Set(values)];
function section(id, title, note, ...content) {
  return el("section", { id }, el("header", {}, el("h2", {}, title), note ? el("p", {}, note) : null), ...content);
}
function choose(label, values, value, onchange, name = (item) => item) {
  const select = el("select", { "aria-label": label, onchange: () => onchange(select.value) });
  for (const item of values) select.append(el("option", { value: item, selected: item === value }, legible(name(item))));
  return el("label", {}, label, select);
}
const right = (reward) => (reward === null || reward === undefined ? null : reward >= 1 - 1e-9);
function rewardMark(reward) {
  if (reward === null || reward === undefined) return null;
  const good = right(reward);
  const part = !good && reward > 0;
  return el("span", { className: good ? "good" : "bad", title: "reward " + number(reward) }, good ? "✓" : part ? number(reward, 2) : "✗");
}
