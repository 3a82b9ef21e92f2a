// The conversations that this browser keeps, and their list. Where it keeps nothing, they last until the
// page is closed.

import { $, button, el, say, twice } from "./dom.js";

const MOST = 100; // conversations
const ROOM = 2_000_000; // characters of all of them: browsers have room for five million
const PREFIX = `asyncllm.chat ${location.pathname} `; // another server may have the same host

const unkept = new Map(); // what the browser has no room for, or keeps nothing at all

function attempt(act, otherwise) {
  try {
    return act();
  } catch {
    return otherwise;
  }
}

/** What is kept under a key: what the list shows is its first line, the messages are the second. */
function read(key, whole = false) {
  return attempt(() => {
    const value = unkept.get(key) ?? localStorage.getItem(key);
    const end = value.indexOf("\n");
    const { title, at } = JSON.parse(value.slice(0, end));
    const messages = (whole ? JSON.parse(value.slice(end)) : []).filter(({ content }) => typeof content === "string");
    for (const message of messages) message.stats ??= {};
    return { id: key.slice(PREFIX.length), title: String(title), at: Number(at), size: value.length, messages };
  }, null); // it is not ours
}

/** The conversations that are kept, without their messages; the latest first. */
export function keptChats() {
  const keys = new Set([...unkept.keys(), ...attempt(() => Object.keys(localStorage), [])]);
  return [...keys].filter((key) => key.startsWith(PREFIX)).map((key) => read(key)).filter(Boolean).sort((a, b) => b.at - a.at);
}

export const newChat = () => ({ id: `${Date.now().toString(36)}${Math.random().toString(36).slice(2)}`, title: "", at: 0, messages: [] });
export const loadChat = (id) => read(PREFIX + id, true);

export function forgetChat(id) {
  unkept.delete(PREFIX + id);
  attempt(() => localStorage.removeItem(PREFIX + id));
}

/** Keep a conversation, in place of the oldest ones if there are too many; false if there is no room. */
export function keepChat({ id, title, at, messages }) {
  const bare = messages.map(({ tokens, asked, ...rest }) => rest);
  const value = `${JSON.stringify({ title, at })}\n${JSON.stringify(bare)}`;
  let room = ROOM - value.length;
  const fits = room >= 0 && attempt(() => {
    localStorage.setItem(PREFIX + id, value);
    return true;
  }, false);
  if (!fits) {
    unkept.set(PREFIX + id, value);
    return false;
  }
  unkept.delete(PREFIX + id);
  keptChats().filter((other) => other.id !== id && !unkept.has(PREFIX + other.id)).forEach((other, i) => {
    room -= other.size;
    if (room < 0 || i >= MOST - 1) forgetChat(other.id);
  });
  return true;
}

// -- the list -------------------------------------------------------------------------------------

let shown = null; // the conversation that is open

/** @param does {open(id), rename(title), remove(), removeAll(), save()}: what the buttons do. */
export function startChats(does) {
  $("chat-list").addEventListener("click", (event) => {
    const id = event.target.closest("[data-id]")?.dataset.id;
    if (id) does.open(id);
  });
  $("rename").addEventListener("click", () => rename(does.rename));
  $("export").addEventListener("click", does.save);
  twice($("delete"), "Really delete?", does.remove);
  twice($("delete-all"), "Really delete all?", does.removeAll);
  addEventListener("storage", () => drawChats(shown));
}

/** @param fits whether the browser had room for the one that is open. */
export function drawChats(chat, fits = true) {
  shown = chat;
  const all = keptChats();
  const isNew = !all.some(({ id }) => id === chat.id);
  if (isNew && chat.messages.length) all.unshift(chat);
  $("chat-list").replaceChildren(...all.map(({ id, title, at }) =>
    el("li", {}, el("button.item", { type: "button", "data-id": id, title, "aria-current": id === chat.id ? "true" : null },
      el("span", {}, title), el("span.hint", {}, when(at))))));
  for (const name of ["rename", "export", "delete"]) $(name).disabled = !chat.messages.length;
  $("delete-all").hidden = !all.length;
  say($("chats-text"), !fits ? "The browser has no room for this one: it is gone when the page is closed."
    : all.length ? `The latest ${MOST} stay in this browser.` : "None yet. They stay in this browser.");
}

/** The day; nothing for today. */
function when(at) {
  const date = new Date(at);
  return date.toDateString() === new Date().toDateString() ? "" : date.toLocaleDateString("en", { day: "numeric", month: "short" });
}

/** Put a field in the place of the open conversation's title. */
function rename(done) {
  const item = $("chat-list").querySelector("[aria-current]");
  const field = el("input", { "aria-label": "Title", value: shown.title, maxlength: 200 });
  const end = (title) => {
    field.onblur = null;
    if (title?.trim()) done(title.trim());
    drawChats(shown);
    $("rename").focus();
  };
  field.onblur = () => end(field.value);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") end(field.value);
    else if (event.key === "Escape") end(null);
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  item.replaceWith(field);
  field.select();
}
