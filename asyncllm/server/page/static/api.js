// Requests to the server. All paths are relative: the server may be mounted below another one.

import { $, memory } from "./dom.js";

const KEPT = "It stays in this tab, and is forgotten when you close it.";
let asking = null;

/** Ask for the API key, or another one; every request that needs it waits for the same answer. */
export function askKey(name = "key", title = "This server wants an API key") {
  asking ??= new Promise((resolve) => {
    const dialog = $("key");
    $("key-title").textContent = title;
    $("key-text").textContent = memory.get(name, "") ? "The server did not accept that key." : KEPT;
    $("key-value").value = "";
    dialog.addEventListener("close", () => {
      memory.set(name, $("key-value").value.trim());
      $("key-value").value = "";
      $("forget").hidden = false;
      asking = null;
      resolve();
    }, { once: true });
    dialog.showModal();
    $("key-value").focus();
  });
  return asking;
}

export function startKeys() {
  $("forget").hidden = !memory.get("key", "");
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    $("key").close();
  });
  $("forget").addEventListener("click", () => {
    memory.set("key", "");
    memory.set("admin", "");
    location.reload();
  });
}

export class ApiError extends Error {
  constructor(status, message, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

/** A response that is well; asks for the key where the server wants another one. */
export async function call(path, options = {}) {
  for (;;) {
    const admin = path.startsWith("live") ? memory.get("admin", "") : "";
    const key = admin || memory.get("key", "");
    const headers = { ...options.headers };
    if (key) headers.Authorization = `Bearer ${key}`;
    if (options.body) headers["Content-Type"] = "application/json";
    const response = await fetch(path, { ...options, headers, cache: "no-store" });
    if (response.ok) return response;
    if (response.status === 401) {
      if (admin) memory.set("admin", "");
      else if (key === memory.get("key", "")) await askKey(); // else it was changed meanwhile
      continue;
    }
    const text = await response.text();
    let message = text.slice(0, 500);
    try {
      message = JSON.parse(text).error.message;
    } catch {
      // not one of the server's own errors
    }
    const retryAfter = Number(response.headers.get("Retry-After"));
    throw new ApiError(response.status, message || response.statusText, retryAfter);
  }
}

export const getJson = async (path) => (await call(path)).json();
export const post = async (path, body) =>
  (await call(path, { method: "POST", body: body && JSON.stringify(body) })).json();

/** The data of each server-sent event of a response, parsed. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: "));
      const text = data.map((line) => line.slice(6)).join("\n");
      if (text === "[DONE]") return;
      if (text) yield JSON.parse(text);
    }
  }
}
