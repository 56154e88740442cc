"""Markdown, formulas and code as the page shows them: what becomes of texts, also of hostile ones."""

import pytest

MARKDOWN = {
    "plain": ("one\ntwo", "<p>one\ntwo</p>"),
    "paragraphs": ("one\n\ntwo", "<p>one</p><p>two</p>"),
    "marks": (
        "**a** *b* _c_ ~~d~~ `e*f*`",
        "<p><strong>a</strong> <em>b</em> <em>c</em> <del>d</del> <code>e*f*</code></p>",
    ),
    "nested marks": ("**a *b* c**", "<p><strong>a <em>b</em> c</strong></p>"),
    "no marks": ("2 * 3 * 4, snake_case_name, a\\*b", "<p>2 * 3 * 4, snake_case_name, a*b</p>"),
    "heading": ("## A *b* ##\ntext", "<h3>A <em>b</em></h3><p>text</p>"),
    "headings in order": ("### a\n# b\n### c", "<h3>a</h3><h3>b</h3><h4>c</h4>"),
    "list": ("- a\n- b\n  - c\n\nend", "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><p>end</p>"),
    "numbers": ("3. a\n\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    "quote": ("> a\n> > b", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>"),
    "rule": ("a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"),
    "break": ("a  \nb", "<p>a<br>b</p>"),
    "link": (
        "[a](https://b.example/c_(d)) https://e.example/f.",
        '<p><a href="https://b.example/c_(d)" target="_blank" rel="noopener noreferrer nofollow">a</a> '
        '<a href="https://e.example/f" target="_blank" rel="noopener noreferrer nofollow">https://e.example/f</a>.</p>',
    ),
    "picture": (
        "![a](https://b.example/c.png)",
        '<p><a href="https://b.example/c.png" target="_blank" rel="noopener noreferrer nofollow">a</a></p>',
    ),
    "bad link": (
        "[a](javascript:alert(1)) [b](data:text/html,x)",
        "<p>[a](javascript:alert(1)) [b](data:text/html,x)</p>",
    ),
    "markup": (
        "<b>a</b> <img src=x onerror=alert(1)> &amp;",
        "<p>&lt;b&gt;a&lt;/b&gt; &lt;img src=x onerror=alert(1)&gt; &amp;amp;</p>",
    ),
    "table": (
        "| a | b |\n|---|--:|\n| 1 | `x` |",
        '<div class="table" tabindex="0"><table><thead><tr><th scope="col">a</th>'
        '<th data-align="end" scope="col">b</th></tr></thead><tbody><tr><td>1</td>'
        '<td data-align="end"><code>x</code></td></tr></tbody></table></div>',
    ),
    "code": (
        "```py\na = '<b>'\n\n# c\n```\nend",
        '<figure class="code"><figcaption><span>py</span>'
        '<button type="button" class="quiet">Copy</button></figcaption>'
        '<pre tabindex="0"><code>a = <span class="s">\'&lt;b&gt;\'</span>\n\n'
        '<span class="c"># c</span></code></pre></figure><p>end</p>',
    ),
    "formulas": (
        r"so \(a_1*2\) and $\frac{a}{b}$ but $5 *or* $6, \(open *too*",
        "<p>so <math><mrow><msub><mi>a</mi><mn>1</mn></msub><mo>∗</mo><mn>2</mn></mrow></math> and "
        "<math><mfrac><mrow><mi>a</mi></mrow><mrow><mi>b</mi></mrow></mfrac></math> but $5 <em>or</em> $6, "
        "(open <em>too</em></p>",
    ),
    "formulas on lines of their own": (
        "so\n\\[\n- a\n+ c\n\\]\nor\n\n$$\n12\n$$",
        '<p>so</p><div class="formula" tabindex="0"><math display="block"><mrow><mo>\u2212</mo>'
        "<mi>a</mi><mo>+</mo><mi>c</mi></mrow></math></div><p>or</p>"
        '<div class="formula" tabindex="0"><math display="block">'
        "<mn>12</mn></math></div>",
    ),
    "a formula that is not understood": (
        r"$\nonsense{<b>}$",
        '<p><code class="tex" title="\\nonsense is unknown">$\\nonsense{&lt;b&gt;}$</code></p>',
    ),
    "tasks": (
        "- [x] a\n- [ ] b\n- [c] d",
        '<ul><li><input type="checkbox" class="task" disabled="" checked="" aria-label="done">a</li>'
        '<li><input type="checkbox" class="task" disabled="" aria-label="to do">b</li><li>[c] d</li></ul>',
    ),
    "footnotes": (
        "a[^1]\n\n[^1]: *b*",
        '<p>a<sup><button type="button" class="note-mark" aria-label="Footnote 1">1</button></sup></p>'
        '<div class="footnote" tabindex="-1" data-note="1"><sup>1</sup><p><em>b</em></p></div>',
    ),
    "a formula that does not end": ("$$ a\n- b", "<p>$$ a</p><ul><li>b</li></ul>"),
    "open code": (
        "```\na",
        '<figure class="code"><figcaption><span>text</span>'
        '<button type="button" class="quiet">Copy</button></figcaption>'
        '<pre tabindex="0"><code>a</code></pre></figure>',
    ),
}
SHOW = """async ([text, step]) => {
    const { show } = await import(new URL("web/markdown.js", location));
    const place = document.createElement("div");
    const began = performance.now();
    for (let end = step; end < text.length; end += step) show(place, text.slice(0, end));
    show(place, text);
    return [place.outerHTML.slice(5, -6), performance.now() - began];
}"""


@pytest.mark.parametrize("name", MARKDOWN)
def test_markdown(blank, name):
    text, html = MARKDOWN[name]
    assert blank.evaluate(SHOW, [text, 10**9])[0] == html
    assert blank.evaluate(SHOW, [text, 1])[0] == html, "letter by letter it becomes the same"


@pytest.mark.parametrize(
    "piece",
    [
        "*a ",
        "**a ",
        "[",
        "![](",
        "`",
        "_a ",
        "> ",
        "- ",
        "| a ",
        "  ",
        "\\",
        "~~x",
        "<a>",
        "http://",
        "\\(",
        "\\[\n",
        "$",
        "$$\n",
        "$a ",
        "```\n",
        "1. ",
        "[^a",
        "[^a]: ",
        "- [x] ",
        "$\\frac{",
        "\\(\\left(",
        "$$\\begin{matrix}",
    ],
)
def test_no_text_is_slow(blank, piece):
    text = piece * (20_000 // len(piece))
    _, spent_ms = blank.evaluate(SHOW, [text, 10**9])
    assert spent_ms < 3000


CODE = """async ([text, language]) => {
    const { coloured } = await import(new URL("web/highlight.js", location));
    const began = performance.now();
    const place = document.createElement("div");
    place.append(...coloured(text, language));
    const kinds = [...place.children].map((node) => [node.className, node.textContent]);
    return [place.textContent, kinds, performance.now() - began];
}"""


@pytest.mark.parametrize(
    ("language", "text", "kinds"),
    [
        ("py", 'if f("a#b"): # c', ["k if", "f f", 's "a#b"', "c # c"]),
        ("js", "let x = `a\n${1}` /* c */ + 0x1F", ["k let", "s `a\n${1}`", "c /* c */", "n 0x1F"]),
        ("sql", "SELECT 'it' -- x", ["k SELECT", "s 'it'", "c -- x"]),
        ("html", "<b id='x'>y</b>", ["k <b", "s 'x'", "k >", "k </b", "k >"]),
        ("diff", "+a\n-b\n c", ["s +a\n", "k -b\n"]),
        ("nothing", "if 1", []),
    ],
)
def test_code_is_coloured(blank, language, text, kinds):
    shown, found, _ = blank.evaluate(CODE, [text, language])
    assert (shown, [" ".join(kind) for kind in found]) == (text, kinds)


PIECES = ('"', "'''", "/*", "<!--", "a", "1", "`", "\\", '"\\', "`\\", "0x", "--", "é")


@pytest.mark.matrix
@pytest.mark.parametrize("language", ["py", "js", "html"])
def test_no_code_is_slow(blank, language):
    for piece in PIECES:
        text = piece * (50_000 // len(piece))
        shown, _, spent_ms = blank.evaluate(CODE, [text, language])
        assert shown == text
        assert spent_ms < 1500, piece


FORMULAS = [
    r"\sum_{n=1}^{N} \frac{1}{n^2} \to \frac{\pi^2}{6}",
    r"\left( \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} \right)^{-1}",
    r"f(x) = \begin{cases} x & \text{if } x > 0 \\ 0 & \text{otherwise} \end{cases}",
    r"\begin{aligned} a &= b \\[2pt] &= c \end{aligned}",
    r"\hat{\mathbf{y}} = \operatorname{softmax}(W\vec{x}) \in \mathbb{R}^n, \sqrt[3]{2}, \binom{n}{k}",
    r"\underbrace{a+b}_{\text{sum}} \xrightarrow{f} f''(x) \quad \left. \frac{df}{dx} \right|_{x=0}",
    r"\int\limits_0^1 x\,dx \bmod 7, \not= , \boxed{E = mc^2} \tag{1}",
    r"\lim_{x \to 0^+} \max\{a, b\} \le \|v\|_2 \cdot \lfloor x \rfloor \ldots",
]


@pytest.mark.parametrize("tex", FORMULAS)
def test_what_models_write_is_set(blank, tex):
    html, _ = blank.evaluate(SHOW, [f"$${tex}$$", 10**9])
    assert html.startswith('<div class="formula" tabindex="0"><math'), html
    broken, _ = blank.evaluate(SHOW, [f"$${tex}{{$$", 10**9])
    assert 'class="tex"' in broken, "what is wrong is shown as it was written"


HOSTILE = [
    "<img src=x onerror=window.hit=1>",
    "[a](javascript:window.hit=1)",
    "```<img src=x onerror=window.hit=1>\n<script>window.hit=1</script>\n```",
    "```html\n<img src=x onerror=window.hit=1>\n```",
    r"$\text{<img src=x onerror=window.hit=1>}$",
    r"$\href{javascript:window.hit=1}{x}$",
    "[^<img src=x onerror=window.hit=1>]: a",
    "| <svg onload=window.hit=1> | b |\n|---|---|\n| [x](data:text/html,x) | c |",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_in_an_answer_runs(blank, text):
    found = blank.evaluate(
        """async (text) => {
            const { show } = await import(new URL("web/markdown.js", location));
            const place = document.createElement("div");
            document.body.append(place);
            show(place, text);
            const links = [...place.querySelectorAll("a, [href]")].map((link) => link.outerHTML);
            return [...links, ...place.querySelectorAll("img, script, svg, iframe")].map(String);
        }""",
        text,
    )
    assert found == []
    assert blank.evaluate("window.hit") is None
