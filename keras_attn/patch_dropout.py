"""A random part of the tokens: dropped in training, or masked to be restored (MAE)."""

import keras
from keras import initializers, layers, ops
from keras.saving import register_keras_serializable

from keras_attn.checks import check_count, check_rank, check_rate
from keras_attn.masks import CarryMask, as_mask
from keras_attn.serialization import fresh

__all__ = ["MaskTokens", "PatchDropout", "RandomMasking", "restore_tokens"]


def restore_tokens(tokens, mask_token, ids_restore):
    """The whole sequence again: kept tokens in their places, `mask_token` elsewhere.

    Args:
        tokens: `(batch, kept, dim)`, as `RandomMasking` gave them or after an encoder.
        mask_token: `(dim,)`, what stands for every token that was removed.
        ids_restore: `(batch, length)`, from `RandomMasking`.

    Returns:
        `(batch, length, dim)`.
    """
    batch, kept, dim = ops.shape(tokens)
    removed = ops.shape(ids_restore)[1] - kept
    fill = ops.cast(ops.reshape(mask_token, (1, 1, dim)), tokens.dtype)
    fill = ops.broadcast_to(fill, (batch, removed, dim))
    return _gather(ops.concatenate([tokens, fill], axis=1), ids_restore)


@register_keras_serializable(package="keras_attn")
class PatchDropout(layers.Layer):
    """In training, keeps a random part of each image's tokens: faster, and regularized.

    Every image keeps the same number of tokens, `(1 - rate) * length` rounded down and
    at least one, in their order. Put it behind the positions. A mask goes with its
    tokens. Outside training everything passes.

    Args:
        rate: the share that is dropped, in `[0, 1)`.
        num_prefix_tokens: how many tokens in front (`PrefixTokens`) are always kept and
            not counted.
        seed: of the random choice.

    Call arguments:
        inputs: `(batch, length, dim)`.
        mask: `(batch, length)`, `True` at real tokens.
        training: whether to drop.

    Returns:
        `(batch, kept, dim)` in training, else `inputs`. The length of the symbolic
        output is open, unless `rate` is 0.

    Example:
    >>> x = keras.random.normal((2, 17, 64))
    >>> drop = PatchDropout(0.5, num_prefix_tokens=1)
    >>> tuple(drop(x, training=True).shape), tuple(drop(x).shape)
    ((2, 9, 64), (2, 17, 64))

    Reference: [Liu et al., 2022](https://arxiv.org/abs/2208.07220).
    """

    def __init__(self, rate, num_prefix_tokens=0, seed=None, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.rate = check_rate("rate", rate)
        self.num_prefix_tokens = check_count("num_prefix_tokens", num_prefix_tokens)
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(seed)
        self.carry_mask = CarryMask(dtype=self.dtype_policy, name="carry_mask")

    def build(self, inputs_shape):
        check_rank(self, inputs_shape, 3, "(batch, length, dim)")
        length = inputs_shape[1]
        if length is not None and length <= self.num_prefix_tokens:
            raise ValueError(
                "Some token must stand behind the prefix. Received: inputs_shape="
                f"{tuple(inputs_shape)}, num_prefix_tokens={self.num_prefix_tokens}"
            )

    def call(self, inputs, mask=None, training=None):
        mask = None if mask is None else as_mask(mask)
        if not training or self.rate == 0:
            # A mask is set on the output, which must not be the caller's own tensor.
            return inputs if mask is None else self.carry_mask(inputs * 1, mask=mask)
        front = self.num_prefix_tokens
        batch, length, _ = ops.shape(inputs)
        noise = _noise(batch, length - front, self.seed_generator)
        order = ops.argsort(noise, axis=1)[:, : _num_kept(length - front, self.rate)]
        kept = ops.cast(ops.sort(order, axis=1), "int32") + front  # (batch, kept)
        outputs = ops.concatenate([inputs[:, :front], _gather(inputs, kept)], axis=1)
        if mask is not None:
            kept_mask = ops.take_along_axis(mask, kept, axis=1)
            mask = ops.concatenate([mask[:, :front], kept_mask], axis=1)
            outputs = self.carry_mask(outputs, mask=mask)
        return outputs

    def compute_mask(self, inputs, previous_mask=None):
        # In a graph that trains the mask is another one, which rides on the output:
        # the graph must not write down the mask of now.
        return previous_mask if self.rate == 0 else None

    def compute_output_shape(self, inputs_shape):
        length = inputs_shape[1] if self.rate == 0 else None
        return (inputs_shape[0], length, inputs_shape[2])

    def get_config(self):
        return {
            **super().get_config(),
            "rate": self.rate,
            "num_prefix_tokens": self.num_prefix_tokens,
            "seed": self.seed,
        }


@register_keras_serializable(package="keras_attn")
class RandomMasking(layers.Layer):
    """Removes a random part of each image's tokens and says which (masked autoencoder).

    The encoder sees what is kept; `MaskTokens` (or `restore_tokens`) then puts the
    sequence together again for the decoder. The loss is the mean over what `removed`
    marks. Put it behind the positions and before class tokens. It removes in training
    and outside alike, since the loss is not defined otherwise: leave the layer out of a
    model that extracts features.

    Every image keeps `(1 - rate) * length` tokens, rounded down and at least one, in
    the random order of the paper.

    Args:
        rate: the share that is removed, in `[0, 1)`; 0.75 in the paper.
        seed: of the random choice.

    Call arguments:
        inputs: `(batch, length, dim)`.
        noise: `(batch, length)`: the tokens of least noise are kept. Defaults to
            random noise.

    Returns:
        Three tensors: the kept tokens, `(batch, kept, dim)`; `removed`, boolean,
        `(batch, length)`, `True` at the tokens that were removed; and `ids_restore`,
        `(batch, length)`, int32, for every token its place among the kept and, after
        them, the removed ones.

    Example:
    >>> masking = RandomMasking(0.75)
    >>> tokens, removed, ids_restore = masking(keras.random.normal((2, 16, 64)))
    >>> tuple(tokens.shape), tuple(removed.shape), tuple(ids_restore.shape)
    ((2, 4, 64), (2, 16), (2, 16))

    Reference: [He et al., 2022](https://arxiv.org/abs/2111.06377), algorithm 1.
    """

    def __init__(self, rate=0.75, seed=None, **kwargs):
        super().__init__(**kwargs)
        self.rate = check_rate("rate", rate)
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(seed)

    def build(self, inputs_shape, noise_shape=None):
        check_rank(self, inputs_shape, 3, "(batch, length, dim)")

    def call(self, inputs, noise=None):
        batch, length, _ = ops.shape(inputs)
        if noise is None:
            noise = _noise(batch, length, self.seed_generator)
        ids_shuffle = ops.argsort(noise, axis=1)  # least noise first
        ids_restore = ops.cast(ops.argsort(ids_shuffle, axis=1), "int32")
        kept = _num_kept(length, self.rate)
        tokens = _gather(inputs, ids_shuffle[:, :kept])
        return tokens, ids_restore >= kept, ids_restore

    def compute_output_spec(self, inputs, noise=None):
        tokens, removed, ids_restore = self.compute_output_shape(inputs.shape)
        return (
            keras.KerasTensor(tokens, dtype=self.compute_dtype),
            keras.KerasTensor(removed, dtype="bool"),
            keras.KerasTensor(ids_restore, dtype="int32"),
        )

    def compute_output_shape(self, inputs_shape, noise_shape=None):
        batch, length, dim = inputs_shape
        kept = None if length is None else _num_kept(length, self.rate)
        return (batch, kept, dim), (batch, length), (batch, length)

    def get_config(self):
        return {**super().get_config(), "rate": self.rate, "seed": self.seed}


@register_keras_serializable(package="keras_attn")
class MaskTokens(layers.Layer):
    """Puts one learned token wherever `RandomMasking` removed one, and restores order.

    Args:
        initializer: initializer of the token.

    Call arguments:
        inputs: `(batch, kept, dim)`, the kept tokens.
        ids_restore: `(batch, length)`, from `RandomMasking`.

    Returns:
        `(batch, length, dim)`.

    Example:
    >>> tokens, removed, ids_restore = RandomMasking()(keras.random.normal((2, 16, 64)))
    >>> tuple(MaskTokens()(tokens, ids_restore).shape)
    (2, 16, 64)

    Reference: [He et al., 2022](https://arxiv.org/abs/2111.06377), section 3.
    """

    def __init__(self, initializer=None, **kwargs):
        super().__init__(**kwargs)
        if initializer is None:
            initializer = initializers.RandomNormal(stddev=0.02)
        self.initializer = initializers.get(initializer)

    def build(self, inputs_shape, ids_restore_shape):
        check_rank(self, inputs_shape, 3, "(batch, length, dim)")
        self.token = self.add_weight(
            name="token",
            shape=(inputs_shape[-1],),
            initializer=fresh(self.initializer),
        )

    def call(self, inputs, ids_restore):
        return restore_tokens(inputs, ops.convert_to_tensor(self.token), ids_restore)

    def compute_output_shape(self, inputs_shape, ids_restore_shape):
        return (inputs_shape[0], ids_restore_shape[1], inputs_shape[2])

    def get_config(self):
        return {
            **super().get_config(),
            "initializer": initializers.serialize(self.initializer),
        }


def _gather(x, ids):
    """The tokens `(batch, ids, dim)` of `(batch, length, dim)`."""
    return ops.take_along_axis(x, ops.expand_dims(ids, -1), axis=1)


def _noise(batch, length, seed):
    return keras.random.uniform((batch, length), dtype="float32", seed=seed)


def _num_kept(length, rate):
    """An int for an int, so that shapes stay static; else a scalar tensor."""
    share = 1.0 - rate
    if isinstance(length, int):
        return max(1, int(length * share + 1e-3))  # 0.1 * 10 must be 1
    kept = ops.cast(length, "float32") * share + 1e-3
    return ops.maximum(1, ops.cast(kept, "int32"))
