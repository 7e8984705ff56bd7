"""The same weights and inputs give what other libraries' layers give.

Every weight, biases and norms too, is random: a part that starts at 0 or 1 would hide
that it is missing. Where a peer is wrong the comparison leaves the rows out that it
gets wrong, and says so.
"""

import keras
import numpy as np
import pytest
from keras import ops

import keras_attn

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def pattern(*shape, seed=0):
    """A random boolean mask in which every row sees its first key."""
    mask = np.random.default_rng(seed).random(shape) < 0.6
    mask[..., 0] = True
    return mask


def lengths(*counts, total):
    """`(batch, total)`: right padding after so many real tokens in each row."""
    return np.arange(total) < np.array(counts)[:, None]


def randomize(layer):
    for seed, weight in enumerate(layer.weights):
        weight.assign(normal(*weight.shape, seed=seed) * 0.5)


def assert_equal(ours, theirs, **tolerance):
    ours, theirs = (ops.convert_to_numpy(x) for x in (ours, theirs))
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, **(tolerance or CLOSE))


# --- keras.layers.MultiHeadAttention ------------------------------------------------

SELF = normal(3, 5, 8)
QUERY, VALUE, KEY = normal(3, 5, 8), normal(3, 7, 6, seed=1), normal(3, 7, 10, seed=2)
GRID, OTHER_GRID = normal(2, 3, 4, 8), normal(2, 3, 5, 6, seed=1)
VIDEO, OTHER_VIDEO = normal(2, 5, 3, 4, 8), normal(2, 5, 3, 2, 8, seed=1)
PADDING = lengths(7, 4, 1, total=7)

# name: (arguments of the layer, its inputs, the other arguments of the call)
KERAS_ATTENTION = {
    "self": ({}, [SELF, SELF], {}),
    "no_bias": ({"use_bias": False}, [SELF, SELF], {}),
    "cross": ({}, [QUERY, VALUE], {}),
    "cross_with_key": ({}, [QUERY, VALUE, KEY], {}),
    "value_dim": ({"value_dim": 5}, [QUERY, VALUE, KEY], {}),
    "output_shape": ({"output_shape": 9}, [QUERY, VALUE], {}),
    "output_shape_pair": ({"output_shape": (3, 2)}, [QUERY, VALUE], {}),
    "gate": ({"use_gate": True}, [QUERY, VALUE], {}),
    "gate_value_dim": ({"use_gate": True, "value_dim": 5}, [QUERY, VALUE], {}),
    "causal": ({}, [SELF, SELF], {"use_causal_mask": True}),
    "causal_cross": ({}, [QUERY, VALUE], {"use_causal_mask": True}),
    "window": ({"sliding_window": 2}, [SELF, SELF], {}),
    "window_1": ({"sliding_window": 1}, [SELF, SELF], {}),
    "window_cross": ({"sliding_window": 3}, [QUERY, VALUE], {}),
    "window_causal": ({"sliding_window": 2}, [SELF, SELF], {"use_causal_mask": True}),
    "mask": ({}, [QUERY, VALUE], {"attention_mask": pattern(3, 5, 7)}),
    "mask_of_heads": ({}, [QUERY, VALUE], {"attention_mask": pattern(3, 2, 5, 7)}),
    "mask_of_ints": (
        {},
        [QUERY, VALUE],
        {"attention_mask": pattern(3, 5, 7).astype("int32")},
    ),
    "mask_shared": ({}, [QUERY, VALUE], {"attention_mask": pattern(5, 7)}),
    "mask_causal": (
        {},
        [SELF, SELF],
        {"attention_mask": pattern(3, 5, 5), "use_causal_mask": True},
    ),
    "value_mask": ({}, [QUERY, VALUE], {"value_mask": PADDING}),
    "key_mask": ({}, [QUERY, VALUE, KEY], {"key_mask": PADDING}),
    "all_at_once": (
        {"sliding_window": 4, "use_gate": True, "value_dim": 5},
        [QUERY, VALUE, KEY],
        {
            "value_mask": PADDING,
            "attention_mask": pattern(3, 5, 7),
            "use_causal_mask": True,
        },
    ),
    "blind_rows": (
        {},
        [QUERY, VALUE],
        {"attention_mask": pattern(3, 5, 7) & (np.arange(5) != 2)[:, None]},
    ),
    "grid": ({}, [GRID, GRID], {}),
    "grid_cols": ({"attention_axes": (2,)}, [GRID, OTHER_GRID], {}),
    "grid_cols_from_the_end": ({"attention_axes": -2}, [GRID, OTHER_GRID], {}),
    "grid_rows": ({"attention_axes": 1}, [GRID, GRID], {"use_causal_mask": True}),
    "grid_cols_gate": (
        {"attention_axes": 2, "use_gate": True, "value_dim": 5},
        [GRID, OTHER_GRID],
        {"attention_mask": pattern(2, 3, 2, 4, 5)},
    ),
    "grid_cols_shared_mask": (
        {"attention_axes": 2},
        [GRID, OTHER_GRID],
        {"attention_mask": pattern(4, 5)},
    ),
    "grid_mask": (
        {},
        [GRID, OTHER_GRID],
        {"attention_mask": pattern(2, 12, 15).reshape(2, 3, 4, 3, 5)},
    ),
    "video": ({}, [VIDEO, OTHER_VIDEO], {}),
    "video_frames": ({"attention_axes": (2, 3)}, [VIDEO, OTHER_VIDEO], {}),
    "video_time": ({"attention_axes": 1}, [VIDEO, VIDEO], {"use_causal_mask": True}),
    "video_time_and_cols": ({"attention_axes": (1, 3)}, [VIDEO, OTHER_VIDEO], {}),
    "video_cols_and_time": ({"attention_axes": (3, 1)}, [VIDEO, OTHER_VIDEO], {}),
}


def keras_pair(ours, theirs, inputs):
    """Both layers, built for the inputs, with the same random weights."""
    shapes = [x.shape for x in inputs]
    ours.build(*shapes)
    theirs.build(*shapes)
    randomize(theirs)
    ours.set_weights(theirs.get_weights())
    return ours, theirs


@pytest.mark.parametrize("case", KERAS_ATTENTION)
def test_keras_attention(case):
    arguments, inputs, call_arguments = KERAS_ATTENTION[case]
    ours, theirs = keras_pair(
        keras_attn.MultiHeadAttention(num_heads=2, key_dim=4, **arguments),
        keras.layers.MultiHeadAttention(num_heads=2, key_dim=4, **arguments),
        inputs,
    )
    # With scores: without, Keras averages all values for a row that may see none, and
    # on JAX refuses a `value_dim` of its own.
    expected, expected_scores = theirs(
        *inputs, return_attention_scores=True, **call_arguments
    )
    output, scores = ours(*inputs, return_attention_scores=True, **call_arguments)
    assert_equal(output, expected)
    assert_equal(scores, expected_scores)
    assert_equal(ours(*inputs, **call_arguments), expected)


def test_keras_attention_with_masks_that_ride_along():
    """Keras ignores a `query_mask` that is given; it reads the one on the query."""
    inputs, masks = [QUERY, VALUE], [lengths(5, 3, 2, total=5), PADDING]
    ours, theirs = keras_pair(
        keras_attn.MultiHeadAttention(num_heads=2, key_dim=4),
        keras.layers.MultiHeadAttention(num_heads=2, key_dim=4),
        inputs,
    )

    def padded():  # anew for each call: Keras takes the mask off its caller's query
        return [
            keras.layers.Masking()(x * mask[..., None])
            for x, mask in zip(inputs, masks, strict=True)
        ]

    expected, expected_scores = theirs(*padded(), return_attention_scores=True)
    output, scores = ours(*padded(), return_attention_scores=True)
    assert_equal(output, expected)
    assert_equal(scores, expected_scores)
    inputs = [x * mask[..., None] for x, mask in zip(inputs, masks, strict=True)]
    given = ours(*inputs, query_mask=masks[0], value_mask=masks[1])
    assert_equal(given, expected)


def test_keras_attention_merges_a_mask_of_heads_with_padding():
    """Keras merges these two wrongly, so it is given what they make together."""
    inputs, mask = [QUERY, VALUE], pattern(3, 2, 5, 7)
    ours, theirs = keras_pair(
        keras_attn.MultiHeadAttention(num_heads=2, key_dim=4),
        keras.layers.MultiHeadAttention(num_heads=2, key_dim=4),
        inputs,
    )
    expected = theirs(*inputs, attention_mask=mask & PADDING[:, None, None])
    assert_equal(ours(*inputs, attention_mask=mask, value_mask=PADDING), expected)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("arguments", "call_arguments"),
    [
        ({}, {}),
        ({"use_bias": False, "use_gate": True}, {"attention_mask": pattern(3, 5, 7)}),
        ({"sliding_window": 4}, {"use_causal_mask": True}),
        ({}, {"value_mask": PADDING, "use_causal_mask": True}),
    ],
    ids=["plain", "gate_mask", "window_causal", "padding_causal"],
)
def test_keras_grouped_query_attention(num_kv_heads, arguments, call_arguments):
    inputs = [QUERY, VALUE, KEY]
    ours, theirs = keras_pair(
        keras_attn.MultiHeadAttention(
            num_heads=4, key_dim=6, num_kv_heads=num_kv_heads, **arguments
        ),
        keras.layers.GroupQueryAttention(
            head_dim=6, num_query_heads=4, num_key_value_heads=num_kv_heads, **arguments
        ),
        inputs,
    )
    expected = theirs(*inputs, **call_arguments)
    output, _ = ours(*inputs, return_attention_scores=True, **call_arguments)
    assert_equal(output, expected)
    assert_equal(ours(*inputs, **call_arguments), expected)


def swapped_model(attention):
    """What a user wrote for `keras.layers.MultiHeadAttention`, and did not touch."""
    tokens = keras.Input((9,), dtype="int32")
    x = keras.layers.Embedding(11, 12, mask_zero=True)(tokens)
    y, scores = attention(3, 4, name="first")(x, x, return_attention_scores=True)
    y = attention(2, 5, name="second")(query=y, value=x, use_causal_mask=True)
    return keras.Model(tokens, [y, scores])


def test_swap_the_import(tmp_path):
    theirs = swapped_model(keras.layers.MultiHeadAttention)
    ours = swapped_model(keras_attn.MultiHeadAttention)
    randomize(theirs)
    tokens = np.random.default_rng(0).integers(1, 11, size=(3, 9))
    tokens *= lengths(9, 6, 2, total=9)
    expected, expected_scores = theirs.predict(tokens, verbose=0)

    ours.set_weights(theirs.get_weights())
    output, scores = ours.predict(tokens, verbose=0)
    # At padding Keras averages all values, where scores are not asked for.
    assert_equal(output[tokens > 0], expected[tokens > 0])
    assert_equal(scores, expected_scores)

    theirs.save_weights(tmp_path / "keras.weights.h5")
    randomize(ours)
    ours.load_weights(tmp_path / "keras.weights.h5")
    assert_equal(ours.predict(tokens, verbose=0)[0], output)


# --- KerasHub -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def keras_hub():
    return pytest.importorskip("keras_hub")


def copy_weights(pairs):
    for ours, theirs in pairs:
        randomize(theirs)
        ours.set_weights(theirs.get_weights())


MEMORY = normal(3, 7, 8, seed=3)
TOKENS = lengths(5, 3, 2, total=5)
PLACEMENTS = pytest.mark.parametrize("norm_placement", ["post", "pre"])
ACTIVATIONS = pytest.mark.parametrize("activation", ["relu", "gelu"])


@PLACEMENTS
@ACTIVATIONS
@pytest.mark.parametrize("attention_mask", [None, pattern(3, 5, 5)], ids=["", "mask"])
@pytest.mark.parametrize("padding", [None, TOKENS], ids=["", "padding"])
def test_keras_hub_encoder(
    keras_hub, norm_placement, activation, attention_mask, padding
):
    ours = keras_attn.EncoderBlock(
        num_heads=2,
        intermediate_dim=12,
        activation=activation,
        norm_placement=norm_placement,
    )
    theirs = keras_hub.layers.TransformerEncoder(
        intermediate_dim=12,
        num_heads=2,
        activation=activation,
        normalize_first=norm_placement == "pre",
    )
    ours.build(SELF.shape)
    theirs.build(SELF.shape)
    copy_weights(
        [
            (ours.attention, theirs._self_attention_layer),
            (ours.attention_residual.norm, theirs._self_attention_layer_norm),
            (
                ours.feed_forward.intermediate_dense,
                theirs._feedforward_intermediate_dense,
            ),
            (ours.feed_forward.output_dense, theirs._feedforward_output_dense),
            (ours.feed_forward_residual.norm, theirs._feedforward_layer_norm),
        ]
    )
    output = ours(SELF, mask=padding, attention_mask=attention_mask)
    expected = theirs(SELF, padding_mask=padding, attention_mask=attention_mask)
    real = slice(None) if padding is None else padding  # padding differs, and may
    assert_equal(output[real], expected[real])


@PLACEMENTS
@pytest.mark.parametrize("with_memory", [True, False], ids=["memory", "no_memory"])
@pytest.mark.parametrize("padding", [None, TOKENS], ids=["", "padding"])
def test_keras_hub_decoder(keras_hub, norm_placement, with_memory, padding):
    ours = keras_attn.DecoderBlock(
        num_heads=2, intermediate_dim=12, norm_placement=norm_placement
    )
    theirs = keras_hub.layers.TransformerDecoder(
        intermediate_dim=12, num_heads=2, normalize_first=norm_placement == "pre"
    )
    inputs = [SELF, MEMORY] if with_memory else [SELF]
    shapes = [x.shape for x in inputs]
    ours.build(*shapes)
    theirs.build(*shapes)
    pairs = [
        (ours.self_attention, theirs._self_attention_layer),
        (ours.self_attention_residual.norm, theirs._self_attention_layer_norm),
        (ours.feed_forward.intermediate_dense, theirs._feedforward_intermediate_dense),
        (ours.feed_forward.output_dense, theirs._feedforward_output_dense),
        (ours.feed_forward_residual.norm, theirs._feedforward_layer_norm),
    ]
    if with_memory:
        pairs += [
            (ours.cross_attention, theirs._cross_attention_layer),
            (ours.cross_attention_residual.norm, theirs._cross_attention_layer_norm),
        ]
    copy_weights(pairs)
    masks, their_masks = {"mask": padding}, {"decoder_padding_mask": padding}
    if with_memory:
        masks["memory_mask"] = their_masks["encoder_padding_mask"] = PADDING
    output, expected = ours(*inputs, **masks), theirs(*inputs, **their_masks)
    real = slice(None) if padding is None else padding
    assert_equal(output[real], expected[real])


# --- torch --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


def to_numpy(tensor):
    return tensor.detach().cpu().numpy()


def torch_layer(torch, kind, norm_placement, activation):
    layer = kind(
        d_model=8,
        nhead=2,
        dim_feedforward=12,
        dropout=0.0,
        activation=activation,
        batch_first=True,
        norm_first=norm_placement == "pre",
    )
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter.copy_(torch.tensor(normal(*parameter.shape, seed=seed) * 0.5))
    return layer.eval()


def copy_torch_attention(ours, theirs):
    """Torch multiplies by the transpose and stacks query, key and value; its features
    are `heads * key_dim`, ours `(heads, key_dim)`."""
    kernels = np.split(to_numpy(theirs.in_proj_weight), 3)
    biases = np.split(to_numpy(theirs.in_proj_bias), 3)
    projections = ours.query, ours.key, ours.value
    for dense, kernel, bias in zip(projections, kernels, biases, strict=True):
        dense.set_weights(
            [kernel.T.reshape(dense.kernel.shape), bias.reshape(dense.bias.shape)]
        )
    kernel, bias = to_numpy(theirs.out_proj.weight), to_numpy(theirs.out_proj.bias)
    shape = ours.attention_output.kernel.shape
    ours.attention_output.set_weights([kernel.T.reshape(shape), bias])


def copy_torch_feed_forward(ours, theirs):
    ours.intermediate_dense.set_weights(
        [to_numpy(theirs.linear1.weight).T, to_numpy(theirs.linear1.bias)]
    )
    ours.output_dense.set_weights(
        [to_numpy(theirs.linear2.weight).T, to_numpy(theirs.linear2.bias)]
    )


def copy_torch_norm(ours, theirs):
    ours.norm.set_weights([to_numpy(theirs.weight), to_numpy(theirs.bias)])


@PLACEMENTS
@ACTIVATIONS
@pytest.mark.parametrize("padding", [None, TOKENS], ids=["", "padding"])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_torch_encoder(torch, norm_placement, activation, padding, causal):
    theirs = torch_layer(
        torch, torch.nn.TransformerEncoderLayer, norm_placement, activation
    )
    ours = keras_attn.EncoderBlock(
        num_heads=2,
        intermediate_dim=12,
        activation=activation,
        norm_placement=norm_placement,
    )
    ours.build(SELF.shape)
    copy_torch_attention(ours.attention, theirs.self_attn)
    copy_torch_norm(ours.attention_residual, theirs.norm1)
    copy_torch_feed_forward(ours.feed_forward, theirs)
    copy_torch_norm(ours.feed_forward_residual, theirs.norm2)

    mask = np.tril(np.ones((5, 5), bool)) if causal else None
    output = ours(SELF, mask=padding, attention_mask=mask)
    with torch.no_grad():
        expected = theirs(  # where torch's masks are true, a key is hidden
            torch.tensor(SELF),
            src_mask=None if mask is None else torch.tensor(~mask),
            src_key_padding_mask=None if padding is None else torch.tensor(~padding),
        )
    real = slice(None) if padding is None else padding
    assert_equal(output[real], to_numpy(expected)[real])


@PLACEMENTS
@ACTIVATIONS
@pytest.mark.parametrize("padding", [None, TOKENS], ids=["", "padding"])
def test_torch_decoder(torch, norm_placement, activation, padding):
    theirs = torch_layer(
        torch, torch.nn.TransformerDecoderLayer, norm_placement, activation
    )
    ours = keras_attn.DecoderBlock(
        num_heads=2,
        intermediate_dim=12,
        activation=activation,
        norm_placement=norm_placement,
    )
    ours.build(SELF.shape, MEMORY.shape)
    copy_torch_attention(ours.self_attention, theirs.self_attn)
    copy_torch_norm(ours.self_attention_residual, theirs.norm1)
    copy_torch_attention(ours.cross_attention, theirs.multihead_attn)
    copy_torch_norm(ours.cross_attention_residual, theirs.norm2)
    copy_torch_feed_forward(ours.feed_forward, theirs)
    copy_torch_norm(ours.feed_forward_residual, theirs.norm3)

    output = ours(SELF, MEMORY, mask=padding, memory_mask=PADDING)
    with torch.no_grad():
        expected = theirs(
            torch.tensor(SELF),
            torch.tensor(MEMORY),
            tgt_mask=torch.tensor(np.triu(np.ones((5, 5), bool), 1)),
            tgt_key_padding_mask=None if padding is None else torch.tensor(~padding),
            memory_key_padding_mask=torch.tensor(~PADDING),
        )
    real = slice(None) if padding is None else padding
    assert_equal(output[real], to_numpy(expected)[real])


# name: (arguments of ours, arguments of torch's)
BIAS = normal(3, 4, 5, 7, seed=4)
DOT_PRODUCTS = {
    "plain": ({}, {}),
    "scale": ({"scale": 0.3}, {"scale": 0.3}),
    "causal": ({"is_causal": True}, {"is_causal": True}),
    "mask": ({"mask": pattern(3, 5, 7)}, {"attn_mask": pattern(3, 1, 5, 7)}),
    "mask_shared": ({"mask": pattern(5, 7)}, {"attn_mask": pattern(5, 7)}),
    "mask_of_heads": (
        {"mask": pattern(3, 4, 5, 7)},
        {"attn_mask": pattern(3, 4, 5, 7)},
    ),
    "bias": ({"bias": BIAS}, {"attn_mask": BIAS}),
    "bias_shared": ({"bias": BIAS[0, 0]}, {"attn_mask": BIAS[0, 0]}),
    "bias_and_mask": (
        {"bias": BIAS, "mask": pattern(3, 5, 7)},
        {"attn_mask": np.where(pattern(3, 1, 5, 7), BIAS, -np.inf)},
    ),
    "bias_and_causal": (
        {"bias": BIAS, "is_causal": True},
        {"attn_mask": np.where(np.tri(5, 7) > 0, BIAS, -np.inf).astype("float32")},
    ),
}


@pytest.mark.parametrize("case", DOT_PRODUCTS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("return_scores", [False, True], ids=["", "scores"])
def test_torch_dot_product(torch, case, kv_heads, return_scores):
    query = normal(3, 4, 5, 6)
    key, value = normal(3, kv_heads, 7, 6, seed=1), normal(3, kv_heads, 7, 9, seed=2)
    arguments, their_arguments = DOT_PRODUCTS[case]
    output = keras_attn.dot_product_attention(
        query, key, value, return_scores=return_scores, **arguments
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        *map(torch.tensor, (query, key, value)),
        enable_gqa=kv_heads < 4,
        **{
            name: torch.tensor(x) if isinstance(x, np.ndarray) else x
            for name, x in their_arguments.items()
        },
    )
    assert_equal(output[0] if return_scores else output, to_numpy(expected))


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize(
    "grid", [(4, 6), (8, 12), (5, 7), (9, 6), (4, 3), (3, 2), (2, 13), (1, 1)]
)
def test_torch_interpolate(torch, interpolation, grid):
    layer = keras_attn.LearnedPositionEmbedding((4, 6), interpolation=interpolation)
    layer.build((None, None, None, 8))
    randomize(layer)
    (table,) = layer.get_weights()
    expected = torch.nn.functional.interpolate(
        torch.tensor(table).permute(2, 0, 1)[None],  # (1, dim, rows, cols)
        size=grid,
        mode=interpolation,
        align_corners=False,
        antialias=False,
    )
    expected = to_numpy(expected[0].permute(1, 2, 0))
    output = ops.convert_to_numpy(layer(np.zeros((2, *grid, 8), "float32")))
    for row in output:
        np.testing.assert_allclose(row, expected, rtol=0, atol=2e-6)
        if grid == (4, 6):
            np.testing.assert_array_equal(row, table)
