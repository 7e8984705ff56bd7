"""The axes attention runs over: folded to `(batch, heads, length, dim)` and back."""

import math

from keras import ops

from keras_attn.checks import broadcasts
from keras_attn.masks import as_mask

__all__ = [
    "as_axes",
    "fold",
    "check_attention_mask",
    "check_unambiguous",
    "fold_attention_mask",
    "fold_bias",
    "fold_padding",
    "normalized",
    "other_axes",
    "scores_shape",
    "unfold",
    "unfold_scores",
]


def fold(x, axes):
    """`(batch, ..., heads, dim)` to `(batch * others, heads, length, dim)`.

    Args:
        x: the axes before the last two are the batch and the positions.
        axes: the axes that attention runs over; they become `length`, the other ones
            join the batch.
    """
    others = other_axes(len(x.shape) - 2, axes)
    heads, dim = len(x.shape) - 2, len(x.shape) - 1
    x = ops.transpose(x, (*others, heads, *axes, dim))
    if len(x.shape) == 4:
        return x
    shape = ops.shape(x)
    length = math.prod(shape[len(others) + 1 : -1])
    return ops.reshape(x, (-1, shape[len(others)], length, shape[-1]))


def unfold(x, positions, axes):
    """`(batch * others, heads, length, dim)` to `(batch, ..., heads, dim)`.

    Args:
        x: what `fold` gave, with any `dim`.
        positions: the sizes of the batch and the positions, as they were before.
        axes: as in `fold`.
    """
    others = other_axes(len(positions), axes)
    _, heads, _, dim = ops.shape(x)
    order = (*others, len(positions), *axes, len(positions) + 1)
    if len(order) != 4:
        sizes = (*positions, heads, dim)
        x = ops.reshape(x, [sizes[axis] for axis in order])
    return ops.transpose(x, [order.index(axis) for axis in range(len(order))])


def unfold_scores(scores, query, key, axes):
    """`(batch * others, heads, query, key)` with every folded axis on its own."""
    if len(query.shape) == 3:
        return scores
    heads = ops.shape(scores)[1]
    shape = scores_shape(ops.shape(query), ops.shape(key), heads, axes)
    return ops.reshape(scores, shape)


def fold_padding(name, mask, x, axes):
    """A mask on the positions of `x` to `(batch * others, length)`.

    Raises:
        TypeError: a float mask.
        ValueError: a mask of another shape than `x` without its features.
    """
    mask = as_mask(mask, name)
    if not broadcasts(mask.shape, x.shape[:-1]):
        raise ValueError(
            f"`{name}` must have the shape of its input without the features, "
            f"{tuple(x.shape[:-1])}. Received: {name} of shape {tuple(mask.shape)}"
        )
    if len(mask.shape) == 2:
        return mask
    mask = fold(ops.expand_dims(ops.expand_dims(mask, -1), -1), axes)
    return ops.squeeze(mask, (1, 3))  # (batch * others, 1, length, 1) without the 1s


def fold_attention_mask(mask, query, key, num_heads, axes):
    """A mask on all axes to one on `(batch * others, heads, query, key)`.

    As in Keras, a mask ends in `(query axes, key axes)`; where it has fewer axes than
    the scores, the missing ones are shared and stand right before those.

    Raises:
        TypeError: a float mask.
        ValueError: a mask that does not broadcast so, or that can be read in two ways.
    """
    mask = as_mask(mask, "attention_mask")
    check_attention_mask(mask.shape, query.shape, key.shape, num_heads, axes)
    if len(query.shape) == 3:
        return mask
    while len(mask.shape) < len(query.shape) + len(axes):
        mask = ops.expand_dims(mask, len(mask.shape) - 2 * len(axes))
    return _fold_scores(mask, query, key, axes)


def fold_bias(bias, query, key, num_heads, axes):
    """A bias that broadcasts to the scores, on `(batch * others, heads, query, key)`.

    Raises:
        ValueError: with more axes than `(batch, length, dim)`, a bias of another rank
            than the scores.
    """
    if bias is None or len(query.shape) == 3:
        return bias  # `dot_product_attention` checks it
    bias = ops.convert_to_tensor(bias)
    expected = scores_shape(query.shape, key.shape, num_heads, axes)
    if not broadcasts(bias.shape, expected):
        raise ValueError(
            f"`bias` must broadcast, axis by axis, to the scores, {expected}. "
            f"Received: bias of shape {tuple(bias.shape)}"
        )
    return _fold_scores(bias, query, key, axes)


def scores_shape(query_shape, key_shape, num_heads, axes):
    """The shape of the scores: other axes, heads, query axes, key axes."""
    return (
        *(query_shape[axis] for axis in other_axes(len(query_shape) - 1, axes)),
        num_heads,
        *(query_shape[axis] for axis in axes),
        *(key_shape[axis] for axis in axes),
    )


def _fold_scores(x, query, key, axes):
    """What broadcasts to the scores, axis by axis, with its heads as they are."""
    heads = x.shape[len(query.shape) - 1 - len(axes)]
    full = scores_shape(ops.shape(query), ops.shape(key), heads, axes)
    rows, columns = full[-2 * len(axes) : -len(axes)], full[-len(axes) :]
    x = ops.broadcast_to(x, full)
    return ops.reshape(x, (-1, heads, math.prod(rows), math.prod(columns)))


def other_axes(rank, axes):
    """The axes, the batch first, that attention does not run over."""
    return tuple(axis for axis in range(rank) if axis not in axes)


def as_axes(attention_axes):
    """The argument `attention_axes` as a tuple, or `None` for all positions."""
    if attention_axes is None:
        return None
    if isinstance(attention_axes, int):
        return (attention_axes,)
    if not isinstance(attention_axes, (list, tuple)) or not attention_axes:
        raise ValueError(
            "`attention_axes` must be an int, list, or tuple. "
            f"Received: attention_axes={attention_axes}"
        )
    return tuple(attention_axes)


def normalized(attention_axes, rank):
    """`attention_axes` counted from the front; all positions for `None`."""
    if attention_axes is None:
        return tuple(range(1, rank - 1))
    counted = tuple(axis + rank if axis < 0 else axis for axis in attention_axes)
    inside = all(1 <= axis < rank - 1 for axis in counted)
    if not inside or len(set(counted)) < len(counted):
        raise ValueError(
            f"`attention_axes` must be different axes between batch and features of a "
            f"rank {rank} query. Received: attention_axes={attention_axes}"
        )
    return counted


def check_attention_mask(shape, query_shape, key_shape, num_heads, axes):
    """Raises where a mask of `shape` does not broadcast to the scores, as in Keras."""
    shape = tuple(shape)
    full = scores_shape(query_shape, key_shape, num_heads, axes)
    batch, patterns = full[: -2 * len(axes) - 1], full[-2 * len(axes) :]
    leading = (*batch, num_heads)
    if len(shape) < len(full):
        leading = batch[: max(len(shape) - len(patterns), 0)]
    if not broadcasts(shape, (*leading, *patterns)):
        raise ValueError(
            "`attention_mask` must be `(query, key)`, `(batch, query, key)` or "
            f"`(batch, heads, query, key)`, with batch={batch}, heads={num_heads}, "
            f"query={patterns[: len(axes)]}, key={patterns[len(axes) :]}. "
            f"Received: attention_mask of shape {shape}"
        )


def check_unambiguous(shape, query_shape):
    """Raises where a mask may be meant as `(query, key)` or as `(batch, key)`."""
    if len(shape) == 2 and len(query_shape) == 3:
        batch, length, _ = query_shape
        if batch == length == shape[0] and batch > 1:
            raise ValueError(
                "`attention_mask` of shape (n, key) is ambiguous where the batch and "
                "the query length are both n: pass `attention_mask[None]` for a "
                "`(query, key)` pattern, `value_mask=` for a `(batch, key)` padding "
                f"mask. Received: attention_mask of shape {tuple(shape)}, query of "
                f"shape {tuple(query_shape)}"
            )
