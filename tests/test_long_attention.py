"""Blocked and chunked attention give what the dense one gives."""

import keras
import numpy as np
import oracle
import pytest
from cases import numpy
from keras import ops

from keras_attn import (
    AlibiBias,
    MultiHeadAttention,
    RelativePositionBias,
    dot_product_attention,
)
from keras_attn.dot_product import attend, chunked

LENGTH = 150


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def some(*shape, share=0.7):
    return np.random.default_rng(5).random(shape) < share


PLACES = np.arange(LENGTH, dtype="int32")
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "padded": {"mask": some(2, 1, LENGTH)},
    "padded_causal": {"mask": some(2, 1, LENGTH, share=0.3), "is_causal": True},
    "nothing_seen": {"mask": some(2, 1, LENGTH) & (np.arange(2) == 0)[:, None, None]},
    "query_mask": {"query_mask": some(2, LENGTH)},
    "bias_of_keys": {"bias": normal(2, 4, 1, LENGTH)},
    "soft_cap": {"logit_soft_cap": 1.5},
    "sinks": {"sinks": normal(4), "mask": some(2, 1, LENGTH, share=0.1)},
    "alibi": {
        "position_bias": AlibiBias(4).attention_bias,
        "query_positions": PLACES,
        "key_positions": np.stack([PLACES, PLACES * 2]),
    },
}


def arrays(kv_heads=2):
    return (
        normal(2, 4, LENGTH, 3),
        normal(2, kv_heads, LENGTH, 3, seed=1),
        normal(2, kv_heads, LENGTH, 5, seed=2),
    )


@pytest.mark.parametrize("window", [5, (70, 0), (0, 3), (90, 20)], ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_blocked_is_dense(option, window):
    options = {**OPTIONS[option], "sliding_window": window}
    dense = dot_product_attention(*arrays(), implementation="dense", **options)
    found = dot_product_attention(*arrays(), implementation="blocked", **options)
    np.testing.assert_allclose(numpy(found), numpy(dense), rtol=1e-5, atol=1e-5)


OF_EVERY_QUERY = {
    "mask": {"mask": some(2, LENGTH, LENGTH, share=0.1)},
    "mask_of_heads": {"mask": some(1, 4, LENGTH, LENGTH), "is_causal": True},
    "bias": {"bias": normal(LENGTH, LENGTH)},
}


@pytest.fixture
def small_chunks(monkeypatch):
    """Two chunks and a part of one, of queries and of keys."""
    monkeypatch.setattr(chunked, "CHUNK", 64)


@pytest.mark.parametrize("window", [None, 70, (0, 3)], ids=str)
@pytest.mark.parametrize("option", [*OPTIONS, *OF_EVERY_QUERY])
def test_chunked_is_dense(option, window, small_chunks):
    options = {**OPTIONS, **OF_EVERY_QUERY}[option] | {"sliding_window": window}
    dense = dot_product_attention(*arrays(), implementation="dense", **options)
    found = dot_product_attention(*arrays(), implementation="chunked", **options)
    np.testing.assert_allclose(numpy(found), numpy(dense), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["blocked", "chunked"])
def test_the_formula_itself(implementation):
    inputs, mask = arrays(), some(2, 1, LENGTH)
    expected, _ = oracle.attention(*inputs, mask=mask, window=20, is_causal=True)
    found = dot_product_attention(
        *inputs,
        mask=mask,
        sliding_window=20,
        is_causal=True,
        implementation=implementation,
    )
    np.testing.assert_allclose(numpy(found), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [LENGTH, 20])
def test_chunked_takes_other_lengths_than_its_keys(rows, small_chunks):
    query, key, value = arrays()
    inputs = query[:, :, :rows], key[:, :, :100], value[:, :, :100]
    for options in ({}, {"is_causal": True}, {"sliding_window": 10}):
        dense = dot_product_attention(*inputs, implementation="dense", **options)
        found = dot_product_attention(*inputs, implementation="chunked", **options)
        np.testing.assert_allclose(numpy(found), numpy(dense), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["blocked", "chunked"])
def test_gradients_are_those_of_the_dense_form(implementation, gradients, small_chunks):
    mask = some(2, 1, LENGTH, share=0.2)

    def loss(implementation):
        def function(query, key, value, bias, sinks):
            output = dot_product_attention(
                query,
                key,
                value,
                bias=bias,
                sinks=sinks,
                mask=mask,
                sliding_window=20,
                implementation=implementation,
            )
            return ops.square(output)

        return gradients(function, *arrays(), normal(2, 4, 1, LENGTH), normal(4))

    for found, expected in zip(loss(implementation), loss("dense"), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", ["blocked", "chunked"])
def test_a_compiled_step_trains_the_table_of_a_position(implementation, small_chunks):
    """XLA differentiates a loop only where it knows its length."""
    x, tables, weights = normal(1, LENGTH, 4), {}, None
    for form in ("dense", implementation):
        inputs = keras.Input((LENGTH, 4))
        position = RelativePositionBias(2)
        attention = MultiHeadAttention(
            2, position=position, sliding_window=20, implementation=form
        )
        model = keras.Model(inputs, attention(inputs))
        weights = weights or model.get_weights()
        model.set_weights(weights)
        before = numpy(position.weights[0])
        jit = keras.backend.backend() != "torch"  # which would need a C++ compiler
        model.compile(keras.optimizers.SGD(10.0), "mse", jit_compile=jit)
        model.train_on_batch(x, x)
        tables[form] = numpy(position.weights[0]) - before
    assert np.abs(tables["dense"]).max() > 1e-3
    np.testing.assert_allclose(tables[implementation], tables["dense"], atol=1e-5)


@pytest.mark.parametrize("dtype", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("implementation", ["blocked", "chunked"])
def test_half_precision_stays_finite(implementation, dtype):
    layer = MultiHeadAttention(
        2, sliding_window=9, implementation=implementation, dtype=dtype
    )
    output = numpy(ops.cast(layer(100.0 * normal(2, LENGTH, 8)), "float32"))
    assert np.isfinite(output).all()


@pytest.mark.parametrize("implementation", ["blocked", "chunked", "dense"])
def test_a_layer_says_which(implementation):
    layer = MultiHeadAttention(2, sliding_window=9, implementation=implementation)
    plain = MultiHeadAttention(2, sliding_window=9, implementation="dense")
    x, mask = normal(2, LENGTH, 8), some(2, LENGTH)
    plain.build(x.shape)
    layer.build(x.shape)
    layer.set_weights(plain.get_weights())
    again = MultiHeadAttention.from_config(layer.get_config())
    assert again.implementation == implementation
    np.testing.assert_allclose(
        numpy(layer(x, query_mask=mask)),
        numpy(plain(x, query_mask=mask)),
        rtol=1e-5,
        atol=1e-5,
    )


def chosen(monkeypatch, query, **options):
    """Which implementation a call takes."""
    taken = []
    for name in attend.IMPLEMENTATIONS:
        function = getattr(attend, f"{name}_attention")

        def spy(*args, name=name, function=function):
            taken.append(name)
            return function(*args)

        monkeypatch.setattr(attend, f"{name}_attention", spy)
    dot_product_attention(query, query, query, **options)
    return taken[0]


def test_the_size_chooses(monkeypatch):
    short, middle = normal(1, 1, 50, 2), normal(1, 1, 400, 2)
    assert chosen(monkeypatch, short, sliding_window=9) == "dense"
    assert chosen(monkeypatch, middle, sliding_window=9) == "blocked"
    assert chosen(monkeypatch, middle, sliding_window=300) == "dense"
    bias = normal(400, 400)
    assert chosen(monkeypatch, middle, sliding_window=9, bias=bias) == "dense"
    assert chosen(monkeypatch, middle) == "dense"
    monkeypatch.setattr(attend, "MANY_SCORES", 400 * 400)
    assert chosen(monkeypatch, middle, logit_soft_cap=3.0) == "chunked"
    assert chosen(monkeypatch, middle, logit_soft_cap=3.0, bias=bias) == "chunked"
    plain = "dense" if keras.backend.backend() == "torch" else "chunked"
    assert chosen(monkeypatch, middle) == plain  # torch's kernel is as light


@pytest.mark.parametrize("implementation", ["blocked", "chunked"])
def test_a_layers_own_sinks(implementation, small_chunks):
    layer, plain = (
        MultiHeadAttention(2, sliding_window=9, use_sinks=True, implementation=form)
        for form in (implementation, "dense")
    )
    x = normal(2, LENGTH, 8)
    layer.build(x.shape)
    plain.build(x.shape)
    layer.sinks.assign([1.0, -2.0])
    plain.set_weights(layer.get_weights())
    np.testing.assert_allclose(numpy(layer(x)), numpy(plain(x)), rtol=1e-5, atol=1e-5)


REFUSED = {
    "window": ({"sliding_window": None}, "no sliding window"),
    "scores": ({"return_scores": True}, "scores are asked for"),
    "mask": ({"mask": some(LENGTH, LENGTH)}, "mask differs by query"),
    "bias": ({"bias": normal(LENGTH, LENGTH)}, "bias differs by query"),
}


@pytest.mark.parametrize(
    "reason, implementation",
    [*((reason, "blocked") for reason in REFUSED), ("scores", "chunked")],
)
def test_what_cannot_be_had_is_refused(reason, implementation):
    options, said = REFUSED[reason]
    options = {"sliding_window": 9, **options}
    with pytest.raises(ValueError, match=f"(?s){implementation}.*{said}"):
        dot_product_attention(*arrays(), implementation=implementation, **options)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match=r"(?s)implementation.*'fast'"):
        MultiHeadAttention(2, implementation="fast")
