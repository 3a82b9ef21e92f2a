// Shows a model's Markdown. The parser says what is where in the text; the nodes are made here, with
// nothing but text in them: markup in the text stays text, images stay links, links lead to the web or
// to mail. A growing text costs little: blocks that have ended are kept, and so are ended items of lists
// and rows of tables.

import { copy, el } from "./dom.js";
import { GFM, parser } from "./lezer.js";
import { Source } from "./tokens.js";

const LONGEST = 10_000; // characters of a paragraph: emphasis and links of a longer one are not looked for
const DEEPEST = 24; // lists and quotes in one another; what is deeper is shown as it is written
const WIDEST = 50; // columns
const PROTOCOLS = ["http:", "https:", "mailto:"];
const ENTITIES = {
  amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©", reg: "®", hellip: "…", ndash: "–",
  mdash: "—", times: "×", divide: "÷", deg: "°", plusmn: "±", le: "≤", ge: "≥", ne: "≠", larr: "←", rarr: "→",
};
const WRAPPED = { Emphasis: "em", StrongEmphasis: "strong", Strikethrough: "del" };
const HIDDEN = /Mark$|^LinkTitle$|^LinkLabel$/;

// Hostile texts take time that grows with the square of a paragraph, or of the depth: both have an end.
const markdown = parser.configure([GFM, {
  parseInline: [{ name: "TooLong", before: "Escape", parse: (cx) => (cx.text.length > LONGEST ? cx.end : -1) }],
  parseBlock: [{
    name: "TooDeep",
    before: "IndentedCode",
    parse(cx, line) {
      if (cx.depth <= DEEPEST) return false;
      const from = cx.lineStart + line.pos;
      cx.nextLine();
      cx.addElement(cx.elt("Paragraph", from, cx.prevLineEnd()));
      return true;
    },
  }],
}]);

/** The blocks of a text that begins at a position of the whole text. */
function parse(text, base) {
  const { children } = markdown.parse(text);
  for (const left = [...children]; left.length; ) {
    const node = left.pop();
    node.from += base;
    node.to += base;
    for (const child of node.children) left.push(child);
  }
  return children;
}

/** Shows a growing text in a node. */
export class MarkdownView {
  #source = new Source();
  #ended = 0; // blocks that later text does not change
  #at = 0; // where the first block begins that it may change
  #links = new Map(); // by what they are called in the text: [name]: address
  #rule = []; // how the columns of the table at hand are aligned: :--, :-: or --:

  constructor(node) {
    this.node = node;
  }

  /**
   * @param tokens whose texts join to the whole text; or none.
   * @param live whether more of the text may come.
   */
  show(text, tokens = [], live = false) {
    if (!this.#source.grow(text, tokens)) this.#forget();
    let blocks = parse(text.slice(this.#at), this.#at);
    // A line that is not whole may yet belong to the block before it, or be the beginning of an address.
    const lastLine = text.lastIndexOf("\n") + 1;
    if (this.#learn(blocks, live ? lastLine : text.length + 1)) {
      this.#forget();
      blocks = parse(text, 0);
    }
    this.#fill(this.node, blocks, 0, this.#ended);
    const open = blocks.findLastIndex((block) => block.from < lastLine);
    if (open > 0) {
      this.#ended += open;
      this.#at = text.lastIndexOf("\n", blocks[open].from) + 1;
    }
  }

  #forget() {
    this.#ended = this.#at = 0;
    this.node.replaceChildren();
  }

  /** Take the addresses that blocks give names to; true if any is new. */
  #learn(blocks, end) {
    const before = this.#links.size;
    for (const { name, to, children } of blocks) {
      if (name !== "LinkReference" || to >= end) continue;
      const [label, url] = ["LinkLabel", "URL"].map((part) => this.#part(children, part));
      if (url && !this.#links.has(label.toLowerCase())) this.#links.set(label.toLowerCase(), url);
    }
    return this.#links.size > before;
  }

  #part(children, name) {
    const found = children.find((child) => child.name === name);
    return found && this.#source.text.slice(found.from, found.to);
  }

  /** Make the children of a parent, from the one on with that index; those that are still right stay. */
  #fill(parent, blocks, depth, first = 0) {
    const shown = blocks.filter(({ name }) => !/Mark$/.test(name) && name !== "TableDelimiter");
    shown.forEach((block, i) => {
      const old = parent.children[first + i];
      const { name, from, to } = old?.block ?? {};
      if (name === block.name && from === block.from) {
        if (to === block.to || old.grow?.(block)) {
          old.block = block;
          return;
        }
      }
      const made = this.#make(block, depth);
      made.block = block;
      if (old) old.replaceWith(made);
      else parent.append(made);
    });
    while (parent.children.length > first + shown.length) parent.lastChild.remove();
  }

  #make(block, depth) {
    const { name, from, to, children } = block;
    const inside = (node, into = node) => {
      const rule = this.#part(children, "TableDelimiter");
      node.grow = (later) => {
        if (this.#part(later.children, "TableDelimiter") !== rule) return false;
        this.#rule = rule?.match(/:?-+:?/g);
        this.#fill(into, later.children, depth + 1);
        return true;
      };
      node.grow(block);
      return node;
    };
    const inline = (node) => {
      this.#inline(node, block, from, to, depth);
      return node;
    };
    const heading = /^(?:ATX|Setext)Heading(\d)$/.exec(name);
    if (heading) return inline(el(`h${Math.min(6, 2 + Number(heading[1]))}`));
    switch (name) {
      case "Paragraph": {
        const node = inline(el("p"));
        let end = to;
        node.grow = (later) => {
          if (children.length || later.children.length || later.to < end) return false;
          this.#prose(node, end, later.to); // as long as it is plain text
          end = later.to;
          return true;
        };
        return node;
      }
      case "Task": return inline(el("p.task"));
      case "Blockquote": return inside(el("blockquote"));
      case "BulletList": return inside(el("ul"));
      case "OrderedList": return inside(el("ol", { start: Number.parseInt(this.#source.text.slice(from, from + 9), 10) }));
      case "ListItem": return inside(el("li"));
      case "FencedCode":
      case "CodeBlock": return this.#code(block);
      case "HorizontalRule": return el("hr");
      case "Table": {
        const body = el("tbody");
        return inside(el("div.scroll", { tabindex: 0 }, el("table", {}, body)), body);
      }
      case "TableHeader":
      case "TableRow": return this.#row(block, depth);
    }
    const node = el("p"); // markup, and names of addresses
    this.#source.put(node, from, to);
    return node;
  }

  #row({ name, from, to, children }, depth) {
    const tag = name === "TableHeader" ? "th" : "td";
    const cells = [];
    let column = -1;
    for (const cell of children) {
      if (cell.name === "TableDelimiter") column += cell.from > from || column < 0;
      else {
        column = Math.max(column, 0);
        while (cells.length <= column) {
          const rule = this.#rule[cells.length] ?? "";
          cells.push(el(rule.endsWith(":") ? `${tag}.${rule[0] === ":" ? "center" : "right"}` : tag));
        }
        if (cells.length === WIDEST) { // all that is left in one
          this.#source.put(cells.at(-1), cell.from, to);
          break;
        }
        this.#inline(cells[column], cell, cell.from, cell.to, depth);
      }
    }
    return el("tr", {}, ...cells);
  }

  /** A block of code; while it grows, only what is new is added. */
  #code(block) {
    const languageOf = ({ children }) => (this.#part(children, "CodeInfo") ?? "text").split(/\s/)[0];
    const language = languageOf(block);
    const code = el("code");
    const button = el("button.quiet", { type: "button", onclick: () => copy(code.textContent, button) }, "Copy");
    const node = el("div.code-block", {},
      el("div.row", {}, el("span.hint", {}, language), button),
      el("pre", { tabindex: 0, "aria-label": `Code: ${language}` }, code));
    const ends = []; // of the parts that are shown
    node.grow = (later) => {
      const parts = later.children.filter(({ name }) => name === "CodeText");
      // The end of the last line is no part of them.
      const fenced = later.name === "FencedCode";
      const stops = parts.map(({ to }, i) => to + (fenced && i === parts.length - 1 && this.#source.text[to] === "\n"));
      if (languageOf(later) !== language || ends.some((end, i) => !(end <= stops[i]))) return false;
      parts.forEach(({ from }, i) => {
        this.#source.put(code, Math.max(from, ends[i] ?? 0), stops[i]);
        ends[i] = stops[i];
      });
      return true;
    };
    node.grow(block);
    return node;
  }

  // -- in a paragraph -----------------------------------------------------------------------------

  #inline(node, { children }, from, to, depth) {
    let at = from;
    for (const child of children) {
      this.#prose(node, at, child.from);
      this.#piece(node, child, depth + 1);
      at = child.to;
      if (/^(QuoteMark|HeaderMark|HardBreak)$/.test(child.name)) while (at < to && /[ \t]/.test(this.#source.text[at])) at++;
    }
    this.#prose(node, at, to);
  }

  /** Text as it is; but lines begin at the left. */
  #prose(node, from, to) {
    const { text } = this.#source;
    for (let at = from; at < to; ) {
      const end = text.indexOf("\n", at) + 1 || to;
      this.#source.put(node, at, Math.min(end, to));
      at = end;
      while (at < to && /[ \t]/.test(text[at])) at++;
    }
  }

  #piece(node, piece, depth) {
    const { name, from, to } = piece;
    const written = this.#source.text.slice(from, to);
    if (HIDDEN.test(name)) return;
    if (depth > 2 * DEEPEST) this.#source.put(node, from, to);
    else if (WRAPPED[name]) {
      const inner = el(WRAPPED[name]);
      this.#inline(inner, piece, from, to, depth);
      node.append(inner);
    } else if (name === "InlineCode") this.#inlineCode(node, piece);
    else if (["Link", "Image", "Autolink", "URL"].includes(name)) this.#link(node, piece, written, depth);
    else if (name === "Escape") this.#source.put(node, from + 1, to);
    else if (name === "Entity") this.#source.put(node, from, to, entity(written));
    else if (name === "HardBreak" || /^<br\s*\/?>$/i.test(written)) node.append(el("br"));
    else if (name === "TaskMarker") {
      const done = written !== "[ ]";
      node.append(el("span", { role: "img", "aria-label": done ? "done" : "to do" }, done ? "☑" : "☐"));
    } else this.#source.put(node, from, to);
  }

  #inlineCode(node, { children, from, to }) {
    const { text } = this.#source;
    let [start, end] = [children[0].to, children.at(-1).from];
    const padded = text[start] === " " && text[end - 1] === " " && text.slice(start, end).trim();
    if (padded) [start, end] = [start + 1, end - 1];
    const code = el("code");
    this.#source.put(code, start, end);
    node.append(code);
  }

  #link(node, piece, written, depth) {
    const { name, from, to, children } = piece;
    const label = this.#part(children, "LinkLabel") ?? written;
    const named = this.#links.get(label.toLowerCase()) ?? this.#links.get(written.slice(written.indexOf("[")).toLowerCase());
    const address = name === "URL" ? written : this.#part(children, "URL") ?? named;
    const href = safe(address, name);
    if (!href) {
      this.#source.put(node, from, to);
      return;
    }
    const a = el("a", { href, title: href, target: "_blank", rel: "noopener noreferrer" });
    if (name === "URL") this.#source.put(a, from, to);
    else if (name === "Autolink") this.#source.put(a, from + 1, to - 1);
    else {
      // The text is between the first two marks.
      const [open, close] = children.filter((child) => child.name === "LinkMark");
      const inner = children.filter((child) => child.from >= open.to && child.to <= close.from);
      this.#inline(a, { children: inner }, open.to, close.from, depth);
      if (name === "Image") a.prepend("Image: ");
      if (!a.textContent.trim()) a.append(href);
    }
    node.append(a);
  }
}

/** An address that a link may lead to; null for any other. */
function safe(written, name) {
  if (!written) return null;
  let address = written.replace(/^<(.*)>$/s, "$1").replace(/\\([!-/:-@[-`{-~])/g, "$1").replace(/&#?\w+;/g, entity);
  if (name === "URL" || name === "Autolink") {
    if (/^www\./i.test(address)) address = `https:${address}`;
    else if (/^[^:/]+@/.test(address)) address = `mailto:${address}`;
  }
  const url = URL.parse?.(address) ?? null;
  return url && PROTOCOLS.includes(url.protocol) ? url.href : null;
}

function entity(written) {
  const [, hex, decimal, name] = /^&(?:#[xX]([\da-fA-F]{1,6})|#(\d{1,7})|(\w+));$/.exec(written) ?? [];
  if (name !== undefined) return Object.hasOwn(ENTITIES, name) ? ENTITIES[name] : written;
  const code = hex === undefined ? Number.parseInt(decimal, 10) : Number.parseInt(hex, 16);
  return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : "\ufffd";
}
