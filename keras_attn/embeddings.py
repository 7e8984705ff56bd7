"""Token embeddings that are scaled and tied as in the paper."""

from keras import initializers, layers
from keras.saving import register_keras_serializable

from keras_attn.masks import CarryMask, padding_mask

__all__ = ["TokenEmbedding"]


@register_keras_serializable(package="keras_attn")
class TokenEmbedding(layers.ReversibleEmbedding):
    r"""Token ids to vectors, and with `reverse=True` vectors to logits over the tokens.

    The same matrix serves both ways ("Attention Is All You Need", section 3.4); on the
    way in its rows are multiplied by $\sqrt{d}$, which the default initializer, of
    deviation $1 / \sqrt{d}$, turns into unit variance.

    With `mask_zero` id 0 is padding: its mask leaves with the vectors.

    Args:
        input_dim: size of the vocabulary.
        output_dim: width $d$ of the vectors.
        scale: whether to multiply by $\sqrt{d}$.
        **kwargs: the other arguments of `keras.layers.ReversibleEmbedding`, among them
            `mask_zero`, `tie_weights`, `embeddings_initializer`.

    Call arguments:
        inputs: `(batch, length)` ids, or `(batch, length, dim)` with `reverse`.
        reverse: vectors to logits.

    Returns:
        `(batch, length, output_dim)`, or `(batch, length, input_dim)` logits.

    Example:
    >>> embedding = TokenEmbedding(100, 64, mask_zero=True)
    >>> vectors = embedding(np.array([[5, 7, 0]]))
    >>> tuple(vectors.shape), tuple(embedding(vectors, reverse=True).shape)
    ((1, 3, 64), (1, 3, 100))
    """

    def __init__(self, input_dim, output_dim, scale=True, **kwargs):
        kwargs.setdefault(
            "embeddings_initializer",
            initializers.RandomNormal(stddev=output_dim**-0.5),
        )
        super().__init__(input_dim, output_dim, **kwargs)
        self.scale = scale
        self.carry_mask = CarryMask(dtype=self.dtype_policy, name="carry_mask")

    def call(self, inputs, reverse=False):
        outputs = super().call(inputs, reverse=reverse)
        if reverse or not self.scale:
            return outputs
        outputs = outputs * self.output_dim**0.5
        if self.mask_zero:
            outputs = self.carry_mask(outputs, mask=padding_mask(inputs))
        return outputs

    def get_config(self):
        return {**super().get_config(), "scale": self.scale}
