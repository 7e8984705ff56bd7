"""What a score gains by the distance of key and query: ALiBi and T5."""

import fractions
import math

import numpy as np

__all__ = ["alibi_slopes", "relative_position_buckets"]


def alibi_slopes(num_heads):
    """The slope of every head: a geometric sequence, the paper's for any number.

    For a number that is no power of two, the slopes of the next lower power come first,
    then every second one of the next higher.

    Returns:
        `(num_heads,)`, numpy float64.

    Reference: [Press et al., 2022](https://arxiv.org/abs/2108.12409), section 3.
    """

    def slopes(number):
        return 2.0 ** (-8.0 / number * np.arange(1, number + 1))

    power = 2 ** math.floor(math.log2(num_heads))
    between = slopes(2 * power)[::2][: num_heads - power]
    return np.concatenate([slopes(power), between])


def relative_position_buckets(num_buckets=32, max_distance=128, bidirectional=True):
    """T5's bucket of every distance: near ones alone, far ones together.

    Half of the buckets (of each direction's) hold one distance each; the others grow
    geometrically up to `max_distance`, from where on all share the last. The bounds are
    computed in exact arithmetic, so they are the same on every machine.

    Args:
        num_buckets: of both directions together.
        max_distance: where the last bucket begins.
        bidirectional: whether keys after the query have buckets of their own; else
            they share bucket 0.

    Returns:
        `(2 * max_distance + 1,)`, numpy int32: entry `max_distance + d` is the bucket
        of distance `d = key - query`; farther ones are as the nearest end.

    Reference: [Raffel et al., 2020](https://arxiv.org/abs/1910.10683), section 2.1.
    """
    buckets = num_buckets // 2 if bidirectional else num_buckets
    exact = buckets // 2
    growth = fractions.Fraction(max_distance, exact)

    def bucket(distance):
        if distance < exact:
            return distance
        ratio = fractions.Fraction(distance, exact)
        beyond = sum(
            ratio ** (buckets - exact) >= growth**step
            for step in range(1, buckets - exact)
        )
        return exact + beyond

    before = [bucket(distance) for distance in range(max_distance + 1)]
    after = (
        [number + buckets for number in before] if bidirectional else [0] * len(before)
    )
    return np.array(before[:0:-1] + [0] + after[1:], "int32")
