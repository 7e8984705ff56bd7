"""Multi-head attention."""

import functools
import math
import string

import keras
from keras import constraints, initializers, layers, ops, regularizers
from keras.saving import register_keras_serializable

from keras_attn import axes
from keras_attn.checks import check_positive, check_rate
from keras_attn.dot_product import dot_product_attention
from keras_attn.masks import (
    CarryMask,
    combine_masks,
    sliding_window_mask,
    window_sides,
)
from keras_attn.serialization import fresh, quantized_dtype

__all__ = ["MultiHeadAttention"]


@register_keras_serializable(package="keras_attn")
class MultiHeadAttention(layers.Layer):
    r"""Attention in several learned subspaces at once; a superset of Keras' own layer.

    $$\mathrm{head}_h = \mathrm{softmax}\left(\frac{Q_h K_h^T}{\sqrt{d}}\right) V_h,
      \qquad Q_h = x_q W^Q_h,\; K_h = x_k W^K_h,\; V_h = x_v W^V_h$$

    Swap the import and everything that `keras.layers.MultiHeadAttention` takes means
    the same here, with the same weights in the same order. Where the two differ:
    `key_dim` and `value` may be left out, a mask is never misread, and a query that may
    see no key gives exactly 0 on every path.

    Masking: the masks that ride on `query`, `key` and `value` are applied, as are
    `query_mask`, `value_mask` and `key_mask`. The query's mask leaves with the output.

    Args:
        num_heads: number of heads.
        key_dim: size of each head for query and key. Defaults to the width of the
            query over `num_heads`, which must divide.
        value_dim: size of each head for value. Defaults to `key_dim`.
        dropout: rate on the attention weights, in `[0, 1)`.
        use_bias: whether the projections have biases.
        output_shape: shape of an output feature, an int or a tuple. Defaults to the
            width of the query.
        attention_axes: the axes that attention runs over. Defaults to all but batch
            and features.
        sliding_window: a positive int `w` shows a query only the keys with
            `|query - key| < w` (Keras' meaning); a pair `(left, right)` that many keys
            before and after it.
        flash_attention: `True` demands the backend's flash kernel, `False` forbids it.
            Defaults to `keras.config.is_flash_attention_enabled()`.
        kernel_initializer: initializer of the kernels.
        bias_initializer: initializer of the biases.
        kernel_regularizer: regularizer of the kernels.
        bias_regularizer: regularizer of the biases.
        activity_regularizer: regularizer of the projections' outputs.
        kernel_constraint: constraint of the kernels.
        bias_constraint: constraint of the biases.
        use_gate: multiply each head by a sigmoid of the query
            ([Qiu et al., 2025](https://arxiv.org/abs/2505.06708)).
        seed: seed of the dropout.
        num_kv_heads: number of key/value heads, a divisor of `num_heads`: 1 is
            multi-query ([Shazeer, 2019](https://arxiv.org/abs/1911.02150)), between is
            grouped-query ([Ainslie et al., 2023](https://arxiv.org/abs/2305.13245)).
            Defaults to `num_heads`.

    Call arguments:
        query: `(batch, query, dim)`, or more axes.
        value: `(batch, key, value_width)`. Defaults to `query`: self-attention.
        key: `(batch, key, key_width)`. Defaults to `value`.
        query_mask: `(batch, query)`, `True` at real tokens.
        value_mask: `(batch, key)`, `True` at real tokens.
        key_mask: `(batch, key)`, `True` at real tokens.
        attention_mask: `(batch, query, key)`, `(batch, heads, query, key)` or
            `(query, key)`, `True` where a key may be seen. A layer that is built with a
            batch as large as its query refuses the last form, which could be meant as
            `(batch, key)`: write `attention_mask[None]`, or `value_mask=`.
        return_attention_scores: also return the weights.
        training: whether dropout is on.
        use_causal_mask: query `i` sees the keys `0 .. i`.
        bias: float, added to the scores; broadcasts, from the right, to
            `(batch, heads, query, key)`. -inf hides a key, as a mask does.

    Returns:
        `(batch, query, dim)`; with `return_attention_scores` a pair with the weights
        `(batch, heads, query, key)`.

    Raises:
        TypeError: a float mask.
        ValueError: a size that is not positive, a width that `num_heads` does not
            divide, keys and values of different lengths, a mask of another shape.

    Example:
    >>> x = keras.random.normal((2, 10, 64))
    >>> tuple(MultiHeadAttention(num_heads=4)(x, use_causal_mask=True).shape)
    (2, 10, 64)

    Reference: [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762), section 3.2.
    """

    def __init__(
        self,
        num_heads,
        key_dim=None,
        value_dim=None,
        dropout=0.0,
        use_bias=True,
        output_shape=None,
        attention_axes=None,
        sliding_window=None,
        flash_attention=None,
        kernel_initializer="glorot_uniform",
        bias_initializer="zeros",
        kernel_regularizer=None,
        bias_regularizer=None,
        activity_regularizer=None,
        kernel_constraint=None,
        bias_constraint=None,
        use_gate=False,
        seed=None,
        *,
        num_kv_heads=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.num_heads = check_positive("num_heads", num_heads)
        self.key_dim = check_positive("key_dim", key_dim, optional=True)
        self.value_dim = check_positive("value_dim", value_dim, optional=True)
        self.num_kv_heads = check_positive("num_kv_heads", num_kv_heads, optional=True)
        if self.num_heads % (self.num_kv_heads or 1):
            raise ValueError(
                "`num_kv_heads` must divide `num_heads`. Received: "
                f"num_heads={num_heads}, num_kv_heads={num_kv_heads}"
            )
        self.dropout = check_rate("dropout", dropout)
        self.use_bias = use_bias
        self.output_feature = _as_shape(output_shape)
        self.attention_axes = axes.as_axes(attention_axes)
        if sliding_window is not None:
            window_sides(sliding_window)
        if isinstance(sliding_window, list):  # from a config
            sliding_window = tuple(sliding_window)
        self.sliding_window = sliding_window
        self.flash_attention = flash_attention
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.bias_initializer = initializers.get(bias_initializer)
        self.kernel_regularizer = regularizers.get(kernel_regularizer)
        self.bias_regularizer = regularizers.get(bias_regularizer)
        self.projection_regularizer = regularizers.get(activity_regularizer)
        self.kernel_constraint = constraints.get(kernel_constraint)
        self.bias_constraint = constraints.get(bias_constraint)
        self.use_gate = use_gate
        self.seed = seed
        self._use_flash = (
            keras.config.is_flash_attention_enabled()
            if flash_attention is None
            else flash_attention
        )
        if self._use_flash and self.dropout:
            raise ValueError(
                "Dropout is not supported when flash attention is enabled. Received: "
                f"dropout={dropout}, flash_attention={flash_attention}"
            )

    def build(
        self,
        query_shape,
        value_shape=None,
        key_shape=None,
        attention_mask_shape=None,
    ):
        value_shape = query_shape if value_shape is None else value_shape
        key_shape = value_shape if key_shape is None else key_shape
        self._check_shapes(query_shape, value_shape, key_shape)
        key_dim = self.key_dim or self._derived_key_dim(query_shape)
        value_dim = self.value_dim or key_dim
        kv_heads = self.num_kv_heads or self.num_heads
        self._axes = axes.normalized(self.attention_axes, len(query_shape))
        self._scale = key_dim**-0.5
        if attention_mask_shape is not None:
            axes.check_unambiguous(attention_mask_shape, query_shape)
            axes.check_attention_mask(
                attention_mask_shape,
                query_shape,
                key_shape,
                self.num_heads,
                self._axes,
            )

        self.query = self._project("query", query_shape, (self.num_heads, key_dim))
        self.key = self._project("key", key_shape, (kv_heads, key_dim))
        self.gate = None
        if self.use_gate:
            self.gate = self._project(
                "gate", query_shape, (self.num_heads, value_dim), activation="sigmoid"
            )
        self.value = self._project("value", value_shape, (kv_heads, value_dim))
        self.attention_output = self._project(
            "attention_output",
            (*query_shape[:-1], self.num_heads, value_dim),
            self.output_feature or (query_shape[-1],),
            bound=2,
        )
        self.attention_dropout = layers.Dropout(
            self.dropout,
            seed=self.seed,
            dtype=self.dtype_policy,
            name="attention_dropout",
        )
        self.carry_mask = CarryMask(dtype=self.dtype_policy, name="carry_mask")

    def __call__(self, query, value=None, *args, **kwargs):
        # Keras reads the masks that ride on the arguments it is given: self-attention
        # gives it the query, and the query's mask, in both places.
        if value is None:
            value = query
            if kwargs.get("value_mask") is None:
                kwargs["value_mask"] = kwargs.get("query_mask")
        return super().__call__(query, value, *args, **kwargs)

    def call(
        self,
        query,
        value=None,
        key=None,
        query_mask=None,
        value_mask=None,
        key_mask=None,
        attention_mask=None,
        return_attention_scores=False,
        training=None,
        use_causal_mask=False,
        bias=None,
    ):
        if value is None:  # `call` itself was called: see `__call__`
            value = query
            value_mask = query_mask if value_mask is None else value_mask
        key = value if key is None else key
        if self._use_flash and return_attention_scores:
            raise ValueError(
                "Returning attention scores is not supported when flash attention is "
                "enabled. Please disable flash attention to access attention scores."
            )
        mask = self._mask(query, key, value_mask, key_mask, attention_mask)
        result = dot_product_attention(
            axes.fold(self.query(query), self._axes),  # (batch, heads, query, key_dim)
            axes.fold(self.key(key), self._axes),  # (batch, kv_heads, key, key_dim)
            axes.fold(self.value(value), self._axes),
            mask=mask,
            query_mask=self._fold_padding("query_mask", query_mask, query),
            bias=axes.fold_bias(bias, query, key, self.num_heads, self._axes),
            is_causal=use_causal_mask,
            scale=self._scale,
            dropout=self._active_dropout(training),
            flash_attention=self._use_flash,
            return_scores=return_attention_scores,
        )
        output, scores = result if return_attention_scores else (result, None)
        output = axes.unfold(output, ops.shape(query)[:-1], self._axes)
        if self.use_gate:
            output = output * self.gate(query)  # (batch, query, heads, value_dim)
        output = self.attention_output(output)  # (batch, query, dim)
        if query_mask is not None:
            output = self.carry_mask(output, mask=query_mask)
        if return_attention_scores:
            return output, axes.unfold_scores(scores, query, key, self._axes)
        return output

    def compute_output_shape(self, query_shape, value_shape=None, key_shape=None):
        value_shape = query_shape if value_shape is None else value_shape
        key_shape = value_shape if key_shape is None else key_shape
        self._check_shapes(query_shape, value_shape, key_shape)
        return (*query_shape[:-1], *(self.output_feature or query_shape[-1:]))

    def compute_output_spec(
        self, query, value=None, key=None, return_attention_scores=False, **kwargs
    ):
        value = query if value is None else value
        key = value if key is None else key
        shape = self.compute_output_shape(query.shape, value.shape, key.shape)
        output = keras.KerasTensor(shape, dtype=self.compute_dtype)
        if not return_attention_scores:
            return output
        shape = axes.scores_shape(
            query.shape,
            key.shape,
            self.num_heads,
            axes.normalized(self.attention_axes, len(query.shape)),
        )
        return output, keras.KerasTensor(shape, dtype=self.compute_dtype)

    # Keras' names of the projections, under which its weight files keep them too.

    @property
    def query_dense(self):
        return self.query

    @property
    def key_dense(self):
        return self.key

    @property
    def value_dense(self):
        return self.value

    @property
    def output_dense(self):
        return self.attention_output

    @property
    def _gate_dense(self):
        return self.gate

    def get_config(self):
        return {
            **super().get_config(),
            "num_heads": self.num_heads,
            "key_dim": self.key_dim,
            "value_dim": self.value_dim,
            "dropout": self.dropout,
            "use_bias": self.use_bias,
            "output_shape": self.output_feature,
            "attention_axes": self.attention_axes,
            "sliding_window": self.sliding_window,
            "flash_attention": self.flash_attention,
            "kernel_initializer": initializers.serialize(self.kernel_initializer),
            "bias_initializer": initializers.serialize(self.bias_initializer),
            "kernel_regularizer": regularizers.serialize(self.kernel_regularizer),
            "bias_regularizer": regularizers.serialize(self.bias_regularizer),
            "activity_regularizer": regularizers.serialize(self.projection_regularizer),
            "kernel_constraint": constraints.serialize(self.kernel_constraint),
            "bias_constraint": constraints.serialize(self.bias_constraint),
            "use_gate": self.use_gate,
            "seed": self.seed,
            "num_kv_heads": self.num_kv_heads,
            **quantized_dtype(self),
        }

    def _mask(self, query, key, value_mask, key_mask, attention_mask):
        """Every mask that hides keys, together on `(batch, heads, query, key)`."""
        masks = []
        for name, mask in (("value_mask", value_mask), ("key_mask", key_mask)):
            mask = self._fold_padding(name, mask, key)
            if mask is not None:
                masks.append(ops.expand_dims(mask, 1))  # (batch, 1, key)
        if self.sliding_window is not None:
            lengths = (
                math.prod(ops.shape(x)[axis] for axis in self._axes)
                for x in (query, key)
            )
            masks.append(sliding_window_mask(*lengths, window=self.sliding_window))
        if attention_mask is not None:
            masks.append(
                axes.fold_attention_mask(
                    attention_mask, query, key, self.num_heads, self._axes
                )
            )
        return combine_masks(*masks)

    def _fold_padding(self, name, mask, x):
        return None if mask is None else axes.fold_padding(name, mask, x, self._axes)

    def _active_dropout(self, training):
        if self.dropout and training:
            return functools.partial(self.attention_dropout, training=True)
        return None

    def _project(self, name, shape, features, bound=1, activation=None):
        """A dense layer from the last `bound` axes of `shape` to `features`."""
        letters = string.ascii_lowercase
        free, rank = letters[: len(shape) - bound], len(shape)
        inner, outer = letters[len(free) : rank], letters[rank : rank + len(features)]
        dense = layers.EinsumDense(
            f"{free}{inner},{inner}{outer}->{free}{outer}",
            output_shape=(*(None for _ in free[1:]), *features),
            bias_axes=outer if self.use_bias else None,
            activation=activation,
            kernel_initializer=fresh(self.kernel_initializer),
            bias_initializer=fresh(self.bias_initializer),
            kernel_regularizer=self.kernel_regularizer,
            bias_regularizer=self.bias_regularizer,
            activity_regularizer=self.projection_regularizer,
            kernel_constraint=self.kernel_constraint,
            bias_constraint=self.bias_constraint,
            dtype=self.dtype_policy,
            name=name,
        )
        dense.supports_masking = True  # position-wise: a mask that rides along is kept
        dense.build(shape)
        return dense

    def _check_shapes(self, query_shape, value_shape, key_shape):
        received = (
            f"Received: query_shape={tuple(query_shape)}, "
            f"value_shape={tuple(value_shape)}, key_shape={tuple(key_shape)}"
        )
        if tuple(value_shape[1:-1]) != tuple(key_shape[1:-1]):
            raise ValueError(
                "All dimensions of `value` and `key`, except the last one, must be "
                "equal. " + received
            )
        if not 3 <= len(query_shape) == len(value_shape):
            raise ValueError(
                "`query` and `value` must have the same rank, at least 3. " + received
            )
        if None in (query_shape[-1], value_shape[-1], key_shape[-1]):
            raise ValueError("The last dimension must be known. " + received)
        run = axes.normalized(self.attention_axes, len(query_shape))
        for axis in axes.other_axes(len(query_shape) - 1, run):
            sizes = {query_shape[axis], value_shape[axis]} - {None}
            if len(sizes) > 1:
                raise ValueError(
                    "`query` and `value` must have the same size in an axis that "
                    f"attention does not run over: axis {axis}. " + received
                )

    def _derived_key_dim(self, query_shape):
        if query_shape[-1] % self.num_heads:
            raise ValueError(
                "The width of `query` must be a multiple of `num_heads` when `key_dim` "
                f"is not given. Received: query_shape={tuple(query_shape)}, "
                f"num_heads={self.num_heads}"
            )
        return query_shape[-1] // self.num_heads


def _as_shape(output_shape):
    if output_shape is None:
        return None
    try:
        shape = (output_shape,) if isinstance(output_shape, int) else output_shape
        return tuple(check_positive("output_shape", size) for size in shape)
    except (TypeError, ValueError):
        raise ValueError(
            "Invalid `output_shape`: expected a positive integer or a tuple of them. "
            f"Received: output_shape={output_shape}"
        ) from None
