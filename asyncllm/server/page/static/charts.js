// The charts of the live view, in SVG. Each is also told in words, for those who do not see it.

import { duration, el, number, percent, plural, set, svg } from "./dom.js";

/** A line of the latest values. */
export function sparkline(values) {
  const most = Math.max(...values, 1e-9);
  const points = values.map((value, i) => `${(100 * i) / Math.max(1, values.length - 1)},${24 - (22 * value) / most}`);
  return svg("svg", { viewBox: "0 0 100 25", preserveAspectRatio: "none", class: "spark", "aria-hidden": true },
    svg("polyline", { points: points.join(" "), "vector-effect": "non-scaling-stroke" }));
}

const WIDTH = 1000;
const HEIGHT = 150;
const BASE = 118; // gaps hang below this line
/** What a step computes, from the top of its bar to the line: tokens by kind. */
const KINDS = [["prompt", "prompt tokens"], ["decode", "decode rows"], ["accepted", "drafted tokens that were right"], ["rejected", "and wrong ones"]];
const FAR = 2.5; // times p99: a target beyond is drawn at the top, or all bars would be low

/** The latest steps as bars: time up, the gap before each down. Arrow keys go from one to the next. */
export class StepsChart {
  constructor(box, legend, readout) {
    this.readout = readout;
    this.at = null; // the key of the step that is told of
    this.steps = [];
    this.target = svg("line", { class: "target", x1: 0, x2: WIDTH });
    this.bars = svg("g");
    this.mark = svg("rect", { class: "mark", y: 0, height: HEIGHT });
    this.scale = el("span.scale");
    this.targetText = el("span.scale.left");
    this.summary = el("span.hint");
    this.node = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", tabindex: 0, class: "steps", role: "img" },
      this.mark, this.bars, this.target, svg("line", { class: "base", x1: 0, x2: WIDTH, y1: BASE, y2: BASE }));
    box.append(this.node, this.scale, this.targetText);
    legend.append(...[...KINDS, ["gap", "idle before the step"], ["open", "under way"], ["beyond", "beyond the scale"]]
      .map(([name, text]) => el("span", {}, el(`i.${name}`), text)), this.summary);
    this.node.addEventListener("pointermove", (event) => this.point(event));
    this.node.addEventListener("pointerleave", () => this.tell(null));
    this.node.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by || !this.steps.length) return;
      event.preventDefault();
      const index = this.steps.findIndex((step) => step.key === this.at);
      const next = index < 0 ? this.steps.length - 1 : index + by;
      this.tell(this.steps[Math.max(0, Math.min(this.steps.length - 1, next))].key);
    });
  }

  update(state) {
    const ends = {}; // of each replica's step before
    const several = state.replicas.length > 1;
    const steps = (this.steps = state.steps.map(([number, began, ms, decodes, chunks, prompts, replica, drafted = 0, accepted = 0]) => {
      const gap = ms === null ? 0 : Math.max(0, began - (ends[replica] ?? began));
      ends[replica] = ms === null ? undefined : began + ms;
      const name = several ? `Step ${number} of replica ${replica}` : `Step ${number}`;
      return { key: `${replica} ${number}`, name, ms: ms ?? state.time_ms - began, open: ms === null, chunks, gap, drafted,
        prompt: prompts, decode: decodes, accepted, rejected: drafted - accepted };
    }));
    const done = steps.filter((step) => !step.open);
    const sorted = done.map((step) => step.ms).sort((a, b) => a - b);
    const part = (share) => sorted[Math.floor(share * (sorted.length - 1))] ?? 0;
    // The longest steps do not make the scale: those beyond it are marked.
    const target = state.itl_target_ms;
    const isFar = target > FAR * part(0.99) && sorted.length > 0;
    const most = 1.15 * Math.max(part(0.99), isFar ? 0 : target, 0.1);
    const width = WIDTH / Math.max(64, steps.length);
    this.width = width;
    this.first = WIDTH - steps.length * width;
    const high = (ms) => Math.min(BASE - 4, ((BASE - 8) * ms) / most);
    const bars = [];
    steps.forEach((step, i) => {
      const x = this.first + i * width;
      const tall = high(step.ms);
      const bar = (name, y, height) => height > 0.2 && bars.push(svg("rect", { class: name, x, y, width: width * 0.82, height }));
      if (step.open) bar("open", BASE - tall, tall);
      else {
        const tokens = Math.max(1, KINDS.reduce((sum, [kind]) => sum + step[kind], 0));
        let top = BASE - tall;
        for (const [kind] of KINDS) {
          bar(kind, top, tall * (step[kind] / tokens));
          top += tall * (step[kind] / tokens);
        }
      }
      if (step.ms > most) bar("beyond", BASE - tall, 6);
      bar("gap", BASE, Math.min(HEIGHT - BASE, high(step.gap)));
    });
    this.bars.replaceChildren(...bars);
    const line = BASE - high(Math.min(target, most));
    set(this.target, { y1: line, y2: line, visibility: target ? "visible" : "hidden" });
    this.targetText.textContent = target ? `target ${duration(target)}${isFar ? ", above" : ""}` : "";
    this.targetText.style.top = `${line + 1}px`;
    this.scale.textContent = duration(most);
    const longest = sorted.at(-1) ?? 0;
    const beyond = done.filter((step) => step.ms > most).length;
    this.summary.textContent = `median ${duration(part(0.5))}, p99 ${duration(part(0.99))}, longest ${duration(longest)}`;
    const sum = (field) => done.reduce((all, step) => all + step[field], 0);
    if (sum("drafted")) this.summary.textContent += `, ${percent(sum("accepted") / sum("drafted"))} of ${plural(sum("drafted"), "drafted token")} right`;
    set(this.node, { "aria-label": `The latest ${plural(done.length, "step")}: ${this.summary.textContent}; ` +
      `${number(beyond)} beyond the scale; the target for steps with decode rows is ${duration(target)}. Arrow keys tell of each.` });
    this.tell(this.at);
  }

  point(event) {
    const box = this.node.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH;
    this.tell(this.steps[Math.floor((x - this.first) / this.width)]?.key ?? null);
  }

  tell(wanted) {
    this.at = wanted;
    const index = this.steps.findIndex((step) => step.key === wanted);
    set(this.mark, { visibility: index < 0 ? "hidden" : "visible", x: this.first + index * this.width || 0, width: this.width || 0 });
    const step = this.steps[index];
    this.readout.textContent = step
      ? `${step.name}: ${duration(step.ms)}${step.open ? " so far" : ""}, ${plural(step.decode, "decode row")}, ` +
        (step.drafted ? `${plural(step.drafted, "drafted token")}${step.open ? "" : ` (${number(step.accepted)} right)`}, ` : "") +
        `${plural(step.prompt, "prompt token")} in ${plural(step.chunks, "chunk")}, idle before ${duration(step.gap)}`
      : " ";
  }
}

const CELLS = 240;

/** The KV pages as cells, by who has them. */
export class PagesChart {
  constructor(box, legend, readout, open) {
    this.legend = legend;
    this.readout = readout;
    this.node = el("div.cells", { role: "img" });
    this.cells = Array.from({ length: CELLS }, () => el("span.cell"));
    this.node.append(...this.cells);
    box.append(this.node);
    const partOf = (event) => this.parts?.[event.target.dataset?.part];
    this.node.addEventListener("pointerover", (event) => {
      const part = partOf(event);
      readout.textContent = part ? `${part.text}: ${plural(part.pages, "page")}` : " ";
    });
    this.node.addEventListener("pointerleave", () => (readout.textContent = " "));
    this.node.addEventListener("click", (event) => {
      const part = partOf(event);
      if (part?.row?.id) open(part.row.id);
    });
  }

  update({ pages, prefixes, running }) {
    const used = new Map(prefixes.map((prefix) => [prefix.prefix, prefix]));
    const top = [...running].sort((a, b) => b.own_pages - a.own_pages);
    const listed = top.reduce((sum, row) => sum + row.own_pages, 0);
    const pinned = Math.min(pages.pinned, pages.cached);
    const parts = [
      { kind: "shared", pages: pages.shared, text: `In use by several requests, or being copied${used.size ? `; ${plural(used.size, "prefix").replace("prefixs", "prefixes")}` : ""}` },
      ...top.map((row, i) => ({ kind: `owner c${i % 8}`, pages: row.own_pages, row, text: row.name || (row.id ? `Request ${row.id}` : "A request of another key") })),
      { kind: "owner other", pages: Math.max(0, pages.own - listed), text: "Further running requests" },
      { kind: "pinned", pages: pinned, text: "Cached and pinned" },
      { kind: "cached", pages: pages.cached - pinned, text: "Cached, for whoever asks for the same prefix" },
      { kind: "free", pages: pages.free, text: "Free" },
    ];
    this.parts = parts;
    let index = 0;
    let end = parts[0].pages;
    this.cells.forEach((cell, i) => {
      const page = ((i + 0.5) * pages.total) / CELLS;
      while (page > end && index < parts.length - 1) end += parts[(index += 1)].pages;
      const name = `cell ${parts[index].kind}`;
      if (cell.className !== name) cell.className = name;
      cell.dataset.part = index;
    });
    const total = Math.max(1, pages.total);
    const sums = [["owner c0", "running, by request", pages.own], ["shared", "shared prefixes", pages.shared],
      ["pinned", "pinned", pinned], ["cached", "cached", pages.cached - pinned], ["free", "free", pages.free]];
    this.legend.replaceChildren(
      ...sums.map(([kind, text, count]) => el("span", {}, el(`i.cell.${kind.replace(" ", ".")}`), `${text} ${percent(count / total)}`)),
      el("span.hint", {}, `${number(pages.total)} pages of ${pages.page_size} tokens`),
      pages.states ? el("span.hint", {}, `${plural(pages.states, "recurrent state")}: ${number(pages.states_running)} running, ${number(pages.states_cached)} cached`) : "");
    set(this.node, { "aria-label": sums.map(([, text, count]) => `${text} ${percent(count / total)}`).join(", ") });
  }
}
