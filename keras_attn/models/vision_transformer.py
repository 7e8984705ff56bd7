"""Vision Transformer."""

import keras
from keras import layers

from keras_attn.checks import check_choice, check_count, check_pair, check_positive
from keras_attn.deep_norm import deep_norm_constants
from keras_attn.encoder import EncoderBlock
from keras_attn.models.sizes import resolve
from keras_attn.patches import PatchEmbedding
from keras_attn.pooling import AttentionPooling
from keras_attn.positions import LearnedPositionEmbedding
from keras_attn.prefix_tokens import PrefixTokens
from keras_attn.stochastic_depth import stochastic_depth_rates

__all__ = ["VISION_TRANSFORMER_SIZES", "VisionTransformer"]

# Tiny and Small: DeiT, table 1 (https://arxiv.org/abs/2012.12877).
# Base: An Image is Worth 16x16 Words, table 1 (https://arxiv.org/abs/2010.11929).
VISION_TRANSFORMER_SIZES = {
    # size       layers          width       heads           feed-forward
    "tiny": dict(num_layers=12, dim=192, num_heads=3, intermediate_dim=768),  # 5.7 M
    "small": dict(num_layers=12, dim=384, num_heads=6, intermediate_dim=1536),  # 22 M
    "base": dict(num_layers=12, dim=768, num_heads=12, intermediate_dim=3072),  # 86 M
}


def VisionTransformer(
    num_classes=1000,
    image_size=224,
    size="tiny",
    patch_size=16,
    num_layers=None,
    dim=None,
    num_heads=None,
    intermediate_dim=None,
    channels=3,
    dropout=0.0,
    attention_dropout=0.0,
    pooling="token",
    num_register_tokens=0,
    norm_placement="pre",
    activation="gelu",
    epsilon=1e-6,
    any_size=False,
    layer_scale=None,
    stochastic_depth=0.0,
    name="vision_transformer",
):
    """A Vision Transformer: patches, learned positions, encoder blocks, a linear head.

    Args:
        num_classes: number of logits; `None` gives the pooled features.
        image_size: an int or `(height, width)`, in pixels, that the positions are
            learned at.
        size: `"tiny"`, `"small"`, `"base"`, or `None` when the four settings below are
            given; a setting that is given replaces that of the size.
        patch_size: an int or `(rows, cols)`, in pixels.
        num_layers: number of blocks.
        dim: width of the tokens.
        num_heads: number of attention heads.
        intermediate_dim: width inside the feed-forwards.
        channels: channels of the images.
        dropout: rate after the positions and on the output of every part of a block.
        attention_dropout: rate on the attention weights.
        pooling: `"token"` reads a class token, `"mean"` averages the patches,
            `"attention"` pools the patches by `AttentionPooling` with a feed-forward.
        num_register_tokens: how many learned tokens stand before the patches, behind a
            class token, and are read by nobody but the blocks.
        norm_placement: `"pre"` (the paper), `"post"`, `"sandwich"`, or `"deep"` with
            DeepNorm's constants for so many layers.
        activation: of the feed-forwards.
        epsilon: of the normalizations.
        any_size: accept images of any size that the patches cover, and resize the
            positions for them; otherwise the model takes `image_size` alone.
        layer_scale: first value of a `LayerScale` on each branch; `None` for none.
        stochastic_depth: rate at which samples skip a branch of the last block; it
            grows from 0, see `stochastic_depth_rates`.
        name: of the model.

    Returns:
        A functional `keras.Model` from `(batch, height, width, channels)` to logits
        `(batch, num_classes)`.

    Example:
    >>> model = VisionTransformer(10, image_size=32, patch_size=8, num_layers=2)
    >>> model.output_shape
    (None, 10)

    Reference: [Dosovitskiy et al., 2021](https://arxiv.org/abs/2010.11929),
    [Zhai et al., 2022](https://arxiv.org/abs/2106.04560) (attention pooling),
    [Darcet et al., 2024](https://arxiv.org/abs/2309.16588) (registers).
    """
    settings = resolve(
        size,
        VISION_TRANSFORMER_SIZES,
        num_layers=num_layers,
        dim=dim,
        num_heads=num_heads,
        intermediate_dim=intermediate_dim,
    )
    check_choice("pooling", pooling, ("token", "mean", "attention"))
    height, width = check_pair("image_size", image_size)
    channels = check_positive("channels", channels)
    check_count("num_register_tokens", num_register_tokens)
    num_classes = check_positive("num_classes", num_classes, optional=True)
    truncated_normal = keras.initializers.TruncatedNormal(stddev=0.02)
    patches = PatchEmbedding(
        settings["dim"],
        patch_size,
        data_format="channels_last",
        kernel_initializer=truncated_normal,
        name="patches",
    )
    _, rows, cols, _ = patches.compute_output_shape((None, height, width, channels))

    sides = (None, None) if any_size else (height, width)
    images = keras.Input((*sides, channels), name="images")
    x = patches(images)
    x = LearnedPositionEmbedding((rows, cols), name="positions")(x)
    x = layers.Reshape((-1, settings["dim"]), name="tokens")(x)
    if num_register_tokens:
        x = PrefixTokens(num_register_tokens, truncated_normal, name="register_tokens")(
            x
        )
    if pooling == "token":
        x = PrefixTokens(1, name="class_token")(x)
    x = layers.Dropout(dropout, name="dropout")(x)
    constants = {}
    if norm_placement == "deep":
        constants = deep_norm_constants(settings["num_layers"])["encoder"]
    rates = stochastic_depth_rates(settings["num_layers"], stochastic_depth)
    for index, rate in enumerate(rates):
        x = EncoderBlock(
            settings["num_heads"],
            settings["intermediate_dim"],
            dropout=dropout,
            attention_dropout=attention_dropout,
            activation=activation,
            norm_placement=norm_placement,
            epsilon=epsilon,
            kernel_initializer=truncated_normal,
            layer_scale=layer_scale,
            stochastic_depth=rate,
            **constants,
            name=f"block_{index}",
        )(x)
    if norm_placement in ("pre", "sandwich"):
        x = layers.LayerNormalization(epsilon=epsilon, name="norm")(x)
    x = _pool(x, pooling, num_register_tokens, settings, epsilon)
    if num_classes is not None:
        x = layers.Dense(
            num_classes,
            kernel_initializer=truncated_normal,
            dtype="float32",
            name="logits",
        )(x)
    return keras.Model(images, x, name=name)


def _pool(x, pooling, num_register_tokens, settings, epsilon):
    """`(batch, tokens, dim)` to `(batch, dim)`."""
    if pooling == "token":
        return x[:, 0]
    if num_register_tokens:
        x = x[:, num_register_tokens:]
    if pooling == "mean":
        mean = layers.GlobalAveragePooling1D(data_format="channels_last", name="mean")
        return mean(x)
    return AttentionPooling(
        settings["num_heads"],
        intermediate_dim=settings["intermediate_dim"],
        epsilon=epsilon,
        name="pooling",
    )(x)
