"""The axes attention runs over: folded to `(batch, heads, length, dim)` and back."""

import math

from keras import ops

from keras_attn.masks import as_mask

__all__ = [
    "as_axes",
    "fold",
    "fold_attention_mask",
    "fold_padding",
    "normalized",
    "other_axes",
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


def unfold_scores(scores, query_positions, key_positions, axes):
    """`(batch * others, heads, query, key)` with every folded axis on its own."""
    if len(query_positions) == 2:
        return scores
    others = other_axes(len(query_positions), axes)
    return ops.reshape(
        scores,
        (
            *(query_positions[axis] for axis in others),
            ops.shape(scores)[1],
            *(query_positions[axis] for axis in axes),
            *(key_positions[axis] for axis in axes),
        ),
    )


def fold_padding(name, mask, x, axes):
    """A mask on the positions of `x` to `(batch * others, length)`.

    Raises:
        TypeError: a float mask.
        ValueError: a mask of another shape than `x` without its features.
    """
    mask = as_mask(mask, name)
    if not _broadcasts(mask.shape, x.shape[:-1]):
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
    others = other_axes(len(query.shape) - 1, axes)
    _check_attention_mask(mask, query, key, num_heads, axes, others)
    if len(query.shape) == 3:
        return mask
    while len(mask.shape) < len(others) + 1 + 2 * len(axes):
        mask = ops.expand_dims(mask, len(mask.shape) - 2 * len(axes))
    query_sizes, key_sizes = ops.shape(query), ops.shape(key)
    heads = ops.shape(mask)[len(others)]
    batch = [query_sizes[axis] for axis in others]
    rows = [query_sizes[axis] for axis in axes]
    columns = [key_sizes[axis] for axis in axes]
    mask = ops.broadcast_to(mask, (*batch, heads, *rows, *columns))
    return ops.reshape(mask, (-1, heads, math.prod(rows), math.prod(columns)))


def other_axes(rank, axes):
    """The axes, the batch first, that attention does not run over."""
    return tuple(axis for axis in range(rank) if axis not in axes)


def as_axes(attention_axes):
    """The argument `attention_axes` as a tuple, or `None` for all positions."""
    if attention_axes is None:
        return None
    if isinstance(attention_axes, int):
        return (attention_axes,)
    if not isinstance(attention_axes, (list, tuple)):
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
    if not all(1 <= axis < rank - 1 for axis in counted):
        raise ValueError(
            f"`attention_axes` must lie between batch and features of a rank {rank} "
            f"query. Received: attention_axes={attention_axes}"
        )
    return counted


def _check_attention_mask(mask, query, key, num_heads, axes, others):
    shape, scores = tuple(mask.shape), 2 * len(axes)
    batch = tuple(query.shape[axis] for axis in others)
    rows = tuple(query.shape[axis] for axis in axes)
    columns = tuple(key.shape[axis] for axis in axes)
    leading = (*batch, num_heads)
    if len(shape) <= len(batch) + scores:
        leading = batch[: max(len(shape) - scores, 0)]
    if not _broadcasts(shape, (*leading, *rows, *columns)):
        raise ValueError(
            "`attention_mask` must be `(query, key)`, `(batch, query, key)` or "
            f"`(batch, heads, query, key)`, batch={batch}, heads={num_heads}, "
            f"query={rows}, key={columns}. Received: attention_mask of shape {shape}"
        )
    rows_or_batch = shape[0] or 0
    if len(query.shape) == 3 and len(shape) == 2 and 1 < rows_or_batch == batch[0]:
        raise ValueError(
            "`attention_mask` of shape (n, key) is ambiguous where the batch and the "
            "query length are both n: pass `attention_mask[None]` for a `(query, key)` "
            "pattern, `value_mask=` for a `(batch, key)` padding mask. Received: "
            f"attention_mask of shape {shape}, query of shape {tuple(query.shape)}"
        )


def _broadcasts(shape, expected):
    """Whether `shape` broadcasts to `expected`, as far as both are known."""
    return len(shape) == len(expected) and all(
        size is None or full is None or size in (1, full)
        for size, full in zip(shape, expected, strict=True)
    )
