"""Lets griffe read what Keras' docstrings have and Google's do not."""

import re
import textwrap

import griffe

CALL_ARGUMENTS = re.compile(r"^Call arguments:$", re.MULTILINE)
TITLE = re.compile(r"^(Example|Glossary of shapes)s?:\s*?\n+", re.MULTILINE)
RETURNS = re.compile(r"^Returns:\n((?: {4}.*\n?|\n)+)", re.MULTILINE)
INDENTED = re.compile(r"^\*\*Example\*\*\n\n((?: {4}.*\n?|\n)+)", re.MULTILINE)
DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class KerasDocstrings(griffe.Extension):
    """`Call arguments:` becomes a section like `Args:`, an example a block of code."""

    def on_object(self, *, obj, **kwargs):
        if obj.docstring is not None:
            obj.docstring.value = rewrite(obj.docstring.value)


def rewrite(text):
    text = CALL_ARGUMENTS.sub("Other Args: Call arguments:", text)
    text = RETURNS.sub(lambda match: f"**Returns**\n\n{unindented(match[1])}\n\n", text)
    text = TITLE.sub(r"**\1**\n\n", text)
    text = INDENTED.sub(lambda match: example(match[1]), text)
    return DOCTEST.sub(r"```pycon\n\g<0>\n```", text)


def unindented(text):
    return textwrap.dedent(text).strip("\n")


def example(code):
    code = unindented(code)
    if not code.startswith(">>>"):
        code = f"```python\n{code}\n```"
    return f"**Example**\n\n{code}\n\n"
