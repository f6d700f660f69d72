"""Text of an HTML page: what a reader sees of its content, block by block.

selectolax with the lexbor engine parses as browsers do. Scripts, styles, forms and what the page marks as navigation
are left out; a page that marks its content (`main`, `article`) is taken at its word when that holds most of the text.
"""

import re
from typing import Any

from shared_data.errors import require_extra

_LEFT_OUT = (
    "script, style, noscript, template, svg, iframe, nav, header, footer, aside, form, button, select, "
    "[role=navigation], [role=search], [role=banner], [role=contentinfo], [hidden], [aria-hidden=true]"
)
_BLOCKS = (
    "address, article, blockquote, caption, dd, div, dl, dt, fieldset, figcaption, figure, h1, h2, h3, h4, h5, h6, hr, "
    "li, main, ol, p, section, table, tr, ul"
)
_BREAK, _PRE_SPACE, _PRE_LINE = "\ue000", "\ue001", "\ue002"
_CONTENT_SHARE = 0.5


def text_of_html(page: str) -> str:
    """The text of a page: a blank line between blocks, lines kept inside `pre`, white space folded elsewhere."""
    parser = require_extra("selectolax.lexbor", "data").LexborHTMLParser(page)
    body = parser.body
    if body is None:
        return ""
    for node in body.css(_LEFT_OUT):
        node.decompose()
    for node in body.css("pre, textarea"):
        lines = node.text().replace(" ", _PRE_SPACE).replace("\t", _PRE_SPACE * 4).strip("\n")
        node.replace_with(_BREAK + lines.replace("\n", _PRE_LINE) + _BREAK)
    for node in body.css("br"):
        node.replace_with(_PRE_LINE)
    for node in body.css("td, th"):
        node.insert_after(" ")
    for node in body.css(_BLOCKS):
        node.insert_before(_BREAK)
        node.insert_after(_BREAK)
    root = _content(body)
    blocks = (re.sub(rf" ?{_PRE_LINE} ?", "\n", " ".join(block.split())) for block in root.text().split(_BREAK))
    return "\n\n".join(block for block in blocks if block.strip(f" \n{_PRE_SPACE}")).replace(_PRE_SPACE, " ")


def _content(body: Any) -> Any:
    """The element that the page marks as its content, if most of the text is in it, else the body."""
    whole = len(body.text())
    marked = [node for node in body.css("main, article, [role=main]") if len(node.text()) > _CONTENT_SHARE * whole]
    return marked[0] if marked else body
