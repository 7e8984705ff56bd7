"""The snippets of README.md, docs/ and the docstrings are tests."""

import contextlib
import tempfile

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

# What mkdocs loads, with packages that only the site needs.
collect_ignore_glob = ["docs/*.py"]


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


@pytest.hookimpl(optionalhook=True)  # without xdist there is nothing to schedule
def pytest_xdist_make_scheduler(config, log):
    """A document's snippets build on each other: they go to one worker, in order.

    Their marks would say so too, but xdist 3.8 on pytest 9.2 does not read them.
    """
    from xdist.scheduler import LoadScopeScheduling

    class DocumentScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path = nodeid.split("::")[0]
            return path if path.endswith(".md") else nodeid

    return DocumentScheduling(config, log)
