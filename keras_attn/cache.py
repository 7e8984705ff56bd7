"""Key/value caches: what an attention layer keeps of the tokens it has read.

A cache is a dictionary of tensors of fixed shapes, so that it passes through compiled
loops, functional models and the signatures of exported files:

* `"key"`: `(batch, kv_heads, slots, key_dim)`, already rotated;
* `"value"`: `(batch, kv_heads, slots, value_dim)`;
* `"positions"`: `(batch, slots)`, int32, where the token in the slot stands;
* `"length"`: `(batch,)`, int32, how many real tokens each row has read.

Token `n` of a row lies in slot `n % slots`. Padding is not written, so rows with
prompts of different lengths have no gaps. Where a sliding window never looks further
back than the cache is long, the cache may roll: new tokens take the oldest ones' slots.

A *memory* cache, for cross-attention, has `"key"`, `"value"` and `"mask"`, `(batch,
slots)`: it is written once and read by every step.
"""

import keras
from keras import ops

from keras_attn.masks import as_mask, token_positions

__all__ = [
    "append",
    "counts_of",
    "in_order",
    "is_memory",
    "make_cache",
    "make_memory_cache",
    "ordinals",
    "read",
    "reorder",
    "rewind",
]


def make_cache(batch_size, kv_heads, num_slots, key_dim, value_dim=None, dtype=None):
    """An empty cache.

    Args:
        batch_size: number of rows, an int or a scalar tensor.
        kv_heads: number of key/value heads.
        num_slots: how many tokens it holds.
        key_dim: size of a head's key.
        value_dim: size of a head's value. Defaults to `key_dim`.
        dtype: of keys and values. Defaults to `keras.config.floatx()`.

    Returns:
        The dictionary that this file describes.
    """
    dtype = dtype or keras.config.floatx()
    shape = (batch_size, kv_heads, num_slots)
    return {
        "key": ops.zeros((*shape, key_dim), dtype),
        "length": ops.zeros((batch_size,), "int32"),
        "positions": ops.zeros((batch_size, num_slots), "int32"),
        "value": ops.zeros((*shape, value_dim or key_dim), dtype),
    }


def make_memory_cache(key, value, mask=None):
    """The keys and values of a memory, computed once for all steps.

    Args:
        key: `(batch, kv_heads, length, key_dim)`.
        value: `(batch, kv_heads, length, value_dim)`.
        mask: `(batch, length)`, `True` at real tokens.
    """
    if mask is None:
        mask = ops.ones((ops.shape(key)[0], ops.shape(key)[2]), "bool")
    return {"key": key, "mask": as_mask(mask), "value": value}


def is_memory(cache):
    """Whether `cache` is of a memory, which is read only."""
    return "length" not in cache


def append(cache, key, value, positions, counts, mask=None):
    """The cache with new tokens in it.

    Args:
        cache: a dictionary as this file describes.
        key: `(batch, kv_heads, length, key_dim)`.
        value: `(batch, kv_heads, length, value_dim)`.
        positions: `(length,)` or `(batch, length)`, where the new tokens stand.
        counts: `(batch, length)`, how many real tokens of the row come before each.
        mask: `(batch, length)`, `True` at real tokens: only they are written.

    Returns:
        A cache; the one that was given is as it was.
    """
    batch, slots = ops.shape(cache["key"])[0], cache["key"].shape[2]
    new = ops.shape(key)[2]
    if mask is None:
        mask = ops.ones((batch, new), "bool")
    length = cache["length"] + ops.sum(ops.cast(mask, "int32"), axis=-1)
    newest = _newest(length, slots)  # (batch, slots)
    lands = ops.logical_and(
        ops.equal(ops.expand_dims(newest, 2), ops.expand_dims(counts, 1)),
        ops.expand_dims(mask, 1),
    )  # (batch, slots, new)
    is_new = ops.any(lands, axis=-1)
    source = ops.argmax(ops.cast(lands, "int32"), axis=-1)  # (batch, slots)
    positions = ops.broadcast_to(positions, (batch, new))

    def write(old, tokens):
        """Both `(batch, heads, length, dim)`."""
        if tokens.shape[2] != 1:  # one token goes to its slot by broadcasting
            index = ops.expand_dims(ops.expand_dims(source, 1), -1)
            tokens = ops.take_along_axis(tokens, index, axis=2)
        here = ops.expand_dims(ops.expand_dims(is_new, 1), -1)
        return ops.where(here, ops.cast(tokens, old.dtype), old)

    return {
        "key": write(cache["key"], key),
        "length": length,
        "positions": ops.where(
            is_new,
            ops.take_along_axis(ops.cast(positions, "int32"), source, axis=1),
            cache["positions"],
        ),
        "value": write(cache["value"], value),
    }


def in_order(cache):
    """The cache, or the dictionary of caches, with its names in alphabetical order.

    Some backends flatten a dictionary in the order of its names, others as it was
    made: only where the two are one does a saved model find its tensors on all.
    """
    if not isinstance(cache, dict):
        return cache
    return {name: in_order(cache[name]) for name in sorted(cache)}


def counts_of(cache, mask, length):
    """How many real tokens of the row come before each of `length` new ones.

    Args:
        cache: the cache that they will be appended to.
        mask: `(batch, length)`, `True` at real tokens, or `None`.
        length: number of new tokens.

    Returns:
        `(batch, length)`, int32.
    """
    if mask is None:
        inside = ops.expand_dims(ops.arange(0, length, dtype="int32"), 0)
    else:
        inside = token_positions(mask)
    return ops.expand_dims(cache["length"], 1) + inside


def read(old, new, key, value, positions, counts, mask=None, left=None, rolls=False):
    """What the new tokens attend to, after they were appended.

    Args:
        old: the cache before.
        new: the cache after.
        key: `(batch, kv_heads, length, key_dim)` of the new tokens, as is what follows.
        value: `(batch, kv_heads, length, value_dim)`.
        positions: `(length,)` or `(batch, length)`.
        counts: `(batch, length)`.
        mask: `(batch, length)`, `True` at real tokens.
        left: how many tokens back a query sees; `None` for all.
        rolls: whether new tokens may have replaced some that others of them see: the
            cache is then read as it was, and the new tokens beside it.

    Returns:
        Keys, values, their positions `(batch, keys)`, a mask `(batch, length, keys)`.
    """
    if not rolls or key.shape[2] == 1:
        key, value, positions = new["key"], new["value"], new["positions"]
        key_counts = ordinals(new)
        is_filled = key_counts >= 0
    else:
        batch, length = ops.shape(counts)
        key = ops.concatenate([old["key"], ops.cast(key, old["key"].dtype)], axis=2)
        value = ops.concatenate(
            [old["value"], ops.cast(value, old["value"].dtype)], axis=2
        )
        positions = ops.broadcast_to(ops.cast(positions, "int32"), (batch, length))
        positions = ops.concatenate([old["positions"], positions], axis=1)
        before = ordinals(old)
        if mask is None:
            mask = ops.ones((batch, length), "bool")
        is_filled = ops.concatenate([before >= 0, mask], axis=1)
        key_counts = ops.concatenate([before, counts], axis=1)
    back = ops.expand_dims(counts, 2) - ops.expand_dims(key_counts, 1)
    visible = ops.logical_and(back >= 0, ops.expand_dims(is_filled, 1))
    if left is not None:
        visible = ops.logical_and(visible, back <= left)
    return key, value, positions, visible


def ordinals(cache):
    """How many real tokens of its row came before the one in each slot.

    Returns:
        `(batch, slots)`, int32; negative where a slot is empty.
    """
    return _newest(cache["length"], cache["key"].shape[2])


def reorder(cache, rows):
    """The rows of a cache in another order: what a beam search needs after a step.

    Args:
        cache: a cache, or any nest of them.
        rows: `(new_batch,)`, the row that each new row continues.
    """
    return keras.tree.map_structure(lambda x: ops.take(x, rows, axis=0), cache)


def rewind(cache, length):
    """The cache as it was when it had read `length` tokens, an int or `(batch,)`.

    A dictionary of caches, a block's or a model's, goes back in all of them; memories
    stay as they are. A cache that has rolled cannot give back what was overwritten.
    """
    if "key" not in cache:
        return in_order({name: rewind(part, length) for name, part in cache.items()})
    if is_memory(cache):
        return cache
    length = ops.cast(ops.convert_to_tensor(length), "int32")
    length = ops.broadcast_to(length, ops.shape(cache["length"]))
    return in_order({**cache, "length": length})


def _newest(length, slots):
    """The newest token `n < length` with `n % slots` the slot: `(batch, slots)`."""
    last = ops.expand_dims(length, 1) - 1
    slot = ops.expand_dims(ops.arange(0, slots, dtype="int32"), 0)
    return last - ops.mod(last - slot, slots)
