"""Token embeddings that are scaled and tied as in the paper."""

import keras
from keras import initializers, layers
from keras.saving import register_keras_serializable

from keras_attn.checks import check_positive
from keras_attn.masks import CarryMask, padding_mask
from keras_attn.serialization import fresh, quantized_dtype

__all__ = ["TokenEmbedding"]


@register_keras_serializable(package="keras_attn")
class TokenEmbedding(layers.Layer):
    r"""Token ids to vectors, and with `reverse=True` vectors to logits over the tokens.

    The same matrix serves both ways ("Attention Is All You Need", section 3.4); on the
    way in its rows are multiplied by $\sqrt{d}$, which the default initializer, of
    deviation $1 / \sqrt{d}$, turns into unit variance.

    With `mask_zero` id 0 is padding: its mask leaves with the vectors. A mask that
    rides on vectors leaves with their logits.

    Args:
        input_dim: size of the vocabulary.
        output_dim: width $d$ of the vectors.
        scale: whether to multiply by $\sqrt{d}$.
        mask_zero: whether id 0 is padding.
        tie_weights: whether the logits come from the same matrix; else from another.
        embeddings_initializer: initializer of the matrix. Defaults to a normal one of
            deviation $1 / \sqrt{d}$.
        reverse_dtype: dtype of the logits, `"float32"` say under mixed precision.
            Defaults to that of the layer.

    Call arguments:
        inputs: `(batch, length)` ids, or `(batch, length, output_dim)` with `reverse`.
        reverse: vectors to logits.

    Returns:
        `(batch, length, output_dim)`, or `(batch, length, input_dim)` logits.

    Example:
    >>> embedding = TokenEmbedding(100, 64, mask_zero=True)
    >>> vectors = embedding(np.array([[5, 7, 0]]))
    >>> tuple(vectors.shape), tuple(embedding(vectors, reverse=True).shape)
    ((1, 3, 64), (1, 3, 100))
    """

    def __init__(
        self,
        input_dim,
        output_dim,
        scale=True,
        mask_zero=False,
        tie_weights=True,
        embeddings_initializer=None,
        reverse_dtype=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.input_dim = check_positive("input_dim", input_dim)
        self.output_dim = check_positive("output_dim", output_dim)
        self.scale = scale
        self.mask_zero = mask_zero
        self.tie_weights = tie_weights
        if embeddings_initializer is None:
            embeddings_initializer = initializers.RandomNormal(stddev=output_dim**-0.5)
        self.embeddings_initializer = initializers.get(embeddings_initializer)
        self.reverse_dtype = reverse_dtype
        self.embedding = layers.ReversibleEmbedding(
            self.input_dim,
            self.output_dim,
            tie_weights=tie_weights,
            embeddings_initializer=fresh(self.embeddings_initializer),
            reverse_dtype=reverse_dtype,
            dtype=self.dtype_policy,
            name="embedding",
        )
        self.embedding.supports_masking = True  # else it warns of the vectors' mask
        self.carry_mask = CarryMask(dtype=self.dtype_policy, name="carry_mask")

    def build(self, inputs_shape):
        self.embedding.build(inputs_shape)

    def call(self, inputs, reverse=False):
        if reverse:
            return self.embedding(inputs, reverse=True)
        outputs = self.embedding(inputs)  # (batch, length, output_dim)
        if self.scale:
            outputs = outputs * self.output_dim**0.5
        if self.mask_zero:
            outputs = self.carry_mask(outputs, mask=padding_mask(inputs))
        return outputs

    def compute_output_shape(self, inputs_shape, reverse=False):
        if reverse:
            return (*inputs_shape[:-1], self.input_dim)
        return (*inputs_shape, self.output_dim)

    def compute_output_spec(self, inputs, reverse=False):
        dtype = self.reverse_dtype if reverse else None
        shape = self.compute_output_shape(inputs.shape, reverse)
        return keras.KerasTensor(shape, dtype=dtype or self.compute_dtype)

    def get_config(self):
        return {
            **super().get_config(),
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "scale": self.scale,
            "mask_zero": self.mask_zero,
            "tie_weights": self.tie_weights,
            "embeddings_initializer": initializers.serialize(
                self.embeddings_initializer
            ),
            "reverse_dtype": self.reverse_dtype,
            **quantized_dtype(self),
        }
