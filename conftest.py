"""Runs the Python snippets of README.md and docs/ as tests, a document at a time."""

import contextlib
import tempfile

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser


def enter_scratch_folder(namespace):
    """Snippets write `model.tflite` and the like: not into the checkout."""
    stack = contextlib.ExitStack()
    scratch = stack.enter_context(tempfile.TemporaryDirectory())
    stack.enter_context(contextlib.chdir(scratch))
    namespace["_scratch"] = stack


def leave_scratch_folder(namespace):
    namespace.pop("_scratch").close()


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["README.md", "docs/*.md"],
    setup=enter_scratch_folder,
    teardown=leave_scratch_folder,
).pytest()


def pytest_collection_modifyitems(items):
    """Keep a document's snippets, which build on each other, on one worker."""
    for item in items:
        if item.path.suffix == ".md":
            item.add_marker(pytest.mark.xdist_group(item.path.name))
