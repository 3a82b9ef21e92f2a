// One message of the chat, as it is shown.

import { copy, duration, el, number, plural, say } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { TokensView } from "./tokens.js";

export class MessageView {
  /** @param does what its buttons do: {trace(message)}. */
  constructor(message, does) {
    this.message = message;
    const { role } = message;
    const label = { user: "You", assistant: "Model", tool: `Result of ${message.name}` }[role];
    this.body = el("div.body");
    this.node = el(`article.message.${role}`, {}, el("h2", {}, label));
    if (role === "assistant") this.#makeAnswer(does);
    else this.node.append(this.body);
    this.#view = role === "assistant" ? new MarkdownView(this.body) : new TokensView(this.body);
  }

  #view;

  #makeAnswer(does) {
    const { message, body } = this;
    const button = (name, onclick) => el("button.quiet", { type: "button", onclick }, name);
    body.setAttribute("aria-label", "Answer");
    this.thoughts = el("details.thoughts", {}, el("summary"), el("p.text"));
    this.calls = el("div");
    this.error = el("p.error", { role: "alert" });
    this.stats = el("span.hint");
    this.shade = button("Probabilities", () => this.#toggle());
    this.shade.setAttribute("aria-pressed", false);
    this.why = button("Why so long?", () => does.trace(message));
    const copyText = button("Copy", () => copy(message.content, copyText));
    this.actions = el("div.row.actions", {}, this.stats, el("span", {}, this.why, this.shade, copyText));
    this.node.append(this.thoughts, body, this.calls, this.error, this.actions);
  }

  /** Show the tokens as they are written, shaded by how likely they were; or the text again. */
  #toggle() {
    const on = this.body.classList.toggle("shaded");
    this.shade.setAttribute("aria-pressed", on);
    this.body.tabIndex = on ? 0 : -1;
    this.body.replaceChildren();
    this.#view = new (on ? TokensView : MarkdownView)(this.body);
    this.#view.show(this.message.content, this.message.tokens);
    if (on) this.body.focus();
  }

  /** @param live whether it is being written. */
  draw(live) {
    const { message } = this;
    const { content, reasoning, calls = [], tokens = [], stats, error } = message;
    this.#view.show(content, tokens, live);
    if (!this.actions) return;
    this.thoughts.hidden = !reasoning;
    say(this.thoughts.firstChild, content || calls.length || !live ? `Thought for ${duration(stats.thought)}` : "Thinking…");
    say(this.thoughts.lastChild, reasoning);
    this.calls.replaceChildren(...calls.map(drawCall));
    say(this.error, error ?? "");
    this.error.hidden = !error;
    say(this.stats, live ? "" : statsText(message));
    this.actions.hidden = live;
    this.why.hidden = !stats.id;
    this.shade.hidden = !tokens.length;
    this.node.classList.toggle("growing", live);
  }
}

function drawCall({ name, arguments: given }) {
  let shown = given;
  try {
    shown = JSON.stringify(JSON.parse(given), null, 2);
  } catch {
    // it is still arriving
  }
  return el("div.call", {}, el("div.hint", {}, "calls ", el("code", {}, name)), el("pre", {}, el("code", {}, shown)));
}

function statsText({ stats }) {
  const parts = [];
  if (stats.first !== undefined) parts.push(`first token ${duration(stats.first)}`);
  const count = stats.usage?.completion_tokens;
  if (count) {
    parts.push(plural(count, "token"));
    if (count > 1) parts.push(`${number((1000 * (count - 1)) / (stats.total - stats.first || 1))} per second`);
    const cached = stats.usage.prompt_tokens_details?.cached_tokens;
    parts.push(`prompt ${number(stats.usage.prompt_tokens)}${cached ? ` (${number(cached)} cached)` : ""}`);
  }
  if (stats.finish && stats.finish !== "stop") parts.push(stats.finish);
  return parts.join(" · ");
}
