"""Attention against a float64 reference that works one query at a time."""

import keras
import numpy as np
import oracle
import pytest
from cases import numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

from keras_attn import dot_product_attention, masks

BATCH, HEADS, QUERY, KEY, HEAD_DIM, VALUE_DIM = 2, 6, 5, 7, 3, 4


def arrays(kv_heads=HEADS, query=QUERY, key=KEY, deviation=1.0, seed=0):
    random = np.random.default_rng(seed)
    shapes = [
        (BATCH, HEADS, query, HEAD_DIM),
        (BATCH, kv_heads, key, HEAD_DIM),
        (BATCH, kv_heads, key, VALUE_DIM),
    ]
    return [
        (deviation * random.normal(size=shape)).astype("float32") for shape in shapes
    ]


def random_mask(*shape, seed=3):
    return np.random.default_rng(seed).random(shape) < 0.6


def random_bias(*shape, seed=4):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


PATHS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"is_causal": True},
    "mask_2": {"mask": random_mask(QUERY, KEY)},
    "mask_3": {"mask": random_mask(BATCH, QUERY, KEY)},
    "mask_4": {"mask": random_mask(BATCH, HEADS, QUERY, KEY)},
    "mask_shared_by_heads": {"mask": random_mask(BATCH, 1, 1, KEY)},
    "mask_causal": {"mask": random_mask(BATCH, 1, 1, KEY), "is_causal": True},
    "bias": {"bias": random_bias(BATCH, HEADS, QUERY, KEY)},
    "bias_of_heads": {"bias": random_bias(HEADS, QUERY, KEY)},
    "bias_2": {"bias": random_bias(QUERY, KEY)},
    "bias_mask": {
        "bias": random_bias(1, HEADS, QUERY, KEY),
        "mask": random_mask(BATCH, QUERY, KEY),
    },
    "bias_mask_causal": {
        "bias": random_bias(1, HEADS, QUERY, KEY),
        "mask": random_mask(BATCH, HEADS, QUERY, KEY),
        "is_causal": True,
    },
    "bias_causal": {"bias": random_bias(HEADS, QUERY, KEY), "is_causal": True},
    "soft_cap": {"logit_soft_cap": 1.5},
    "soft_cap_mask_bias": {
        "logit_soft_cap": 1.5,
        "mask": random_mask(BATCH, QUERY, KEY),
        "bias": random_bias(HEADS, QUERY, KEY),
    },
    "window": {"mask": numpy(masks.sliding_window_mask(QUERY, KEY, window=2))},
}


def reference(query, key, value, logit_soft_cap=None, **options):
    return oracle.attention(query, key, value, soft_cap=logit_soft_cap, **options)


def close(actual, expected, tolerance=1e-5):
    np.testing.assert_allclose(numpy(actual), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kv_heads", [HEADS, 2, 1])
@pytest.mark.parametrize("path", PATHS)
def test_every_path_is_the_formula(path, kv_heads):
    """Fused or explicit, with scores or without, dropout or not: the same numbers."""
    options, inputs = PATHS[path], arrays(kv_heads)
    output, weights = reference(*inputs, **options)
    close(dot_product_attention(*inputs, **options), output)
    close(dot_product_attention(*inputs, flash_attention=False, **options), output)
    close(dot_product_attention(*inputs, dropout=lambda x: x, **options), output)
    both = dot_product_attention(*inputs, return_scores=True, **options)
    close(both[0], output)
    close(both[1], weights)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    # Few sizes: JAX compiles for each. `kv_heads`, `queries`, `keys`, `dim`.
    sizes=st.sampled_from([(1, 1, 1, 1), (2, 1, 5, 3), (1, 4, 1, 2), (2, 4, 5, 3)]),
    groups=st.sampled_from([1, 3]),
    share=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    with_bias=st.booleans(),
    is_causal=st.booleans(),
    scores=st.booleans(),
)
def test_any_sizes(seed, sizes, groups, share, with_bias, is_causal, scores):
    random = np.random.default_rng(seed)
    kv_heads, queries, keys, dim = sizes
    heads = kv_heads * groups
    query, key, value = (
        random.normal(size=shape).astype("float32")
        for shape in [
            (2, heads, queries, dim),
            (2, kv_heads, keys, dim),
            (2, kv_heads, keys, 3),
        ]
    )
    mask = random.random((2, queries, keys)) < share
    options = {"is_causal": is_causal, "mask": mask}
    if with_bias:
        options["bias"] = random.normal(size=(heads, queries, keys)).astype("float32")
    expected, weights = oracle.attention(query, key, value, **options)
    output = dot_product_attention(query, key, value, return_scores=scores, **options)
    if scores:
        output, found = output
        close(found, weights)
    close(output, expected)


def test_a_sentence_attends_to_its_past():
    """ "<Begin> I have a cat": row i attends to 0..i and its weights sum to 1."""
    inputs = arrays(query=5, key=5)
    _, weights = dot_product_attention(*inputs, is_causal=True, return_scores=True)
    weights = numpy(weights)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
    seen = np.tril(np.ones((5, 5), bool))
    assert (weights[..., ~seen] == 0).all()
    assert (weights[..., seen] > 0).all()
    np.testing.assert_allclose(weights[..., 0, 0], 1, atol=1e-6)


def test_equal_keys_share_evenly():
    query, _, value = arrays()
    output = dot_product_attention(query, np.zeros((2, 6, 7, 3), "float32"), value)
    mean = value.mean(2, keepdims=True)
    np.testing.assert_allclose(numpy(output), np.repeat(mean, 5, 2), atol=1e-6)


BLIND = {
    "mask": {},
    "scores": {"return_scores": True},
    "bias": {"bias": random_bias(1, HEADS, QUERY, KEY)},
    "causal": {"is_causal": True},
    "dropout": {"dropout": lambda x: x},
    "explicit": {"flash_attention": False},
    "everything": {
        "bias": random_bias(1, HEADS, QUERY, KEY),
        "is_causal": True,
        "return_scores": True,
        "dropout": lambda x: x,
        "logit_soft_cap": 2.0,
    },
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("path", BLIND)
def test_a_query_that_sees_nothing_gives_exactly_zero(path, dtype, gradients):
    mask = np.ones((BATCH, 1, QUERY, KEY), bool)
    mask[0, :, 2] = mask[1] = False
    options = BLIND[path]
    inputs = [ops.cast(array, dtype) for array in arrays()]
    output = dot_product_attention(*inputs, mask=mask, **options)
    if options.get("return_scores"):
        output, weights = output
        weights = numpy(ops.cast(weights, "float32"))
        assert (weights[0, :, 2] == 0).all() and (weights[1] == 0).all()
        assert (weights[0, :, 3].sum(-1) > 0.9).all()
    output = numpy(ops.cast(output, "float32"))
    assert (output[0, :, 2] == 0).all() and (output[1] == 0).all()
    assert (output[0, :, 3] != 0).any()

    def loss(query, key, value):
        inputs = [ops.cast(x, dtype) for x in (query, key, value)]
        output = dot_product_attention(*inputs, mask=mask, **options)
        output = output[0] if options.get("return_scores") else output
        return ops.square(ops.cast(output, "float32"))

    found = gradients(loss, *arrays())
    for gradient in found:
        assert np.isfinite(gradient).all()
        assert (gradient[1] == 0).all()  # a batch row that is blind learns nothing
        assert (gradient[0] != 0).any()
    assert (found[0][0, :, 2] == 0).all()


def test_a_query_blind_by_causal_and_padding_together():
    """Left padding under a causal mask: the padded rows see nothing at all."""
    inputs = arrays(query=5, key=5)
    real = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], bool)
    for scores in (False, True):
        output = dot_product_attention(
            *inputs, mask=real[:, None, :], is_causal=True, return_scores=scores
        )
        output = numpy(output[0] if scores else output)
        assert (output[0, :, :2] == 0).all()
        assert (output[0, :, 2] != 0).any()


def test_content_under_the_mask_has_no_weight():
    query, key, value = arrays()
    mask = random_mask(KEY)[None, None, :]
    assert 0 < mask.sum() < KEY
    one = dot_product_attention(query, key, value, mask=mask)
    hidden = ~mask[0, 0]
    key[:, :, hidden], value[:, :, hidden] = 1e4, -1e4
    two = dot_product_attention(query, key, value, mask=mask)
    close(one, numpy(two), 1e-6)


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_large_inputs_stay_finite_in_half_precision(dtype, scores):
    inputs = [ops.cast(x, dtype) for x in arrays(deviation=100.0)]
    mask = random_mask(BATCH, QUERY, KEY)
    for options in ({}, {"mask": mask}, {"mask": mask, "bias": PATHS["bias"]["bias"]}):
        outputs = dot_product_attention(*inputs, return_scores=scores, **options)
        for output in outputs if scores else [outputs]:
            assert keras.backend.standardize_dtype(output.dtype) == dtype
            assert np.isfinite(numpy(ops.cast(output, "float32"))).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scores", [False, True])
def test_half_precision_is_close(dtype, scores):
    """The softmax in float32: only the rounding of inputs and outputs is lost."""
    options = {"mask": random_mask(BATCH, QUERY, KEY), "bias": random_bias(QUERY, KEY)}
    inputs = [ops.cast(x, dtype) for x in arrays(deviation=2.0)]
    expected, _ = reference(*[numpy(ops.cast(x, "float32")) for x in inputs], **options)
    output = dot_product_attention(*inputs, return_scores=scores, **options)
    output = ops.cast(output[0] if scores else output, "float32")
    close(output, expected, 0.01 if dtype == "float16" else 0.08)


def test_dropout_is_applied_to_the_weights_and_not_to_the_scores_returned():
    inputs = arrays()
    expected, weights = reference(*inputs)
    output, scores = dot_product_attention(
        *inputs, dropout=lambda x: 2.0 * x, return_scores=True
    )
    close(output, 2 * expected)
    close(scores, weights)


def test_a_float_mask_is_refused():
    with pytest.raises(TypeError, match="boolean.*float32.*bias="):
        dot_product_attention(*arrays(), mask=np.zeros((QUERY, KEY), "float32"))


def test_a_boolean_bias_is_refused():
    with pytest.raises(TypeError, match="must be float.*bool.*mask="):
        dot_product_attention(*arrays(), bias=ops.ones((QUERY, KEY), dtype="bool"))


def test_a_wrong_rank_is_refused():
    query, key, value = arrays()
    with pytest.raises(ValueError, match=r"length, dim.*\(6, 5, 3\)"):
        dot_product_attention(query[0], key, value)


def test_heads_that_do_not_divide_are_refused():
    query, key, value = arrays()
    with pytest.raises(ValueError, match=r"multiple.*\(2, 6, 5, 3\).*\(2, 4, 7, 3\)"):
        dot_product_attention(query, key[:, :4], value[:, :4])
    with pytest.raises(ValueError, match="multiple"):
        dot_product_attention(query, key[:, :2], value[:, :3])


@pytest.mark.parametrize("low", [-np.inf, np.finfo("float32").min])
@pytest.mark.parametrize("return_scores", [False, True])
def test_a_bias_of_minus_infinity_is_a_mask(low, return_scores):
    inputs, mask = arrays(), random_mask(BATCH, 1, QUERY, KEY)
    mask[1, :, 2] = False  # a query that sees nothing
    padding = np.arange(KEY) < 5
    bias = np.where(mask, 0.5, low).astype("float32")
    call = {"return_scores": return_scores}
    both = dot_product_attention(*inputs, mask=padding[None, None], bias=bias, **call)
    same = dot_product_attention(*inputs, mask=mask & padding, **call)
    for one, two in zip(
        keras.tree.flatten(both), keras.tree.flatten(same), strict=True
    ):
        close(one, numpy(two))
        assert (numpy(one)[1, :, 2] == 0).all()


@pytest.mark.parametrize("shape", [(KEY,), (QUERY, 2), (3, QUERY, KEY), (1,) * 5])
def test_a_bias_of_the_wrong_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"(?s)broadcast.*\(2, 6, 5, 7\).*Received"):
        dot_product_attention(*arrays(), bias=np.zeros(shape, "float32"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_bias_keeps_its_precision_under_half(dtype):
    """A constant on the scores changes no softmax: in half precision 300 would."""
    random = np.random.default_rng(0)
    query, key, value = (
        ops.cast(random.normal(size=(1, 2, 6, 4)), dtype) for _ in range(3)
    )
    bias = random.normal(size=(1, 2, 6, 6)).astype("float32")
    plain = dot_product_attention(query, key, value, bias=bias)
    shifted = dot_product_attention(query, key, value, bias=bias + 300)
    for other in (
        shifted,
        dot_product_attention(query, key, value, bias=bias, return_scores=True)[0],
    ):
        np.testing.assert_allclose(
            numpy(ops.cast(other, "float32")),
            numpy(ops.cast(plain, "float32")),
            atol=2e-2 if dtype == "bfloat16" else 2e-3,
        )


def test_no_bias_lets_a_later_key_through_under_float16():
    query = ops.cast(np.random.default_rng(0).normal(size=(1, 1, 3, 4)), "float16")
    value = ops.cast(np.arange(3.0).reshape(1, 1, 3, 1) * np.ones(4), "float16")
    bias = np.zeros((1, 1, 1, 3), "float16")
    bias[..., 0] = -65504
    output = dot_product_attention(query, query, value, is_causal=True, bias=bias)
    np.testing.assert_array_equal(numpy(ops.cast(output, "float32"))[0, 0, 0], 0)


def test_an_empty_batch_of_grouped_heads():
    query, key = np.zeros((0, 4, 3, 2), "float32"), np.zeros((0, 2, 3, 2), "float32")
    output = dot_product_attention(query, key, key, logit_soft_cap=2.0)
    assert tuple(output.shape) == (0, 4, 3, 2)
