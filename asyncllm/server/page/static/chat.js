// The chat: the conversation that is open, and the answer under way.

import { ApiError, call, events, getJson } from "./api.js";
import { drawChats, forgetChat, keepChat, keptChats, loadChat, newChat, startChats } from "./chats.js";
import { $, download, el, memory, plural, say } from "./dom.js";
import { MessageView } from "./message.js";
import { showPrompt, startTips } from "./tokens.js";

const NUMBERS = ["temperature", "max_tokens", "top_p", "top_k", "presence_penalty",
  "frequency_penalty", "repetition_penalty", "seed"];
const ALTERNATIVES = 5;
const TITLE = 60; // characters of the first message
const narrow = matchMedia("(max-width: 60rem)");

let chat = restore();
let running = null; // the AbortController of the answer under way
const does = { prompt: promptOf, retry: regenerate, resend };

export function startChat(showTrace) {
  does.trace = ({ stats }) => showTrace(stats.id);
  const options = $("options");
  for (const [name, value] of Object.entries(memory.get("options", {}))) {
    const field = options.elements[name];
    if (field?.type === "checkbox") field.checked = value;
    else if (field) field.value = value;
  }
  options.addEventListener("input", keepOptions);
  options.addEventListener("submit", (event) => event.preventDefault());
  const sides = () => ["chats", "settings"].forEach((name) => ($(name).open = !narrow.matches));
  sides();
  narrow.addEventListener("change", sides);
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
  $("new").addEventListener("click", () => open(newChat()));
  $("again").addEventListener("click", regenerate);
  addEventListener("pagehide", keep);
  startTips($("messages"));
  startChats({
    open(id) {
      open(loadChat(id) ?? newChat());
      if (narrow.matches) $("chats").open = false;
    },
    rename(title) {
      chat.title = title;
      keep();
    },
    remove() {
      forgetChat(chat.id);
      open(newChat(), true);
    },
    removeAll() {
      for (const { id } of keptChats()) forgetChat(id);
      open(newChat(), true);
    },
    save: () => download(new Blob([JSON.stringify(exported(), null, 2)], { type: "application/json" }), `${chat.title}.json`),
  });
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

// -- conversations --------------------------------------------------------------------------------

/** What this tab showed before it was reloaded; probabilities are kept in the tab alone. */
function restore() {
  const found = loadChat(memory.get("chat", ""));
  if (!found) return newChat();
  const tokens = memory.get("tokens", []);
  found.messages.forEach((message, i) => (message.tokens = tokens[i] ?? undefined));
  return found;
}

function keep() {
  if (!chat.messages.length) return;
  chat.title ||= chat.messages[0].content.trim().replace(/\s+/g, " ").slice(0, TITLE);
  const fits = keepChat(chat);
  memory.set("tokens", chat.messages.map(({ tokens }) => tokens)) || memory.set("tokens", []);
  drawChats(chat, fits);
}

function open(other, isGone = false) {
  stop();
  if (!isGone) keep();
  chat = other;
  memory.set("chat", chat.id);
  memory.set("tokens", []);
  draw();
  if (!narrow.matches) $("draft").focus(); // a phone would show its keyboard
}

const exported = () => ({ title: chat.title, at: new Date(chat.at).toISOString(), ...asked(chat.messages) });

// -- what the buttons do --------------------------------------------------------------------------

function send() {
  const text = $("draft").value;
  if (running || !text.trim()) return;
  const wanted = openCall();
  const { messages } = chat;
  if (wanted) messages.push({ role: "tool", tool_call_id: wanted.id, name: wanted.name, content: text });
  else messages.push({ role: "user", content: text });
  $("draft").value = "";
  memory.set("draft", "");
  if (openCall()) draw(); // further calls want their results first
  else answer();
}

function stop() {
  running?.abort();
  running = null;
}

function regenerate() {
  if (running) return;
  const { messages } = chat;
  while (messages.length && messages.at(-1).role === "assistant") messages.pop();
  if (messages.length) answer();
}

function resend(message, text) {
  if (running) return;
  chat.messages.splice(chat.messages.indexOf(message), Infinity, { role: "user", content: text });
  answer();
  $("draft").focus();
}

function promptOf(message) {
  const before = chat.messages.slice(0, chat.messages.indexOf(message));
  showPrompt(() => message.asked ?? { ...asked(before), tools: tools() }, message.stats.usage?.prompt_tokens_details?.cached_tokens);
}

/** The first call of the last answer that has no result yet. */
function openCall() {
  const { messages } = chat;
  const results = new Set(messages.filter((m) => m.role === "tool").map((m) => m.tool_call_id));
  const latest = messages.findLast((m) => m.role === "assistant");
  const calls = messages.at(-1)?.role === "user" ? [] : latest?.calls ?? [];
  return calls.find((each) => !results.has(each.id));
}

// -- an answer ------------------------------------------------------------------------------------

/** The model and the messages of a request. */
function asked(messages) {
  const fields = $("options").elements;
  const body = { model: fields.model.value, messages: [] };
  if (fields.system.value.trim()) body.messages.push({ role: "system", content: fields.system.value });
  for (const { role, content, calls, tool_call_id } of messages) {
    const message = { role, content };
    if (tool_call_id) message.tool_call_id = tool_call_id;
    if (calls?.length) {
      message.tool_calls = calls.map((each) => ({
        id: each.id, type: "function", function: { name: each.name, arguments: each.arguments },
      }));
    }
    if (content || calls?.length) body.messages.push(message);
  }
  return body;
}

function tools() {
  const { value } = $("options").elements.tools;
  try {
    return value.trim() ? JSON.parse(value) : undefined;
  } catch (error) {
    throw new Error(`Tools are not JSON: ${error.message}`);
  }
}

function sampling() {
  const fields = $("options").elements;
  const body = { stream: true, stream_options: { include_usage: true } };
  for (const name of NUMBERS) if (fields[name].value !== "") body[name] = Number(fields[name].value);
  if (fields.logprobs.checked) Object.assign(body, { logprobs: true, top_logprobs: ALTERNATIVES });
  return body;
}

async function answer() {
  const message = { role: "assistant", content: "", reasoning: "", calls: [], stats: {} };
  const controller = (running = new AbortController());
  const mine = chat;
  const began = performance.now();
  mine.at = Date.now();
  try {
    message.asked = { ...asked(mine.messages), tools: tools() };
    mine.messages.push(message);
    draw();
    const body = { ...message.asked, ...sampling() };
    if (body.logprobs) message.tokens = [];
    const response = await call("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal: controller.signal });
    message.stats.id = response.headers.get("X-Request-Id");
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) message.stats.usage = event.usage;
      for (const choice of event.choices ?? []) take(message, choice, performance.now() - began);
      drawSoon();
    }
  } catch (error) {
    if (!mine.messages.includes(message)) mine.messages.push(message);
    if (error.name === "AbortError") message.stats.finish = "stopped";
    else message.error = explain(error);
  } finally {
    if (running === controller) running = null;
    if (mine === chat) {
      draw();
      say($("state"), message.error ? "" : "Answer complete");
    }
  }
}

/** Add what an event brings to the message. */
function take(message, { delta, logprobs, finish_reason: finish }, ms) {
  const { stats } = message;
  const thought = delta.reasoning_content ?? delta.reasoning;
  if (thought || delta.content || delta.tool_calls) {
    stats.first ??= ms;
    stats.last = ms;
  }
  if (thought) {
    message.reasoning += thought;
    stats.thought = ms;
  }
  if (delta.content) {
    message.content += delta.content;
    message.tokens?.push(...aligned(delta.content, logprobs?.content ?? []));
  }
  for (const part of delta.tool_calls ?? []) {
    const made = (message.calls[part.index] ??= { id: "", name: "", arguments: "" });
    made.id ||= part.id ?? "";
    made.name ||= part.function.name ?? "";
    made.arguments += part.function.arguments ?? "";
  }
  if (finish) stats.finish = finish;
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
let rest = 0; // when the next drawing may begin: a long answer takes a third of the time at most

function drawSoon() {
  if (drawing) return;
  drawing = true;
  setTimeout(() => requestAnimationFrame(() => {
    const began = performance.now();
    drawing = false;
    if (chat.messages.length) drawMessage(chat.messages.at(-1));
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
  const { messages } = chat;
  const nodes = messages.map(drawMessage);
  if (!messages.length) nodes.push(el("p.empty", {}, "Nothing leaves this server. Ask away."));
  if (nodes.length !== box.children.length || nodes.some((node, i) => node !== box.children[i])) box.replaceChildren(...nodes);
  follow(true);
  $("stop").hidden = !running;
  $("send").hidden = Boolean(running);
  $("again").disabled = Boolean(running) || !messages.length;
  const wanted = openCall();
  $("draft").placeholder = wanted ? `The result of ${wanted.name}` : "Ask something";
  box.setAttribute("aria-busy", Boolean(running));
  memory.set("chat", chat.id);
  if (messages.length) keep();
  else drawChats(chat);
}

function drawMessage(message) {
  if (!views.has(message)) views.set(message, new MessageView(message, does));
  const view = views.get(message);
  view.draw(Boolean(running) && message === chat.messages.at(-1));
  return view.node;
}
