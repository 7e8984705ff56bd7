"""Windows of a grid as pure functions, for attention inside windows (Swin).

A window has an axis of its own, `(batch, windows, length, dim)`: attention runs over
`length` with `MultiHeadAttention(attention_axes=2)`, and what differs by window, as
`shifted_window_mask` does, needs no copy for every image of the batch.
"""

from keras import ops

from keras_attn.checks import check_pair

__all__ = ["shifted_window_mask", "window_partition", "window_reverse"]


def window_partition(x, window_size):
    """Cuts a grid into windows that do not overlap.

    Pad a grid that they do not cover, with `keras.layers.ZeroPadding2D` say, on the
    right and below; partition `(batch, rows, cols, 1)`, `True` at real tokens, alike,
    and drop its last axis: that is the `value_mask` which hides the padding.

    Args:
        x: `(batch, rows, cols, dim)`, any dtype.
        window_size: an int or `(rows, cols)`.

    Returns:
        `(batch, windows, length, dim)`: windows row by row over the grid, tokens row by
        row inside the window.

    Raises:
        ValueError: a grid that the windows do not cover exactly, or a grid of unknown
            size in a functional model (inside a layer's `call` it may be unknown).

    Example:
    >>> x = keras.random.normal((2, 4, 6, 32))
    >>> tuple(keras_attn.windows.window_partition(x, 2).shape)
    (2, 6, 4, 32)

    Reference: [Liu et al., 2021](https://arxiv.org/abs/2103.14030), section 3.2.
    """
    height, width = check_pair("window_size", window_size)
    if len(x.shape) != 4:
        raise ValueError(
            "`x` must be `(batch, rows, cols, dim)`. "
            f"Received: x of shape {tuple(x.shape)}"
        )
    dim = x.shape[-1]
    _, rows, cols, _ = ops.shape(x)
    down, across = _count(rows, cols, height, width)
    x = ops.reshape(x, (-1, down, height, across, width, dim))
    x = ops.transpose(
        x, (0, 1, 3, 2, 4, 5)
    )  # (batch, down, across, height, width, dim)
    return ops.reshape(x, (-1, down * across, height * width, dim))


def window_reverse(windows, window_size, rows, cols):
    """Puts the windows of `window_partition` back together.

    Args:
        windows: `(batch, windows, length, dim)`.
        window_size: an int or `(rows, cols)`, as it was cut.
        rows: number of rows of the grid.
        cols: number of columns of the grid.

    Returns:
        `(batch, rows, cols, dim)`.

    Raises:
        ValueError: windows of another number or length than this grid has.
    """
    height, width = check_pair("window_size", window_size)
    down, across = _count(rows, cols, height, width)
    expected, found = (down * across, height * width), tuple(windows.shape[1:3])
    known = all(isinstance(size, int) for size in (*expected, *found))
    if len(windows.shape) != 4 or (known and expected != found):
        raise ValueError(
            f"`windows` of a grid of ({rows}, {cols}) must be `(batch, windows, length,"
            f" dim)` = (batch, {down * across}, {height * width}, dim). Received: "
            f"windows of shape {tuple(windows.shape)}, window_size={window_size}"
        )
    dim = windows.shape[-1]
    x = ops.reshape(windows, (-1, down, across, height, width, dim))
    x = ops.transpose(
        x, (0, 1, 3, 2, 4, 5)
    )  # (batch, down, height, across, width, dim)
    return ops.reshape(x, (-1, rows, cols, dim))


def shifted_window_mask(rows, cols, window_size, shift):
    """What may be seen where the windows are shifted by rolling the grid.

    After `roll(x, (-shift, -shift), axis=(1, 2))` the windows at the right and lower
    edge hold tokens from opposite sides of the grid; a token sees only those that were
    its neighbours before.

    Args:
        rows: number of rows of the grid.
        cols: number of columns of the grid.
        window_size: an int or `(rows, cols)`.
        shift: an int or `(rows, cols)`, from 0 to below the window's size.

    Returns:
        `(windows, query, key)`, boolean, `True` where the key may be seen. For
        `(batch, windows, length, dim)` and attention over axis 2 it is
        `attention_mask=mask[None, :, None]`: `(batch, windows, heads, query, key)`.

    Raises:
        ValueError: a shift that is negative or not below the window's size, or a grid
            that the windows do not cover exactly.

    Example:
    >>> mask = keras_attn.windows.shifted_window_mask(1, 4, (1, 4), (0, 1))
    >>> keras.ops.convert_to_numpy(mask[0]).astype(int)
    array([[1, 1, 1, 0],
           [1, 1, 1, 0],
           [1, 1, 1, 0],
           [0, 0, 0, 1]])

    Reference: [Liu et al., 2021](https://arxiv.org/abs/2103.14030), figure 4.
    """
    sizes = check_pair("window_size", window_size)
    shifts = tuple(shift) if isinstance(shift, (tuple, list)) else (shift, shift)
    if len(shifts) != 2 or not all(
        0 <= shift < size for shift, size in zip(shifts, sizes, strict=False)
    ):
        raise ValueError(
            "`shift` must be an integer or a pair of them, at least 0 and below the "
            f"window's size. Received: shift={shift}, window_size={window_size}"
        )
    # Rolled by `shift`, the last `shift` rows come from the top: another region.
    row, col = (
        ops.cast(ops.arange(0, length, dtype="int32") >= length - shift, "int32")
        for length, shift in zip((rows, cols), shifts, strict=True)
    )
    region = 2 * ops.expand_dims(row, 1) + ops.expand_dims(col, 0)  # (rows, cols)
    region = window_partition(ops.reshape(region, (1, rows, cols, 1)), sizes)
    region = region[0, :, :, 0]  # (windows, length)
    return ops.equal(ops.expand_dims(region, 2), ops.expand_dims(region, 1))


def _count(rows, cols, height, width):
    """How many windows there are down and across the grid."""
    if None in (rows, cols):
        raise ValueError(
            "In a functional model the grid's size must be known; call the windows' "
            f"functions inside a layer's `call`. Received: a grid of ({rows}, {cols})"
        )
    known = isinstance(rows, int) and isinstance(cols, int)
    if known and (rows % height or cols % width):
        raise ValueError(
            f"Windows of ({height}, {width}) do not cover the grid exactly: pad it. "
            f"Received: a grid of ({rows}, {cols})"
        )
    return rows // height, cols // width
