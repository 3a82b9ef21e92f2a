// One request: where its time went, and why. Opened from the live view, or from a message.

import { getJson, post } from "./api.js";
import { $, button, duration, el, number, percent, plural } from "./dom.js";

const PARTS = {
  queue: "in the queue", prefix: "waiting for a prefix", host: "loading pages",
  prefill: "prompt", decode: "answer", preempted: "preempted",
};
const QUEUE = {
  slots: ["a free slot", "Other requests had taken all of them."],
  pages: ["KV pages", "Other requests held them."],
  budget: ["room in a step", "Prompts before it filled the steps."],
};
const WAITS = {
  slots: (row, state) => `a free slot: all ${number(state.max_running)} are taken`,
  pages: (row, state, who) => `KV pages: ${who} may need ${number(row.needs)}, and ${number(row.available)} are to be had`,
  budget: () => "room in a step for a prompt",
  step: () => "the end of the step under way",
  prefix: () => "another request, which computes the same prefix",
  host: () => "a prefix, which is copied back from the host's memory",
  preempted: () => "the end of the step under way, after a preemption",
  trial: () => "the requests of a failed step, which run again first",
  deadline: () => "nothing any more: the deadline can no longer be met",
};

/** Why a row of the live view waits, as the end of "waits for ..."; or several rows, of which it is the first. */
export function whyText(row, state, who = "it") {
  const ahead = row.ahead ? `; ${plural(row.ahead, "request")} before ${who}` : "";
  return (WAITS[row.reason]?.(row, state, who) ?? row.reason) + ahead;
}

/** Where the time of a sequence of a trace went: [[part, ms]] in order of time. */
export function parts(trace) {
  const found = [];
  let part = null;
  let begin = 0;
  const turn = (next, at) => {
    if (part && at > begin) found.push([part, at - begin]);
    part = next;
    begin = Math.max(begin, at);
  };
  const next = { queued: "queue", shares: "prefix", loading: "host", preempted: "preempted" };
  let first = trace.first_token_ms;
  for (const event of trace.events) {
    if (first !== null && part === "prefill" && event.at_ms > first) {
      turn("decode", first);
      first = null;
    }
    if (next[event.kind]) turn(next[event.kind], event.at_ms);
    else if (event.kind === "admitted") turn("prefill", event.at_ms);
    else if (part === "preempted" && event.kind === "chunk") turn("prefill", event.at_ms);
  }
  const waited = Object.values(trace.waited_ms).reduce((a, b) => a + b, 0);
  const end = trace.ended_ms ?? Math.max(trace.outcome === "waiting" ? begin + waited : 0, trace.first_token_ms ?? 0, ...trace.events.map((e) => e.at_ms),
    ...trace.steps_detail.map((s) => (s.began_ms ?? s.planned_ms) + (s.ms ?? 0)));
  if (first !== null && part === "prefill") turn("decode", first);
  turn(null, Math.max(end, begin));
  return found;
}

function sums(trace) {
  const total = {};
  for (const [part, ms] of parts(trace)) total[part] = (total[part] ?? 0) + ms;
  return total;
}

/** What it waited for before it ran, and after preemptions; the times add up to the whole: [ms, [[reason, ms]]]. */
export function waits(trace) {
  const total = sums(trace);
  const all = ["queue", "prefix", "host", "preempted"].reduce((sum, part) => sum + (total[part] ?? 0), 0);
  const known = Object.entries(trace.waited_ms).filter(([, ms]) => ms > 0);
  const rest = all - known.reduce((sum, [, ms]) => sum + ms, 0);
  if (rest > 0.05) known.push(["", rest]);
  return [all, known.sort((a, b) => b[1] - a[1])];
}

function waitsText(trace, place = "") {
  const [all, each] = waits(trace);
  const shared = Object.keys(sums(trace)).some((part) => part === "prefix" || part === "host");
  const texts = each.map(([reason, ms]) => [duration(ms), QUEUE[reason]?.[0] ?? (shared ? "a prefix, or steps under way" : "steps under way")]);
  if (texts.length < 2) return duration(all) + place + texts.map(([, what]) => ` for ${what}`).join("");
  return `${duration(all)}${place}: ${texts.map(([ms, what]) => `${ms} for ${what}`).join(", ")}`;
}

/** One sentence or two: the part that took longest, and why. */
export function cause(trace) {
  const total = sums(trace);
  const [part, ms] = Object.entries(total).sort((a, b) => b[1] - a[1])[0] ?? ["queue", 0];
  const count = (kind) => trace.events.filter((event) => event.kind === kind).length;
  const took = duration(ms);
  if (part === "queue") {
    const [[reason]] = [...waits(trace)[1], [""]];
    return `It waited ${waitsText(trace, " in the queue")}. ${QUEUE[reason]?.[1] ?? ""}`;
  }
  if (part === "prefix") return `It waited ${took} until another request had computed the prefix they share.`;
  if (part === "host") return `Its prefix was copied back from the host's memory for ${took}.`;
  if (part === "preempted") {
    return `It was preempted ${plural(count("preempted"), "time")} and waited ${took} to go on: older requests needed its KV pages.`;
  }
  const own = new Set(trace.events.map((event) => (event.kind === "chunk" ? event.step : null))); // with its prompt
  const steps = trace.steps_detail.filter(({ step, ms: took }) => took !== null && (part === "prefill" || !own.has(step)));
  const sum = (field) => steps.reduce((all, step) => all + step[field], 0);
  if (part === "prefill") {
    const fresh = trace.prompt_tokens - trace.cached_tokens;
    const mine = Math.min(fresh, sum("tokens"));
    const others = sum("tokens") > 2 * mine && trace.ended_ms === null && steps.length > 1
      ? " Other requests had most of these steps." : "";
    return `Its prompt took ${took}: ${plural(fresh, "token")} to compute in ${plural(count("chunk"), "chunk")}, ${number(trace.cached_tokens)} cached.${others}`;
  }
  const each = ms / Math.max(1, trace.completion_tokens - 1);
  const prompts = sum("prompt_tokens") / Math.max(1, sum("tokens"));
  const gaps = steps.slice(1).reduce(
    (all, step, i) => all + Math.max(0, step.began_ms - steps[i].began_ms - steps[i].ms), 0);
  const mean = (field) => sum(field) / steps.length;
  let why = steps.length ? ` Its steps had ${plural(Math.round(mean("rows")), "row")} and took ${duration(mean("ms"))} on average.` : "";
  if (prompts > 0.5) why += ` ${percent(prompts)} of their tokens were prompts of other requests.`;
  if (gaps > 0.25 * ms) why += ` The device was idle for ${duration(gaps)} between them.`;
  return `Its answer took ${took}: ${plural(trace.completion_tokens, "token")} at ${duration(each)} each.${why}`;
}

// -- the sheet ------------------------------------------------------------------------------------

let shown = 0; // counts openings: an answer that comes late is dropped

export function startSheet() {
  const sheet = $("request");
  sheet.addEventListener("close", () => (shown += 1));
  sheet.addEventListener("click", (event) => {
    if (event.target === sheet) sheet.close(); // beside it
  });
}

/** Open the sheet; {content: where to show what there is, isOpen(), title}. */
export function openSheet(name) {
  const sheet = $("request");
  const mine = (shown += 1);
  const title = el("h2", { id: "request-title", tabindex: -1 }, name);
  const content = el("div", {}, el("p.hint", {}, "Looking…"));
  sheet.replaceChildren(el("div.row.top", {}, title, button("Close", () => sheet.close())), content);
  if (!sheet.open) sheet.showModal();
  title.focus();
  return { title, content, isOpen: () => mine === shown };
}

/** Show a request.
 * @param path of the request, to which /trace and /abort belong.
 * @param row of the live view, if it is there; state is that view.
 * @param open shows another request by its number.
 */
export async function showTrace(path, { row = null, state = null, open = null } = {}) {
  const { title, content, isOpen } = openSheet(row?.name || "Request");
  let trace;
  try {
    trace = await getJson(`${path}/trace`);
  } catch (error) {
    if (isOpen()) content.replaceChildren(el("p.error", {}, error.message));
    return;
  }
  if (!isOpen()) return;
  title.textContent = trace.id;
  const nodes = trace.sequences.map((sequence) => sequenceNode(sequence, trace.sequences.length));
  if (row?.reason && trace.sequences.some(({ outcome }) => outcome === "waiting")) {
    const text = el("p.cause", {}, `It waits for ${whyText(row, state)}.`);
    if (row.blocked_by !== null && open) {
      text.append(" ", el("button", { type: "button", onclick: () => open(row.blocked_by) }, "Show that request"));
    }
    nodes.unshift(text);
  }
  content.replaceChildren(actions(path, trace), ...nodes);
}

function actions(path, trace) {
  const alive = trace.sequences.some((sequence) => sequence.ended_ms === null);
  const row = el("div.row");
  if (alive) {
    const cancel = el("button.danger", { type: "button", onclick: async () => {
      cancel.disabled = true;
      try {
        await post(`${path}/abort`);
        cancel.textContent = "Cancelled";
      } catch (error) {
        cancel.textContent = error.message;
      }
    } }, "Cancel request");
    row.append(cancel);
  }
  row.append(el("button", { type: "button", onclick: () => showTrace(path) }, "Refresh"));
  return row;
}

function sequenceNode(trace, count) {
  const total = sums(trace);
  const all = Object.values(total).reduce((a, b) => a + b, 0) || 1;
  const bar = el("div.parts", { role: "img", "aria-label": Object.entries(total)
    .map(([part, ms]) => `${PARTS[part]} ${duration(ms)}`).join(", ") });
  for (const [part, ms] of parts(trace)) {
    const piece = el(`span.part.${part}`, { title: `${PARTS[part]} ${duration(ms)}` });
    piece.style.width = `${(100 * ms) / all}%`;
    bar.append(piece);
  }
  const facts = [
    ["Outcome", trace.outcome], ["Key", trace.tenant || "–"], ["Prompt", `${number(trace.prompt_tokens)} tokens, ${number(trace.cached_tokens)} cached`],
    ["Answer", plural(trace.completion_tokens, "token")], ["Waited", waitsText(trace)],
    ["First token", duration(trace.first_token_ms)], ["Ended", duration(trace.ended_ms)],
  ];
  return el("section", {},
    count > 1 ? el("h3", {}, `Choice ${trace.index}`) : null,
    el("p.cause", {}, cause(trace)), bar,
    el("p.legend", {}, ...Object.entries(total).map(([part, ms]) =>
      el("span", {}, el(`i.part.${part}`), `${PARTS[part]} ${duration(ms)}`))),
    el("dl.facts", {}, ...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
    el("h3", {}, "What happened"),
    el("table", {}, el("tbody", {}, ...trace.events.map(eventNode))),
    trace.events_dropped ? el("p.hint", {}, `and ${plural(trace.events_dropped, "event")} more`) : null);
}

function eventNode(event) {
  const text = {
    queued: () => `queued, ${number(event.ahead)} were waiting`,
    shares: () => "waits for a prefix that another request computes",
    loading: () => `${plural(event.pages, "page")} of its prefix come from the host`,
    admitted: () => `admitted to slot ${event.slot}, ${plural(event.cached_tokens, "token")} cached`,
    chunk: () => `${plural(event.tokens, "prompt token")} from position ${number(event.start)} on`,
    preempted: () => `preempted, at ${plural(event.tokens, "token")}`,
    finished: () => `finished, at ${plural(event.tokens, "token")}`,
    pinned: () => `${plural(event.pages, "page")} pinned for ${duration(event.ttl_ms)}`,
  }[event.kind]?.() ?? event.kind;
  const step = event.step === undefined ? "" : `step ${event.step}`;
  return el("tr", {}, el("td.num", {}, duration(event.at_ms)), el("td", {}, text), el("td.hint", {}, step));
}
