// The live view: what runs, what waits and why, asked for once a second while it is shown.

import { askKey, getJson } from "./api.js";
import { PagesChart, StepsChart, sparkline } from "./charts.js";
import { $, duration, el, number, percent, plural, say, set } from "./dom.js";
import { showTrace, whyText } from "./request.js";

const PERIOD = 1000;
const KEPT = 120; // values in the sparklines

let notice = () => {};
let wanted = false; // the view is shown
let asking = false;
let paused = false;
let before = null; // the state before, for rates
let state = null;
let charts = null;
const history = {};

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
        notice(next.draining ? "The server is shutting down: it takes no new requests." : "");
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

function open(id) {
  const rows = [...state.waiting, ...state.running, ...state.ended];
  showTrace(`live/${id}`, { row: rows.find((row) => row.id === id) ?? null, state, open });
}

function draw() {
  drawTiles();
  $("admin").hidden = !state.admin_sees_more;
  for (const chart of charts) chart.update(state);
  const { running } = state;
  const waiting = [...state.waiting].sort((a, b) => a.ahead - b.ahead);
  say($("waiting-title"), `Waiting: ${number(state.num_waiting)}${state.num_reserved ? `, and ${number(state.num_reserved)} being read` : ""}`);
  say($("running-title"), `Running: ${number(state.num_running)} of ${number(state.max_running)}`);
  table($("waiting"), ["Request", "Waits for", "Since", "Prompt"], waiting, waitingCells, "Nothing waits.",
    state.num_waiting - waiting.length);
  table($("running"), ["Request", "Does", "Since", "Prompt", "Answer", "Pages"], running, runningCells, "Nothing runs.",
    state.num_running - running.length);
  drawEnded();
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
  const admitted = before ? totals.admitted_tokens - before.totals.admitted_tokens : 0;
  const hits = (now, then) => (now.cached_tokens - then.cached_tokens) / (now.admitted_tokens - then.admitted_tokens);
  const share = admitted > 0 ? hits(totals, before.totals) : history.hits?.at(-1) ?? 0;
  const all = totals.admitted_tokens ? totals.cached_tokens / totals.admitted_tokens : 0;
  tile("running", "Running", number(state.num_running), state.num_running, `of ${number(state.max_running)}`);
  tile("waiting", "Waiting", number(state.num_waiting), state.num_waiting, state.num_waiting ? headText() : "nothing waits");
  tile("output", "Output", `${number(rate("generation_tokens"))}/s`, rate("generation_tokens"), "tokens generated");
  tile("prompt", "Prompts", `${number(rate("prompt_tokens"))}/s`, rate("prompt_tokens"), "prompt tokens");
  tile("cache", "KV in use", percent((pages.own + pages.shared) / Math.max(1, pages.total)), pages.own + pages.shared,
    plural(totals.preemptions, "preemption"));
  tile("hits", "Prefix hits", percent(share), share, `${percent(all)} since the start`);
  tile("device", "Device busy", percent(Math.min(1, rate("device_busy_ms") / 1000)), rate("device_busy_ms"), `${number(rate("steps"))} steps/s`);
  tile("lag", "Loop lag", duration(state.lag_ms), state.lag_ms,
    `${duration(state.longest_lag_ms)} at worst, CPU ${percent(Math.min(1, rate("loop_cpu_ms") / 1000))}`);
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

function waitingCells(row) {
  return [whyText(row, state), duration(row.age_ms), promptText(row)];
}

function runningCells(row) {
  const total = row.max_output_tokens ? ` of ${number(row.max_output_tokens)}` : "";
  const doing = row.state === "prefill" ? `reads its prompt, ${plural(row.prompt_left, "token")} left` : "answers";
  const again = row.preemptions ? `, preempted ${plural(row.preemptions, "time")}` : "";
  return [doing + again, duration(row.age_ms), promptText(row), number(row.output_tokens) + total, number(row.pages)];
}

function endedCells(row) {
  const waited = Object.values(row.waited_ms).reduce((sum, ms) => sum + ms, 0);
  return [row.outcome, duration(row.total_ms), duration(waited), duration(row.first_token_ms), promptText(row), number(row.output_tokens)];
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
    const key = row.id ?? `other ${(strangers += 1)}`;
    used.add(key);
    if (!known.has(key)) known.set(key, makeRow(row, heads));
    const line = known.get(key);
    say(line.cells[0].firstChild, row.id ? row.name || `Request ${row.id}` : "another key");
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

function makeRow(row, heads) {
  const { id } = row;
  const name = id ? el("button.link", { type: "button" }) : el("span.hint");
  const cells = heads.slice(1).map((head) => el("td", { "data-head": head }));
  const line = el("tr", {}, el("td.name", {}, name), ...cells);
  if (id) {
    line.classList.add("clickable");
    line.addEventListener("click", () => open(id));
  }
  return line;
}
