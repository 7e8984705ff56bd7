"""Attention pooling against the papers' formulas in float64."""

import numpy as np
import oracle
import pytest
from cases import numpy, padding, randomize

from keras_attn import AttentionPooling


def array(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def close(actual, expected, tolerance=1e-5):
    np.testing.assert_allclose(numpy(actual), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("intermediate_dim", [None, 11])
@pytest.mark.parametrize("num_queries", [1, 3])
def test_pooling_is_the_papers(num_queries, intermediate_dim, masked):
    x = array(3, 7, 6)
    mask = padding(7) if masked else None
    layer = AttentionPooling(2, num_queries, intermediate_dim=intermediate_dim)
    layer(x)
    randomize(layer)
    weights = oracle.weights_of(layer)
    assert weights["queries"].shape == (num_queries, 6)
    expected = oracle.attention_pooling(weights, x, mask, bool(intermediate_dim))
    output = layer(x, mask=mask)
    if num_queries == 1:
        expected = expected[:, 0]
    assert tuple(output.shape) == expected.shape
    close(output, expected, 2e-5)


def test_the_head_of_scaling_vision_transformers_by_torch():
    """torch's own attention, norm and GELU, put together as the paper does."""
    torch = pytest.importorskip("torch")
    x = array(2, 7, 6)
    layer = AttentionPooling(2, intermediate_dim=11)
    layer(x)
    randomize(layer)
    weights = {k: torch.tensor(v) for k, v in oracle.weights_of(layer).items()}
    attention = torch.nn.MultiheadAttention(6, 2, batch_first=True).double()
    parts = [
        [weights[f"attention/{name}/{kind}"] for name in ("query", "key", "value")]
        for kind in ("kernel", "bias")
    ]
    out = weights["attention/attention_output/kernel"].reshape(6, 6)
    with torch.no_grad():
        attention.in_proj_weight[:] = torch.cat([w.reshape(6, 6).T for w in parts[0]])
        attention.in_proj_bias[:] = torch.cat([b.reshape(6) for b in parts[1]])
        attention.out_proj.weight[:] = out.T
        attention.out_proj.bias[:] = weights["attention/attention_output/bias"]
        tokens = torch.tensor(x).double()
        queries = weights["queries"].expand(2, 1, 6)
        z = attention(queries, tokens, tokens)[0]
        norm = oracle.inside(weights, "feed_forward_residual/norm")
        y = torch.nn.functional.layer_norm(z, (6,), norm["gamma"], norm["beta"], 1e-6)
        dense = oracle.inside(weights, "feed_forward")
        y = y @ dense["intermediate_dense/kernel"] + dense["intermediate_dense/bias"]
        y = torch.nn.functional.gelu(y)
        y = z + y @ dense["output_dense/kernel"] + dense["output_dense/bias"]
    close(layer(x), y[:, 0].numpy(), 2e-5)


def test_the_order_of_the_tokens_does_not_matter():
    x, layer = array(2, 7, 6), AttentionPooling(2, num_queries=3)
    close(layer(x), numpy(layer(x[:, ::-1])))


def test_padding_alone_gives_nothing():
    layer = AttentionPooling(2, use_bias=False)
    x, mask = array(2, 5, 6), np.array([[True] * 5, [False] * 5])
    output = numpy(layer(x, mask=mask))
    assert np.abs(output[0]).max() > 1e-3
    np.testing.assert_array_equal(output[1], 0)


def test_the_queries_differ_and_learn(gradients):
    x, layer = array(2, 5, 6), AttentionPooling(2, num_queries=3)
    output = numpy(layer(x))
    assert np.abs(output[:, 0] - output[:, 1]).max() > 1e-3


BAD = [
    (lambda: AttentionPooling(0), "positive.*num_heads=0"),
    (lambda: AttentionPooling(2, num_queries=0), "positive.*num_queries=0"),
    (lambda: AttentionPooling(2, intermediate_dim=0), "intermediate_dim=0"),
    (lambda: AttentionPooling(2, dropout=1), r"\[0, 1\).*dropout=1"),
    (lambda: AttentionPooling(4)(array(2, 5, 6)), r"multiple.*num_heads=4"),
    (lambda: AttentionPooling(2)(array(2, 5, 5, 6)), r"length, dim.*\(2, 5, 5, 6\)"),
]


@pytest.mark.parametrize("make, said", BAD, ids=lambda x: x if x is str else "")
def test_a_bad_argument_is_refused(make, said):
    with pytest.raises(ValueError, match=f"(?s){said}"):
        make()
