// A prompt as the model reads it: the rendered template, token by token.

import { post } from "./api.js";
import { button, el, number, plural, say } from "./dom.js";
import { openSheet } from "./request.js";
import { visible, walk } from "./tokens.js";

const MOST = 2000; // tokens shown at once

/** @param cached how many of its tokens the server had in its prefix cache, if that is known. */
export async function showPrompt({ model, messages, tools }, cached = 0) {
  const { content, isOpen } = openSheet("The prompt as tokens");
  let found;
  try {
    found = await post("tokenize", { model, messages, tools, return_token_strs: true });
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
