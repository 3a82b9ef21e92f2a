// The chat: a conversation with the model, which survives a reload of the page.

import { ApiError, call, events, getJson } from "./api.js";
import { $, el, memory, plural, say } from "./dom.js";
import { MessageView } from "./message.js";
import { startTips } from "./tokens.js";

const NUMBERS = ["temperature", "max_tokens", "top_p", "top_k", "presence_penalty",
  "frequency_penalty", "repetition_penalty", "seed"];
const ALTERNATIVES = 5;

let messages = memory.get("messages", []);
let running = null; // the AbortController of the answer under way
let showTrace = () => {};

export function startChat(onTrace) {
  showTrace = onTrace;
  const options = $("options");
  for (const [name, value] of Object.entries(memory.get("options", {}))) {
    const field = options.elements[name];
    if (field?.type === "checkbox") field.checked = value;
    else if (field) field.value = value;
  }
  options.addEventListener("input", keepOptions);
  options.addEventListener("submit", (event) => event.preventDefault());
  const narrow = matchMedia("(max-width: 60rem)");
  $("settings").open = !narrow.matches;
  narrow.addEventListener("change", () => ($("settings").open = !narrow.matches));
  $("draft").value = memory.get("draft", "");
  $("draft").addEventListener("input", () => memory.set("draft", $("draft").value));
  $("draft").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running && !document.querySelector("dialog[open]")) stop();
  });
  $("stop").addEventListener("click", stop);
  $("clear").addEventListener("click", clear);
  $("again").addEventListener("click", regenerate);
  startTips($("messages"));
  draw();
}

/** Fill the list of models; again when the server has become ready. */
export async function loadModels() {
  const select = $("options").elements.model;
  const { data } = await getJson("v1/models");
  const kept = memory.get("options", {}).model;
  select.replaceChildren(...data.map(({ id }) => el("option", { value: id }, id)));
  if (data.some(({ id }) => id === kept)) select.value = kept;
}

function keepOptions() {
  const kept = {};
  for (const field of $("options").elements) {
    if (field.name) kept[field.name] = field.type === "checkbox" ? field.checked : field.value;
  }
  memory.set("options", kept);
}

function keep() {
  if (memory.set("messages", messages)) return;
  // No room: probabilities take most of it.
  memory.set("messages", messages.map(({ tokens, ...rest }) => rest));
}

// -- what the buttons do --------------------------------------------------------------------------

function send() {
  const text = $("draft").value;
  if (running || !text.trim()) return;
  const wanted = openCall();
  if (wanted) messages.push({ role: "tool", tool_call_id: wanted.id, name: wanted.name, content: text });
  else messages.push({ role: "user", content: text });
  $("draft").value = "";
  memory.set("draft", "");
  if (openCall()) draw(); // further calls want their results first
  else answer();
}

function stop() {
  running?.abort();
}

function clear() {
  stop();
  messages = [];
  draw();
  $("draft").focus();
}

function regenerate() {
  if (running) return;
  while (messages.length && messages.at(-1).role === "assistant") messages.pop();
  if (messages.length) answer();
}

/** The first call of the last answer that has no result yet. */
function openCall() {
  const results = new Set(messages.filter((m) => m.role === "tool").map((m) => m.tool_call_id));
  const asked = messages.findLast((m) => m.role === "assistant");
  const calls = messages.at(-1)?.role === "user" ? [] : asked?.calls ?? [];
  return calls.find((call) => !results.has(call.id));
}

// -- an answer ------------------------------------------------------------------------------------

function body() {
  const fields = $("options").elements;
  const asked = { model: fields.model.value, messages: [], stream: true, stream_options: { include_usage: true } };
  if (fields.system.value.trim()) asked.messages.push({ role: "system", content: fields.system.value });
  for (const { role, content, calls, tool_call_id } of messages) {
    const message = { role, content };
    if (tool_call_id) message.tool_call_id = tool_call_id;
    if (calls?.length) {
      message.tool_calls = calls.map((call) => ({
        id: call.id, type: "function", function: { name: call.name, arguments: call.arguments },
      }));
    }
    if (content || calls?.length) asked.messages.push(message);
  }
  for (const name of NUMBERS) if (fields[name].value !== "") asked[name] = Number(fields[name].value);
  if (fields.logprobs.checked) Object.assign(asked, { logprobs: true, top_logprobs: ALTERNATIVES });
  if (fields.tools.value.trim()) {
    try {
      asked.tools = JSON.parse(fields.tools.value);
    } catch (error) {
      throw new Error(`Tools are not JSON: ${error.message}`);
    }
  }
  return asked;
}

async function answer() {
  const message = { role: "assistant", content: "", reasoning: "", calls: [], tokens: [], stats: {} };
  const controller = (running = new AbortController());
  const began = performance.now();
  let last = began;
  try {
    const asked = body();
    messages.push(message);
    draw();
    const options = { method: "POST", body: JSON.stringify(asked), signal: controller.signal };
    const response = await call("v1/chat/completions", options);
    message.stats.id = response.headers.get("X-Request-Id");
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) message.stats.usage = event.usage;
      for (const choice of event.choices ?? []) {
        last = performance.now();
        message.stats.first ??= last - began;
        take(message, choice, last - began);
      }
      drawSoon();
    }
  } catch (error) {
    if (!messages.includes(message)) messages.push(message);
    if (error.name === "AbortError") message.stats.finish = "stopped";
    else message.error = explain(error);
  } finally {
    message.stats.total = last - began;
    delete message.thinking;
    if (running === controller) running = null;
    draw();
    say($("state"), message.error ? "" : "Answer complete");
  }
}

/** Add what an event brings to the message. */
function take(message, { delta, logprobs, finish_reason: finish }, ms) {
  const thought = delta.reasoning_content ?? delta.reasoning;
  if (thought) {
    message.reasoning += thought;
    message.stats.thought = ms;
  }
  if (delta.content) {
    message.content += delta.content;
    if ($("options").elements.logprobs.checked || message.tokens.length) {
      message.tokens.push(...aligned(delta.content, logprobs?.content ?? []));
    }
  }
  for (const part of delta.tool_calls ?? []) {
    const call = (message.calls[part.index] ??= { id: "", name: "", arguments: "" });
    call.id ||= part.id ?? "";
    call.name ||= part.function.name ?? "";
    call.arguments += part.function.arguments ?? "";
  }
  if (finish) message.stats.finish = finish;
}

/** Tokens whose texts join to ``text``: one for each entry if they fit, else one for all. */
function aligned(text, entries) {
  const top = (entry) => entry.top_logprobs.map((other) => [other.token, other.logprob]);
  if (entries.map((entry) => entry.token).join("") === text) {
    return entries.map((entry) => ({ text: entry.token, logprob: entry.logprob, top: top(entry) }));
  }
  const [first] = entries;
  return [first
    ? { text, logprob: entries.reduce((sum, entry) => sum + entry.logprob, 0), top: entries.length > 1 ? [] : top(first) }
    : { text, logprob: 0, top: [] }];
}

function explain(error) {
  if (!(error instanceof ApiError)) {
    return error instanceof TypeError ? "The connection to the server was lost." : error.message;
  }
  const wait = error.retryAfter ? ` Try again in ${plural(error.retryAfter, "second")}.` : "";
  return error.message + wait;
}

// -- what is shown --------------------------------------------------------------------------------

const views = new WeakMap(); // of each message

let drawing = false;
let rest = 0; // when the next drawing may begin: long answers take less than a third of the time

function drawSoon() {
  if (drawing) return;
  drawing = true;
  setTimeout(() => requestAnimationFrame(() => {
    const began = performance.now();
    drawing = false;
    if (messages.length) drawMessage(messages.at(-1));
    follow();
    rest = performance.now() + 2 * (performance.now() - began);
  }), rest - performance.now());
}

/** Stay at the end, unless the reader has scrolled up. */
function follow(always = false) {
  const box = $("messages");
  const end = box.scrollHeight - box.clientHeight;
  if (always || end - box.scrollTop < 120) box.scrollTop = end;
}

function draw() {
  const box = $("messages");
  box.replaceChildren(...messages.map(drawMessage));
  if (!messages.length) box.append(el("p.empty", {}, "Nothing leaves this server. Ask away."));
  follow(true);
  $("stop").hidden = !running;
  $("send").hidden = Boolean(running);
  $("again").disabled = Boolean(running) || !messages.length;
  const wanted = openCall();
  $("draft").placeholder = wanted ? `The result of ${wanted.name}` : "Ask something";
  box.setAttribute("aria-busy", Boolean(running));
  if (!running) keep();
}

function drawMessage(message) {
  if (!views.has(message)) views.set(message, new MessageView(message, { trace: ({ stats }) => showTrace(stats.id) }));
  const view = views.get(message);
  view.draw(Boolean(running) && message === messages.at(-1));
  return view.node;
}
