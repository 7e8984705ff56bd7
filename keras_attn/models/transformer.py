"""The encoder-decoder Transformer."""

import keras
from keras import layers

from keras_attn.checks import check_positive
from keras_attn.decoder import DecoderBlock
from keras_attn.deep_norm import deep_norm_constants
from keras_attn.embeddings import TokenEmbedding
from keras_attn.encoder import EncoderBlock
from keras_attn.models.sizes import resolve
from keras_attn.positions import SinusoidalPositionEncoding

__all__ = ["TRANSFORMER_SIZES", "Transformer"]

# Attention Is All You Need, table 3 (https://arxiv.org/abs/1706.03762).
TRANSFORMER_SIZES = {
    "base": dict(
        num_layers=6, dim=512, num_heads=8, intermediate_dim=2048, dropout=0.1
    ),  # 65 M
    "big": dict(
        num_layers=6, dim=1024, num_heads=16, intermediate_dim=4096, dropout=0.3
    ),  # 213 M
}


def Transformer(
    source_vocabulary_size,
    target_vocabulary_size=None,
    size="base",
    num_layers=None,
    dim=None,
    num_heads=None,
    intermediate_dim=None,
    dropout=None,
    num_decoder_layers=None,
    attention_dropout=0.0,
    activation="relu",
    norm_placement="post",
    epsilon=1e-6,
    share_embeddings=None,
    tie_output=True,
    scale_embeddings=True,
    name="transformer",
):
    """The Transformer of "Attention Is All You Need", trained by teacher forcing.

    The model takes a dict of ids, 0 for padding: `"source"`, and `"target"`, the right
    answer shifted right by one (a begin token in front). Row `i` of the logits predicts
    token `i + 1` of the target.

    Args:
        source_vocabulary_size: number of source ids, padding included.
        target_vocabulary_size: number of target ids. Defaults to one vocabulary for
            both sides.
        size: `"base"`, `"big"`, or `None` when the five settings below are given; a
            setting that is given replaces that of the size.
        num_layers: number of encoder blocks, and of decoder blocks.
        dim: width of the tokens.
        num_heads: number of attention heads.
        intermediate_dim: width inside the feed-forwards.
        dropout: rate after the positions and on the output of every part of a block.
        num_decoder_layers: number of decoder blocks. Defaults to `num_layers`.
        attention_dropout: rate on the attention weights.
        activation: of the feed-forwards.
        norm_placement: `"post"` (the paper); `"pre"` or `"sandwich"`, which add a last
            norm to encoder and decoder; `"deep"` with DeepNorm's constants for so many
            layers.
        epsilon: of the normalizations.
        share_embeddings: one embedding for source and target. Defaults to whether they
            share a vocabulary.
        tie_output: the target embedding serves as the output projection too.
        scale_embeddings: multiply embeddings by the root of `dim`.
        name: of the model.

    Returns:
        A functional `keras.Model` from `{"source": (batch, source_length), "target":
        (batch, target_length)}` to logits `(batch, target_length,
        target_vocabulary_size)`, float32.

    Example:
    >>> model = Transformer(100, num_layers=1, dim=32, num_heads=2, intermediate_dim=64)
    >>> model.output_shape
    (None, None, 100)

    Reference: [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762).
    """
    settings = resolve(
        size,
        TRANSFORMER_SIZES,
        num_layers=num_layers,
        dim=dim,
        num_heads=num_heads,
        intermediate_dim=intermediate_dim,
        dropout=dropout,
    )
    num_decoder_layers = check_positive(
        "num_decoder_layers", num_decoder_layers, optional=True
    )
    if target_vocabulary_size is None:
        target_vocabulary_size = source_vocabulary_size
    check_positive("source_vocabulary_size", source_vocabulary_size)
    check_positive("target_vocabulary_size", target_vocabulary_size)
    one_vocabulary = target_vocabulary_size == source_vocabulary_size
    if share_embeddings is None:
        share_embeddings = one_vocabulary
    if share_embeddings and not one_vocabulary:
        raise ValueError(
            "Source and target can share an embedding only with one vocabulary. "
            f"Received: source_vocabulary_size={source_vocabulary_size}, "
            f"target_vocabulary_size={target_vocabulary_size}, share_embeddings=True"
        )

    def embedding(vocabulary_size, name):
        return TokenEmbedding(
            vocabulary_size,
            settings["dim"],
            scale=scale_embeddings,
            mask_zero=True,
            tie_weights=tie_output or name == "source_embedding",
            reverse_dtype="float32",
            name=name,
        )

    target_embedding = embedding(
        target_vocabulary_size, "embedding" if share_embeddings else "target_embedding"
    )
    source_embedding = (
        target_embedding
        if share_embeddings
        else embedding(source_vocabulary_size, "source_embedding")
    )
    block = dict(
        num_heads=settings["num_heads"],
        intermediate_dim=settings["intermediate_dim"],
        dropout=settings["dropout"],
        attention_dropout=attention_dropout,
        activation=activation,
        norm_placement=norm_placement,
        epsilon=epsilon,
    )

    num_decoder_layers = num_decoder_layers or settings["num_layers"]
    constants = {"encoder": {}, "decoder": {}}
    if norm_placement == "deep":
        constants = deep_norm_constants(settings["num_layers"], num_decoder_layers)
    has_last_norm = norm_placement in ("pre", "sandwich")

    source = keras.Input((None,), dtype="int32", name="source")
    target = keras.Input((None,), dtype="int32", name="target")

    x = SinusoidalPositionEncoding(name="source_positions")(source_embedding(source))
    x = layers.Dropout(settings["dropout"], name="source_dropout")(x)
    for index in range(settings["num_layers"]):
        x = EncoderBlock(**block, **constants["encoder"], name=f"encoder_{index}")(x)
    if has_last_norm:
        x = layers.LayerNormalization(epsilon=epsilon, name="encoder_norm")(x)
    memory = x

    x = SinusoidalPositionEncoding(name="target_positions")(target_embedding(target))
    x = layers.Dropout(settings["dropout"], name="target_dropout")(x)
    for index in range(num_decoder_layers):
        decode = DecoderBlock(**block, **constants["decoder"], name=f"decoder_{index}")
        x = decode(x, memory)
    if has_last_norm:
        x = layers.LayerNormalization(epsilon=epsilon, name="decoder_norm")(x)
    x = target_embedding(x, reverse=True)
    logits = layers.Identity(dtype="float32", name="logits")(x)
    return keras.Model({"source": source, "target": target}, logits, name=name)
