"""Blocks whose attention or feed-forward is a layer that the caller gave."""

import keras
import numpy as np
import oracle
import pytest
from cases import Ride, numpy, padding, randomize, riding_mask
from keras import ops

from keras_attn import (
    DecoderBlock,
    EncoderBlock,
    FeedForward,
    GatedFeedForward,
    MixtureOfExperts,
    MultiHeadAttention,
)

BATCH, LENGTH, MEMORY, DIM = 3, 5, 7, 6
X = np.random.default_rng(0).normal(size=(BATCH, LENGTH, DIM)).astype("float32")
M = np.random.default_rng(1).normal(size=(BATCH, MEMORY, 4)).astype("float32")


def close(actual, expected, tolerance=1e-5):
    np.testing.assert_allclose(numpy(actual), expected, rtol=tolerance, atol=tolerance)


def built(layer, *inputs):
    layer(*inputs)
    randomize(layer)
    return layer, oracle.weights_of(layer)


# --- Our own layers ------------------------------------------------------------------


def test_the_given_layers_are_the_parts():
    attention = MultiHeadAttention(4, 5, num_kv_heads=2, name="attention")
    feed = GatedFeedForward(7, name="feed_forward")
    layer, weights = built(EncoderBlock(attention=attention, feed_forward=feed), X)
    assert layer.attention is attention and layer.feed_forward is feed
    mask = padding(LENGTH)
    expected = oracle.encoder_block(weights, X, mask, feed=oracle.gated_feed_forward)
    close(layer(X, mask=mask), expected, 3e-5)


def test_each_part_of_a_decoder_alone():
    plain, _ = built(DecoderBlock(2, 11), X, M)
    masks = {"mask": padding(LENGTH), "memory_mask": padding(MEMORY)}
    for name, part in {
        "self_attention": MultiHeadAttention(2, name="self_attention"),
        "cross_attention": MultiHeadAttention(2, name="cross_attention"),
        "feed_forward": FeedForward(11, name="feed_forward"),
    }.items():
        sizes = (2, None) if name == "feed_forward" else (2, 11)
        layer = DecoderBlock(*sizes, **{name: part})
        layer(X, M)
        weights = {w.path.split("/", 1)[1]: w for w in plain.weights}
        for weight in layer.weights:
            weight.assign(weights[weight.path.split("/", 1)[1]])
        close(layer(X, M, **masks), numpy(plain(X, M, **masks)), 1e-6)


def test_a_decoder_of_given_attention_needs_no_heads():
    attention = MultiHeadAttention(3, name="self_attention")
    layer = DecoderBlock(intermediate_dim=11, self_attention=attention)
    layer, weights = built(layer, X)
    close(layer(X), oracle.decoder_block(weights, X), 3e-5)
    layer = DecoderBlock(intermediate_dim=11, self_attention=MultiHeadAttention(3))
    with pytest.raises(ValueError, match="(?s)num_heads.*cross_attention"):
        layer(X, M)


@pytest.mark.parametrize("way", ["config", "file"])
def test_given_parts_are_saved(way, tmp_path):
    layer = DecoderBlock(
        self_attention=MultiHeadAttention(2, sliding_window=2),
        cross_attention=keras.layers.MultiHeadAttention(2, 3),
        feed_forward=MixtureOfExperts(3, 5),
    )
    inputs = [keras.Input((None, DIM)), keras.Input((None, 4))]
    model = keras.Model(inputs, layer(*inputs))
    randomize(model)
    if way == "config":
        again = keras.models.clone_model(model)
        again.set_weights(model.get_weights())
    else:
        model.save(tmp_path / "model.keras")
        again = keras.saving.load_model(tmp_path / "model.keras")
    close(again([X, M]), numpy(model([X, M])), 1e-6)
    block = next(part for part in again.layers if isinstance(part, DecoderBlock))
    assert block.self_attention.sliding_window == 2
    assert type(block.cross_attention) is keras.layers.MultiHeadAttention


# --- Layers of others ----------------------------------------------------------------


class Known(keras.layers.Layer):
    """A layer that says it deals with masks."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True


class TakesAttentionMask(Known):
    """The least that attends: scores all 0."""

    def call(self, query, value, attention_mask=None):
        if attention_mask is None:
            shape = (1, ops.shape(query)[1], ops.shape(value)[1])
            attention_mask = ops.ones(shape, "bool")
        weights = ops.cast(attention_mask, "float32")
        weights = weights / ops.maximum(ops.sum(weights, -1, keepdims=True), 1.0)
        if weights.shape[0] == 1:
            weights = ops.repeat(weights, ops.shape(value)[0], 0)
        mixed = ops.matmul(weights, value)
        return ops.mean(mixed, -1, keepdims=True) * ops.arange(6.0)  # not for a norm


class TakesMask(Known):
    """A mixer of one input."""

    def call(self, inputs, mask=None, training=None):
        if mask is None:
            mask = ops.ones(ops.shape(inputs)[:2], "bool")
        weights = ops.cast(mask, inputs.dtype)[..., None]
        total = ops.sum(inputs * weights, 1, keepdims=True)
        return total / ops.sum(weights, 1, keepdims=True) + 0 * inputs


class TakesKerasNames(Known):
    def call(self, x, memory, x_mask=None, memory_mask=None, training=None):
        weights = ops.ones(ops.shape(memory)[:2], memory.dtype)
        if memory_mask is not None:
            weights = ops.cast(memory_mask, memory.dtype)
        total = ops.sum(memory * weights[..., None], 1) / ops.sum(weights, 1)[:, None]
        return ops.mean(total, -1)[:, None, None] * ops.arange(6.0) + 0 * x


class Convolution(keras.layers.Layer):
    """Knows of no masks at all."""

    def build(self, inputs_shape):
        self.mix = keras.layers.Conv1D(
            inputs_shape[-1], 3, padding="same", data_format="channels_last"
        )
        self.mix.build(inputs_shape)

    def call(self, inputs):
        return self.mix(inputs)


def keras_attention(**arguments):
    return keras.layers.MultiHeadAttention(2, 3, **arguments)


ENCODERS = {
    "keras": lambda: keras_attention(name="attention"),
    "keras_dropout": lambda: keras_attention(name="attention", dropout=0.1),
    "keras_grouped": lambda: keras.layers.GroupQueryAttention(3, 2, 1),
    "attention_mask": TakesAttentionMask,
    "mask": TakesMask,
}


@pytest.mark.parametrize("way", ["argument", "riding", "functional"])
@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("name", ENCODERS)
def test_padding_is_hidden_from_any_attention(name, placement, way):
    mask = padding(LENGTH)
    layer = EncoderBlock(
        intermediate_dim=11, attention=ENCODERS[name](), norm_placement=placement
    )
    layer, _ = built(layer, X)
    other = np.where(mask[..., None], X, 9.0).astype("float32")
    outputs = []
    for x in (X, other):
        if way == "argument":
            y = layer(x, mask=mask)
        elif way == "riding":
            ridden = Ride(mask)(x)
            y = layer(ridden)
            assert ridden._keras_mask is not None  # Keras' attention takes masks off
        else:
            inputs = keras.Input((LENGTH, DIM), batch_size=BATCH)
            y = keras.Model(inputs, layer(Ride(mask)(inputs)))(x)
        np.testing.assert_array_equal(riding_mask(y), mask)
        outputs.append(numpy(y))
    close(outputs[0][mask], outputs[1][mask])
    assert np.abs(outputs[0] - numpy(layer(X)))[mask].max() > 1e-3


def test_keras_attention_gives_what_ours_gives():
    mask, random = padding(LENGTH), np.random.default_rng(4)
    attention = keras_attention(name="attention")
    theirs, _ = built(EncoderBlock(intermediate_dim=11, attention=attention), X)
    ours = EncoderBlock(2, 11, key_dim=3)
    ours(X)
    ours.set_weights(theirs.get_weights())
    square = (LENGTH, LENGTH)
    for shape in [square, (BATCH, *square), (BATCH, 2, *square)]:
        pattern = random.random(shape) < 0.6
        pattern[..., 0] = True  # Keras averages where nothing may be seen
        options = {"mask": mask, "attention_mask": pattern}
        close(theirs(X, **options)[mask], numpy(ours(X, **options))[mask])


CAUSAL = {
    "keras": keras_attention,
    "attention_mask": TakesAttentionMask,
    "ours": lambda: MultiHeadAttention(2),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", CAUSAL)
def test_no_attention_sees_the_future(name, masked):
    layer = DecoderBlock(intermediate_dim=11, self_attention=CAUSAL[name]())
    layer, _ = built(layer, X)
    options = {"mask": np.ones((BATCH, LENGTH), bool)} if masked else {}
    other = X.copy()
    other[:, 3:] = 9.0
    one, two = (numpy(layer(x, **options)) for x in (X, other))
    close(one[:, :3], two[:, :3])
    assert np.abs(one - two)[:, 3:].max() > 1e-2


@pytest.mark.parametrize(
    "attention", [TakesMask, Convolution], ids=lambda thing: thing.__name__
)
def test_an_attention_that_would_see_the_future_is_refused(attention):
    layer = DecoderBlock(intermediate_dim=11, self_attention=attention(name="mixer"))
    with pytest.raises(ValueError, match="(?s)'mixer'.*future.*use_causal_mask"):
        layer(X)


def test_a_layer_that_is_causal_by_itself_says_so():
    class Causal(Convolution):
        def call(self, inputs, use_causal_mask=False):
            return ops.cumsum(inputs, 1)

    layer = DecoderBlock(intermediate_dim=11, self_attention=Causal())
    assert tuple(layer(X).shape) == X.shape


@pytest.mark.parametrize("attention", [TakesAttentionMask, TakesKerasNames])
@pytest.mark.parametrize("way", ["argument", "riding"])
def test_the_memorys_padding_is_hidden_from_any_attention(attention, way):
    mask = padding(MEMORY)
    layer, _ = built(DecoderBlock(2, 11, cross_attention=attention()), X, M)
    other = np.where(mask[..., None], M, 9.0).astype("float32")
    if way == "argument":
        one, two = (layer(X, m, memory_mask=mask) for m in (M, other))
    else:
        one, two = (layer(X, Ride(mask)(m)) for m in (M, other))
    close(one, numpy(two))
    assert np.abs(numpy(layer(X, M)) - numpy(layer(X, other))).max() > 1e-3


def test_an_attention_of_one_input_cannot_read_a_memory():
    layer = DecoderBlock(2, 11, cross_attention=TakesMask(name="mixer"))
    with pytest.raises(ValueError, match="(?s)'mixer'.*memory.*second"):
        layer(X, M)


def test_a_layer_that_knows_no_masks_works_without_and_is_refused_with_one():
    layer = EncoderBlock(intermediate_dim=11, attention=Convolution(name="mixer"))
    assert tuple(layer(X).shape) == X.shape
    said = "(?s)'mixer' .Convolution.*no padding mask.*supports_masking"
    with pytest.raises(ValueError, match=said):
        layer(X, mask=padding(LENGTH))
    with pytest.raises(ValueError, match=said):
        layer(Ride(padding(LENGTH))(X))


@pytest.mark.parametrize("name", ["keras", "attention_mask", "mask"])
def test_a_wrong_mask_is_refused_for_any_attention(name):
    layer = EncoderBlock(intermediate_dim=11, attention=ENCODERS[name]())
    with pytest.raises(TypeError, match="(?s)boolean.*float32"):
        layer(X, mask=padding(LENGTH).astype("float32"))
    with pytest.raises(ValueError, match=r"(?s)\(3, 5\).*\(3, 4\)"):
        layer(X, mask=np.ones((BATCH, 4), bool))
    if name != "mask":
        with pytest.raises(TypeError, match="(?s)attention_mask|mask.*boolean"):
            layer(X, attention_mask=np.ones((LENGTH, LENGTH), "float32"))


def test_a_mixer_of_grids():
    class Mean(keras.layers.Layer):
        def call(self, inputs):
            return ops.mean(inputs, (1, 2), keepdims=True) + 0 * inputs

    grid = np.random.default_rng(0).normal(size=(2, 3, 4, DIM)).astype("float32")
    layer = EncoderBlock(intermediate_dim=11, attention=Mean(), norm_placement="pre")
    assert tuple(layer(grid).shape) == grid.shape
    layer = EncoderBlock(intermediate_dim=11, attention=keras_attention())
    assert tuple(layer(grid).shape) == grid.shape
    with pytest.raises(ValueError, match=r"(?s)length, dim.*\(2, 3, 4, 6\)"):
        layer(grid, mask=np.ones((2, 3, 4), bool))


@pytest.mark.parametrize("name", ["bias", "positions", "attention_mask"])
@pytest.mark.parametrize("block", [EncoderBlock, DecoderBlock])
def test_what_a_layer_does_not_take_is_refused_by_name(block, name):
    class Narrow(Known):
        def call(self, query, value, use_causal_mask=False):
            return query

    part = "attention" if block is EncoderBlock else "self_attention"
    layer = block(intermediate_dim=11, **{part: Narrow(name="narrow")})
    given = {
        "bias": np.zeros((LENGTH, LENGTH), "float32"),
        "positions": np.zeros((BATCH, LENGTH), "int32"),
        "attention_mask": np.ones((LENGTH, LENGTH), bool),
    }[name]
    assert tuple(layer(X).shape) == X.shape
    with pytest.raises(ValueError, match=f"(?s)'narrow'.*cannot take `{name}`"):
        layer(X, **{name: given})


@pytest.mark.parametrize("block", [EncoderBlock, DecoderBlock])
def test_positions_and_bias_are_handed_on(block):
    class Placed(Known):
        def call(self, query, value, use_causal_mask=False, bias=None, positions=None):
            if positions is None:
                return query
            return query + ops.cast(positions, "float32")[..., None] + ops.sum(bias)

    part = "attention" if block is EncoderBlock else "self_attention"
    layer = block(
        intermediate_dim=11, norm_placement="pre", use_bias=False, **{part: Placed()}
    )
    layer(X)
    layer.feed_forward.output_dense.kernel.assign(np.zeros((11, DIM)))
    positions = np.arange(BATCH * LENGTH, dtype="int32").reshape(BATCH, LENGTH)
    bias = np.full((LENGTH, LENGTH), 2.0, "float32")
    found = numpy(layer(X, positions=positions, bias=bias)) - numpy(layer(X))
    close(found, np.broadcast_to(positions[..., None] + 50.0, X.shape), 1e-4)


def test_any_feed_forward():
    class Plain(keras.layers.Layer):
        """Says nothing of masks, which must not be lost, nor warned of."""

        def call(self, inputs):
            return inputs * 2

    mask = padding(LENGTH)
    parts = [
        keras.layers.Dense(DIM),
        keras.Sequential([keras.layers.Dense(11, "relu"), keras.layers.Dense(DIM)]),
        Plain(),
    ]
    for part in parts:
        layer, _ = built(EncoderBlock(2, feed_forward=part), X)
        y = layer(Ride(mask)(X))
        np.testing.assert_array_equal(riding_mask(y), mask)
        close(numpy(y)[mask], numpy(layer(X, mask=mask))[mask], 1e-6)


@pytest.mark.parametrize("way", ["argument", "riding"])
def test_what_is_inside_a_feed_forward_sees_the_padding(way):
    class Around(keras.layers.Layer):
        """Takes no mask; what it holds reads the one on the input."""

        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.supports_masking = True
            self.experts = MixtureOfExperts(3, 11)

        def build(self, inputs_shape):
            self.experts.build(inputs_shape)

        def call(self, inputs):
            return self.experts(inputs)

    mask = padding(LENGTH)
    for part in (Around(), keras.Sequential([MixtureOfExperts(3, 11)])):
        experts = next(x for x in part._flatten_layers() if hasattr(x, "router"))
        layer, _ = built(EncoderBlock(2, feed_forward=part), X)
        if way == "argument":
            layer(X, mask=mask, training=True)
        else:
            layer(Ride(mask)(X), training=True)
        assert numpy(experts.expert_counts).sum() == 2 * mask.sum()


def test_a_subclass_is_asked_for_what_it_takes_itself():
    """Keras lets no tensor through `**kwargs`, so nothing is handed over there."""

    class Loud(MultiHeadAttention):
        def call(self, query, value=None, **kwargs):
            return 2 * super().call(query, value, **kwargs)

    class Louder(MultiHeadAttention):
        def call(self, query, value=None, query_mask=None, value_mask=None):
            return 2 * super().call(query, value, None, query_mask, value_mask)

    mask = padding(LENGTH)
    block = EncoderBlock(intermediate_dim=3, attention=Loud(2))
    assert tuple(block(X).shape) == X.shape
    with pytest.raises(ValueError, match="(?s)Loud.*cannot take `query_mask`"):
        block(X, mask=mask)
    with pytest.raises(ValueError, match="(?s)Loud.*future"):
        DecoderBlock(intermediate_dim=3, self_attention=Loud(2))(X)
    layer, _ = built(EncoderBlock(intermediate_dim=3, attention=Louder(2)), X)
    other = np.where(mask[..., None], X, 9.0).astype("float32")
    one, two = (numpy(layer(x, mask=mask)) for x in (X, other))
    close(one[mask], two[mask])


def test_dropout_of_a_given_layer_is_active_in_training_alone():
    for arguments in (
        {"intermediate_dim": 11, "attention": keras_attention(dropout=0.5)},
        {"num_heads": 2, "feed_forward": GatedFeedForward(11, dropout=0.5)},
    ):
        layer, _ = built(EncoderBlock(**arguments), X)
        close(layer(X), numpy(layer(X, training=False)), 1e-6)
        change = numpy(layer(X, training=True)) - numpy(layer(X))
        assert np.abs(change).max() > 1e-2


def test_cached_attention_of_keras_hub():
    hub = pytest.importorskip("keras_hub")
    attention = hub.layers.CachedMultiHeadAttention(2, 3)
    layer = DecoderBlock(intermediate_dim=11, self_attention=attention)
    layer, _ = built(layer, X)
    mask = padding(LENGTH)
    other = X.copy()
    other[:, 3:] = 9.0
    other[~mask] = 9.0
    one, two = (numpy(layer(x, mask=mask))[:, :3] for x in (X, other))
    close(one[mask[:, :3]], two[mask[:, :3]])


# --- Bad input -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, error, said",
    [
        (lambda: EncoderBlock(), ValueError, "num_heads.*attention=None"),
        (lambda: DecoderBlock(), ValueError, "num_heads.*self_attention=None"),
        (lambda: EncoderBlock(2), ValueError, "intermediate_dim=None.*feed_forward"),
        (
            lambda: EncoderBlock(2, 11, attention=MultiHeadAttention(2)),
            ValueError,
            "its own.*num_heads=2",
        ),
        (
            lambda: EncoderBlock(2, 11, feed_forward=FeedForward(11)),
            ValueError,
            "not both.*intermediate_dim=11",
        ),
        (
            lambda: EncoderBlock(2, feed_forward="dense"),
            TypeError,
            "Keras layer.*feed_forward='dense'",
        ),
        (
            lambda: EncoderBlock(intermediate_dim=3, attention=len),
            TypeError,
            "Keras layer.*attention=",
        ),
        (
            lambda: DecoderBlock(2, 11, parallel=True)(X, M),
            ValueError,
            "side by side.*parallel=True",
        ),
        (
            lambda: DecoderBlock(2, 11, cross_attention=MultiHeadAttention(2))(X),
            ValueError,
            "cross_attention.*memory=None",
        ),
        (
            lambda: EncoderBlock(2, feed_forward=FeedForward(11, output_dim=7))(X),
            ValueError,
            r"keep the shape.*\(3, 5, 6\).*\(3, 5, 7\)",
        ),
        (
            lambda: EncoderBlock(
                intermediate_dim=3, attention=MultiHeadAttention(2, output_shape=7)
            )(X),
            ValueError,
            r"keep the shape.*\(3, 5, 6\).*\(3, 5, 7\)",
        ),
    ],
)
def test_bad_parts_are_refused(make, error, said):
    with pytest.raises(error, match=f"(?s){said}"):
        make()
