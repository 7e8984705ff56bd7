"""Argument checks whose errors name both sides."""

import math
import numbers

import keras

__all__ = [
    "broadcasts",
    "check_choice",
    "check_count",
    "check_greater",
    "check_pair",
    "check_positive",
    "check_rank",
    "check_rate",
    "check_sides",
    "is_known_false",
]


def check_positive(name, value, optional=False):
    """`value` as an int greater than 0; with `optional`, `None` is let through."""
    if value is None and optional:
        return None
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or value <= 0:
        raise ValueError(
            f"Invalid value for argument `{name}`: expected a positive integer"
            f"{' or `None`' if optional else ''}. Received: {name}={value!r}"
        )
    return int(value)


def check_count(name, value):
    """`value` as an int, 0 or more."""
    return (
        0 if value == 0 and not isinstance(value, bool) else check_positive(name, value)
    )


def check_greater(name, value, bound):
    """`value`, a number greater than `bound`."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not bound < value < math.inf:
        raise ValueError(
            f"Invalid value for argument `{name}`: expected a number greater than "
            f"{bound}. Received: {name}={value!r}"
        )
    return value


def check_rate(name, value):
    """`value` as a float in `[0, 1)`: the share that is dropped."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 <= value < 1:
        raise ValueError(
            f"Invalid value for argument `{name}`: expected a rate in [0, 1). "
            f"Received: {name}={value!r}"
        )
    return float(value)


def check_pair(name, value):
    """`value`, a positive int or a pair of them, as the pair."""
    return check_sides(name, value, 2)


def check_sides(name, value, count):
    """`value`, a positive int or `count` (2 or 3) of them, as a tuple of `count`."""
    sides = tuple(value) if isinstance(value, (tuple, list)) else (value,) * count
    if len(sides) != count:
        raise ValueError(
            f"`{name}` must be a positive integer or a {('pair', 'triple')[count - 2]} "
            f"of them. Received: {name}={value!r}"
        )
    return tuple(check_positive(name, side) for side in sides)


def broadcasts(shape, expected):
    """Whether `shape` broadcasts to `expected` of the same rank, as far as is known."""
    return len(shape) == len(expected) and all(
        size is None or full is None or size in (1, full)
        for size, full in zip(shape, expected, strict=True)
    )


def check_choice(name, value, choices):
    """`value`, which must be one of `choices`."""
    if value not in choices:
        raise ValueError(
            f"Invalid value for argument `{name}`: expected one of {tuple(choices)}. "
            f"Received: {name}={value!r}"
        )
    return value


def check_rank(layer, shape, rank, expected):
    """Raises where the input of `layer` has another rank than `expected` says."""
    if len(shape) != rank:
        raise ValueError(
            f"{type(layer).__name__} expects {expected}. "
            f"Received: inputs_shape={tuple(shape)}"
        )


def is_known_false(value):
    """Whether a boolean scalar is `False` already now, before any compiled run."""
    try:
        return not bool(keras.ops.convert_to_numpy(value))
    except Exception:  # a traced value: each backend refuses with an error of its own
        return False
