"""Formulas as MathML, which browsers draw themselves: no script, no font, nothing to load."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(
    r'<(span|div) class="arithmatex">\s*(\\\(|\\\[)(.*?)(\\\)|\\\])\s*</\1>', re.DOTALL
)


def mathml(match: re.Match[str]) -> str:
    """MathML of what arithmatex has marked."""
    tag, opening, formula, _ = match.groups()
    display = "block" if opening == "\\[" else "inline"
    return f'<{tag} class="formula">{convert(html.unescape(formula), display=display)}</{tag}>'


def on_page_content(content: str, **_: Any) -> str:
    """Replace every formula of a page."""
    return FORMULA.sub(mathml, content)
