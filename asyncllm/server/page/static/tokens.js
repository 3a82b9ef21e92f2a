// A text and its tokens: which token a character belongs to, how likely it was; and a prompt as tokens.

import { post } from "./api.js";
import { $, button, el, number, plural, say } from "./dom.js";
import { openSheet } from "./request.js";

const MOST = 2000; // tokens of a prompt that are shown at once

/** A growing text, and the tokens whose texts join to it. Text only ever becomes text nodes. */
export class Source {
  text = "";
  tokens = []; // [{text, logprob, top: [[text, logprob]]}]
  #starts = [];

  /** Take a later state of the same text; false if it is another text, or has tokens now. */
  grow(text, tokens) {
    const same = text.startsWith(this.text) && (!this.text || Boolean(tokens.length) === Boolean(this.#starts.length));
    if (!same || tokens !== this.tokens) this.#starts = [];
    let at = this.#starts.length ? this.#starts.at(-1) + tokens[this.#starts.length - 1].text.length : 0;
    for (const token of tokens.slice(this.#starts.length)) {
      this.#starts.push(at);
      at += token.text.length;
    }
    Object.assign(this, { text, tokens });
    return same;
  }

  /** Append text[from:to], or what is shown in its place; each token is a span of its own. */
  put(node, from, to, shown = null) {
    if (from >= to) return;
    if (!this.tokens.length) {
      node.append(shown ?? this.text.slice(from, to));
      return;
    }
    const starts = this.#starts;
    let index = last(starts, from);
    for (let at = from; at < to; index++) {
      const stop = shown === null && index + 1 < starts.length ? Math.min(to, starts[index + 1]) : to;
      if (stop <= at) continue;
      const span = el("span.token", {}, shown ?? this.text.slice(at, stop));
      span.token = this.tokens[index];
      span.dataset.sure = sureness(span.token);
      node.append(span);
      at = stop;
    }
  }
}

/** Shows a growing text as it is written. */
export class TokensView {
  #source = new Source();
  #shown = 0;

  constructor(node) {
    this.paragraph = el("p.text");
    node.replaceChildren(this.paragraph);
  }

  show(text, tokens = []) {
    if (!this.#source.grow(text, tokens)) {
      this.paragraph.replaceChildren();
      this.#shown = 0;
    }
    this.#source.put(this.paragraph, this.#shown, text.length);
    this.#shown = text.length;
  }
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

/** Show probabilities of tokens in the answers that are shaded, or under the pointer. */
export function startTips(container) {
  walk(container, ".body.shaded", (span) => {
    $("tip").hidden = !span;
    if (span) showTip(span);
  });
}

/** Tell of the token under the pointer, or with arrow keys of the next one within what has the focus; of null in the end. */
function walk(container, within, tell) {
  let at = null;
  const go = (span) => {
    if (!span && !at) return;
    at?.classList.remove("at");
    at = span;
    tell(span);
  };
  container.addEventListener("pointerover", ({ target }) => go(target.token ? target : null));
  for (const name of ["pointerleave", "focusout"]) container.addEventListener(name, () => go(null));
  container.addEventListener("scroll", () => (at?.classList.contains("at") ? tell(at) : go(null)));
  container.addEventListener("keydown", (event) => {
    const box = event.target.closest(within);
    const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    if (!box || !step) return;
    event.preventDefault();
    const next = (box.contains(at) && at[step]) || at || box.querySelector(".token");
    if (!next) return;
    next.scrollIntoView({ block: "nearest" });
    go(next);
    next.classList.add("at");
  });
}

// -- a prompt -------------------------------------------------------------------------------------

/**
 * Show a prompt as the model reads it: the rendered template, token by token.
 * @param request makes {model, messages, tools}.
 * @param cached how many of its tokens the server had in its prefix cache, if that is known.
 */
export async function showPrompt(request, cached = 0) {
  const { content, isOpen } = openSheet("The prompt as tokens");
  let found;
  try {
    found = await post("tokenize", { ...request(), return_token_strs: true });
  } catch (error) {
    if (isOpen()) content.replaceChildren(el("p.error", {}, error.message));
    return;
  }
  if (!isOpen()) return;
  const { tokens, token_strs: texts, max_model_len: most } = found;
  const box = el("p.text.prompt-tokens", { tabindex: 0, role: "group", "aria-label": "Tokens; arrow keys tell of each" });
  const readout = el("p.readout", { "aria-live": "polite" });
  const calm = `${plural(tokens.length, "token")} of at most ${number(most)}${cached ? `; the first ${number(cached)} were cached` : ""}. Point at one, or use the arrow keys.`;
  const more = button("", () => show());
  let count = 0;
  const show = () => {
    const end = Math.min(tokens.length, count + MOST);
    for (; count < end; count++) {
      const text = texts[count];
      const span = el("span.token", {}, text.startsWith("bytes:") ? text.slice(6) : text.replaceAll("\n", "⏎\n") || `#${tokens[count]}`);
      if (/^<.+>$/s.test(text)) span.classList.add("special");
      if (count < cached) span.classList.add("cached");
      span.token = `Token ${number(count + 1)}: id ${tokens[count]}, ${visible(text) || "no text"}`;
      box.append(span);
    }
    more.hidden = count === tokens.length;
    say(more, `Show more of the other ${number(tokens.length - count)}`);
  };
  show();
  walk(content, ".prompt-tokens", (span) => say(readout, span ? span.token : calm));
  say(readout, calm);
  content.replaceChildren(readout, box, more);
}
