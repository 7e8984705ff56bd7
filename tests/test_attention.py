"""The whole attention layer against a float64 reference, on every path."""

import itertools

import keras
import numpy as np
import oracle
import pytest
from cases import Ride, numpy, padding, randomize, riding_mask
from keras import ops

from keras_attn import DecoderBlock, EncoderBlock, MultiHeadAttention

BATCH, QUERY, KEY = 3, 5, 7


def arrays(*shapes, seed=0):
    random = np.random.default_rng(seed)
    return [random.normal(size=shape).astype("float32") for shape in shapes]


def built(*inputs, call=None, **arguments):
    layer = MultiHeadAttention(**{"num_heads": 2, "key_dim": 3, **arguments})
    layer(*inputs, **call or {})
    randomize(layer)
    return layer


def close(actual, expected, tolerance=1e-5):
    np.testing.assert_allclose(numpy(actual), expected, rtol=tolerance, atol=tolerance)


def check(layer, inputs, expected, **call):
    """With scores and without, the reference's numbers."""
    output, scores = expected
    close(layer(*inputs, **call), output)
    both = layer(*inputs, return_attention_scores=True, **call)
    close(both[0], output)
    close(both[1], scores)


ARGUMENTS = {
    "plain": {},
    "no_bias": {"use_bias": False},
    "value_dim": {"value_dim": 4},
    "derived_key_dim": {"key_dim": None},
    "output_width": {"output_shape": 4},
    "output_shape": {"output_shape": (4, 3)},
    "gate": {"use_gate": True, "value_dim": 4},
    "grouped": {"num_heads": 6, "num_kv_heads": 2},
    "multi_query": {"num_heads": 3, "num_kv_heads": 1, "use_gate": True},
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_self_attention(name):
    (x,) = arrays((BATCH, QUERY, 6))
    layer = built(x, **ARGUMENTS[name])
    expected = oracle.multi_head_attention(oracle.weights_of(layer), x)
    check(layer, [x], expected)
    close(layer(x, x), expected[0])
    close(layer(x, x, x), expected[0])


@pytest.mark.parametrize("name", ARGUMENTS)
def test_cross_attention_of_other_widths(name):
    inputs = arrays((BATCH, QUERY, 6), (BATCH, KEY, 5), (BATCH, KEY, 2))
    layer = built(*inputs, **ARGUMENTS[name])
    weights = oracle.weights_of(layer)
    check(layer, inputs, oracle.multi_head_attention(weights, *inputs))
    layer = built(*inputs[:2], **ARGUMENTS[name])
    weights = oracle.weights_of(layer)
    check(layer, inputs[:2], oracle.multi_head_attention(weights, *inputs[:2]))


# Each option and what it means to the reference.
random = np.random.default_rng(5)
REAL_QUERY, REAL_KEY = padding(QUERY, side="left"), padding(KEY)
PATTERN = {
    2: random.random((QUERY, KEY)) < 0.7,
    3: random.random((BATCH, QUERY, KEY)) < 0.7,
    4: random.random((BATCH, 2, QUERY, KEY)) < 0.7,
}
BIAS = random.normal(size=(2, QUERY, KEY)).astype("float32")
OPTIONS = {
    "dropout": [0.0, 0.5],
    "sliding_window": [None, 3],
    "use_causal_mask": [False, True],
    "bias": [None, BIAS],
    "attention_mask": [None, 2, 3, 4],
    "padding": ["none", "argument", "riding"],
}


def pairwise(options):
    """Every pair of values of any two options occurs in one of these rows."""
    names = list(options)
    wanted = {
        frozenset({(a, i), (b, j)})
        for a, b in itertools.combinations(names, 2)
        for i in range(len(options[a]))
        for j in range(len(options[b]))
    }
    every = list(itertools.product(*(range(len(options[name])) for name in names)))
    rows = []
    while wanted:
        pairs, best = max(
            (
                len(
                    wanted
                    & {
                        frozenset(pair)
                        for pair in itertools.combinations(
                            zip(names, row, strict=True), 2
                        )
                    }
                ),
                row,
            )
            for row in every
        )
        assert pairs
        rows.append(best)
        wanted -= {
            frozenset(pair)
            for pair in itertools.combinations(zip(names, best, strict=True), 2)
        }
    return [
        {name: options[name][i] for name, i in zip(names, row, strict=True)}
        for row in rows
    ]


def describe(row):
    return "-".join(
        f"{name}={value}"
        for name, value in row.items()
        if not isinstance(value, np.ndarray)
    )


@pytest.mark.parametrize("row", pairwise(OPTIONS), ids=describe)
def test_every_pair_of_options(row):
    """Masks, bias, window, causality, dropout (at rest), padding: all at once."""
    inputs = arrays((BATCH, QUERY, 6), (BATCH, KEY, 5))
    layer = built(*inputs, dropout=row["dropout"], sliding_window=row["sliding_window"])
    pattern = PATTERN.get(row["attention_mask"])
    call = {"use_causal_mask": row["use_causal_mask"], "bias": row["bias"]}
    call["attention_mask"] = pattern
    seen = np.ones((BATCH, 1, QUERY, KEY), bool)
    if pattern is not None:
        seen = seen & (pattern[:, None] if pattern.ndim == 3 else pattern)
    if row["padding"] != "none":
        seen = seen & oracle.padding(REAL_QUERY, REAL_KEY)
    expected = oracle.multi_head_attention(
        oracle.weights_of(layer),
        *inputs,
        mask=seen,
        bias=row["bias"],
        is_causal=row["use_causal_mask"],
        window=row["sliding_window"],
    )
    if row["padding"] == "argument":
        call |= {"query_mask": REAL_QUERY, "value_mask": REAL_KEY}
    if row["padding"] == "riding":
        inputs = [Ride(REAL_QUERY)(inputs[0]), Ride(REAL_KEY)(inputs[1])]
    check(layer, inputs, expected, **call)


@pytest.mark.parametrize("window", [1, 2, (2, 0), (0, 3)])
def test_sliding_windows(window):
    (x,) = arrays((BATCH, KEY, 6))
    layer = built(x, sliding_window=window)
    weights = oracle.weights_of(layer)
    check(layer, [x], oracle.multi_head_attention(weights, x, window=window))


AXES = [(1,), (2,), (1, 2), (-2,), (2, 1), None]


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_attention_axes(axes):
    """Attention over some axes, the others a batch; cross, with a mask a pair."""
    keys = {(1,): (7, 3), (2,): (2, 7), (-2,): (2, 7)}.get(axes, (7, 5))
    query, value = arrays((BATCH, 2, 3, 6), (BATCH, *keys, 5))
    layer = built(query, value, attention_axes=axes)
    weights = oracle.weights_of(layer)
    check(
        layer,
        [query, value],
        oracle.multi_head_attention(weights, query, value, attention_axes=axes),
    )
    run = (1, 2) if axes is None else tuple(axis % 4 for axis in axes)
    others = [axis for axis in range(3) if axis not in run]
    full = (
        *(query.shape[axis] for axis in others),
        2,
        *(query.shape[axis] for axis in run),
        *(value.shape[axis] for axis in run),
    )
    mask = np.random.default_rng(2).random(full) < 0.6
    expected = oracle.multi_head_attention(
        weights, query, value, attention_axes=axes, mask=mask
    )
    check(layer, [query, value], expected, attention_mask=mask)
    no_heads = mask[(slice(None),) * len(others) + (0,)]
    expected = oracle.multi_head_attention(
        weights,
        query,
        value,
        attention_axes=axes,
        mask=np.expand_dims(no_heads, len(others)),
    )
    check(layer, [query, value], expected, attention_mask=no_heads)


@pytest.mark.parametrize("axes", [(1,), (2,), None], ids=str)
@pytest.mark.parametrize("way", ["argument", "riding"])
def test_padding_on_a_grid(axes, way):
    (x,) = arrays((BATCH, 3, 5, 6))
    real = np.random.default_rng(2).random((BATCH, 3, 5)) < 0.7
    layer = built(x, attention_axes=axes)
    if axes == (1,):
        mask = np.einsum("bqi,bki->biqk", real, real)[:, :, None]
    elif axes == (2,):
        mask = np.einsum("biq,bik->biqk", real, real)[:, :, None]
    else:
        mask = np.einsum("bqr,bks->bqrks", real, real)[:, None]
    expected = oracle.multi_head_attention(
        oracle.weights_of(layer), x, attention_axes=axes, mask=mask
    )
    if way == "argument":
        check(layer, [x], expected, query_mask=real, value_mask=real)
    else:
        check(layer, [Ride(real)(x)], expected)


def test_a_query_that_sees_nothing_gives_exactly_zero(gradients):
    inputs = arrays((BATCH, QUERY, 6), (BATCH, KEY, 5))
    real = np.ones((BATCH, KEY), bool)
    real[1] = False
    for options in ({}, {"dropout": 0.5, "seed": 1}, {"sliding_window": 9}):
        layer = built(*inputs, use_bias=False, **options)
        for scores, training in itertools.product([False, True], repeat=2):
            output = layer(
                *inputs,
                value_mask=real,
                return_attention_scores=scores,
                training=training,
            )
            output, weights = output if scores else (output, None)
            assert (numpy(output)[1] == 0).all()
            assert (numpy(output)[0] != 0).any()
            if scores:
                assert (numpy(weights)[1] == 0).all()

        def loss(query, value, layer=layer):
            return ops.square(layer(query, value, value_mask=real, training=True))

        for gradient in gradients(loss, *inputs):
            assert np.isfinite(gradient).all()
            assert (gradient[1] == 0).all()
            assert (gradient[0] != 0).any()


def test_the_mask_given_for_self_attention_hides_the_keys_too():
    """With `value` left out, query and value are one tensor, with one mask."""
    (x,) = arrays((BATCH, QUERY, 6))
    layer, real = built(x), padding(QUERY)
    expected = oracle.multi_head_attention(
        oracle.weights_of(layer), x, mask=oracle.padding(real, real)
    )
    check(layer, [x], expected, query_mask=real)


def test_masks_of_query_value_and_key_are_all_obeyed():
    inputs = arrays((BATCH, QUERY, 6), (BATCH, KEY, 5), (BATCH, KEY, 2))
    layer = built(*inputs)
    random = np.random.default_rng(0)
    query, value, key = (
        random.random((BATCH, length)) < 0.7 for length in (QUERY, KEY, KEY)
    )
    expected = oracle.multi_head_attention(
        oracle.weights_of(layer), *inputs, mask=oracle.padding(query, value & key)
    )
    check(layer, inputs, expected, query_mask=query, value_mask=value, key_mask=key)
    ridden = [
        Ride(mask)(x) for x, mask in zip(inputs, (query, value, key), strict=True)
    ]
    check(layer, ridden, expected)
    check(layer, ridden, expected, bias=np.zeros((QUERY, KEY), "float32"))


def test_only_the_querys_mask_leaves():
    inputs = arrays((BATCH, QUERY, 6), (BATCH, KEY, 5))
    layer = built(*inputs)
    assert riding_mask(layer(inputs[0], Ride(REAL_KEY)(inputs[1]))) is None
    output, _ = layer(
        Ride(REAL_QUERY)(inputs[0]), inputs[1], return_attention_scores=True
    )
    np.testing.assert_array_equal(riding_mask(output), REAL_QUERY)


def test_dropout_drops_weights_and_keeps_the_mean():
    x, value = arrays((1, 1, 6), (1, 997, 6))
    layer = built(x, value, dropout=0.25, seed=1)
    rest, scores = layer(x, value, return_attention_scores=True, training=False)
    first = layer(x, value, training=True)
    assert np.abs(numpy(first) - numpy(layer(x, value, training=True))).max() > 1e-4
    outputs = [numpy(layer(x, value, training=True)) for _ in range(50)]
    np.testing.assert_allclose(np.mean(outputs, 0), numpy(rest), atol=0.1)
    _, again = layer(x, value, return_attention_scores=True, training=True)
    np.testing.assert_allclose(numpy(again), numpy(scores), atol=1e-6)


def test_flash_attention_forbidden_is_the_same_function():
    (x,) = arrays((BATCH, QUERY, 6))
    layer = built(x, flash_attention=False)
    check(layer, [x], oracle.multi_head_attention(oracle.weights_of(layer), x))


def test_a_regularizer_and_a_constraint_reach_the_kernels():
    (x,) = arrays((BATCH, QUERY, 6))
    layer = built(
        x,
        kernel_regularizer="l2",
        bias_regularizer="l2",
        activity_regularizer="l1",
        kernel_constraint="non_neg",
    )
    layer(x)
    assert len(layer.losses) >= 8 + 1
    kernels = [w for w in layer.trainable_weights if w.path.endswith("kernel")]
    assert len(kernels) == 4 and all(w.constraint is not None for w in kernels)


BAD_ARGUMENTS = [
    ({"num_heads": 0}, "num_heads=0"),
    ({"num_heads": -2}, "num_heads=-2"),
    ({"num_heads": 2.5}, "num_heads=2.5"),
    ({"key_dim": 0}, "key_dim=0"),
    ({"value_dim": -1}, "value_dim=-1"),
    ({"num_kv_heads": 0}, "num_kv_heads=0"),
    ({"num_heads": 6, "num_kv_heads": 4}, "divide.*num_heads=6, num_kv_heads=4"),
    ({"dropout": 1.0}, r"\[0, 1\).*dropout=1.0"),
    ({"dropout": -0.1}, r"\[0, 1\).*dropout=-0.1"),
    ({"output_shape": 0}, "positive.*output_shape=0"),
    ({"output_shape": "wide"}, "positive.*output_shape=wide"),
    ({"attention_axes": 1.5}, "int, list, or tuple.*attention_axes=1.5"),
    ({"sliding_window": 0}, "positive.*sliding_window=0"),
    ({"sliding_window": (1, -1)}, r"sliding_window=\(1, -1\)"),
    ({"flash_attention": True, "dropout": 0.5}, "dropout=0.5, flash_attention=True"),
]


@pytest.mark.parametrize("arguments, said", BAD_ARGUMENTS, ids=str)
def test_a_bad_argument_is_refused_at_once(arguments, said):
    with pytest.raises(ValueError, match=f"(?s).*{said}"):
        MultiHeadAttention(**{"num_heads": 2, "key_dim": 3, **arguments})


BAD_SHAPES = [
    ({"num_heads": 3, "key_dim": None}, [(2, 5, 8)], r"\(2, 5, 8\), num_heads=3"),
    ({}, [(2, 5, 6), (2, 7, 6), (2, 11, 6)], r"\(2, 7, 6\).*\(2, 11, 6\)"),
    ({}, [(2, 6)], r"rank.*\(2, 6\)"),
    ({}, [(2, 5, 6), (2, 3, 5, 6)], r"rank.*\(2, 5, 6\).*\(2, 3, 5, 6\)"),
    ({"attention_axes": (3,)}, [(2, 5, 5, 6)], r"between.*\(3,\)"),
    ({"attention_axes": (0,)}, [(2, 5, 5, 6)], r"between.*\(0,\)"),
]


@pytest.mark.parametrize("arguments, shapes, said", BAD_SHAPES, ids=str)
@pytest.mark.parametrize("symbolic", [False, True])
def test_a_bad_shape_is_refused(arguments, shapes, said, symbolic):
    layer = MultiHeadAttention(**{"num_heads": 2, "key_dim": 3, **arguments})
    make = keras.KerasTensor if symbolic else np.ones
    with pytest.raises(ValueError, match=f"(?s).*{said}"):
        layer(*[make(shape, dtype="float32") for shape in shapes])


BAD_MASKS = [
    ({"query_mask": (BATCH, KEY)}, r"query_mask.*\(3, 5\).*\(3, 7\)"),
    ({"query_mask": (BATCH, QUERY, 1)}, r"query_mask.*\(3, 5\).*\(3, 5, 1\)"),
    ({"value_mask": (BATCH, QUERY)}, r"value_mask.*\(3, 7\).*\(3, 5\)"),
    ({"key_mask": (2, KEY)}, r"key_mask.*\(3, 7\).*\(2, 7\)"),
    ({"attention_mask": (KEY,)}, r"\(query, key\).*\(7,\)"),
    ({"attention_mask": (QUERY, QUERY)}, r"query=\(?5.*key=\(?7.*\(5, 5\)"),
    ({"attention_mask": (2, QUERY, KEY)}, r"batch=\(?3.*\(2, 5, 7\)"),
    ({"attention_mask": (BATCH, 4, QUERY, KEY)}, r"heads=2.*\(3, 4, 5, 7\)"),
    ({"attention_mask": (BATCH, 1, 2, QUERY, KEY)}, r"\(3, 1, 2, 5, 7\)"),
]


@pytest.mark.parametrize("masks, said", BAD_MASKS, ids=str)
def test_a_mask_of_the_wrong_shape_is_refused(masks, said):
    inputs = arrays((BATCH, QUERY, 6), (BATCH, KEY, 5))
    layer = built(*inputs)
    masks = {name: np.ones(shape, bool) for name, shape in masks.items()}
    with pytest.raises(ValueError, match=f"(?s).*{said}"):
        layer(*inputs, **masks)


@pytest.mark.parametrize("name", ["attention_mask", "query_mask", "value_mask"])
def test_a_float_mask_is_refused(name):
    (x,) = arrays((BATCH, QUERY, 6))
    shape = (QUERY, QUERY) if name == "attention_mask" else (BATCH, QUERY)
    with pytest.raises(TypeError, match=rf"(?s)`{name}`.*boolean.*float32.*bias="):
        built(x)(x, x, **{name: np.zeros(shape, "float32")})


def test_a_padding_mask_is_never_read_as_a_pattern():
    """`(batch, key)` where batch and query length are equal: Keras guesses, we ask.

    Once, when the layer is built: a model whose last batch happens to be as large as
    its length must not fail there.
    """
    (x,) = arrays((QUERY, QUERY, 6))
    pattern = np.tril(np.ones((QUERY, QUERY), bool))
    for layer in (MultiHeadAttention(2), EncoderBlock(2, 11), DecoderBlock(2, 11)):
        with pytest.raises(ValueError, match="(?s)ambiguous.*value_mask"):
            layer(x, attention_mask=pattern)
    inputs = keras.Input((QUERY, 6))
    output = MultiHeadAttention(2)(inputs, attention_mask=pattern)
    model = keras.Model(inputs, output)
    close(model(x)[:2], numpy(model(x[:2])))


def test_a_bias_of_all_axes_is_folded_like_the_scores():
    x = np.random.default_rng(0).normal(size=(2, 3, 5, 6)).astype("float32")
    layer = built(x, attention_axes=2)
    bias = np.zeros((1, 3, 2, 5, 5), "float32")  # (batch, other, heads, query, key)
    bias[:, 1, :, :, 4] = -np.inf
    mask = np.ones((2, 3, 5, 5), bool)
    mask[:, 1, :, 4] = False
    close(layer(x, bias=bias), numpy(layer(x, attention_mask=mask)))
    with pytest.raises(ValueError, match=r"(?s)broadcast.*\(2, 3, 2, 5, 5\).*\(2, 5\)"):
        layer(x, bias=np.zeros((2, 5), "float32"))


BAD_SIZES = [
    ((2, 5, 6), (3, 5, 6), {}, "axis 0"),
    ((2, 3, 5, 6), (2, 4, 5, 6), {"attention_axes": 2}, "axis 1"),
    ((2, 5, None), (2, 5, None), {}, "must be known"),
]


@pytest.mark.parametrize("query, value, options, said", BAD_SIZES, ids=str)
def test_sizes_that_do_not_meet_are_refused_in_build(query, value, options, said):
    with pytest.raises(ValueError, match=f"(?s){said}.*{query[1]}.*{value[1]}"):
        MultiHeadAttention(2, 3, **options).build(query, value)


@pytest.mark.parametrize("axes", [(), (1, 1), (0,), (3,)])
def test_attention_axes_are_different_positions(axes):
    with pytest.raises(ValueError, match="attention_axes"):
        MultiHeadAttention(2, 3, attention_axes=axes).build((2, 3, 5, 6))


@pytest.mark.parametrize("window", [(1.5, 2), "12", True, (1,), 0, (-1, 2)])
def test_a_window_is_whole_numbers(window):
    with pytest.raises(ValueError, match="sliding_window"):
        MultiHeadAttention(2, 3, sliding_window=window)
