"""A stem of convolutions in place of patches."""

import math

import keras
from keras import activations, initializers, layers, ops
from keras.saving import register_keras_serializable

from keras_attn.checks import check_choice, check_greater, check_positive
from keras_attn.serialization import fresh, quantized_dtype

__all__ = ["ConvStem"]

NORMALIZATIONS = {
    "batch": layers.BatchNormalization,
    "layer": layers.LayerNormalization,
}


@register_keras_serializable(package="keras_attn")
class ConvStem(layers.Layer):
    """Turns an image into a grid of vectors by small convolutions; it replaces patches.

    A stack of 3x3 convolutions, each followed by normalization and activation, and a
    1x1 convolution to `dim`. Four of stride 2 give the grid of 16x16 patches. The
    paper's models then leave out one encoder block. Images of any size are taken: a
    side of `n` pixels becomes `ceil(n / stride)` at every convolution.

    Args:
        dim: width of the vectors.
        filters: widths of the 3x3 convolutions, `(24, 48, 96, 192)` in the paper's
            smallest model.
        strides: an int for all, or one for each 3x3 convolution.
        normalization: `"batch"` (the paper) or `"layer"`.
        activation: after each normalization.
        epsilon: of the normalizations.
        data_format: `"channels_last"` or `"channels_first"`, of the images; the grid is
            always channels last. Defaults to `keras.config.image_data_format()`.
        kernel_initializer: initializer of the kernels.
        bias_initializer: initializer of the last convolution's bias; the others have
            none, since a normalization follows.

    Call arguments:
        inputs: `(batch, height, width, channels)`, or `(batch, channels, height,
            width)` for `"channels_first"`.
        training: whether batch normalization learns its statistics.

    Returns:
        `(batch, rows, cols, dim)`.

    Example:
    >>> stem = ConvStem(64, filters=(8, 16, 32, 64), data_format="channels_last")
    >>> tuple(stem(keras.random.normal((2, 32, 48, 3))).shape)
    (2, 2, 3, 64)

    Reference: [Xiao et al., 2021](https://arxiv.org/abs/2106.14881).
    """

    def __init__(
        self,
        dim,
        filters,
        strides=2,
        normalization="batch",
        activation="relu",
        epsilon=1e-5,
        data_format=None,
        kernel_initializer="glorot_uniform",
        bias_initializer="zeros",
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.dim = check_positive("dim", dim)
        filters = (filters,) if isinstance(filters, int) else tuple(filters)
        self.filters = tuple(check_positive("filters", width) for width in filters)
        strides = (strides,) * len(filters) if isinstance(strides, int) else strides
        self.strides = tuple(check_positive("strides", stride) for stride in strides)
        if not self.filters or len(self.filters) != len(self.strides):
            raise ValueError(
                "`filters` and `strides` must name one 3x3 convolution each, and at "
                f"least one. Received: filters={filters}, strides={strides}"
            )
        check_choice("normalization", normalization, NORMALIZATIONS)
        self.normalization = normalization
        self.activation = activations.get(activation)
        self.epsilon = check_greater("epsilon", epsilon, 0)
        self.data_format = check_choice(
            "data_format",
            data_format or keras.config.image_data_format(),
            ("channels_last", "channels_first"),
        )
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.bias_initializer = initializers.get(bias_initializer)
        for index, (width, stride) in enumerate(
            zip(self.filters, self.strides, strict=True)
        ):
            conv = self._conv(f"conv_{index}", width, 3, stride, use_bias=False)
            norm = NORMALIZATIONS[normalization](
                epsilon=epsilon, dtype=self.dtype_policy, name=f"norm_{index}"
            )
            setattr(self, conv.name, conv)
            setattr(self, norm.name, norm)
        self.projection = self._conv("projection", self.dim, 1, 1)

    def build(self, inputs_shape):
        batch, rows, cols, channels = self._channels_last(inputs_shape)
        if channels is None:
            raise ValueError(
                "The number of channels must be known. "
                f"Received: inputs_shape={tuple(inputs_shape)}"
            )
        for conv, norm in self._stages():
            conv.build((batch, None, None, channels))
            channels = conv.filters
            norm.build((batch, None, None, channels))
        self.projection.build((batch, None, None, channels))

    def call(self, inputs, training=None):
        x = inputs
        if self.data_format == "channels_first":
            x = ops.moveaxis(x, 1, -1)
        for conv, norm in self._stages():
            # The paper's padding, the same on all sides; "same" would depend on size.
            x = conv(ops.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))))
            x = self.activation(norm(x, training=training))
        return self.projection(x)  # (batch, rows, cols, dim)

    def compute_output_shape(self, inputs_shape):
        batch, *grid, _ = self._channels_last(inputs_shape)
        for stride in self.strides:
            grid = [None if side is None else math.ceil(side / stride) for side in grid]
        return (batch, *grid, self.dim)

    def get_config(self):
        return {
            **super().get_config(),
            "dim": self.dim,
            "filters": self.filters,
            "strides": self.strides,
            "normalization": self.normalization,
            "activation": activations.serialize(self.activation),
            "epsilon": self.epsilon,
            "data_format": self.data_format,
            "kernel_initializer": initializers.serialize(self.kernel_initializer),
            "bias_initializer": initializers.serialize(self.bias_initializer),
            **quantized_dtype(self),
        }

    def _stages(self):
        for index in range(len(self.filters)):
            yield getattr(self, f"conv_{index}"), getattr(self, f"norm_{index}")

    def _channels_last(self, shape):
        if len(shape) != 4:
            raise ValueError(
                "ConvStem expects a batch of images of rank 4. "
                f"Received: inputs_shape={tuple(shape)}"
            )
        if self.data_format == "channels_first":
            return (shape[0], shape[2], shape[3], shape[1])
        return tuple(shape)

    def _conv(self, name, filters, size, stride, use_bias=True):
        return layers.Conv2D(
            filters,
            size,
            strides=stride,
            use_bias=use_bias,
            data_format="channels_last",
            kernel_initializer=fresh(self.kernel_initializer),
            bias_initializer=fresh(self.bias_initializer),
            dtype=self.dtype_policy,
            name=name,
        )
