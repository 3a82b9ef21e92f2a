// One message of the chat, as it is shown.

import { button, copy, duration, el, number, plural, say } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { TokensView } from "./tokens.js";

const LEAST_SPAN = 20; // milliseconds in which tokens arrived, for a rate

export class MessageView {
  #view;

  /** @param does what its buttons do: {trace, prompt, retry, resend}, each with the message. */
  constructor(message, does) {
    this.message = message;
    const { role } = message;
    const label = { user: "You", assistant: "Model", tool: `Result of ${message.name}` }[role];
    this.body = el("div.body");
    this.node = el(`article.message.${role}`, {}, el("h2", {}, label));
    if (role === "assistant") this.#makeAnswer(does);
    else this.node.append(this.body);
    if (role === "user") this.#makeQuestion(does);
    this.#view = new (role === "assistant" ? MarkdownView : TokensView)(this.body);
  }

  #makeQuestion(does) {
    this.edit = button("Edit", () => {
      const area = el("textarea", { "aria-label": "Message", rows: 3 });
      area.value = this.message.content;
      const end = () => {
        form.replaceWith(this.body, this.actions);
        this.edit.focus();
      };
      const send = () => area.value.trim() && does.resend(this.message, area.value);
      area.addEventListener("keydown", (event) => {
        if (event.key === "Escape") end();
        else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send();
        else return;
        event.preventDefault();
        event.stopPropagation();
      });
      const form = el("div.edit", {}, area, el("div.row", {}, el("span.hint", {}, "Replaces all that follows"),
        button("Cancel", end), el("button.main", { type: "button", onclick: send }, "Send")));
      this.body.replaceWith(form);
      this.actions.remove();
      area.focus();
    });
    const copyText = button("Copy", () => copy(this.message.content, copyText));
    this.actions = el("div.actions", {}, this.edit, copyText);
    this.node.append(this.actions);
  }

  #makeAnswer(does) {
    const { message, body } = this;
    body.setAttribute("aria-label", "Answer");
    this.thoughts = el("details.thoughts", {}, el("summary"), el("p.text"));
    this.calls = el("div");
    this.error = el("p", {});
    this.retry = button("Retry", () => does.retry(message));
    this.failure = el("div.error.row", { role: "alert" }, this.error, this.retry);
    this.stats = el("span.hint.stats");
    this.shade = button("Probabilities", () => this.#toggle(), { "aria-pressed": "false" });
    this.why = button("Why so long?", () => does.trace(message));
    const copyText = button("Copy", () => copy(message.content, copyText));
    this.actions = el("div.actions", {}, copyText, button("Prompt", () => does.prompt(message)), this.why, this.shade, this.stats);
    this.node.append(this.thoughts, body, this.calls, this.failure, this.actions);
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
    if (message.role !== "assistant") return;
    this.thoughts.hidden = !reasoning;
    const thinks = live && !content && !calls.length;
    say(this.thoughts.firstChild, thinks ? "Thinking…" : `Thought for ${duration(stats.thought - stats.first)}`);
    say(this.thoughts.lastChild, reasoning ?? "");
    this.calls.replaceChildren(...calls.map(drawCall));
    say(this.error, error ?? "");
    this.failure.hidden = !error;
    say(this.stats, statsText(message));
    this.why.disabled = !stats.id;
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

/** The rate counts the tokens after the first one, over the time since it arrived. */
function statsText({ stats }) {
  const parts = [];
  if (stats.first !== undefined) parts.push(`first token ${duration(stats.first)}`);
  const count = stats.usage?.completion_tokens;
  if (count) {
    parts.push(plural(count, "token"));
    const span = stats.last - stats.first;
    if (count > 1 && span >= LEAST_SPAN) parts.push(`${number((1000 * (count - 1)) / span)} per second`);
    const cached = stats.usage.prompt_tokens_details?.cached_tokens;
    parts.push(`prompt ${number(stats.usage.prompt_tokens)}${cached ? ` (${number(cached)} cached)` : ""}`);
  }
  if (stats.finish && stats.finish !== "stop") parts.push(stats.finish);
  return parts.join(" · ");
}
