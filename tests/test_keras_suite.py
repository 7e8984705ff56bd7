"""Keras' own tests of `MultiHeadAttention`, run with our class in its place.

The tests are read from the installed Keras, never copied: a new Keras brings its new
tests. What they cannot ask of our class is listed, by name and with the reason, in
`REFUSED`; each of those must fail, so that the list never grows stale.
"""

import functools
import importlib.util
import pathlib
import types

import keras
import numpy as np
import pytest
from keras import ops

import keras_attn

SUITE_FILE = "src/layers/attention/multi_head_attention_test.py"

FLOAT_MASK = (
    "hands over a float mask: ours refuses it, for an additive one would be read "
    "inverted; `test_mask_shapes` is the same test with a boolean mask"
)
PRIVATE = (
    "calls or overrides the private `_compute_attention`, which ours does not have: "
    "scores are made in `dot_product_attention` alone"
)

# The name of a test (without what tells its parameters apart) and why it cannot pass.
REFUSED = {
    "test_masking_with_different_shapes": (TypeError, FLOAT_MASK),
    "test_causal_only_skipped_for_subclass": (KeyError, PRIVATE),
    "test_compute_attention_combines_causal_and_explicit_mask": (
        AttributeError,
        PRIVATE + "; `test_causal_and_explicit_mask` asks the public function",
    ),
}
# Methods of the suite in Keras 3.15 that must pass; later versions may add to them.
PASSING = 46


@keras.saving.register_keras_serializable(package="tests")
class Renamed(keras_attn.MultiHeadAttention):
    """Our layer; its parts and settings also by the names that Keras' tests read."""

    _query_dense = property(lambda self: self.query)
    _key_dense = property(lambda self: self.key)
    _value_dense = property(lambda self: self.value)
    _gate_dense = property(lambda self: self.gate)
    _output_dense = property(lambda self: self.attention_output)
    _sliding_window = property(lambda self: self.sliding_window)
    _flash_attention = property(lambda self: self.flash_attention)


class Layers(types.ModuleType):
    """`keras.layers`, but for the layer under test."""

    MultiHeadAttention = Renamed

    def __getattr__(self, name):
        return getattr(keras.layers, name)


def load_suite():
    """The test file of the installed Keras as a module, looking at our layer."""
    path = pathlib.Path(keras.__file__).parent / SUITE_FILE
    spec = importlib.util.spec_from_file_location("keras_suite", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.layers = Layers("layers")
    return module


SUITE = load_suite()
TESTS = sorted(
    name for name in dir(SUITE.MultiHeadAttentionTest) if name.startswith("test_")
)


def refusal(test):
    """The name in `REFUSED` that covers this test, or `None`."""
    return next((name for name in REFUSED if test.startswith(name)), None)


@pytest.mark.filterwarnings("ignore:When providing `inputs` as a dict:UserWarning")
@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
class TestKerasSuite(SUITE.MultiHeadAttentionTest):
    @pytest.fixture(autouse=True)
    def leave_keras_as_it_was(self):
        """Keras' base class switches the filter off for good."""
        filtered = keras.config.is_traceback_filtering_enabled()
        yield
        if filtered:
            keras.config.enable_traceback_filtering()


def must_fail(test):
    """The test as one that fails with the error that `REFUSED` names."""
    method = getattr(SUITE.MultiHeadAttentionTest, test)
    error, reason = REFUSED[refusal(test)]

    @pytest.mark.xfail(raises=error, reason=reason, strict=True)
    @functools.wraps(method)
    def wrapped(self):
        method(self)

    return wrapped


for _test in filter(refusal, TESTS):
    setattr(TestKerasSuite, _test, must_fail(_test))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_tests_exist(name):
    assert [test for test in TESTS if test.startswith(name)]


def test_nothing_else_is_left_out():
    marks = {
        test: [
            mark.name
            for mark in getattr(getattr(TestKerasSuite, test), "pytestmark", ())
        ]
        for test in TESTS
    }
    assert [test for test in TESTS if "xfail" in marks[test]] == [
        *filter(refusal, TESTS)
    ]
    assert sum("xfail" not in names for names in marks.values()) >= PASSING


def test_it_is_ours_that_is_tested():
    assert issubclass(SUITE.layers.MultiHeadAttention, keras_attn.MultiHeadAttention)
    assert SUITE.layers.Embedding is keras.layers.Embedding
    assert TestKerasSuite.test_basics.__globals__ is vars(SUITE)
    assert not issubclass(
        keras.layers.MultiHeadAttention, keras_attn.MultiHeadAttention
    )


def test_mask_shapes():
    """`test_masking_with_different_shapes` with a boolean mask."""
    x = keras.random.uniform((2, 5, 8))
    mask = np.tril(np.ones((5, 5), bool))
    layer = keras_attn.MultiHeadAttention(num_heads=2, key_dim=4)
    by_pattern = layer(x, x, attention_mask=mask)
    by_row = layer(x, x, attention_mask=np.tile(mask, (2, 1, 1)))
    by_head = layer(x, x, attention_mask=np.tile(mask, (2, 2, 1, 1)))
    causal = layer(x, x, use_causal_mask=True)
    for output in (by_row, by_head, causal):
        np.testing.assert_allclose(
            ops.convert_to_numpy(output), ops.convert_to_numpy(by_pattern), atol=1e-6
        )


@pytest.mark.parametrize("return_scores", [False, True])
def test_causal_and_explicit_mask(return_scores):
    """`test_compute_attention_combines_causal_and_explicit_mask`, publicly."""
    query, key, value = (
        np.random.default_rng(seed).normal(size=(1, 2, 5, 4)).astype("float32")
        for seed in range(3)
    )
    extra = np.ones((1, 5, 5), bool)
    extra[:, 3, 1] = False
    both = keras_attn.dot_product_attention(
        query, key, value, mask=extra, is_causal=True, return_scores=return_scores
    )
    merged = keras_attn.dot_product_attention(
        query, key, value, mask=np.tril(extra), return_scores=return_scores
    )
    both, merged = (x[0] if return_scores else x for x in (both, merged))
    np.testing.assert_allclose(
        ops.convert_to_numpy(both), ops.convert_to_numpy(merged), atol=1e-6
    )
