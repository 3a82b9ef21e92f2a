// Shows a model's text: paragraphs, code blocks and inline code. The text may be anything, also HTML
// or script, so it only ever becomes text nodes.

import { $, copy, el } from "./dom.js";

const FENCE = /^ {0,3}(```+|~~~+)[ \t]*([\w+#.-]*)[^\n]*$/;

/** Split a text into blocks: {kind: "text" | "code", start, end, language}, by position. */
export function blocks(text) {
  const found = [];
  let start = 0;
  let code = null;
  for (let at = 0; at <= text.length; ) {
    const newline = text.indexOf("\n", at);
    const end = newline < 0 ? text.length : newline;
    const next = newline < 0 ? text.length + 1 : newline + 1;
    const fence = FENCE.exec(text.slice(at, end));
    if (code === null && fence) {
      if (at > start) found.push({ kind: "text", start, end: at });
      code = { kind: "code", fence: fence[1], language: fence[2], start: Math.min(next, text.length) };
    } else if (code !== null && fence && !fence[2] && fence[1].startsWith(code.fence)) {
      found.push({ ...code, end: at });
      code = null;
      start = Math.min(next, text.length);
    }
    at = next;
  }
  if (code !== null) found.push({ ...code, end: text.length });
  else if (start < text.length) found.push({ kind: "text", start, end: text.length });
  return found;
}

/** Renders a growing text into a node; only the last block is made again. */
export class TextView {
  /** @param tokens [{text, logprob, top: [[text, logprob]]}], whose texts join to the whole text. */
  constructor(node) {
    this.node = node;
    this.key = [];
  }

  show(text, tokens = []) {
    const found = blocks(text);
    const starts = offsets(tokens);
    found.forEach((block, index) => {
      const key = `${block.kind} ${block.start} ${block.end} ${block.language} ${tokens.length > 0}`;
      if (this.key[index] === key) return;
      this.key[index] = key;
      const made = block.kind === "code" ? codeBlock(text, block) : el("p.text");
      const inside = made.querySelector("code") ?? made;
      if (block.kind === "code") spans(inside, text, block.start, block.end, tokens, starts);
      else inline(inside, text, block, tokens, starts);
      const old = this.node.children[index];
      if (old) old.replaceWith(made);
      else this.node.append(made);
    });
    while (this.node.children.length > found.length) this.node.lastChild.remove();
    this.key.length = found.length;
  }
}

function codeBlock(text, block) {
  const button = el("button.quiet", { type: "button" }, "Copy");
  button.addEventListener("click", () => copy(text.slice(block.start, block.end), button));
  return el("div.code-block", {},
    el("div.row", {}, el("span.hint", {}, block.language || "text"), button),
    el("pre", { tabindex: 0 }, el("code")));
}

/** A paragraph: inline code in backticks, the rest as it is. */
function inline(node, text, { start, end }, tokens, starts) {
  let at = start;
  const ticks = /`([^`\n]+)`/g;
  ticks.lastIndex = start;
  for (let match; (match = ticks.exec(text)) && match.index + match[0].length <= end; ) {
    spans(node, text, at, match.index, tokens, starts);
    const code = el("code");
    spans(code, text, match.index + 1, match.index + match[0].length - 1, tokens, starts);
    node.append(code);
    at = match.index + match[0].length;
  }
  spans(node, text, at, end, tokens, starts);
}

/** Append text[start:end], with a span for each token that has some of it. */
function spans(node, text, start, end, tokens, starts) {
  if (start >= end) return;
  if (!tokens.length) {
    node.append(text.slice(start, end));
    return;
  }
  let index = last(starts, start);
  for (let at = start; at < end; index++) {
    const stop = index + 1 < starts.length ? Math.min(end, starts[index + 1]) : end;
    if (stop <= at) continue;
    const span = el("span.token", {}, text.slice(at, stop));
    span.token = tokens[index];
    span.dataset.sure = sureness(tokens[index]);
    node.append(span);
    at = stop;
  }
}

function offsets(tokens) {
  let at = 0;
  return tokens.map((token) => (at += token.text.length) - token.text.length);
}

/** The last index with starts[index] <= value. */
function last(starts, value) {
  let low = 0;
  let high = starts.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (starts[middle] <= value) low = middle;
    else high = middle - 1;
  }
  return low;
}

function sureness({ logprob }) {
  const p = Math.exp(logprob);
  return p > 0.9 ? 4 : p > 0.6 ? 3 : p > 0.3 ? 2 : p > 0.1 ? 1 : 0;
}

const visible = (text) => JSON.stringify(text).slice(1, -1).replaceAll(" ", "␣");
const share = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;

function showTip(span) {
  const tip = $("tip");
  const { text, logprob, top } = span.token;
  const rows = top.length ? top : [[text, logprob]];
  tip.replaceChildren(
    el("div.tip-head", {}, el("code", {}, visible(text)), ` ${share(logprob)}`),
    ...rows.map(([other, value]) => {
      const bar = el("span.fill");
      bar.style.width = `${100 * Math.exp(value)}%`;
      return el("div.tip-row", {}, el("code", {}, visible(other)), el("span.track", {}, bar), share(value));
    }));
  tip.hidden = false;
  const place = span.getBoundingClientRect();
  const below = place.bottom + tip.offsetHeight + 8 < innerHeight;
  tip.style.left = `${Math.max(4, Math.min(place.left, innerWidth - tip.offsetWidth - 4))}px`;
  tip.style.top = `${below ? place.bottom + 4 : place.top - tip.offsetHeight - 4}px`;
}

/** Show probabilities of the token under the pointer, or with arrow keys of the next one. */
export function startTips(container) {
  const hide = () => {
    $("tip").hidden = true;
    container.querySelector(".token.at")?.classList.remove("at");
  };
  container.addEventListener("pointerover", (event) => {
    hide();
    if (event.target.token) showTip(event.target);
  });
  container.addEventListener("pointerleave", hide);
  container.addEventListener("focusout", hide);
  container.addEventListener("scroll", hide);
  container.addEventListener("keydown", (event) => {
    const body = event.target.closest(".body.shaded");
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!body || !step) return;
    const all = [...body.querySelectorAll(".token")];
    const at = all.findIndex((span) => span.classList.contains("at"));
    hide();
    const next = all[Math.max(0, Math.min(all.length - 1, at + step))];
    if (!next) return;
    next.classList.add("at");
    next.scrollIntoView({ block: "nearest" });
    showTip(next);
    event.preventDefault();
  });
}
