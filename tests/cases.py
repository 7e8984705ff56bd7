"""The table of every public layer: what the contract tests run over.

A row says how to make the layer, what to feed it and what it promises. `python -m
pytest tests/test_contract.py -k encoder_post` runs every contract on one row.
"""

import dataclasses
import functools
import random

import keras
import numpy as np

import keras_attn
from keras_attn import (
    DecoderBlock,
    EncoderBlock,
    FeedForward,
    GatedFeedForward,
    LayerScale,
    LearnedPositionEmbedding,
    MixtureOfExperts,
    MultiHeadAttention,
    PatchEmbedding,
    PrefixTokens,
    Residual,
    SinusoidalPositionEncoding,
    SinusoidalPositionEncoding2D,
    StochasticDepth,
    TokenEmbedding,
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
        has_dropout: whether `training=True` is random.
        vocabulary: the inputs are ids below it.
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
            (deviation * generator.normal(size=shape)).astype("float32")
            for shape in shapes
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
                dtype="int32" if self.vocabulary else "float32",
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


def numpy(x):
    return np.asarray(keras.ops.convert_to_numpy(x))
