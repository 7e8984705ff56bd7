"""The snippets of README.md, docs/ and the docstrings are tests."""

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


@pytest.fixture(autouse=True, scope="session")
def names_for_docstrings(doctest_namespace):
    """What a reader of the docstrings has imported."""
    import keras
    import numpy as np

    import keras_attn

    public = {name: getattr(keras_attn, name) for name in keras_attn.__all__}
    doctest_namespace.update(public, keras=keras, keras_attn=keras_attn, np=np)


def pytest_collection_modifyitems(items):
    """Keep a document's snippets, which build on each other, on one worker."""
    for item in items:
        if item.path.suffix == ".md":
            item.add_marker(pytest.mark.xdist_group(item.path.name))
