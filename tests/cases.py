"""The table of every public layer: what the contract tests run over.

A row says how to make the layer, what to feed it and what it promises. `python -m
pytest tests/test_contract.py -k encoder_post` runs every contract on one row.
"""

import dataclasses
import functools
import random
from collections.abc import Callable

import keras
import numpy as np
from keras import ops

import keras_attn
from keras_attn import (
    AlibiBias,
    AttentionPooling,
    ConvStem,
    DecoderBlock,
    EncoderBlock,
    FeedForward,
    GatedFeedForward,
    LayerScale,
    LearnedPositionEmbedding,
    MaskTokens,
    MixtureOfExperts,
    MultiHeadAttention,
    PatchDropout,
    PatchEmbedding,
    PrefixTokens,
    RandomMasking,
    RelativePositionBias,
    RelativePositionBias2D,
    Residual,
    RotaryEmbedding,
    SinusoidalPositionEncoding,
    SinusoidalPositionEncoding2D,
    StochasticDepth,
    TokenEmbedding,
    TubeletEmbedding,
)

BATCH, LENGTH, MEMORY, DIM = 3, 5, 7, 6
SEQUENCE = (LENGTH, DIM)


@dataclasses.dataclass(frozen=True)
class Case:
    """One public layer with one set of arguments.

    Args:
        name: of the row.
        layer: the class.
        arguments: for its constructor.
        inputs: the shape of each input, without the batch.
        open_axes: the axes of each input, without the batch, that may be unknown.
        call: other arguments of the call.
        mask_names: the call argument that takes the padding mask of each input, or a
            tuple of them; empty where the layer knows no padding.
        keeps_mask: whether the first input's mask leaves with the output.
        front: number of tokens put in front of the first input's.
        is_causal: whether a token may not depend on later ones.
        has_dropout: whether `training=True` is random, or for another reason not what
            `training=False` is.
        vocabulary: the inputs are ids below it.
        orders: the inputs, by number, that are permutations of their length.
        pools: whether the output has no tokens of its own.
        is_shared: whether the output has a batch of one, for all.
        dtype: of the output, where it is the same under every policy.
        has_open_length: whether the length of the symbolic output is never known.
        readout: of the output and the first input, one output with a batch, for models
            with many outputs.
    """

    name: str
    layer: type
    arguments: dict = dataclasses.field(default_factory=dict)
    inputs: tuple = (SEQUENCE,)
    open_axes: tuple = ((0,),)
    call: dict = dataclasses.field(default_factory=dict)
    mask_names: tuple = ()
    keeps_mask: bool = False
    front: int = 0
    is_causal: bool = False
    has_dropout: bool = False
    vocabulary: int = 0
    orders: tuple = ()
    pools: bool = False
    is_shared: bool = False
    dtype: str | None = None
    has_open_length: bool = False
    readout: Callable = lambda output, first: output

    def make(self, **more):
        arguments = {"name": self.name, **self.arguments, **more}
        for name, value in arguments.items():
            if isinstance(value, functools.partial):  # a layer inside the layer
                arguments[name] = value()
        return self.layer(**arguments)

    def arrays(self, batch=BATCH, seed=0, deviation=1.0):
        generator = np.random.default_rng(seed)
        shapes = [(batch, *shape) for shape in self.inputs]
        if self.vocabulary:
            return [
                generator.integers(1, self.vocabulary, shape).astype("int32")
                for shape in shapes
            ]
        return [
            generator.permuted(np.tile(np.arange(shape[1]), (batch, 1)), axis=1).astype(
                "int32"
            )
            if index in self.orders
            else (deviation * generator.normal(size=shape)).astype("float32")
            for index, shape in enumerate(shapes)
        ]

    def symbols(self, is_open=True, batch=None):
        """Keras inputs, with unknown axes where the layer allows them."""
        return [
            keras.Input(
                [
                    None if is_open and axis in axes else size
                    for axis, size in enumerate(shape)
                ],
                batch_size=batch,
                dtype="int32" if self.vocabulary or index in self.orders else "float32",
                name=f"{self.name}_{index}",
            )
            for index, (shape, axes) in enumerate(
                zip(self.inputs, self.open_axes, strict=True)
            )
        ]

    def mask_arguments(self, masks):
        """The masks of the inputs by the names of the call's arguments."""
        named = {}
        for names, mask in zip(self.mask_names, masks, strict=True):
            names = (names,) if isinstance(names, str) else names
            named.update(dict.fromkeys(names, mask))
        return named

    def build(self, **more):
        """The layer, built, with weights that make every term count."""
        random.seed(7)  # initializers take their seeds from here
        layer = self.make(**more)
        layer(*self.arrays(), **self.call)
        randomize(layer)
        return layer


def randomize(layer, seed=1):
    """Biases and norms start as 0 and 1: give them values that can be got wrong."""
    generator = np.random.default_rng(seed)
    for variable in layer.trainable_variables:
        noise = 0.5 * generator.normal(size=variable.shape)
        variable.assign(variable.numpy().astype("float32") + noise.astype("float32"))


def _attention(name, inputs=(SEQUENCE,), call=None, **arguments):
    arguments = {"num_heads": 2, "key_dim": 3, **arguments}
    names = ("query_mask", "value_mask")
    names = names if len(inputs) > 1 else (names,)
    return Case(
        name,
        MultiHeadAttention,
        arguments,
        inputs=inputs,
        open_axes=tuple(tuple(range(len(shape) - 1)) for shape in inputs),
        call=call or {},
        mask_names=names,
        keeps_mask=True,
        is_causal=bool(call and call.get("use_causal_mask")),
        has_dropout=bool(arguments.get("dropout")),
    )


def _block(name, layer, memory=False, **arguments):
    random = ("dropout", "attention_dropout", "stochastic_depth")
    if "attention" not in arguments and "self_attention" not in arguments:
        arguments = {"num_heads": 2, **arguments}
    if "feed_forward" not in arguments:
        arguments = {"intermediate_dim": 11, **arguments}
    return Case(
        name,
        layer,
        arguments,
        inputs=(SEQUENCE, (MEMORY, 4)) if memory else (SEQUENCE,),
        open_axes=((0,), (0,)) if memory else ((0,),),
        mask_names=("mask", "memory_mask") if memory else ("mask",),
        keeps_mask=True,
        is_causal=layer is DecoderBlock,
        has_dropout=any(arguments.get(name) for name in random),
    )


def _part(name, layer, **arguments):
    """A layer to be made inside a layer: under its name its weights are found."""
    return functools.partial(layer, **arguments, name=name)


def _experts(name, **arguments):
    return Case(
        name,
        MixtureOfExperts,
        {"num_experts": 3, "intermediate_dim": 11, **arguments},
        mask_names=("mask",),
        keeps_mask=True,
        is_causal=True,
    )


def _pooling(name, **arguments):
    return Case(
        name,
        AttentionPooling,
        {"num_heads": 2, **arguments},
        mask_names=("mask",),
        pools=True,
        has_dropout=bool(arguments.get("dropout")),
    )


def for_every_row(output, first):
    axes = tuple(range(1, len(first.shape)))
    term = ops.reshape(ops.mean(first, axis=axes), (-1, 1, 1, 1))
    # In this order: on TensorFlow Keras takes a second summand of one long axis for the
    # bias of a convolution.
    return ops.cast(term, output.dtype) + output


def _bias(name, layer, **arguments):
    return Case(
        name, layer, arguments, is_shared=True, dtype="float32", readout=for_every_row
    )


def _grid_bias(name, shape, **arguments):
    return Case(
        name,
        RelativePositionBias2D,
        {"num_heads": 2, **arguments},
        inputs=(shape,),
        open_axes=(tuple(range(len(shape) - 1)),),
        is_shared=True,
        readout=for_every_row,
    )


def mean(output, first):
    return ops.mean(output, axis=1)


def mean_of_first(output, first):
    return ops.mean(output[0], axis=1)


CASES = [
    Case(
        "sinusoids",
        SinusoidalPositionEncoding,
        mask_names=("mask",),
        keeps_mask=True,
    ),
    Case(
        "sinusoids_halves",
        SinusoidalPositionEncoding,
        {"layout": "halves", "max_wavelength": 500},
        mask_names=("mask",),
        keeps_mask=True,
    ),
    Case(
        "sinusoids_2d",
        SinusoidalPositionEncoding2D,
        inputs=((2, 3, 8),),
        open_axes=((0, 1),),
    ),
    Case(
        "learned_positions",
        LearnedPositionEmbedding,
        {"size": 11},
        mask_names=("mask",),
        keeps_mask=True,
    ),
    Case(
        "learned_grid",
        LearnedPositionEmbedding,
        {"size": (3, 5)},
        inputs=((3, 5, 7),),
        open_axes=((0, 1),),
    ),
    Case(
        "learned_grid_resized",
        LearnedPositionEmbedding,
        {"size": (3, 5), "interpolation": "bilinear"},
        inputs=((5, 2, 7),),
        open_axes=((0, 1),),
    ),
    Case(
        "rotary",
        RotaryEmbedding,
        {"layout": "interleaved", "rotary_dim": 4},
        inputs=((2, LENGTH, DIM),),
        open_axes=((1,),),
        keeps_mask=False,
    ),
    Case(
        "rotary_grid",
        RotaryEmbedding,
        {"grid": (2, 3), "num_prefix_tokens": 1, "base": 100},
        inputs=((2, 7, 8),),
        open_axes=((),),
    ),
    _bias("alibi", AlibiBias, num_heads=3),
    _bias(
        "t5_bias",
        RelativePositionBias,
        num_heads=3,
        num_buckets=6,
        bidirectional=False,
    ),
    _attention("attention"),
    _attention("attention_causal", call={"use_causal_mask": True}, use_bias=False),
    _attention(
        "attention_cross",
        ((LENGTH, 6), (MEMORY, 4), (MEMORY, 3)),
        value_dim=5,
        output_shape=(2, 7),
    ),
    _attention("attention_dropout", dropout=0.4, seed=3),
    _attention("attention_window", sliding_window=2),
    _attention("attention_window_pair", sliding_window=(2, 0)),
    _attention("attention_gate", use_gate=True),
    _attention("attention_grouped", num_heads=6, num_kv_heads=2),
    _attention(
        "attention_rotary",
        key_dim=4,
        position=functools.partial(RotaryEmbedding, name="position"),
        query_key_norm="rms",
        call={"use_causal_mask": True},
    ),
    _attention(
        "attention_alibi",
        position=functools.partial(AlibiBias, 2, name="position"),
        query_key_norm="layer",
        logit_soft_cap=2.0,
    ),
    _attention(
        "attention_t5",
        ((LENGTH, DIM), (MEMORY, DIM)),
        position=functools.partial(
            RelativePositionBias, 2, num_buckets=8, max_distance=5, name="position"
        ),
        query_key_norm="l2",
        use_sinks=True,
    ),
    _attention("attention_chunked", sliding_window=3, implementation="chunked"),
    _attention(
        "attention_axes", ((2, LENGTH, DIM), (2, MEMORY, DIM)), attention_axes=(2,)
    ),
    _attention("attention_grid", ((2, 3, DIM),)),
    Case(
        "feed_forward",
        FeedForward,
        {"intermediate_dim": 11, "output_dim": 7, "dropout": 0.4, "seed": 3},
        keeps_mask=True,
        has_dropout=True,
        is_causal=True,
    ),
    Case(
        "swiglu",
        GatedFeedForward,
        {"intermediate_dim": 11},
        keeps_mask=True,
        is_causal=True,
    ),
    Case(
        "geglu",
        GatedFeedForward,
        {
            "intermediate_dim": 11,
            "activation": "gelu",
            "output_dim": 7,
            "use_bias": True,
            "dropout": 0.4,
            "seed": 3,
        },
        keeps_mask=True,
        has_dropout=True,
        is_causal=True,
    ),
    _experts("experts"),
    _experts("experts_switch", top_k=1, load_balancing_weight=0, use_bias=False),
    _experts("experts_capacity", capacity_factor=0.9, z_loss_weight=0.1),
    _experts("experts_gated", use_gate=True, activation="silu", capacity_factor=1.0),
    Case(
        "layer_scale",
        LayerScale,
        {"initial_value": 0.1},
        keeps_mask=True,
        is_causal=True,
    ),
    Case(
        "stochastic_depth",
        StochasticDepth,
        {"rate": 0.4, "seed": 3},
        keeps_mask=True,
        has_dropout=True,
        is_causal=True,
    ),
    Case(
        "residual_post",
        Residual,
        {
            "layer": functools.partial(FeedForward, 11, name="layer"),
            "dropout": 0.4,
            "seed": 3,
        },
        keeps_mask=True,
        has_dropout=True,
        is_causal=True,
    ),
    Case(
        "residual_pre",
        Residual,
        {
            "layer": functools.partial(FeedForward, 11, name="layer"),
            "norm_placement": "pre",
        },
        keeps_mask=True,
        is_causal=True,
    ),
    Case(
        "residual_sandwich",
        Residual,
        {
            "layer": functools.partial(FeedForward, 11, name="layer"),
            "norm_placement": "sandwich",
            "layer_scale": 0.1,
            "stochastic_depth": 0.4,
            "seed": 3,
        },
        keeps_mask=True,
        has_dropout=True,
        is_causal=True,
    ),
    Case(
        "residual_deep",
        Residual,
        {
            "layer": functools.partial(FeedForward, 11, name="layer"),
            "norm_placement": "deep",
            "alpha": 1.7,
        },
        keeps_mask=True,
        is_causal=True,
    ),
    _block("encoder_post", EncoderBlock),
    _block(
        "encoder_pre", EncoderBlock, norm_placement="pre", activation="gelu", key_dim=5
    ),
    _block("encoder_rms", EncoderBlock, normalization="rms", use_bias=False),
    _block("encoder_dropout", EncoderBlock, dropout=0.3, attention_dropout=0.3, seed=3),
    _block(
        "encoder_parts",
        EncoderBlock,
        attention=_part("attention", MultiHeadAttention, num_heads=2, num_kv_heads=1),
        feed_forward=_part("feed_forward", GatedFeedForward, intermediate_dim=11),
        norm_placement="pre",
    ),
    _block("encoder_parallel", EncoderBlock, norm_placement="pre", parallel=True),
    _block(
        "encoder_depth",
        EncoderBlock,
        norm_placement="sandwich",
        layer_scale=0.1,
        stochastic_depth=0.3,
        seed=3,
    ),
    _block("encoder_deep", EncoderBlock, norm_placement="deep", alpha=1.7, beta=0.4),
    _block("decoder", DecoderBlock, memory=True),
    _block(
        "decoder_deep",
        DecoderBlock,
        memory=True,
        norm_placement="deep",
        alpha=1.7,
        beta=0.4,
    ),
    _block(
        "decoder_parts",
        DecoderBlock,
        memory=True,
        self_attention=_part("self_attention", MultiHeadAttention, num_heads=2),
        cross_attention=_part("cross_attention", MultiHeadAttention, num_heads=3),
        feed_forward=_part(
            "feed_forward", MixtureOfExperts, num_experts=3, intermediate_dim=5
        ),
        norm_placement="pre",
    ),
    _block("decoder_parallel", DecoderBlock, norm_placement="pre", parallel=True),
    _block("decoder_pre", DecoderBlock, memory=True, norm_placement="pre"),
    _block("decoder_only", DecoderBlock, dropout=0.3, attention_dropout=0.3, seed=3),
    Case(
        "patches",
        PatchEmbedding,
        {"dim": 7, "patch_size": (2, 3), "data_format": "channels_last"},
        inputs=((6, 15, 3),),
        open_axes=((0, 1),),
    ),
    Case(
        "patches_same",
        PatchEmbedding,
        {
            "dim": 7,
            "patch_size": 3,
            "strides": 2,
            "padding": "same",
            "data_format": "channels_first",
        },
        inputs=((3, 6, 11),),
        open_axes=((1, 2),),
    ),
    Case(
        "tubelets",
        TubeletEmbedding,
        {"dim": 7, "patch_size": (2, 2, 3), "data_format": "channels_last"},
        inputs=((4, 4, 9, 3),),
        open_axes=((0, 1, 2),),
    ),
    Case(
        "tubelets_same",
        TubeletEmbedding,
        {
            "dim": 7,
            "patch_size": (3, 2, 3),
            "strides": (2, 2, 1),
            "padding": "same",
            "data_format": "channels_first",
        },
        inputs=((2, 3, 4, 5),),
        open_axes=((1, 2, 3),),
    ),
    Case(
        "conv_stem",
        ConvStem,
        {"dim": 7, "filters": (3, 5), "data_format": "channels_last"},
        inputs=((6, 9, 3),),
        open_axes=((0, 1),),
        has_dropout=True,
    ),
    Case(
        "conv_stem_layer_norm",
        ConvStem,
        {
            "dim": 7,
            "filters": (5, 3),
            "strides": (2, 1),
            "normalization": "layer",
            "data_format": "channels_first",
        },
        inputs=((3, 6, 5),),
        open_axes=((1, 2),),
    ),
    Case(
        "prefix_video",
        PrefixTokens,
        {"num_tokens": 2},
        inputs=((2, 3, 2, DIM),),
        open_axes=((0, 1, 2),),
    ),
    Case(
        "patch_dropout",
        PatchDropout,
        {"rate": 0.5, "num_prefix_tokens": 1, "seed": 3},
        mask_names=("mask",),
        keeps_mask=True,
        has_dropout=True,
        has_open_length=True,
        readout=mean,
    ),
    Case(
        "random_masking",
        RandomMasking,
        {"rate": 0.5, "seed": 3},
        inputs=(SEQUENCE, (LENGTH,)),
        open_axes=((0,), (0,)),
        readout=mean_of_first,
    ),
    Case(
        "mask_tokens",
        MaskTokens,
        inputs=((2, DIM), (LENGTH,)),
        open_axes=((0,), (0,)),
        orders=(1,),
    ),
    _pooling("pooling", num_queries=3, key_dim=5, use_bias=False),
    _pooling("pooling_feed_forward", intermediate_dim=11),
    _pooling("pooling_dropout", intermediate_dim=11, dropout=0.4, seed=3),
    _grid_bias("grid_bias", (2, 3, DIM), grid=(2, 3)),
    _grid_bias(
        "grid_bias_resized",
        (2, 4, DIM),
        grid=(3, 2),
        num_prefix_tokens=2,
        interpolation="bilinear",
    ),
    _grid_bias("grid_bias_sequence", SEQUENCE, grid=(2, 2), num_prefix_tokens=1),
    Case("prefix_grid", PrefixTokens, {"num_tokens": 3}, inputs=((2, 5, DIM),)),
    Case(
        "prefix_sequence",
        PrefixTokens,
        mask_names=("mask",),
        keeps_mask=True,
        front=1,
        is_causal=True,
    ),
    Case(
        "token_embedding",
        TokenEmbedding,
        {"input_dim": 11, "output_dim": 6},
        inputs=((LENGTH,),),
        keeps_mask=True,
        is_causal=True,
        vocabulary=11,
    ),
]

PUBLIC_LAYERS = {
    thing
    for name in keras_attn.__all__
    if isinstance(thing := getattr(keras_attn, name), type)
    and issubclass(thing, keras.layers.Layer)
}


def padding(length, batch=BATCH, side="right"):
    """(batch, length), `True` at real tokens: the first row whole, others padded."""
    mask = np.ones((batch, length), bool)
    for row in range(1, batch):
        count = 1 + row % (length - 1)
        if side == "left":
            mask[row, :count] = False
        else:
            mask[row, length - count :] = False
    return mask


class Ride(keras.layers.Layer):
    """Its input with a mask riding on it, set by Keras' own mechanism."""

    def __init__(self, mask, **kwargs):
        super().__init__(**kwargs)
        self.mask = np.asarray(mask)

    def call(self, inputs):
        return inputs * 1

    def compute_mask(self, inputs, previous_mask=None):
        return keras.ops.convert_to_tensor(self.mask)


class Probe(keras.layers.Layer):
    """Gives back the mask that rides on its input, or -1 everywhere."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def call(self, inputs, mask=None):
        if mask is None:
            return keras.ops.full(keras.ops.shape(inputs)[:2], -1, dtype="int32")
        return keras.ops.cast(mask, "int32")

    def compute_output_shape(self, inputs_shape):
        return inputs_shape[:2]

    def compute_output_spec(self, inputs, mask=None):
        return keras.KerasTensor(inputs.shape[:2], dtype="int32")


def riding_mask(x):
    """The mask on a tensor, as the next layer would get it, or `None`."""
    found = numpy(Probe()(x))
    return None if (found == -1).any() else found.astype(bool)


def run_whole(model, inputs):
    """What a model gives. JAX compiles every operation alone, and those that Keras
    quantized at every call: there the whole model is compiled, which is faster.
    """
    if keras.backend.backend() == "jax":
        return model.predict_on_batch(inputs)
    return model(inputs)


def numpy(x):
    return np.asarray(keras.ops.convert_to_numpy(x))
