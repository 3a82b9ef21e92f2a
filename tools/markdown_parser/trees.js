// In place of @lezer/common and @lezer/highlight, whose trees are made for editors: they are balanced,
// packed, reused and coloured. Here a node is {name, from, to, children}, with positions in the text.

class Tree {
  constructor(type, children, positions, length) {
    Object.assign(this, { type, children, positions, length });
  }

  prop() {} // what editors remember of a node

  balance() {
    return this;
  }

  /** Of a list of [type, from, to, size], parents after their children; a size of -1 names a tree. */
  static build({ buffer, reused, nodeSet: { types }, topID, length }) {
    const top = new Tree(types[topID], [], [], length);
    const made = [top];
    const open = [{ tree: top, from: 0, begin: 0 }];
    for (let at = buffer.length - 4; at >= 0; at -= 4) {
      const [id, from, to, size] = buffer.slice(at, at + 4);
      while (open.at(-1).begin > at) open.pop();
      const parent = open.at(-1);
      const tree = size < 0 ? reused[id] : new Tree(types[id], [], [], to - from);
      parent.tree.children.push(tree);
      parent.tree.positions.push(from - parent.from);
      if (size <= 4) continue;
      made.push(tree);
      open.push({ tree, from, begin: at + 4 - size });
    }
    for (const { children, positions } of made) {
      children.reverse();
      positions.reverse();
    }
    return top;
  }
}

function nodes(tree) {
  const top = { name: tree.type.name, from: 0, to: tree.length, children: [] };
  const left = [[tree, top]];
  while (left.length) {
    const [{ children, positions }, node] = left.pop();
    children.forEach((child, i) => {
      const from = node.from + positions[i];
      node.children.push({ name: child.type.name, from, to: from + child.length, children: [] });
      left.push([child, node.children.at(-1)]);
    });
  }
  return top;
}

class Parser {
  parse(text) {
    const input = { length: text.length, chunk: (from) => text.slice(from), lineChunks: false };
    const parse = this.createParse(input, [], [{ from: 0, to: text.length }]);
    for (;;) {
      const tree = parse.advance();
      if (tree) return nodes(tree);
    }
  }
}

class NodeSet {
  constructor(types) {
    this.types = types;
  }

  extend() {
    return this;
  }
}

class Tag {}
const tags = new Proxy(() => {}, { get: () => tags });
const NodeProp = {};
const NodeType = { none: { name: "" }, define: ({ id, name }) => ({ id, name }) };
const styleTags = () => null;
const IterMode = null;
const parseMixed = null;
export { IterMode, NodeProp, NodeSet, NodeType, Parser, Tag, Tree, parseMixed, styleTags, tags };
