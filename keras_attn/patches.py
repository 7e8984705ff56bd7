"""From images and videos to a grid of tokens: patches and tubelets."""

import math

import keras
from keras import initializers, layers, ops
from keras.saving import register_keras_serializable

from keras_attn.checks import check_choice, check_positive, check_sides
from keras_attn.serialization import fresh, quantized_dtype

__all__ = ["PatchEmbedding", "TubeletEmbedding"]


class _Patches(layers.Layer):
    """What images and videos share: a convolution that keeps the grid it makes."""

    content, sides, convolution = "", (), None  # said by the subclass

    def __init__(
        self,
        dim,
        patch_size,
        strides=None,
        padding="valid",
        use_bias=True,
        data_format=None,
        kernel_initializer="glorot_uniform",
        bias_initializer="zeros",
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.dim = check_positive("dim", dim)
        self.patch_size = check_sides("patch_size", patch_size, len(self.sides))
        self.strides = self.patch_size
        if strides is not None:
            self.strides = check_sides("strides", strides, len(self.sides))
        self.padding = check_choice("padding", padding, ("valid", "same"))
        self.use_bias = use_bias
        self.data_format = check_choice(
            "data_format",
            data_format or keras.config.image_data_format(),
            ("channels_last", "channels_first"),
        )
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.bias_initializer = initializers.get(bias_initializer)
        self.projection = self.convolution(
            self.dim,
            self.patch_size,
            strides=self.strides,
            padding=self.padding,
            data_format="channels_last",
            use_bias=use_bias,
            kernel_initializer=fresh(self.kernel_initializer),
            bias_initializer=fresh(self.bias_initializer),
            dtype=self.dtype_policy,
            name="projection",
        )

    def build(self, inputs_shape):
        self._grid(inputs_shape)
        inputs_shape = self._channels_last(inputs_shape)
        if inputs_shape[-1] is None:
            raise ValueError(
                "The number of channels must be known. "
                f"Received: channels last, inputs_shape={inputs_shape}"
            )
        self.projection.build(inputs_shape)

    def call(self, inputs):
        self._grid(inputs.shape)
        if self.data_format == "channels_first":
            inputs = ops.moveaxis(inputs, 1, -1)
        return self.projection(inputs)  # (batch, grid ..., dim)

    def compute_output_shape(self, inputs_shape):
        return (inputs_shape[0], *self._grid(inputs_shape), self.dim)

    def get_config(self):
        return {
            **super().get_config(),
            "dim": self.dim,
            "patch_size": self.patch_size,
            "strides": self.strides,
            "padding": self.padding,
            "use_bias": self.use_bias,
            "data_format": self.data_format,
            "kernel_initializer": initializers.serialize(self.kernel_initializer),
            "bias_initializer": initializers.serialize(self.bias_initializer),
            **quantized_dtype(self),
        }

    def _channels_last(self, shape):
        rank = len(self.sides) + 2
        if len(shape) != rank:
            raise ValueError(
                f"{type(self).__name__} expects a batch of {self.content}s of rank "
                f"{rank}. Received: inputs_shape={tuple(shape)}"
            )
        if self.data_format == "channels_first":
            return (shape[0], *shape[2:], shape[1])
        return tuple(shape)

    def _grid(self, inputs_shape):
        """How many patches a side, `None` where the side is unknown."""
        lengths = self._channels_last(inputs_shape)[1:-1]
        return tuple(
            None if length is None else self._count(*side, length, inputs_shape)
            for length, *side in zip(
                lengths, self.sides, self.patch_size, self.strides, strict=True
            )
        )

    def _count(self, name, patch, stride, length, inputs_shape):
        padded = math.ceil(length / stride)
        if self.padding == "same":
            return padded
        if length < patch or (length - patch) % stride:
            fault = (
                "smaller than a patch"
                if length < patch
                else "not covered exactly by patches"
            )
            raise ValueError(
                f"The {self.content}'s {name}, {length}, is {fault} of {patch} every "
                f'{stride}. Resize the {self.content}, or pass `padding="same"`: it '
                f"pads with zeros to {padded} patches. Received: "
                f"inputs_shape={tuple(inputs_shape)}, patch_size={self.patch_size}, "
                f"strides={self.strides}"
            )
        return (length - patch) // stride + 1


@register_keras_serializable(package="keras_attn")
class PatchEmbedding(_Patches):
    """Cuts an image into patches and projects each to a vector; the grid is kept.

    Args:
        dim: width of the vectors.
        patch_size: an int or `(rows, cols)`, in pixels.
        strides: distance between patches, an int or `(rows, cols)`, in pixels. Defaults
            to `patch_size`: patches that do not overlap.
        padding: `"valid"` demands that the patches cover the image exactly; `"same"`
            pads it with zeros on all sides until they do, as `keras.layers.Conv2D`.
        use_bias: whether the projection has a bias.
        data_format: `"channels_last"` or `"channels_first"`, of the images; the grid is
            always channels last. Defaults to `keras.config.image_data_format()`.
        kernel_initializer: initializer of the kernel.
        bias_initializer: initializer of the bias.

    Call arguments:
        inputs: `(batch, height, width, channels)`, or `(batch, channels, height,
            width)` for `"channels_first"`.

    Returns:
        `(batch, rows, cols, dim)`.

    Raises:
        ValueError: an image smaller than a patch, or one that patches do not cover. (In
            a TensorFlow graph that leaves the image's sides open nobody can look: there
            the rest on the right and below is left out.)

    Example:
    >>> patches = PatchEmbedding(64, patch_size=16, data_format="channels_last")
    >>> tuple(patches(keras.random.normal((2, 32, 48, 3))).shape)
    (2, 2, 3, 64)

    Reference: [Dosovitskiy et al., 2021](https://arxiv.org/abs/2010.11929), 3.1.
    """

    content, sides, convolution = "image", ("height", "width"), layers.Conv2D


@register_keras_serializable(package="keras_attn")
class TubeletEmbedding(_Patches):
    """Cuts a video into tubelets, patches that last some frames, and projects each.

    The grid is kept. A tubelet of one frame embeds every frame by itself.

    Args:
        dim: width of the vectors.
        patch_size: an int or `(frames, rows, cols)`.
        strides: distance between tubelets, an int or `(frames, rows, cols)`. Defaults
            to `patch_size`: tubelets that do not overlap.
        padding: `"valid"` demands that the tubelets cover the video exactly; `"same"`
            pads it with zeros on all sides, in time too, until they do.
        use_bias: whether the projection has a bias.
        data_format: `"channels_last"` or `"channels_first"`, of the videos; the grid is
            always channels last. Defaults to `keras.config.image_data_format()`.
        kernel_initializer: initializer of the kernel.
        bias_initializer: initializer of the bias.

    Call arguments:
        inputs: `(batch, frames, height, width, channels)`, or `(batch, channels,
            frames, height, width)` for `"channels_first"`.

    Returns:
        `(batch, times, rows, cols, dim)`; `PrefixTokens` lays it out as a sequence.

    Raises:
        ValueError: as in `PatchEmbedding`.

    Example:
    >>> tubelets = TubeletEmbedding(64, (2, 16, 16), data_format="channels_last")
    >>> tuple(tubelets(keras.random.normal((1, 8, 32, 48, 3))).shape)
    (1, 4, 2, 3, 64)

    Reference: [Arnab et al., 2021](https://arxiv.org/abs/2103.15691), section 3.2.
    """

    content, sides = "video", ("frames", "height", "width")
    convolution = layers.Conv3D
