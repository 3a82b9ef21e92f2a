"""How the page shows Markdown: what it makes of it, safely, and cheaply while it grows."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.support.server.browser import Tab

#: Shows a text, in one piece or growing, and gives back the node.
SHOW = """
const {MarkdownView} = await import('/page/markdown.js');
const shown = (texts, tokens = []) => {
    const view = new MarkdownView(document.createElement('div'));
    texts.forEach((text, i) => view.show(text, tokens[i] ?? [], i < texts.length - 1));
    return view.node;
};
"""


def run(page: Tab, script: str, value: Any = None) -> Any:
    """What a script returns; it has ``shown`` and ``value``."""
    return page.js(f"(async (value) => {{{SHOW}{script}}})({json.dumps(value)})")


def html(page: Tab, text: str) -> str:
    return str(run(page, "return shown([value]).innerHTML", text))


LINK = 'target="_blank" rel="noopener noreferrer"'
MADE = {
    "# One": "<h3>One</h3>",
    "Two\n---\n### Three #": "<h4>Two\n</h4><h5>Three </h5>",
    "a *b* __c__ ~~d~~ `e`": "<p>a <em>b</em> <strong>c</strong> <del>d</del> <code>e</code></p>",
    "one\ntwo  \nthree\\\n  four": "<p>one\ntwo<br>three<br>four</p>",
    "- a\n- b\n  - c": "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p></li></ul></li></ul>",
    "7. a\n8. b": '<ol start="7"><li><p>a</p></li><li><p>b</p></li></ol>',
    "> a\n> b\n\nc": "<blockquote><p>a\nb</p></blockquote><p>c</p>",
    "a\n\n***": "<p>a</p><hr>",
    r"\*a\* &lt;b&gt; &amp; &#97; &unknown;": "<p>*a* &lt;b&gt; &amp; a &amp;unknown;</p>",
    "`` ` `` ` a`": "<p><code>`</code> <code> a</code></p>",
    "[a *b*](https://x.org/?q=1&r 'title')": (
        f'<p><a href="https://x.org/?q=1&amp;r" title="https://x.org/?q=1&amp;r" {LINK}>'
        "a <em>b</em></a></p>"
    ),
    "www.x.org and a@b.org": (
        f'<p><a href="https://www.x.org/" title="https://www.x.org/" {LINK}>www.x.org</a> and '
        f'<a href="mailto:a@b.org" title="mailto:a@b.org" {LINK}>a@b.org</a></p>'
    ),
    "[a][X] [x]\n\n[x]: http://x.org": (
        f'<p><a href="http://x.org/" title="http://x.org/" {LINK}>a</a> '
        f'<a href="http://x.org/" title="http://x.org/" {LINK}>x</a></p>'
        f"<p>[x]: http://x.org</p>"
    ),
    "![A cat](https://x.org/cat.png)": (
        f'<p><a href="https://x.org/cat.png" title="https://x.org/cat.png" {LINK}>'
        "Image: A cat</a></p>"
    ),
    "| a | b |\n|--:|:-:|\n| 1 | `x` |\n|   | 2<br>3 |": (
        '<div class="scroll" tabindex="0"><table><tbody>'
        '<tr><th class="right">a</th><th class="center">b</th></tr>'
        '<tr><td class="right">1</td><td class="center"><code>x</code></td></tr>'
        '<tr><td class="right"></td><td class="center">2<br>3</td></tr></tbody></table></div>'
    ),
    "- [x] a\n- [ ] b": (
        '<ul><li><p class="task"><span role="img" aria-label="done">☑</span> a</p></li>'
        '<li><p class="task"><span role="img" aria-label="to do">☐</span> b</p></li></ul>'
    ),
}


@pytest.mark.parametrize("text", MADE)
def test_what_is_made(page: Tab, text: str) -> None:
    assert html(page, text) == MADE[text]


def test_code_is_as_it_was_written(page: Tab) -> None:
    code = "def f(x):\n    return '<b>' + x\n\n\n# `end` **of** it\n"
    for text in (f"```python title\n{code}```", f"~~~~python\n{code}~~~~", f"```python\n{code}"):
        script = "const n = shown([value]); return [n.querySelector('code').textContent,"
        script += " n.querySelector('.hint').textContent, n.querySelector('button').textContent]"
        assert run(page, script, text) == [code, "python", "Copy"]
    indented = "".join(f"   {line}" if line.strip() else line for line in code.splitlines(True))
    quoted = "".join(f"> {line}" for line in code.splitlines(True))
    for text in (f"1. a\n\n   ```\n{indented}   ```", f"> ```\n{quoted}> ```"):
        assert run(page, "return shown([value]).querySelector('code').textContent", text) == code


#: Nothing here may become more than text, or a link to the web or to mail.
ATTACKS = [
    "<script>window.owned = 1</script>",
    "<img src=x onerror=window.owned=1>",
    "<svg onload=window.owned=1><a xlink:href='javascript:window.owned=1'>x</a></svg>",
    "<div>\n<iframe srcdoc='<script>parent.owned=1</script>'></iframe>\n</div>",
    "<style>* { display: none }</style>\n\n<link rel=stylesheet href=//evil.example/x.css>",
    "<base href=//evil.example/>\n\n<form action=//evil.example><button>x</button></form>",
    "[x](javascript:window.owned=1)",
    "[x](<javascript:window.owned=1>)",
    "[x](JaVaScRiPt:window.owned=1)",
    "[x](java&#115;cript:window.owned=1) [x](&#106;avascript&colon;window.owned=1)",
    "[x](java\\script:window.owned=1) [x](\\javascript:window.owned=1)",
    "[x](<java\tscript:window.owned=1>) [x](< \x01javascript:window.owned=1>)",
    "[x](javascript&#58;window.owned=1) [x](javascript&#x3A;//%0Awindow.owned=1)",
    "[x](vbscript:x) [x](file:///etc/passwd) [x](blob:http://x/y) [x](about:blank) [x](ftp://x)",
    "[x](data:text/html,<script>window.owned=1</script>)",
    "[x](data:text/html;base64,PHNjcmlwdD53aW5kb3cub3duZWQ9MTwvc2NyaXB0Pg==)",
    "![x](javascript:window.owned=1) ![x](data:image/svg+xml,<svg/onload=window.owned=1>)",
    "![x](https://evil.example/track.png) [![x](https://evil.example/a.png)](https://evil.example)",
    "<javascript:window.owned=1> <data:text/html,x>",
    "[x][r] [r]\n\n[r]: javascript:window.owned=1",
    "[x][r]\n\n[r]: <data:text/html,x>",
    "[__proto__] [x][constructor] &__proto__; &constructor; &toString;",
    "[x](/v1/requests) [x](//evil.example) [x](#live) [x](?q) [x](page/main.js)",
    '[x](https://x.org "onmouseover=window.owned=1") [x](https://x.org/" onclick="owned=1)',
    "```<img src=x onerror=window.owned=1>\n<script>window.owned=1</script>\n```",
    '```" onload="window.owned=1\nx\n```',
    "`<script>window.owned=1</script>` **<img src=x onerror=window.owned=1>**",
    "| <img src=x onerror=owned=1> | [x](javascript:owned=1) |\n|-|-|\n| <script>x</script> | y |",
    "# <script>window.owned=1</script>\n\n- <svg onload=window.owned=1>\n\n> <iframe src=//x>",
    "<!-- <script> -->\n\n<?php x ?>\n\n<![CDATA[ <script> ]]>\n\n<!DOCTYPE html>",
    "</p></div></main><script>window.owned=1</script>",
    "\u202e[x](https://x.org)\u202c \u0000<script>\u0000",
]
ALLOWED = {
    "A", "BLOCKQUOTE", "BR", "BUTTON", "CODE", "DEL", "DIV", "EM", "H3", "H4", "H5", "H6", "HR",
    "LI", "OL", "P", "PRE", "SPAN", "STRONG", "TABLE", "TBODY", "TD", "TH", "TR", "UL",
}  # fmt: skip
ATTRIBUTES = {
    "aria-label", "class", "data-sure", "href", "rel", "role", "start", "tabindex", "target",
    "title", "type",
}  # fmt: skip


@pytest.mark.parametrize("with_tokens", [False, True])
def test_markup_stays_text_and_links_lead_to_the_web(page: Tab, with_tokens: bool) -> None:
    everything = [*ATTACKS, "\n\n".join(ATTACKS), *(f"> - {attack}" for attack in ATTACKS)]
    script = """
    const found = [];
    for (const text of value.texts) {
        const parts = value.withTokens ? [...text] : [];
        const tokens = parts.map((part) => ({text: part, logprob: -1, top: []}));
        const node = shown([text.slice(0, text.length / 2), text], [tokens.slice(0, 0), tokens]);
        document.getElementById('messages').append(node);
        for (const each of node.querySelectorAll('*')) {
            found.push(...each.getAttributeNames().map((name) => ['attribute', name]));
            found.push(['element', each.tagName]);
            if (each.href === undefined) continue;
            found.push(['protocol', new URL(each.href).protocol], ['rel', each.rel]);
        }
        for (const each of node.querySelectorAll('a, button')) if (!each.href) each.click();
        await new Promise((resolve) => setTimeout(resolve));
        node.remove();
    }
    return [...new Set(found.map(String)), String(window.owned)];
    """
    *found, owned = run(page, script, {"texts": everything, "withTokens": with_tokens})
    by_kind: dict[str, set[str]] = {}
    for line in found:
        kind, name = line.split(",", 1)
        by_kind.setdefault(kind, set()).add(name)
    assert owned == "undefined"
    assert by_kind["element"] <= ALLOWED
    assert by_kind["attribute"] <= ATTRIBUTES
    assert by_kind["protocol"] <= {"http:", "https:", "mailto:"}
    assert by_kind["rel"] == {"noopener noreferrer"}


def test_no_text_is_lost(page: Tab) -> None:
    for attack in ATTACKS[:6]:
        assert run(page, "return shown([value]).textContent.replaceAll('\\n', '')", attack) == (
            attack.replace("\n", "")
        )


#: Texts on which parsers of Markdown are known to take a time that grows with the square, or worse,
#: or to run out of stack.
HARD = {
    "stars": "*a",
    "strong": "a**b*c* ",
    "underscores": "_a",
    "brackets": "[",
    "links": "[a](",
    "pointed": "[a](<b",
    "images": "![[",
    "quotes": ">",
    "deep lists": "- ",
    "deep numbers": "1. ",
    "stars of lists": "* ",
    "tildes": "~~a",
    "spaces": "a" + " " * 300,
    "comments": "<!--",
    "tags": "<a ",
    "entities": "&a",
    "footnotes": "[^a]",
    "definitions": "[a]: b\n",
    "columns": "|-",
    "ticks": "a`b``c```",
    "mail": "a.b@",
    "emphasis": "***a** b* ",
}


def test_hard_texts_take_little_time_and_depth(page: Tab) -> None:
    script = """
    const node = shown([value]);
    document.getElementById('messages').append(node);
    let depth = 0;
    let level = [...node.children];
    for (; level.length; depth++) level = level.flatMap((each) => [...each.children]);
    node.offsetHeight;
    node.remove();
    return depth;
    """
    texts = {name: part * (60_000 // len(part)) for name, part in HARD.items()}
    texts["nested brackets"] = "[" * 20_000 + "a" + "](b)" * 20_000
    texts["nested emphasis"] = "*" * 4_500 + "a" + "*" * 4_500
    texts["nested lists"] = "\n".join("  " * i + "- a" for i in range(250))
    texts["wide table"] = "|a" * 20_000 + "|\n" + "|-" * 20_000 + "|\n" + "|b" * 20_000 + "|"
    page.call("Performance.enable")
    slow = {}
    for name, text in texts.items():
        before = seconds_used(page)
        depth = run(page, script, text)
        seconds = seconds_used(page) - before
        if seconds > 1.5 or depth > 80:  # measured: 0.35 s at most
            slow[name] = (seconds, depth)
    assert slow == {}


def seconds_used(page: Tab) -> float:
    """What the page's thread has run: what else the machine does is not in it."""
    metrics = page.call("Performance.getMetrics")["metrics"]
    return float(next(one["value"] for one in metrics if one["name"] == "ThreadTime"))


PIECES = [
    "# ", "## h\n", "- ", "* a", "1. ", "2) b\n", "> ", "```", "```js\n", "~~~\n", "\n", "\n\n",
    "  ", "    ", "\t", "|a|b|\n", "|-|:-:|\n", "| c | `d` |\n", "**", "*", "_", "`",
    "[a](http://x.y)", "[r]", "[r]: http://q.z\n", "[r]: ", "<b>", "</div>\n<div>", "text", "word ",
    "===\n", "---\n", "\\", "&amp;", "- [ ] ", "- [x] t\n", "www.x.y ", "![i](https://z/a.png)",
    "~~", "#", "|", "\r\n", "é😀", "<br>", "1",
]  # fmt: skip


def test_a_growing_text_is_shown_as_a_whole_one(page: Tab) -> None:
    chance = random.Random(7)
    texts = [
        [half for piece in chance.choices(PIECES, k=number) for half in (piece[:1], piece[1:])]
        for number in chance.choices(range(3, 25), k=150)
    ]
    script = """
    const twice = '</span><span class="token" data-sure="2">'; // a token may be in two spans
    const html = (node) => node.innerHTML.replaceAll(twice, '');
    const wrong = [];
    value.forEach((pieces, number) => {
        const texts = pieces.map((_, i) => pieces.slice(0, i + 1).join(''));
        const token = (text) => ({text, logprob: -1, top: []});
        const tokens = number % 2 ? texts.map((_, i) => pieces.slice(0, i + 1).map(token)) : [];
        const whole = shown(texts.slice(-1), tokens.slice(-1));
        if (html(shown(texts, tokens)) !== html(whole)) wrong.push(texts.at(-1));
    });
    return wrong;
    """
    assert run(page, script, texts) == []


LONG = {
    "paragraphs": "A paragraph with *some* `words`.\n\n",
    "code": "    return x + 1  # and so on\n",
    "list": "- item with **bold** words\n",
    "table": "| cell | `code` | 12 |\n",
}


@pytest.mark.parametrize("kind", LONG)
def test_a_growing_text_makes_each_node_about_once(page: Tab, kind: str) -> None:
    head = {"code": "```py\n", "table": "| a | b | c |\n|-|-|-|\n"}.get(kind, "")
    script = """
    let made = 0;
    const create = document.createElement;
    document.createElement = function (...all) { made++; return create.apply(this, all); };
    const pieces = value.part.match(/.{1,7}|\\n/gs);
    const tokens = [];
    const view = new MarkdownView(document.createElement('div'));
    let text = '';
    try {
        for (const piece of [value.head, ...Array(200).fill(pieces).flat()]) {
            text += piece;
            tokens.push({text: piece, logprob: -1, top: []});
            view.show(text, tokens, true);
        }
    } finally {
        document.createElement = create;
    }
    return made / view.node.querySelectorAll('*').length;
    """
    assert run(page, script, {"head": head, "part": LONG[kind]}) < 10
