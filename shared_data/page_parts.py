"""The pieces that a corpus's page is made of: style, tiles, tables and charts, as plain HTML and SVG."""

from collections.abc import Sequence

PAGE = """<!doctype html>
<html lang=en>
<head>
<meta charset=utf-8>
<meta name=viewport content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --ink: #1c2127; --soft: #5c6670; --line: #dfe3e8; --paper: #fff; --card: #f6f7f9;
  --bar: #3b76b8; --rest: #d9dee4; --mark: #c2571a; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e6e9ed; --soft: #9aa4af; --line: #343b43; --paper: #15181c;
  --card: #1e2329; --bar: #6aa5e3; --rest: #39424c; --mark: #f0915a; }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; max-width: 72rem; padding: 1.5rem 1rem 4rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }}
h1 {{ font-size: 1.6rem; margin: 0 0 1rem; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.1rem; margin: 2.2rem 0 .1rem; }}
.note {{ color: var(--soft); margin: 0 0 .7rem; font-size: .88rem; }}
.tiles {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(10.5rem, 1fr)); gap: .7rem; margin: 0; }}
.tiles div {{ background: var(--card); border-radius: 8px; padding: .7rem .9rem; }}
.tiles dt {{ color: var(--soft); font-size: .82rem; }}
.tiles dd {{ margin: 0; font-size: 1.1rem; font-weight: 600; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; font-size: .9rem; }}
th {{ color: var(--soft); font-weight: 500; vertical-align: bottom; }}
th, td {{ padding: .35rem .6rem; border-bottom: 1px solid var(--line); text-align: right;
  font-variant-numeric: tabular-nums; white-space: nowrap; }}
th.text, td.text {{ text-align: left; }}
td.text:last-child {{ white-space: normal; min-width: 16rem; }}
svg {{ display: block; }}
td svg {{ width: 9rem; height: 1rem; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); gap: 1rem; }}
.charts figure {{ margin: 0; background: var(--card); border-radius: 8px; padding: .7rem .9rem; }}
.charts svg {{ width: 100%; height: auto; }}
figcaption {{ color: var(--soft); font-size: .85rem; }}
.bar {{ fill: var(--bar); }} .rest {{ fill: var(--rest); }} .mark {{ fill: var(--mark); }}
svg text {{ fill: var(--soft); font-size: 10px; }}
details {{ border: 1px solid var(--line); border-radius: 8px; margin: .5rem 0; padding: .5rem .9rem; }}
summary {{ cursor: pointer; }}
details figure {{ margin: .7rem 0; }}
pre {{ background: var(--card); border-radius: 6px; padding: .6rem .8rem; margin: .2rem 0 0; max-height: 16rem;
  overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere; font-size: .82rem; }}
</style>
</head>
<body>
<h1>{name}</h1>
{sections}
</body>
</html>
"""


def tiles(found: Sequence[tuple[str, str]]) -> str:
    """A row of figures with their names."""
    return (
        "<dl class=tiles>" + "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in found) + "</dl>"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int, last_is_text: bool = False) -> str:
    """A table; its first columns are text, the others numbers. It scrolls where the page is narrow."""

    def cells(tag: str, row: Sequence[str]) -> str:
        last = len(row) - 1 if last_is_text else -1
        is_text = [" class=text" if n < text_columns or n == last else "" for n in range(len(row))]
        return "".join(f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in zip(is_text, row, strict=True))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<div class=wide><table><thead><tr>{cells('th', head)}</tr></thead><tbody>{body}</tbody></table></div>"


def bar_with_target(share: float, target: float) -> str:
    """A bar and a mark, both in shares of the width."""
    return (
        '<svg viewBox="0 0 144 16" role=img preserveAspectRatio=none>'
        f'<rect class=bar y=3 height=10 rx=2 width="{140 * share:.1f}"/>'
        f'<rect class=mark y=0 height=16 width=2 x="{140 * target:.1f}"/></svg>'
    )


def drop_bar(kept: float) -> str:
    """A bar of what was kept, in a bar of all."""
    return (
        '<svg viewBox="0 0 144 16" role=img preserveAspectRatio=none><rect class=rest y=3 height=10 rx=2 width=144 />'
        f'<rect class=bar y=3 height=10 rx=2 width="{144 * kept:.1f}"/></svg>'
    )


def histogram(title: str, counts: Sequence[int], labels: Sequence[str]) -> str:
    """A histogram with its largest count written on it; every other label, so that they stay readable."""
    largest, step = max([*counts, 1]), 280 / len(counts)
    every = max(1, round(34 / step))
    bars = "".join(
        f'<rect class=bar x="{n * step + 1:.1f}" y="{100 - 90 * count / largest:.1f}" width="{step - 2:.1f}" '
        f'height="{90 * count / largest:.1f}"><title>{labels[n]} tokens and more: {count:,}</title></rect>'
        for n, count in enumerate(counts)
    )
    texts = "".join(
        f'<text x="{n * step + 1:.1f}" y=113>{label}</text>' for n, label in enumerate(labels) if n % every == 0
    )
    at = max(range(len(counts)), key=lambda n: counts[n])
    anchor = "end" if at > len(counts) / 2 else "start"
    most = f'<text x="{(at + (anchor == "end")) * step:.1f}" y=8 text-anchor={anchor}>{largest:,}</text>'
    caption = f"<figcaption>{title} · {sum(counts):,} documents</figcaption>"
    return f'<figure>{caption}<svg viewBox="0 0 280 118" role=img>{bars}{texts}{most}</svg></figure>'
