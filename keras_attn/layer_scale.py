"""Layer scale: a learned factor for each feature of a residual branch."""

from keras import initializers, layers, ops
from keras.saving import register_keras_serializable

from keras_attn.checks import check_greater

__all__ = ["LayerScale"]


@register_keras_serializable(package="keras_attn")
class LayerScale(layers.Layer):
    r"""Multiplies each feature by a learned factor that starts small.

    $$y = \mathrm{diag}(\lambda_1, \dots, \lambda_d)\, x$$

    On the end of a residual branch it makes a deep network start close to the identity;
    `Residual(layer_scale=...)` puts it there. Masks pass through.

    Args:
        initial_value: of every factor. The paper takes 0.1 up to 18 blocks, 1e-5 up to
            24, and 1e-6 beyond.

    Call arguments:
        inputs: `(..., dim)`.

    Returns:
        The shape of `inputs`.

    Example:
    >>> tuple(LayerScale()(keras.random.normal((2, 10, 64))).shape)
    (2, 10, 64)

    Reference: [Touvron et al., 2021](https://arxiv.org/abs/2103.17239), section 2.
    """

    def __init__(self, initial_value=1e-5, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.initial_value = float(check_greater("initial_value", initial_value, 0))

    def build(self, inputs_shape):
        self.gamma = self.add_weight(
            name="gamma",
            shape=(inputs_shape[-1],),
            initializer=initializers.Constant(self.initial_value),
        )

    def call(self, inputs):
        return ops.multiply(inputs, self.gamma)

    def compute_output_shape(self, inputs_shape):
        return inputs_shape

    def get_config(self):
        return {**super().get_config(), "initial_value": self.initial_value}
