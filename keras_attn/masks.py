"""Boolean attention masks, `True` means "may be seen", and what is counted from them.

Shapes, the same everywhere: `(query, key)` for a pattern that every row of the batch
shares, `(batch, query, key)` for one that differs by row, `(batch, heads, query, key)`
for one that differs by head, and `(batch, length)` for padding.
"""

import numbers

from keras import layers, ops
from keras.backend import is_float_dtype, standardize_dtype
from keras.saving import register_keras_serializable

from keras_attn.checks import broadcasts

__all__ = [
    "causal_mask",
    "combine_masks",
    "padding_mask",
    "prefix_mask",
    "segment_mask",
    "segment_positions",
    "sliding_window_mask",
    "token_positions",
]


def causal_mask(query_length, key_length=None, offset=0):
    """Every query sees the keys up to its own position.

    Args:
        query_length: number of queries.
        key_length: number of keys. Defaults to `query_length`.
        offset: position of the first query among the keys (for a cache that already
            holds `offset` keys); an int or a scalar tensor.

    Returns:
        `(query, key)`, `True` where `key <= query + offset`.

    Example:
    >>> keras.ops.convert_to_numpy(causal_mask(3)).astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [1, 1, 1]])
    """
    query, key = _positions(query_length, key_length, offset)
    return ops.less_equal(key, query)


def sliding_window_mask(query_length, key_length=None, *, window, offset=0):
    """Every query sees the keys near its own position.

    Args:
        query_length: number of queries.
        key_length: number of keys. Defaults to `query_length`.
        window: an int is the symmetric band of `keras.layers.MultiHeadAttention`,
            `|query - key| < window`; a pair `(left, right)` lets a query see that many
            keys before and after itself.
        offset: position of the first query among the keys.

    Returns:
        `(query, key)`.
    """
    left, right = window_sides(window)
    query, key = _positions(query_length, key_length, offset)
    distance = ops.subtract(query, key)
    return ops.logical_and(
        ops.less_equal(distance, left), ops.greater_equal(distance, -right)
    )


def padding_mask(tokens, padding_id=0):
    """`True` at real tokens.

    Args:
        tokens: `(batch, length)`, integer ids.
        padding_id: the id that marks padding.

    Returns:
        `(batch, length)`.
    """
    return ops.not_equal(tokens, padding_id)


def segment_mask(segment_ids, key_segment_ids=None):
    """Tokens see only tokens of their own segment: several texts packed in one row.

    Args:
        segment_ids: `(batch, query)`, integer ids; give padding an id of its own.
        key_segment_ids: `(batch, key)`. Defaults to `segment_ids`.

    Returns:
        `(batch, query, key)`.
    """
    key_segment_ids = segment_ids if key_segment_ids is None else key_segment_ids
    return ops.equal(
        ops.expand_dims(segment_ids, -1), ops.expand_dims(key_segment_ids, -2)
    )


def prefix_mask(prefix_length, query_length, key_length=None):
    """Causal, but the first `prefix_length` keys are seen by every query (prefix LM).

    Args:
        prefix_length: an int, or `(batch,)` integers for a prefix that differs by row.
        query_length: number of queries.
        key_length: number of keys. Defaults to `query_length`.

    Returns:
        `(query, key)` for an int, `(batch, query, key)` for a vector.
    """
    prefix_length = ops.convert_to_tensor(prefix_length, dtype="int32")
    _, key = _positions(query_length, key_length)
    for _ in range(len(prefix_length.shape) * 2):
        prefix_length = ops.expand_dims(prefix_length, -1)  # (batch, 1, 1)
    causal = causal_mask(query_length, key_length)
    return ops.logical_or(causal, ops.less(key, prefix_length))


def token_positions(mask, inputs=None):
    """Where each token stands: how many real tokens come before it in its row.

    Args:
        mask: `(batch, length)`, `True` at real tokens.
        inputs: `(batch, length, dim)`, the tokens that the mask is of, to check it.

    Returns:
        `(batch, length)`, int32. Left-padded, right-padded and unpadded rows number
        their real tokens alike, from 0.
    """
    mask = as_mask(mask)
    if inputs is not None and not broadcasts(mask.shape, inputs.shape[:-1]):
        raise ValueError(
            "`mask` must have the shape of its input without the features, "
            f"{tuple(inputs.shape[:-1])}. Received: mask of shape {tuple(mask.shape)}"
        )
    real = ops.cast(mask, "int32")
    return ops.maximum(ops.cumsum(real, axis=-1) - 1, 0)


def segment_positions(segment_ids):
    """Where each token of a packed row stands: how many of its own segment come before.

    Args:
        segment_ids: `(batch, length)`, integer ids, as for `masks.segment_mask`.

    Returns:
        `(batch, length)`, int32: every segment counts from 0.

    Example:
    >>> packed = np.array([[1, 1, 1, 2, 2, 3]])
    >>> keras.ops.convert_to_numpy(segment_positions(packed)).tolist()
    [[0, 1, 2, 0, 1, 0]]
    """
    own = segment_mask(segment_ids)  # (batch, query, key)
    before = causal_mask(ops.shape(own)[1], offset=-1)
    return ops.sum(ops.cast(ops.logical_and(own, before), "int32"), axis=-1)


def combine_masks(*masks):
    """All of the masks at once: a key is seen where every mask lets it be seen.

    Args:
        *masks: masks of rank 2 `(query, key)`, rank 3 `(batch, query, key)` or rank 4
            `(batch, heads, query, key)`, any dimension 1 where it is shared. `None`
            is "no restriction" and is skipped.

    Returns:
        The combined mask in the highest rank among them, or `None` if all are `None`.

    Raises:
        TypeError: a float mask.
        ValueError: a mask of another rank.
    """
    masks = [as_mask(mask) for mask in masks if mask is not None]
    rank = max((len(mask.shape) for mask in masks), default=0)
    combined = None
    for mask in masks:
        if not 2 <= len(mask.shape) <= 4:
            raise ValueError(
                "A mask must have rank 2 `(query, key)`, 3 `(batch, query, key)` or 4 "
                f"`(batch, heads, query, key)`. Received: shape={tuple(mask.shape)}"
            )
        if rank == 4 and len(mask.shape) == 3:
            mask = ops.expand_dims(mask, 1)  # (batch, 1, query, key)
        combined = mask if combined is None else ops.logical_and(combined, mask)
    return combined


def as_mask(mask, name="mask"):
    """`mask` as a boolean tensor; integers count as booleans, floats are refused."""
    mask = ops.convert_to_tensor(mask)
    dtype = standardize_dtype(mask.dtype)
    if is_float_dtype(dtype):
        raise TypeError(
            f"`{name}` must be boolean, `True` where a position may be seen. Received: "
            f"dtype={dtype}. Pass a term that is added to the scores as `bias=`, or "
            f"compare: `{name} > 0`."
        )
    return mask if dtype == "bool" else ops.cast(mask, "bool")


def window_sides(window):
    """`(left, right)`: how many keys before and after itself a query sees."""
    sides = (window - 1, window - 1) if _is_integer(window) else window
    is_pair = isinstance(sides, (tuple, list)) and len(sides) == 2
    if not is_pair or not all(_is_integer(side) and side >= 0 for side in sides):
        raise ValueError(
            "`sliding_window` must be `None`, a positive integer or a pair "
            f"`(left, right)` of integers >= 0. Received: sliding_window={window}"
        )
    return tuple(int(side) for side in sides)


@register_keras_serializable(package="keras_attn")
class CarryMask(layers.Layer):
    """Hands its input on with `mask` riding on it, by Keras' own mechanism."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.built = True  # it holds no weights

    def call(self, inputs, mask=None):
        return inputs


def _is_integer(value):
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _positions(query_length, key_length=None, offset=0):
    key_length = query_length if key_length is None else key_length
    query = ops.add(ops.arange(0, query_length, dtype="int32"), offset)
    key = ops.arange(0, key_length, dtype="int32")
    return ops.expand_dims(query, 1), ops.expand_dims(key, 0)  # (query, 1), (1, key)
