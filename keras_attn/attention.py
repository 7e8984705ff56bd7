"""Multi-head attention."""

import functools
import numbers
import string

import keras
from keras import constraints, initializers, layers, ops, regularizers
from keras.saving import register_keras_serializable

from keras_attn import axes
from keras_attn import cache as caches
from keras_attn.checks import (
    check_choice,
    check_greater,
    check_positive,
    check_rate,
    is_known_false,
)
from keras_attn.dot_product import IMPLEMENTATIONS, dot_product_attention
from keras_attn.masks import (
    CarryMask,
    combine_masks,
    token_positions,
    window_sides,
)
from keras_attn.normalization import make_norm, unit_length
from keras_attn.serialization import fresh, quantized_dtype, serialized

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
        position: a layer that says where the tokens stand: `RotaryEmbedding` turns
            queries and keys, `AlibiBias` and `RelativePositionBias` add to the scores.
            A layer with weights belongs to one attention layer.
        query_key_norm: `"rms"` or `"layer"` normalizes every head of query and key
            before they are rotated (Qwen 3, ViT-22B); `"l2"` gives them length 1, and
            the scores a learned factor a head in place of $1 / \sqrt{d}$
            ([Henry et al., 2020](https://arxiv.org/abs/2010.04245)).
        logit_soft_cap: `c` bounds the scores to `(-c, c)` by `c * tanh(scores / c)`
            (Gemma 2, [Riviere et al., 2024](https://arxiv.org/abs/2408.00118)).
        use_sinks: a learned score a head beside those of the keys, so that a query can
            look at nothing (gpt-oss).
        implementation: `"dense"`, `"blocked"` or `"chunked"`, see
            `dot_product_attention`: the same numbers, other time and memory. Defaults
            to what suits the size.

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
        positions: where the queries stand, `(query,)` or `(batch, query)`, for
            `position`. Defaults to the count of real tokens before each.
        key_positions: where the keys stand. Defaults to `positions` where there are as
            many keys as queries, else to the count.
        cache: what `make_cache` gave, or an earlier call: causal self-attention to the
            tokens in it and to `query`, which joins them. Or what
            `make_memory_cache` gave: cross-attention to that, without `value`.
        cache_index: how many tokens the cache holds, an int or a scalar tensor, when
            it is not what the cache itself has counted. A Python 0 reads only the new
            tokens and costs least; else the keys of `attention_mask` and `bias` are
            the slots of the cache.

    Returns:
        `(batch, query, dim)`. With `return_attention_scores` a tuple with the weights,
        `(batch, heads, query, key)`; with a cache that is written, a tuple that ends
        with the new cache.

    Raises:
        TypeError: a float mask.
        ValueError: a size that is not positive, a width that `num_heads` does not
            divide, keys and values of different lengths, a mask of another shape,
            a write past the end of a cache. (Under `jit` with a tensor as
            `cache_index` nobody can look: there the oldest tokens are forgotten.)

    Example:
    >>> x = keras.random.normal((2, 10, 64))
    >>> tuple(MultiHeadAttention(num_heads=4)(x, use_causal_mask=True).shape)
    (2, 10, 64)

    Token by token, with a cache:
    >>> attention = MultiHeadAttention(num_heads=4)
    >>> whole = attention(x, use_causal_mask=True)
    >>> cache = attention.make_cache(batch_size=2, max_length=10)
    >>> for index in range(10):
    ...     token, cache = attention(x[:, index : index + 1], cache=cache)
    >>> bool(keras.ops.all(keras.ops.abs(token[:, 0] - whole[:, -1]) < 1e-5))
    True

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
        position=None,
        query_key_norm=None,
        logit_soft_cap=None,
        use_sinks=False,
        implementation=None,
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
        self.position = _as_position(position)
        if query_key_norm is not None:
            check_choice("query_key_norm", query_key_norm, ("rms", "layer", "l2"))
        self.query_key_norm = query_key_norm
        if logit_soft_cap is not None:
            check_greater("logit_soft_cap", logit_soft_cap, 0)
        self.logit_soft_cap = logit_soft_cap
        self.use_sinks = use_sinks
        if implementation is not None:
            check_choice("implementation", implementation, IMPLEMENTATIONS)
        self.implementation = implementation
        self._use_flash = (
            keras.config.is_flash_attention_enabled()
            if flash_attention is None
            else flash_attention
        )
        if self._use_flash and (dropout or logit_soft_cap or use_sinks):
            raise ValueError(
                "Dropout is not supported when flash attention is enabled, nor are a "
                f"soft cap and sinks. Received: dropout={dropout}, "
                f"flash_attention={flash_attention}, "
                f"logit_soft_cap={logit_soft_cap}, use_sinks={use_sinks}"
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
        self._rank = len(query_shape)
        self._axes = axes.normalized(self.attention_axes, self._rank)
        self._scale = 1.0 if self.query_key_norm == "l2" else key_dim**-0.5
        self._cache_sizes = kv_heads, key_dim, value_dim
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
        heads_shape = (None, self.num_heads, None, key_dim)
        self.query_norm = self.key_norm = self.logit_scale = self.sinks = None
        if self.query_key_norm in ("rms", "layer"):
            self.query_norm = self._head_norm("query_norm", heads_shape)
            self.key_norm = self._head_norm("key_norm", heads_shape)
        elif self.query_key_norm == "l2":
            self.logit_scale = self.add_weight(
                name="logit_scale",
                shape=(self.num_heads,),
                initializer=initializers.Constant(10.0),
            )
        if self.use_sinks:
            self.sinks = self.add_weight(
                name="sinks", shape=(self.num_heads,), initializer="zeros"
            )
        if self.position is not None:
            self._build_position(heads_shape)
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
        positions=None,
        key_positions=None,
        cache=None,
        cache_index=None,
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
        heads = self._queries(query)  # (batch, heads, query, key_dim)
        own = self._fold_padding("query_mask", query_mask, query)
        window, written = self.sliding_window, None
        if cache is not None and caches.is_memory(cache):
            keys, values, padding = cache["key"], cache["value"], cache["mask"]
            mask, window = ops.expand_dims(padding, 1), None  # (batch, 1, key)
            places = self._places(positions, heads, own), token_positions(padding)
            heads = self._turned(heads, places[0])
            key = keys[:, 0]  # as long as what is read
        else:
            keys = self._keys(key)  # (batch, kv_heads, key, key_dim)
            values = self._split(self.value, value)
            padding = self._key_padding(key, value_mask, key_mask)
            mask = None if padding is None else ops.expand_dims(padding, 1)
            if cache is not None:
                # Masks and biases follow the slots, so long as none is used again.
                rolls = self._rolls(cache) and attention_mask is None and bias is None
                cache = self._checked(cache, cache_index, query, rolls)
                counts = caches.counts_of(cache, padding, ops.shape(query)[1])
                positions = counts if positions is None else positions
            if key_positions is None and query.shape[1] == key.shape[1]:
                key_positions = positions
            places = (
                self._places(positions, heads, own),
                self._places(key_positions, keys, padding),
            )
            heads = self._turned(heads, places[0])
            keys = self._turned(keys, places[1])
            if cache is not None:
                new = keys, values, places[1], counts, padding
                written = caches.append(cache, *new)
                use_causal_mask = _is_start(cache_index)
                if not use_causal_mask:
                    left = None if window is None else window_sides(window)[0]
                    keys, values, key_places, mask = caches.read(
                        cache, written, *new, left, rolls
                    )
                    window = None
                    places = places[0], key_places
                    key = keys[:, 0]

        result = dot_product_attention(
            heads,
            keys,
            values,
            mask=self._mask(mask, attention_mask, query, key),
            query_mask=own,
            bias=axes.fold_bias(bias, query, key, self.num_heads, self._axes),
            is_causal=use_causal_mask,
            sliding_window=window,
            position_bias=self.position and self.position.attention_bias,
            query_positions=places[0],
            key_positions=places[1],
            scale=self._scale,
            logit_soft_cap=self.logit_soft_cap,
            sinks=self.sinks,
            dropout=self._active_dropout(training),
            flash_attention=self._use_flash,
            return_scores=return_attention_scores,
            implementation=self.implementation,
        )
        output, scores = result if return_attention_scores else (result, None)
        output = axes.unfold(output, ops.shape(query)[:-1], self._axes)
        if self.use_gate:
            output = output * self.gate(query)  # (batch, query, heads, value_dim)
        output = self.attention_output(output)  # (batch, query, dim)
        if query_mask is not None:
            output = self.carry_mask(output, mask=query_mask)
        results = [output]
        if return_attention_scores:
            results.append(axes.unfold_scores(scores, query, key, self._axes))
        if written is not None:
            results.append(written)
        return results[0] if len(results) == 1 else tuple(results)

    def make_cache(self, batch_size, max_length, rolling=False):
        """An empty cache for causal self-attention, see `keras_attn.cache`.

        Args:
            batch_size: number of rows.
            max_length: how many tokens a row may have.
            rolling: keep only the tokens that the sliding window sees; a row may then
                have any number.
        """
        self._check_built("make_cache")
        if rolling:
            if self.sliding_window is None:
                raise ValueError(
                    "Only a sliding window lets a cache forget tokens. "
                    f"Received: rolling={rolling}, sliding_window=None"
                )
            max_length = min(max_length, window_sides(self.sliding_window)[0] + 1)
        kv_heads, key_dim, value_dim = self._cache_sizes
        return caches.make_cache(
            batch_size, kv_heads, max_length, key_dim, value_dim, self.compute_dtype
        )

    def make_memory_cache(self, value, key=None, mask=None):
        """The keys and values of a memory, computed once for many queries.

        Args:
            value: `(batch, key, value_width)`.
            key: `(batch, key, key_width)`. Defaults to `value`.
            mask: `(batch, key)`, `True` at real tokens.
        """
        self._check_built("make_memory_cache")
        if self.sliding_window is not None:
            raise ValueError(
                "A sliding window measures from where the queries stand in the memory, "
                "which a cache of it does not know. Received: sliding_window="
                f"{self.sliding_window}"
            )
        key = value if key is None else key
        padding = self._fold_padding("mask", mask, value)
        keys = self._keys(key)
        keys = self._turned(keys, self._places(None, keys, padding))
        return caches.make_memory_cache(keys, self._split(self.value, value), padding)

    def compute_output_shape(self, query_shape, value_shape=None, key_shape=None):
        value_shape = query_shape if value_shape is None else value_shape
        key_shape = value_shape if key_shape is None else key_shape
        self._check_shapes(query_shape, value_shape, key_shape)
        return (*query_shape[:-1], *(self.output_feature or query_shape[-1:]))

    def compute_output_spec(
        self,
        query,
        value=None,
        key=None,
        return_attention_scores=False,
        cache=None,
        cache_index=None,
        **kwargs,
    ):
        value = query if value is None else value
        key = value if key is None else key
        shape = self.compute_output_shape(query.shape, value.shape, key.shape)
        results = [keras.KerasTensor(shape, dtype=self.compute_dtype)]
        is_written = cache is not None and not caches.is_memory(cache)
        if return_attention_scores:
            shape = axes.scores_shape(
                query.shape,
                key.shape,
                self.num_heads,
                axes.normalized(self.attention_axes, len(query.shape)),
            )
            if cache is not None and not _is_start(cache_index):
                follows = any(
                    kwargs.get(name) is not None for name in ("attention_mask", "bias")
                )
                shape = (*shape[:-1], self._num_read(query, cache, follows))
            results.append(keras.KerasTensor(shape, dtype=self.compute_dtype))
        if is_written:
            results.append(
                {
                    name: keras.KerasTensor(x.shape, dtype=x.dtype)
                    for name, x in caches.in_order(cache).items()
                }
            )
        return results[0] if len(results) == 1 else tuple(results)

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
            "position": serialized(self.position),
            "query_key_norm": self.query_key_norm,
            "logit_soft_cap": self.logit_soft_cap,
            "use_sinks": self.use_sinks,
            "implementation": self.implementation,
            **quantized_dtype(self),
        }

    @classmethod
    def from_config(cls, config):
        position = keras.saving.deserialize_keras_object(config.get("position"))
        return super().from_config({**config, "position": position})

    def _queries(self, query):
        heads = self._split(self.query, query)
        if self.query_norm is not None:
            heads = self.query_norm(heads)
        if self.logit_scale is not None:
            scale = ops.reshape(self.logit_scale, (-1, 1, 1))
            heads = unit_length(heads) * ops.cast(scale, heads.dtype)
        return heads

    def _keys(self, key):
        heads = self._split(self.key, key)
        if self.key_norm is not None:
            heads = self.key_norm(heads)
        return heads if self.logit_scale is None else unit_length(heads)

    def _split(self, projection, x):
        """`(batch, heads, length, head_dim)`."""
        return axes.fold(projection(x), self._axes)

    def _places(self, positions, heads, padding):
        """Where the tokens of `heads` stand, for those who ask."""
        if positions is not None:
            positions = ops.convert_to_tensor(positions)
            if len(positions.shape) > 1 and len(self._axes) + 2 < self._rank:
                raise ValueError(
                    "Where attention does not run over all axes every row has the same "
                    "`positions`, `(length,)`. Received: positions of shape "
                    f"{tuple(positions.shape)}"
                )
            return positions
        return None if self.position is None else self.position.count(heads, padding)

    def _turned(self, heads, places):
        return heads if self.position is None else self.position.rotate(heads, places)

    def _key_padding(self, key, value_mask, key_mask):
        """`(batch, key)`, `True` at real tokens, or `None`."""
        masks = [
            self._fold_padding(name, mask, key)
            for name, mask in (("value_mask", value_mask), ("key_mask", key_mask))
            if mask is not None
        ]
        return functools.reduce(ops.logical_and, masks) if masks else None

    def _mask(self, mask, attention_mask, query, key):
        """The masks that hide keys, together on `(batch, heads, query, key)`."""
        if attention_mask is None:
            return mask
        return combine_masks(
            mask,
            axes.fold_attention_mask(
                attention_mask, query, key, self.num_heads, self._axes
            ),
        )

    def _fold_padding(self, name, mask, x):
        return None if mask is None else axes.fold_padding(name, mask, x, self._axes)

    def _checked(self, cache, cache_index, query, rolls):
        """`cache`, holding `cache_index` tokens, if `query` fits in it."""
        if len(query.shape) != 3:
            raise ValueError(
                "A cache is for queries `(batch, length, dim)`. "
                f"Received: query of shape {tuple(query.shape)}"
            )
        if cache_index is not None:
            cache = caches.rewind(cache, cache_index)
        slots, length = cache["key"].shape[2], query.shape[1]
        if length is None or rolls:
            return cache
        held = cache["length"] if cache_index is None else cache_index
        if is_known_false(ops.all(held + length <= slots)):
            raise ValueError(
                f"The cache of {self.name!r} has {slots} slots. Received: {length} "
                f"tokens to join the {keras.ops.convert_to_numpy(held)} that it holds"
            )
        return cache

    def _rolls(self, cache):
        """Whether the cache holds just what the sliding window sees."""
        if self.sliding_window is None:
            return False
        return cache["key"].shape[2] == window_sides(self.sliding_window)[0] + 1

    def _num_read(self, query, cache, follows):
        """How many keys a query sees or not, of those that a cache gives it."""
        slots = cache["key"].shape[2]
        rolls = not caches.is_memory(cache) and self._rolls(cache) and not follows
        if not rolls or query.shape[1] == 1:
            return slots
        return None if query.shape[1] is None else slots + query.shape[1]

    def _check_built(self, method):
        if not self.built:
            raise ValueError(
                f"The sizes of {self.name!r} are known once it is built: call it, or "
                f"`build` it, before `{method}`."
            )

    def _head_norm(self, name, shape):
        norm = make_norm(
            self.query_key_norm, epsilon=1e-6, dtype=self.dtype_policy, name=name
        )
        norm.build(shape)
        return norm

    def _build_position(self, heads_shape):
        if self.position.built and self.position.weights:
            raise ValueError(
                f"{self.position.name!r} belongs to another layer already. To share a "
                "learned bias, call it once and pass what it gives as `bias=`. "
                f"Received: position={self.position!r} of {self.name!r}"
            )
        self.position.build(heads_shape)

    def _active_dropout(self, training):
        if self.dropout and training:
            return functools.partial(self.attention_dropout, training=True)
        return None

    def _initializer_of(self, name):
        """Of the kernel of the projection of this name."""
        return self.kernel_initializer

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
            kernel_initializer=fresh(self._initializer_of(name)),
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


def _as_position(position):
    needed = ("count", "rotate", "attention_bias")
    is_layer = isinstance(position, layers.Layer)
    if position is None or (is_layer and all(hasattr(position, x) for x in needed)):
        return position
    raise TypeError(
        "`position` must be a layer as `RotaryEmbedding`, `AlibiBias` or "
        f"`RelativePositionBias`. Received: position={position!r}"
    )


def _is_start(cache_index):
    """Whether it is a Python number, 0, before anything runs."""
    return isinstance(cache_index, numbers.Integral) and cache_index == 0
