"""Fixed sinusoids, added to a sequence or to a grid."""

from keras import layers, ops
from keras.saving import register_keras_serializable

from keras_attn.checks import check_choice, check_greater, check_rank
from keras_attn.encodings.sinusoidal import (
    LAYOUTS,
    sinusoidal_encoding,
    sinusoidal_encoding_2d,
)
from keras_attn.masks import token_positions

__all__ = ["SinusoidalPositionEncoding", "SinusoidalPositionEncoding2D"]


@register_keras_serializable(package="keras_attn")
class SinusoidalPositionEncoding(layers.Layer):
    """Adds the fixed sinusoids of "Attention Is All You Need" to a sequence.

    The sinusoids are computed in float32 whatever the policy. With a mask a token's
    position is the count of real tokens before it, so padding on either side changes
    nothing. The mask leaves with the output.

    Args:
        max_wavelength: the base of the frequencies, 10,000 in the paper.
        layout: `"interleaved"` (sine, cosine, sine, ..., the paper) or `"halves"` (all
            sines, then all cosines: tensor2tensor, Whisper).

    Call arguments:
        inputs: `(batch, length, dim)`.
        mask: `(batch, length)`, `True` at real tokens.
        positions: `(batch, length)` or `(length,)`, when they are not counted from the
            mask.

    Returns:
        The shape of `inputs`.

    Example:
    >>> tuple(SinusoidalPositionEncoding()(keras.random.normal((2, 10, 64))).shape)
    (2, 10, 64)

    Reference: [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762), section 3.5.
    """

    def __init__(self, max_wavelength=10_000, layout="interleaved", **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.max_wavelength = check_greater("max_wavelength", max_wavelength, 1)
        self.layout = check_choice("layout", layout, LAYOUTS)

    def build(self, inputs_shape):
        check_rank(self, inputs_shape, 3, "(batch, length, dim)")

    def call(self, inputs, mask=None, positions=None):
        if positions is None and mask is not None:
            positions = token_positions(mask, inputs)
        if positions is None:
            positions = ops.arange(0, ops.shape(inputs)[1], dtype="float32")
        encoding = sinusoidal_encoding(
            positions, inputs.shape[-1], self.max_wavelength, self.layout
        )
        return inputs + ops.cast(encoding, inputs.dtype)

    def compute_output_shape(self, inputs_shape):
        return inputs_shape

    def get_config(self):
        return {
            **super().get_config(),
            "max_wavelength": self.max_wavelength,
            "layout": self.layout,
        }


@register_keras_serializable(package="keras_attn")
class SinusoidalPositionEncoding2D(layers.Layer):
    """Adds fixed sinusoids to a grid, half the features for its rows, half for columns.

    Args:
        max_wavelength: the base of the frequencies.
        layout: of each half, as in `SinusoidalPositionEncoding`.

    Call arguments:
        inputs: `(batch, rows, cols, dim)`, `dim` a multiple of 4; any grid size.

    Returns:
        The shape of `inputs`.

    Example:
    >>> tuple(SinusoidalPositionEncoding2D()(keras.random.normal((2, 4, 6, 64))).shape)
    (2, 4, 6, 64)

    Reference: [Chen et al., 2021](https://arxiv.org/abs/2104.02057), MoCo v3.
    """

    def __init__(self, max_wavelength=10_000, layout="interleaved", **kwargs):
        super().__init__(**kwargs)
        self.max_wavelength = check_greater("max_wavelength", max_wavelength, 1)
        self.layout = check_choice("layout", layout, LAYOUTS)

    def build(self, inputs_shape):
        check_rank(self, inputs_shape, 4, "(batch, rows, cols, dim)")
        if inputs_shape[-1] % 4:
            raise ValueError(
                "The width of a grid must be a multiple of 4: a sine and a cosine for "
                f"rows and for columns. Received: inputs_shape={tuple(inputs_shape)}"
            )

    def call(self, inputs):
        _, rows, cols, _ = ops.shape(inputs)
        encoding = sinusoidal_encoding_2d(
            rows, cols, inputs.shape[-1], self.max_wavelength, self.layout
        )
        return inputs + ops.cast(encoding, inputs.dtype)

    def compute_output_shape(self, inputs_shape):
        return inputs_shape

    def get_config(self):
        return {
            **super().get_config(),
            "max_wavelength": self.max_wavelength,
            "layout": self.layout,
        }
