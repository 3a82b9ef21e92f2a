// Small helpers. Text only ever becomes text nodes: nothing here, or elsewhere, parses HTML.

export const $ = (id) => document.getElementById(id);

/** An element with attributes, listeners (onclick, ...) and children; strings become text. */
export function el(name, attributes = {}, ...children) {
  const [tag, ...classes] = name.split(".");
  const node = document.createElement(tag || "div");
  if (classes.length) node.className = classes.join(" ");
  set(node, attributes);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  set(node, attributes);
  node.append(...children);
  return node;
}

export function set(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === false || value === null || value === undefined) node.removeAttribute(name);
    else node.setAttribute(name, value === true ? "" : value);
  }
}

/** A button that is not in the way. */
export const button = (text, onclick, attributes = {}) => el("button.quiet", { type: "button", onclick, ...attributes }, text);

/** Act at the second click only; the first asks. */
export function twice(node, question, act) {
  const text = node.textContent;
  const calm = () => say(node, text);
  node.addEventListener("blur", calm);
  node.addEventListener("click", () => {
    if (node.textContent !== question) say(node, question);
    else {
      calm();
      act();
    }
  });
}

/** Change text only where it differs, so that selections and screen readers are left alone. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export const number = (value, digits = 0) =>
  value.toLocaleString("en", { maximumFractionDigits: digits });

export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
  return `${Math.floor(ms / 60_000)} min ${Math.round((ms % 60_000) / 1000)} s`;
}

export const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}\u00a0%`;

export const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;

export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Browsers offer the clipboard only to https and localhost.
    const area = el("textarea.hidden", {}, text);
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  const before = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = before), 1200);
}

/** Give a file to the user. */
export function download(blob, name) {
  const url = URL.createObjectURL(blob);
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** What this tab remembers; nothing, where the browser refuses. */
export const memory = {
  get(name, otherwise) {
    try {
      return JSON.parse(sessionStorage.getItem(`asyncllm.${name}`)) ?? otherwise;
    } catch {
      return otherwise;
    }
  },
  set(name, value) {
    try {
      sessionStorage.setItem(`asyncllm.${name}`, JSON.stringify(value));
      return true;
    } catch {
      return false;
    }
  },
};
