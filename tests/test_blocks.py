"""Feed-forward, residual, blocks, embeddings against the float64 reference."""

import keras
import numpy as np
import oracle
import pytest
from cases import numpy, padding, randomize
from keras import ops

import keras_attn
from keras_attn import (
    DecoderBlock,
    EncoderBlock,
    FeedForward,
    MultiHeadAttention,
    Residual,
    TokenEmbedding,
)

BATCH, LENGTH, MEMORY, DIM = 3, 5, 7, 6


def array(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def built(layer, *inputs):
    layer(*inputs)
    randomize(layer)
    return layer, oracle.weights_of(layer)


def close(actual, expected, tolerance=1e-5):
    np.testing.assert_allclose(numpy(actual), expected, rtol=tolerance, atol=tolerance)


# --- Feed-forward --------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["relu", "gelu", "tanh"])
@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("output_dim", [None, 7])
def test_feed_forward(activation, use_bias, output_dim):
    x = array(2, 3, DIM)
    layer = FeedForward(11, activation, output_dim=output_dim, use_bias=use_bias)
    layer, weights = built(layer, x)
    assert len(weights) == (4 if use_bias else 2)
    close(layer(x), oracle.feed_forward(weights, x, activation))
    close(layer(x[:, 0]), oracle.feed_forward(weights, x[:, 0], activation))


def test_feed_forward_drops_the_intermediate():
    x = array(2, 3, DIM)
    layer, weights = built(FeedForward(997, dropout=0.3, seed=1, use_bias=False), x)
    outputs = [numpy(layer(x, training=True)) for _ in range(20)]
    assert np.abs(outputs[0] - outputs[1]).max() > 1e-2
    rest = oracle.feed_forward(weights, x)
    error = np.abs(np.mean(outputs, 0) - rest).mean()
    assert error < 0.5 * np.abs(outputs[0] - rest).mean()


# --- Residual ------------------------------------------------------------------------


@pytest.mark.parametrize("normalization", ["layer", "rms"])
@pytest.mark.parametrize("placement", ["post", "pre"])
def test_residual(placement, normalization):
    x = array(2, 3, DIM)
    layer, weights = built(
        Residual(FeedForward(11, name="layer"), placement, normalization, epsilon=0.1),
        x,
    )
    expected = oracle.residual(
        weights,
        x,
        lambda x: oracle.feed_forward(oracle.inside(weights, "layer"), x),
        placement,
        normalization,
        0.1,
    )
    close(layer(x), expected)


def test_residual_around_attention_hands_on_the_mask():
    x, real = array(BATCH, LENGTH, DIM), padding(LENGTH)
    inputs = keras.Input((None, DIM))
    masked = keras.layers.Masking()(inputs)
    layer = Residual(MultiHeadAttention(2, 3, name="layer"), "pre")
    model = keras.Model(inputs, layer(masked))
    randomize(layer)
    weights = oracle.weights_of(layer)
    x = x * real[..., None]
    expected = oracle.residual(
        weights,
        x,
        lambda x: oracle.multi_head_attention(
            oracle.inside(weights, "layer"), x, mask=oracle.padding(real, real)
        )[0],
        "pre",
    )
    close(numpy(model(x))[real], expected[real])


def test_residual_drops_the_branch_alone():
    x = array(2, 997, 2)
    layer = Residual(FeedForward(3), "pre", dropout=0.5, seed=1)
    layer, _ = built(layer, x)
    branch = numpy(layer(x)) - x
    dropped = numpy(layer(x, training=True)) - x
    is_zero = np.abs(dropped) < 1e-6
    assert 0.4 < is_zero.mean() < 0.6
    close(dropped[~is_zero], 2 * branch[~is_zero], 1e-4)


# --- Blocks --------------------------------------------------------------------------

ARGUMENTS = {
    "post": {},
    "pre": {"norm_placement": "pre", "activation": "gelu"},
    "rms": {"normalization": "rms", "epsilon": 0.1},
    "pre_rms": {"norm_placement": "pre", "normalization": "rms"},
    "key_dim": {"key_dim": 5, "num_heads": 4},
    "no_bias": {"use_bias": False},
    "sandwich": {"norm_placement": "sandwich", "layer_scale": 0.3},
    "deep": {"norm_placement": "deep", "alpha": 1.7, "beta": 0.4},
    "layer_scale": {"layer_scale": 0.3},
}


def reference_options(arguments):
    return {
        "activation": arguments.get("activation", "relu"),
        "placement": arguments.get("norm_placement", "post"),
        "normalization": arguments.get("normalization", "layer"),
        "epsilon": arguments.get("epsilon", 1e-5),
        "alpha": arguments.get("alpha"),
    }


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_encoder_block(name, masked):
    arguments = ARGUMENTS[name]
    x = array(BATCH, LENGTH, DIM)
    layer, weights = built(
        EncoderBlock(**{"num_heads": 2, "intermediate_dim": 11, **arguments}), x
    )
    mask = padding(LENGTH) if masked else None
    expected = oracle.encoder_block(weights, x, mask, **reference_options(arguments))
    close(layer(x, mask=mask), expected, 3e-5)


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_decoder_block(name, masked, memory):
    arguments = ARGUMENTS[name]
    inputs = [array(BATCH, LENGTH, DIM), array(BATCH, MEMORY, 4, seed=1)]
    inputs = inputs if memory else inputs[:1]
    layer, weights = built(
        DecoderBlock(**{"num_heads": 2, "intermediate_dim": 11, **arguments}), *inputs
    )
    masks = {}
    if masked:
        masks["mask"] = padding(LENGTH)
        if memory:
            masks["memory_mask"] = padding(MEMORY, side="left")
    expected = oracle.decoder_block(
        weights, *inputs, **masks, **reference_options(arguments)
    )
    close(layer(*inputs, **masks), expected, 3e-5)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("placement", ["post", "pre", "sandwich"])
@pytest.mark.parametrize("make", [EncoderBlock, DecoderBlock])
def test_side_by_side(make, placement, masked):
    x, mask = array(BATCH, LENGTH, DIM), padding(LENGTH) if masked else None
    layer, weights = built(make(2, 11, norm_placement=placement, parallel=True), x)
    reference = {
        EncoderBlock: oracle.encoder_block,
        DecoderBlock: oracle.decoder_block,
    }[make]
    expected = reference(weights, x, mask=mask, placement=placement, parallel=True)
    close(layer(x, mask=mask), expected, 3e-5)


def test_an_encoders_attention_mask_and_bias():
    x, random = array(BATCH, LENGTH, DIM), np.random.default_rng(3)
    layer, weights = built(EncoderBlock(2, 11), x)
    real = padding(LENGTH)
    bias = random.normal(size=(2, LENGTH, LENGTH)).astype("float32")
    square = (LENGTH, LENGTH)
    for shape in [square, (BATCH, *square), (BATCH, 2, *square)]:
        pattern = random.random(shape) < 0.7
        four = pattern if len(shape) != 3 else pattern[:, None]
        x1 = oracle.residual(
            oracle.inside(weights, "attention_residual"),
            x,
            lambda x, four=four: oracle.multi_head_attention(
                oracle.inside(weights, "attention"),
                x,
                mask=oracle.padding(real, real) & four,
                bias=bias,
            )[0],
        )
        expected = oracle.residual(
            oracle.inside(weights, "feed_forward_residual"),
            x1,
            lambda x: oracle.feed_forward(oracle.inside(weights, "feed_forward"), x),
        )
        close(layer(x, mask=real, attention_mask=pattern, bias=bias), expected, 3e-5)


def test_a_decoders_attention_mask_and_bias_are_of_its_self_attention():
    random = np.random.default_rng(3)
    inputs = [array(BATCH, LENGTH, DIM), array(BATCH, MEMORY, 4, seed=1)]
    layer, weights = built(DecoderBlock(2, 11), *inputs)
    pattern = random.random((BATCH, LENGTH, LENGTH)) < 0.7
    bias = random.normal(size=(2, LENGTH, LENGTH)).astype("float32")
    x = oracle.residual(
        oracle.inside(weights, "self_attention_residual"),
        inputs[0],
        lambda x: oracle.multi_head_attention(
            oracle.inside(weights, "self_attention"),
            x,
            mask=pattern[:, None],
            bias=bias,
            is_causal=True,
        )[0],
    )
    x = oracle.residual(
        oracle.inside(weights, "cross_attention_residual"),
        x,
        lambda x: oracle.multi_head_attention(
            oracle.inside(weights, "cross_attention"), x, inputs[1]
        )[0],
    )
    expected = oracle.residual(
        oracle.inside(weights, "feed_forward_residual"),
        x,
        lambda x: oracle.feed_forward(oracle.inside(weights, "feed_forward"), x),
    )
    close(layer(*inputs, attention_mask=pattern, bias=bias), expected, 3e-5)


@pytest.mark.parametrize("rate", ["dropout", "attention_dropout", "stochastic_depth"])
@pytest.mark.parametrize("make", [EncoderBlock, DecoderBlock])
def test_each_dropout_is_active_in_training_alone(make, rate):
    x = array(BATCH, LENGTH, DIM)
    layer, _ = built(make(2, 11, **{rate: 0.5}, seed=3), x)
    rest = numpy(layer(x, training=False))
    close(layer(x), rest)
    one, two = (numpy(layer(x, training=True)) for _ in range(2))
    assert np.abs(one - rest).max() > 1e-2
    assert np.abs(one - two).max() > 1e-2


def test_one_seed_does_not_make_dropouts_alike():
    """Two parts of a block with one seed must not drop the same places."""
    x = np.ones((1, 11, 64), "float32")
    layer = EncoderBlock(2, 11, dropout=0.5, seed=3)
    layer(x)
    parts = [layer.attention_residual, layer.feed_forward_residual]
    drops = [numpy(part.branch_dropout(x, training=True)) == 0 for part in parts]
    assert (drops[0] != drops[1]).any()


def test_a_memory_of_other_length_and_width():
    layer, _ = built(
        DecoderBlock(2, 11), array(BATCH, LENGTH, DIM), array(BATCH, MEMORY, 4)
    )
    output = layer(array(2, 2, DIM), array(2, 11, 4))
    assert tuple(output.shape) == (2, 2, DIM)


# --- Token embedding -----------------------------------------------------------------


def test_token_embedding_scales_on_the_way_in_alone():
    ids = np.array([[5, 1, 0], [2, 2, 7]])
    layer, weights = built(TokenEmbedding(11, DIM), ids)
    (table,) = weights.values()
    close(layer(ids), table[ids] * np.sqrt(DIM))
    x = array(2, 3, DIM)
    close(layer(x, reverse=True), x @ table.T)
    plain = TokenEmbedding(11, DIM, scale=False)
    plain(ids)
    plain.set_weights(layer.get_weights())
    close(plain(ids), table[ids])


def test_token_embedding_starts_with_unit_variance():
    vectors = numpy(TokenEmbedding(503, 64)(np.arange(503)[None]))
    assert 0.95 < vectors.std() < 1.05


def test_untied_weights_are_another_matrix():
    ids = np.array([[5, 1, 0]])
    layer = TokenEmbedding(11, DIM, tie_weights=False)
    layer(ids)
    assert len(layer.weights) == 2


def test_token_embedding_masks_zero():
    from cases import riding_mask

    ids = np.array([[5, 1, 0], [2, 0, 0]])
    layer = TokenEmbedding(11, DIM, mask_zero=True)
    vectors = layer(ids)
    np.testing.assert_array_equal(riding_mask(vectors), ids != 0)
    np.testing.assert_array_equal(riding_mask(layer(vectors, reverse=True)), ids != 0)
    assert riding_mask(TokenEmbedding(11, DIM)(ids)) is None


# --- Bad input -----------------------------------------------------------------------

BAD_ARGUMENTS = [
    (FeedForward, {"intermediate_dim": 0}, "positive.*intermediate_dim=0"),
    (FeedForward, {"intermediate_dim": 3, "dropout": 1.5}, r"\[0, 1\).*dropout=1.5"),
    (FeedForward, {"intermediate_dim": 3, "output_dim": -1}, "output_dim=-1"),
    (Residual, {"norm_placement": "middle"}, "post.*pre.*norm_placement='middle'"),
    (Residual, {"normalization": "batch"}, "layer.*rms.*normalization='batch'"),
    (Residual, {"dropout": -1}, r"\[0, 1\).*dropout=-1"),
]
for block in (EncoderBlock, DecoderBlock):
    good = {"num_heads": 2, "intermediate_dim": 11}
    BAD_ARGUMENTS += [
        (block, {**good, "num_heads": 0}, "positive.*num_heads=0"),
        (block, {**good, "intermediate_dim": -3}, "positive.*intermediate_dim=-3"),
        (block, {**good, "key_dim": 0}, "positive.*key_dim=0"),
        (block, {**good, "dropout": 1}, r"\[0, 1\).*dropout=1"),
        (block, {**good, "attention_dropout": 2}, r"\[0, 1\).*dropout=2"),
        (block, {**good, "norm_placement": "x"}, "post.*pre.*norm_placement='x'"),
        (block, {**good, "norm_placement": "deep"}, "alpha.*deep_norm_constants"),
        (block, {**good, "alpha": 2.0}, "alpha=2.0.*'post'"),
        (
            block,
            {**good, "norm_placement": "deep", "alpha": 2.0},
            "go together.*beta=None",
        ),
        (
            block,
            {
                **good,
                "norm_placement": "deep",
                "alpha": 2,
                "beta": 1,
                "parallel": True,
            },
            "one after the other.*parallel=True",
        ),
        (block, {**good, "stochastic_depth": 1.0}, r"\[0, 1\).*stochastic_depth=1"),
        (block, {**good, "layer_scale": 0}, "layer_scale=0"),
        (block, {**good, "normalization": "x"}, "layer.*rms.*normalization='x'"),
    ]


@pytest.mark.parametrize("layer, arguments, said", BAD_ARGUMENTS, ids=str)
def test_a_bad_argument_is_refused_at_once(layer, arguments, said):
    with pytest.raises(ValueError, match=f"(?s){said}"):
        layer(**arguments)


@pytest.mark.parametrize("block", [EncoderBlock, DecoderBlock])
@pytest.mark.parametrize("symbolic", [False, True])
def test_a_width_that_heads_do_not_divide_is_refused(block, symbolic):
    shape = (2, 10, 8)
    x = keras.KerasTensor(shape) if symbolic else array(*shape)
    with pytest.raises(ValueError, match=r"(?s)multiple.*\(2, 10, 8\).*num_heads=3"):
        block(3, 11)(x)


def test_a_branch_that_changes_the_shape_is_refused():
    with pytest.raises(ValueError, match=r"(?s)\(2, 3, 7\)|\(2, 3, 6\)"):
        Residual(FeedForward(11, output_dim=7))(array(2, 3, DIM))


def test_a_residual_without_a_branch_is_refused():
    with pytest.raises((TypeError, ValueError), match="(?s)branch"):
        Residual()(array(2, 3, DIM))


@pytest.mark.parametrize("symbolic", [False, True])
def test_a_memory_that_is_missing_or_new_is_refused(symbolic):
    make = keras.KerasTensor if symbolic else array
    x, memory = (BATCH, LENGTH, DIM), (BATCH, MEMORY, 4)

    def tensor(shape):
        return make(shape) if symbolic else make(*shape)

    block = DecoderBlock(2, 11)
    block(array(*x), array(*memory))
    with pytest.raises(ValueError, match="(?s)built with `memory`.*called without"):
        block(tensor(x))
    block = DecoderBlock(2, 11)
    block(array(*x))
    with pytest.raises(ValueError, match="(?s)built without `memory`.*called with"):
        block(tensor(x), tensor(memory))


@pytest.mark.parametrize("block", [EncoderBlock, DecoderBlock])
def test_a_mask_of_the_wrong_rank_is_refused(block):
    x = array(BATCH, LENGTH, DIM)
    with pytest.raises(ValueError, match=r"(?s)\(3, 5\).*\(3, 5, 1\)"):
        block(2, 11)(x, mask=np.ones((BATCH, LENGTH, 1), bool))
    with pytest.raises(ValueError, match=r"(?s)query, key.*\(5,\)"):
        block(2, 11)(x, attention_mask=np.ones(LENGTH, bool))
    with pytest.raises(TypeError, match=r"(?s)boolean.*float32.*bias="):
        block(2, 11)(x, attention_mask=np.ones((LENGTH, LENGTH), "float32"))


def test_gradients_reach_every_weight():
    x, memory = array(BATCH, LENGTH, DIM), array(BATCH, MEMORY, 4)
    inputs = [keras.Input(x.shape[1:]), keras.Input(memory.shape[1:])]
    model = keras.Model(inputs, DecoderBlock(2, 11, norm_placement="pre")(*inputs))
    randomize(model)
    before = [numpy(w) for w in model.trainable_weights]
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit([x, memory], ops.convert_to_numpy(x) * 0, verbose=0)
    still = [
        w.path
        for w, old in zip(model.trainable_weights, before, strict=True)
        if np.array_equal(numpy(w), old) and not w.path.endswith("key/bias")
    ]
    assert still == []


@pytest.mark.parametrize("normalization", ["layer", "rms"])
@pytest.mark.parametrize("way", ["argument", "riding"])
def test_the_branch_reads_the_mask_through_the_norm(normalization, way):
    """Keras' RMSNormalization drops masks, and warns."""
    from cases import Ride

    mask, x = padding(LENGTH), array(BATCH, LENGTH, DIM)
    layer = Residual(
        keras_attn.MultiHeadAttention(2),
        norm_placement="pre",
        normalization=normalization,
    )
    other = np.where(mask[..., None], x, 9.0).astype("float32")
    layer(x)
    outputs = [
        numpy(layer(y, mask=mask) if way == "argument" else layer(Ride(mask)(y)))
        for y in (x, other)
    ]
    close(outputs[0][mask], outputs[1][mask])


def test_the_branch_of_a_residual_is_a_layer():
    with pytest.raises(TypeError, match=r"(?s)Keras layer.*'dense'"):
        Residual("dense")
