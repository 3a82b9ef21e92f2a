// The live view: what runs, what waits and why, asked for once a second while it is shown.

import { askKey, getJson } from "./api.js";
import { PagesChart, StepsChart, sparkline } from "./charts.js";
import { $, duration, el, number, percent, plural, say, set } from "./dom.js";
import { showTrace, whyText } from "./request.js";

const PERIOD = 1000;
const KEPT = 120; // values in the sparklines
const WINDOW = 60_000; // milliseconds over which prefix hits are counted

let notice = () => {};
let wanted = false; // the view is shown
let asking = false;
let paused = false;
let before = null; // the state before, for rates
let state = null;
let charts = null;
const history = {};
let past = []; // {time_ms, totals} of the last minute
const opened = new Set(); // groups of waiting requests whose rows are shown

export function startLive(onNotice) {
  notice = onNotice;
  charts = [
    new StepsChart($("steps"), $("steps-legend"), $("step-text")),
    new PagesChart($("pages"), $("pages-legend"), $("page-text"), open),
  ];
  $("pause").addEventListener("click", () => {
    paused = !paused;
    set($("pause"), { "aria-pressed": String(paused) });
    say($("pause"), paused ? "Go on" : "Pause");
  });
  $("admin").addEventListener("click", () => askKey("admin", "The admin key shows the requests of all keys"));
  $("order").addEventListener("change", () => state && drawEnded());
  document.addEventListener("visibilitychange", () => !document.hidden && wakeLive());
}

export function wakeLive() {
  wanted = location.hash === "#live";
  if (wanted) ask();
}

export function pauseLive() {
  wanted = false;
}

async function ask() {
  if (asking) return;
  asking = true;
  while (wanted && !document.hidden) {
    if (!paused) {
      try {
        const next = await getJson("live");
        notice(noticeOf(next));
        before = state;
        state = next;
        draw();
      } catch (error) {
        notice(error.status ? error.message : "The server does not answer.");
      }
    }
    await new Promise((resolve) => setTimeout(resolve, PERIOD));
  }
  asking = false;
}

function noticeOf({ draining, missing }) {
  if (draining) return "The server is shutting down: it takes no new requests.";
  return missing.length ? `Not shown, as it does not answer: replica ${missing.join(", ")}.` : "";
}

function open(id) {
  const rows = [...state.waiting, ...state.running, ...state.ended];
  showTrace(`live/${encodeURIComponent(id)}`, { row: rows.find((row) => row.id === id) ?? null, state, open });
}

function draw() {
  drawTiles();
  $("admin").hidden = !state.admin_sees_more;
  for (const chart of charts) chart.update(state);
  const { running } = state;
  say($("waiting-title"), `Waiting: ${number(state.num_waiting)}${state.num_reserved ? `, and ${number(state.num_reserved)} being read` : ""}`);
  say($("running-title"), `Running: ${number(state.num_running)} of ${number(state.max_running)}`);
  drawWaiting();
  table($("running"), ["Request", "Does", "Since", "Prompt", "Answer", "Pages"], running, runningCells, "Nothing runs.",
    state.num_running - running.length);
  drawEnded();
}

function drawWaiting() {
  const rows = grouped([...state.waiting].sort((a, b) => a.ahead - b.ahead));
  table($("waiting"), ["Request", "Waits for", "Since", "Prompt"], rows, waitingCells, "Nothing waits.",
    state.num_waiting - state.waiting.length);
}

function drawEnded() {
  const slowest = $("order").value === "slowest";
  const rows = slowest ? [...state.ended].sort((a, b) => b.total_ms - a.total_ms) : state.ended;
  table($("ended"), ["Request", "Outcome", "Took", "Queued", "First token", "Prompt", "Answer"], rows, endedCells, "Nothing has ended yet.");
}

// -- figures --------------------------------------------------------------------------------------

function drawTiles() {
  const { totals, pages } = state;
  const seconds = before ? (state.time_ms - before.time_ms) / 1000 : 0;
  const rate = (name) => (seconds > 0 ? Math.max(0, totals[name] - before.totals[name]) / seconds : 0);
  if (before && totals.steps < before.totals.steps) past = []; // the server was started again
  past = [...past.filter(({ time_ms }) => state.time_ms - time_ms <= WINDOW && time_ms < state.time_ms), state];
  const [oldest] = past;
  const hits = (then) => (totals.cached_tokens - then.cached_tokens) / (totals.admitted_tokens - then.admitted_tokens);
  const share = hits(oldest.totals); // NaN where no prompt was admitted
  const all = hits({ cached_tokens: 0, admitted_tokens: 0 }) || 0;
  const whole = 1000 * state.replicas.length; // milliseconds in a second
  tile("running", "Running", number(state.num_running), state.num_running, `of ${number(state.max_running)}`);
  tile("waiting", "Waiting", number(state.num_waiting), state.num_waiting, state.num_waiting ? headText() : "nothing waits");
  tile("output", "Output", `${number(rate("generation_tokens"))}/s`, rate("generation_tokens"), "tokens generated");
  tile("prompt", "Prompts", `${number(rate("prompt_tokens"))}/s`, rate("prompt_tokens"), "prompt tokens");
  tile("cache", "KV in use", percent((pages.own + pages.shared) / Math.max(1, pages.total)), pages.own + pages.shared,
    plural(totals.preemptions, "preemption"));
  tile("hits", "Prefix hits", share >= 0 ? percent(share) : "–", share || 0,
    `in the last ${Math.max(1, Math.round((state.time_ms - oldest.time_ms) / 1000))} s; ${percent(all)} since the start`);
  tile("device", "Device busy", percent(Math.min(1, rate("device_busy_ms") / whole)), rate("device_busy_ms"), `${number(rate("steps"))} steps/s`);
  tile("lag", "Loop lag", duration(state.lag_ms), state.lag_ms,
    `${duration(state.longest_lag_ms)} at worst, CPU ${percent(Math.min(1, rate("loop_cpu_ms") / whole))}`);
}

function headText() {
  const head = state.waiting.find((row) => row.reason);
  return { slots: "for a slot", pages: "for KV pages", budget: "for room in a step" }[head?.reason] ?? "";
}

const tiles = {};

function tile(name, title, value, sample, detail) {
  const values = (history[name] ??= []);
  values.push(sample);
  if (values.length > KEPT) values.shift();
  let node = tiles[name];
  if (!node) {
    node = tiles[name] = { value: el("strong"), detail: el("span.hint"), spark: el("div") };
    $("tiles").append(el("div.tile", {}, el("span", {}, title), node.value, node.spark, node.detail));
  }
  say(node.value, value);
  say(node.detail, detail);
  node.spark.replaceChildren(sparkline(values));
}

// -- tables ---------------------------------------------------------------------------------------

/** Requests that wait for the same thing become one row, which opens. */
function grouped(rows) {
  const groups = Map.groupBy(rows, ({ reason, blocked_by: other }) => `${reason} ${other ?? ""}`);
  return [...groups].flatMap(([key, inside]) => {
    if (inside.length === 1) return inside;
    const isOpen = opened.has(key);
    const toggle = () => {
      if (!opened.delete(key)) opened.add(key);
      drawWaiting();
    };
    const head = { key, toggle, isOpen, inside, name: plural(inside.length, "request") };
    return [head, ...(isOpen ? inside.map((row) => ({ ...row, isInner: true })) : [])];
  });
}

const whereText = (row) => (state.replicas.length > 1 && !row.key ? `, replica ${row.replica}` : "");

function waitingCells(row) {
  const { inside = [row], key } = row;
  const range = (field, text) => {
    const values = inside.map((each) => each[field]).sort((a, b) => a - b);
    return inside.length > 1 ? `${text(values[0])} to ${text(values.at(-1))}` : text(values[0]);
  };
  if (key) return [whyText(inside[0], state, "the first"), range("age_ms", duration), range("prompt_tokens", number)];
  const why = row.isInner ? `${row.ahead ? plural(row.ahead, "request") : "nothing"} before it` : whyText(row, state);
  return [why, duration(row.age_ms), promptText(row)];
}

function runningCells(row) {
  const total = row.max_output_tokens ? ` of ${number(row.max_output_tokens)}` : "";
  const doing = row.state === "prefill" ? `reads its prompt, ${plural(row.prompt_left, "token")} left` : "answers";
  const again = row.preemptions ? `, preempted ${plural(row.preemptions, "time")}` : "";
  return [doing + again, duration(row.age_ms), promptText(row), number(row.output_tokens) + total, number(row.pages)];
}

function endedCells(row) {
  return [row.outcome, duration(row.total_ms), duration(row.started_ms ?? row.total_ms), duration(row.first_token_ms), promptText(row), number(row.output_tokens)];
}

const promptText = (row) => number(row.prompt_tokens) + (row.cached_tokens ? ` (${number(row.cached_tokens)} cached)` : "");

/** Fill a table, keeping the rows that stay: the focus must not move. */
function table(node, heads, rows, cellsOf, nothing, numMore = 0) {
  if (!node.tHead) {
    node.append(el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)))), el("tbody"), el("tfoot"));
    node.rowsById = new Map();
  }
  const known = node.rowsById;
  const used = new Set();
  let strangers = 0;
  const ordered = rows.map((row) => {
    const key = row.key ?? row.id ?? `other ${(strangers += 1)}`;
    used.add(key);
    if (!known.has(key)) known.set(key, makeRow(row, heads));
    const line = known.get(key);
    const name = line.cells[0].firstChild;
    const whole = row.key || row.id !== null ? row.name || `Request ${row.id}` : "another key";
    say(name, short(whole) + whereText(row));
    set(name, { title: whole, "aria-expanded": row.key ? String(row.isOpen) : null });
    line.classList.toggle("inner", Boolean(row.isInner));
    line.act = row.toggle ?? (() => open(row.id));
    cellsOf(row).forEach((text, i) => say(line.cells[i + 1], text));
    return line;
  });
  for (const [key, line] of known) {
    if (!used.has(key)) {
      line.remove();
      known.delete(key);
    }
  }
  const body = node.tBodies[0];
  ordered.forEach((line, i) => body.rows[i] !== line && body.insertBefore(line, body.rows[i] ?? null));
  const text = rows.length ? (numMore > 0 ? `and ${number(numMore)} more` : "") : nothing;
  say(node.tFoot, "");
  if (text) node.tFoot.append(el("tr", {}, el("td.hint", { colspan: heads.length }, text)));
}

/** An id by its beginning and its end; the whole is its title. */
const short = (name) => (name.length > 20 ? `${name.slice(0, 10)}…${name.slice(-4)}` : name);

function makeRow({ id, key }, heads) {
  const isOpenable = Boolean(key) || id !== null;
  const name = isOpenable ? el("button.link", { type: "button" }) : el("span.hint");
  const cells = heads.slice(1).map((head) => el("td", { "data-head": head }));
  const line = el("tr", {}, el("td.name", {}, name), ...cells);
  if (isOpenable) {
    line.classList.add("clickable");
    line.addEventListener("click", () => line.act());
  }
  return line;
}
