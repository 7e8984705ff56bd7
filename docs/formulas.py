"""Turns formulas into MathML while the site is built, so that pages need no script."""

import html
import re

from latex2mathml.converter import convert

FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<latex>.*?)\\[)\]]</(?P=tag)>',
    re.DOTALL,
)


def on_page_content(content, **kwargs):
    return FORMULA.sub(as_mathml, content)


def as_mathml(match):
    display = "block" if match["tag"] == "div" else "inline"
    return convert(html.unescape(match["latex"]), display=display)
