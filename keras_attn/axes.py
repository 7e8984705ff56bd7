"""Folding any choice of attention axes into `(batch, heads, length, dim)` and back."""

import math

from keras import ops

__all__ = ["fold", "fold_mask", "unfold", "unfold_scores"]


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


def fold_mask(mask, query_positions, key_positions, axes):
    """A mask on all axes to one on `(batch * others, heads, query, key)`.

    As in Keras, a mask ends in `(query axes, key axes)`; where it has fewer axes than
    the scores, the missing ones are shared and stand right before those.
    """
    if len(query_positions) == 2:
        return mask
    others = other_axes(len(query_positions), axes)
    while len(mask.shape) < len(others) + 1 + 2 * len(axes):
        mask = ops.expand_dims(mask, len(mask.shape) - 2 * len(axes))
    heads = ops.shape(mask)[len(others)]
    batch = [query_positions[axis] for axis in others]
    query = [query_positions[axis] for axis in axes]
    key = [key_positions[axis] for axis in axes]
    mask = ops.broadcast_to(mask, (*batch, heads, *query, *key))
    return ops.reshape(mask, (-1, heads, math.prod(query), math.prod(key)))


def other_axes(rank, axes):
    """The axes, the batch first, that attention does not run over."""
    return tuple(axis for axis in range(rank) if axis not in axes)
