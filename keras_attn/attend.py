"""How a block calls its attention and feed-forward, which may be any layers."""

import inspect
import warnings

import keras
from keras import layers, ops

from keras_attn.checks import broadcasts
from keras_attn.masks import CarryMask, as_mask, causal_mask, combine_masks

__all__ = ["Attend", "Feed", "build_by_call", "check_layer"]


def check_layer(name, layer):
    """`layer`, a Keras layer or `None`."""
    if layer is not None and not isinstance(layer, layers.Layer):
        raise TypeError(
            f"`{name}` must be a Keras layer or `None`. Received: {name}={layer!r}"
        )
    return layer


def build_by_call(layer, *shapes, dtype):
    """Builds any layer as Keras would, and sees that it keeps the first shape."""
    output = layer(*(keras.KerasTensor(shape, dtype=dtype) for shape in shapes))
    shape, expected = getattr(output, "shape", ()), tuple(shapes[0])
    if len(shape) != len(expected) or any(
        None not in sizes and sizes[0] != sizes[1]
        for sizes in zip(shape, expected, strict=True)
    ):
        raise ValueError(
            f"A part of a block must keep the shape of its input, {expected}. "
            f"Received: {layer.name!r}, which gives {tuple(shape) or output}"
        )


def call_quietly(layer, *inputs, **options):
    """Calls a layer without Keras' warning that it loses a mask: the block keeps it."""
    if layer.supports_masking:
        return layer(*inputs, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Layer .* passed an input with a mask")
        return layer(*inputs, **options)


class Attend(layers.Layer):
    """Calls an attention layer with what its `call` takes of what a block has.

    Which arguments those are is read from the signature of the layer's `call`, once:

    * The first gets the query. The second, if it has no default or is `value`, gets the
      value; a layer without it mixes its one input.
    * All masks go together into `attention_mask`, `(batch or 1, query, key)`, or with
      heads where the caller's has them. A layer that takes none gets the padding as
      `mask`, or by Keras' names (`query_mask`, `value_mask`, ...), or, if it has
      `supports_masking`, riding on its inputs.
    * `use_causal_mask`, `bias`, `positions` and `cache` go where they are named.

    What is needed and has no place is refused: nothing is dropped in silence.

    Args:
        layer: the attention layer. It is given to `call` too: this layer must not own
            it, or its weights would have two homes.
        is_own: whether the layer reads every mask by the names of
            `keras_attn.MultiHeadAttention`.
        is_causal: whether a query must not see later keys.
        is_cross: whether the values are another sequence.
    """

    def __init__(self, layer, is_own=False, is_causal=False, is_cross=False, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.built = True  # it holds no weights
        self.is_own = is_own
        self.is_causal = is_causal
        self.title = f"{layer.name!r} ({type(layer).__name__})"
        self.names = _argument_names(layer)
        self.query_name, self.value_name = _input_names(layer)
        self.carries = layer.supports_masking
        self.carry_mask = CarryMask(dtype=self.dtype_policy, name="carry_mask")
        if is_cross and self.value_name is None:
            raise ValueError(
                f"{self.title} cannot attend to a memory: the second argument of its "
                f"`call` must be `value`. Received: call{self.names}"
            )
        if is_causal and not {"use_causal_mask", "attention_mask"} & {*self.names}:
            raise ValueError(
                f"{self.title} would see the future: its `call` must take "
                "`use_causal_mask` (a layer that is causal by itself may ignore it) or "
                f"`attention_mask`. Received: call{self.names}"
            )

    def call(
        self,
        query,
        value,
        layer,
        query_mask=None,
        value_mask=None,
        attention_mask=None,
        bias=None,
        positions=None,
        cache=None,
        cache_index=None,
        training=None,
    ):
        options = _given(
            bias=bias, positions=positions, cache=cache, cache_index=cache_index
        )
        if self.is_own:
            options |= _given(
                query_mask=query_mask,
                value_mask=value_mask,
                attention_mask=attention_mask,
            )
            if self.is_causal:
                options["use_causal_mask"] = True
        else:
            query, value, masks = self._hand_over_masks(
                query, value, query_mask, value_mask, attention_mask
            )
            options |= masks
        self._check_taken(options)
        inputs = (query,) if self.value_name is None else (query, value)
        return call_quietly(layer, *inputs, **options, training=training)

    def _hand_over_masks(self, query, value, query_mask, value_mask, attention_mask):
        """The inputs without masks of their own, and the masks as options."""
        query_mask = _as_padding("query_mask", query_mask, query)
        value_mask = _as_padding("value_mask", value_mask, value)
        attention_mask = combine_masks(attention_mask)
        is_self = value is query
        query = ops.copy(query)  # Keras' attention takes the masks off its inputs
        value = query if is_self else ops.copy(value)
        is_plain = attention_mask is None and value_mask is None
        if self.is_causal and "use_causal_mask" in self.names and is_plain:
            return query, value, {"use_causal_mask": True}
        if "attention_mask" in self.names:
            if self.is_causal or not is_plain:
                self._check_rank(query)
            mask = attention_mask
            if value_mask is not None:
                padding = ops.expand_dims(value_mask, 1)  # (batch, 1, key)
                mask = combine_masks(mask, padding)
            if self.is_causal:
                causal = causal_mask(ops.shape(query)[1], ops.shape(value)[1])
                mask = combine_masks(mask, causal[None])  # (1, query, key)
            return query, value, _given(attention_mask=mask)
        options = _given(attention_mask=attention_mask)  # which has no place
        if self.is_causal:
            options["use_causal_mask"] = True
        names = self._padding_names()
        if value_mask is not None and "value_mask" not in names:
            if not self.carries:
                raise ValueError(
                    f"{self.title} takes no padding mask, and one was given: its "
                    "`call` must take `mask`, `value_mask` or `attention_mask`, or the "
                    "layer must set `supports_masking`. "
                    f"Received: call{self.names}"
                )
            query = self._carry(query, query_mask)
            value = query if is_self else self._carry(value, value_mask)
            return query, value, options
        for kind, mask in (("query_mask", query_mask), ("value_mask", value_mask)):
            if mask is not None and kind in names:
                options[names[kind]] = mask
        return query, value, options

    def _padding_names(self):
        """The layer's own names of `query_mask` and `value_mask`, where it has them."""
        found = {}
        for name in ("mask", f"{self.query_name}_mask"):
            if name in self.names:
                found["query_mask"] = name
        if self.value_name is None:
            return {kind: name for name in found.values() for kind in _KINDS}
        if f"{self.value_name}_mask" in self.names:
            found["value_mask"] = f"{self.value_name}_mask"
        return found

    def _carry(self, x, mask):
        return x if mask is None else self.carry_mask(x, mask=mask)

    def _check_rank(self, query):
        if len(query.shape) != 3:
            raise ValueError(
                f"For {self.title} the masks are put together on `(batch, query, key)`:"
                " the inputs must be `(batch, length, dim)`. "
                f"Received: inputs of shape {tuple(query.shape)}"
            )

    def _check_taken(self, options):
        missing = [name for name in options if name not in self.names]
        if missing:
            raise ValueError(
                f"{self.title} cannot take {', '.join(f'`{x}`' for x in missing)}, "
                f"which the block was given. Received: call{self.names}"
            )


class Feed(layers.Layer):
    """Calls a feed-forward layer, which may read the padding mask.

    As `mask`, if its `call` takes it, else riding on the input, if the layer has
    `supports_masking`. A layer that does neither computes each token by itself.

    Args:
        layer: the feed-forward, given to `call` too.
        is_own: whether the layer is known to read no mask.
    """

    def __init__(self, layer, is_own=False, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.built = True  # it holds no weights
        self.is_own = is_own
        self.takes_mask = "mask" in _argument_names(layer)
        self.carries = layer.supports_masking
        self.carry_mask = CarryMask(dtype=self.dtype_policy, name="carry_mask")

    def call(self, inputs, layer, mask=None, training=None):
        if self.is_own or (self.carries and mask is None):
            return layer(inputs, training=training)
        inputs = ops.copy(inputs)  # without a mask of its own
        if self.takes_mask:
            return call_quietly(layer, inputs, mask=mask, training=training)
        if self.carries:
            inputs = self.carry_mask(inputs, mask=as_mask(mask))
        return layer(inputs, training=training)


_KINDS = ("query_mask", "value_mask")
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
# Second arguments of a `call` that are no input.
_OPTIONS = ("mask", "attention_mask", "query_mask", "positions", "bias", "training")


def _given(**options):
    return {name: value for name, value in options.items() if value is not None}


def _as_padding(name, mask, x):
    """`mask` as boolean tensor of the shape of `x` without its features, or `None`."""
    if mask is None:
        return None
    mask = as_mask(mask, name)
    if not broadcasts(mask.shape, x.shape[:-1]):
        raise ValueError(
            f"`{name}` must have the shape of its input without the features, "
            f"{tuple(x.shape[:-1])}. Received: {name} of shape {tuple(mask.shape)}"
        )
    return mask


def _argument_names(layer):
    """What the layer's `call` takes by name. Keras lets no mask through `**kwargs`."""
    parameters = inspect.signature(layer.call).parameters.values()
    return tuple(x.name for x in parameters if x.kind in _NAMED)


def _input_names(layer):
    """The names of the query's argument and of the value's, `None` if it has none."""
    query, *others = [*inspect.signature(layer.call).parameters.values()] or [None]
    for parameter in others[:1]:
        is_needed = parameter.default is inspect.Parameter.empty
        is_input = is_needed and parameter.kind in _NAMED
        if parameter.name == "value" or (is_input and parameter.name not in _OPTIONS):
            return query.name, parameter.name
    return query and query.name, None
