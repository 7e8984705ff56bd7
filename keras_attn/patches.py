"""From images to tokens: patches, and learned tokens in front of them."""

import math

import keras
from keras import initializers, layers, ops
from keras.saving import register_keras_serializable

from keras_attn.checks import check_choice, check_pair, check_positive
from keras_attn.masks import as_mask
from keras_attn.serialization import fresh, quantized_dtype

__all__ = ["PatchEmbedding", "PrefixTokens"]


@register_keras_serializable(package="keras_attn")
class PatchEmbedding(layers.Layer):
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
        images: `(batch, height, width, channels)`, or `(batch, channels, height,
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
        self.patch_size = check_pair("patch_size", patch_size)
        self.strides = (
            self.patch_size if strides is None else check_pair("strides", strides)
        )
        self.padding = check_choice("padding", padding, ("valid", "same"))
        self.use_bias = use_bias
        self.data_format = check_choice(
            "data_format",
            data_format or keras.config.image_data_format(),
            ("channels_last", "channels_first"),
        )
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.bias_initializer = initializers.get(bias_initializer)
        self.projection = layers.Conv2D(
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

    def build(self, images_shape):
        self._grid(images_shape)
        images_shape = self._channels_last(images_shape)
        if images_shape[-1] is None:
            raise ValueError(
                "The number of channels must be known. "
                f"Received: channels last, images_shape={images_shape}"
            )
        self.projection.build(images_shape)

    def call(self, images):
        self._grid(images.shape)
        if self.data_format == "channels_first":
            images = ops.transpose(images, (0, 2, 3, 1))
        return self.projection(images)  # (batch, rows, cols, dim)

    def compute_output_shape(self, images_shape):
        return (images_shape[0], *self._grid(images_shape), self.dim)

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
        if len(shape) != 4:
            raise ValueError(
                "PatchEmbedding expects a batch of images of rank 4. "
                f"Received: images_shape={tuple(shape)}"
            )
        if self.data_format == "channels_first":
            return (shape[0], shape[2], shape[3], shape[1])
        return tuple(shape)

    def _grid(self, images_shape):
        """`(rows, cols)`, `None` where the image's side is unknown."""
        sides = self._channels_last(images_shape)[1:3]
        return tuple(
            None
            if side is None
            else self._count(name, side, patch, stride, images_shape)
            for name, side, patch, stride in zip(
                ("height", "width"), sides, self.patch_size, self.strides, strict=True
            )
        )

    def _count(self, name, side, patch, stride, images_shape):
        padded = math.ceil(side / stride)
        if self.padding == "same":
            return padded
        if side < patch or (side - patch) % stride:
            fault = (
                "smaller than a patch"
                if side < patch
                else "not covered exactly by patches"
            )
            raise ValueError(
                f"The image's {name}, {side}, is {fault} of {patch} pixels every "
                f'{stride}. Resize the image, or pass `padding="same"`: it pads with '
                f"zeros to {padded} patches. Received: "
                f"images_shape={tuple(images_shape)}, patch_size={self.patch_size}, "
                f"strides={self.strides}"
            )
        return (side - patch) // stride + 1


@register_keras_serializable(package="keras_attn")
class PrefixTokens(layers.Layer):
    """Flattens a grid to a sequence and puts learned tokens in front of it.

    One token is a ViT's class token; more are register or distillation tokens. The mask
    of a sequence leaves with the output, `True` at the new tokens.

    Args:
        num_tokens: how many.
        initializer: initializer of the tokens.

    Call arguments:
        inputs: `(batch, rows, cols, dim)` or `(batch, length, dim)`.
        mask: `(batch, length)`, `True` at real tokens; sequences only.

    Returns:
        `(batch, num_tokens + length, dim)`, where the length of a grid is
        `rows * cols`, row by row.

    Example:
    >>> tuple(PrefixTokens()(keras.random.normal((2, 4, 6, 64))).shape)
    (2, 25, 64)

    Reference: [Dosovitskiy et al., 2021](https://arxiv.org/abs/2010.11929) (class),
    [Darcet et al., 2024](https://arxiv.org/abs/2309.16588) (registers).
    """

    def __init__(self, num_tokens=1, initializer="zeros", **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.num_tokens = check_positive("num_tokens", num_tokens)
        self.initializer = initializers.get(initializer)

    def build(self, inputs_shape):
        if len(inputs_shape) not in (3, 4):
            raise ValueError(
                "PrefixTokens expects `(batch, rows, cols, dim)` or `(batch, length, "
                f"dim)`. Received: inputs_shape={tuple(inputs_shape)}"
            )
        self.tokens = self.add_weight(
            name="tokens",
            shape=(self.num_tokens, inputs_shape[-1]),
            initializer=fresh(self.initializer),
        )

    def call(self, inputs, mask=None):
        batch, dim = ops.shape(inputs)[0], inputs.shape[-1]
        if len(inputs.shape) == 4:
            length = inputs.shape[1:3]
            length = -1 if None in length else math.prod(length)
            batch_size = batch if length == -1 else -1
            inputs = ops.reshape(inputs, (batch_size, length, dim))
        tokens = ops.expand_dims(ops.convert_to_tensor(self.tokens), 0)
        tokens = ops.broadcast_to(tokens, (batch, self.num_tokens, dim))
        return ops.concatenate([ops.cast(tokens, inputs.dtype), inputs], axis=1)

    def compute_mask(self, inputs, mask=None):
        if mask is None:
            return None
        mask = as_mask(mask)
        front = ops.ones_like(mask[:, :1])
        front = ops.repeat(front, self.num_tokens, axis=1)
        return ops.concatenate([front, mask], axis=1)

    def compute_output_shape(self, inputs_shape):
        batch, *sides, dim = inputs_shape
        length = None if None in sides else math.prod(sides) + self.num_tokens
        return (batch, length, dim)

    def get_config(self):
        return {
            **super().get_config(),
            "num_tokens": self.num_tokens,
            "initializer": initializers.serialize(self.initializer),
        }
