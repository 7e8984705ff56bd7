"""Rotary encoding: features turned in pairs by angles that grow with the position."""

import math

import numpy as np
from keras import ops

from keras_attn.checks import check_choice

__all__ = ["check_rotary_scaling", "rotary_angles", "rotary_frequencies", "rotate"]


def rotary_frequencies(dim, base=10_000, scaling=None):
    r"""The frequency of every rotated pair, and the factor on sines and cosines.

    $$\theta_i = \mathrm{base}^{-2i/d}, \qquad i = 0 \ldots d/2 - 1$$

    `scaling` stretches the frequencies so that a model reads longer sequences than it
    was trained on; it is the `rope_scaling` dictionary of a Hugging Face config:

    * `{"rope_type": "linear", "factor": f}`: all of them over f
      ([Chen et al., 2023](https://arxiv.org/abs/2306.15595));
    * `{"rope_type": "ntk", "factor": f}`: the base times $f^{d/(d-2)}$;
    * `{"rope_type": "yarn", "factor": f, "original_max_position_embeddings": n}`:
      the slow ones over f, the fast ones as they are, between `beta_fast` (32) and
      `beta_slow` (1) turns over n tokens a ramp; sines and cosines times
      `attention_factor` ($0.1 \ln f + 1$); with `truncate` (`True`) the ramp begins
      and ends at whole pairs
      ([Peng et al., 2023](https://arxiv.org/abs/2309.00071));
    * `{"rope_type": "llama3", "factor": f, "original_max_position_embeddings": n,
      "low_freq_factor": l, "high_freq_factor": h}`: over f where a turn takes more
      than n / l tokens, as they are where it takes less than n / h, a ramp between
      ([Grattafiori et al., 2024](https://arxiv.org/abs/2407.21783)).

    Args:
        dim: number of rotated features, even.
        base: the base of the frequencies.
        scaling: a dictionary as above, or `None`.

    Returns:
        A pair: `(dim / 2,)` frequencies, numpy float64, and the factor, a float.

    Reference: [Su et al., 2021](https://arxiv.org/abs/2104.09864).
    """
    kind, settings = check_rotary_scaling(scaling)
    exponents = np.arange(0, dim, 2) / dim
    frequencies = float(base) ** -exponents
    if kind == "default":
        return frequencies, 1.0
    factor = float(settings["factor"])
    if kind == "linear":
        return frequencies / factor, 1.0
    if kind == "ntk":
        stretched = base * factor ** (dim / max(dim - 2, 1))
        return stretched**-exponents, 1.0
    length = settings["original_max_position_embeddings"]
    turns = length * frequencies / (2 * math.pi)  # over the trained length
    if kind == "llama3":
        low, high = settings["low_freq_factor"], settings["high_freq_factor"]
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        scale = 1.0
    else:
        kept = 1.0 - _yarn_ramp(dim, base, length, settings)
        scale = settings["attention_factor"]
        scale = 0.1 * math.log(factor) + 1.0 if scale is None else float(scale)
    return frequencies * (kept + (1.0 - kept) / factor), scale


# What each kind of scaling must say, and may say with its default.
ROTARY_SCALINGS = {
    "default": ((), {}),
    "linear": (("factor",), {}),
    "ntk": (("factor",), {}),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "attention_factor": None,
            "truncate": True,
        },
    ),
    "llama3": (
        ("factor", "original_max_position_embeddings"),
        {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
}


def check_rotary_scaling(scaling):
    """The kind of a `scaling` dictionary and its settings, defaults filled in.

    Raises:
        ValueError: an unknown kind, a missing setting or an unknown one.
    """
    given = dict(scaling or {"rope_type": "default"})
    kind = given.pop("rope_type", given.pop("type", None))
    check_choice("scaling['rope_type']", kind, ROTARY_SCALINGS)
    needed, defaults = ROTARY_SCALINGS[kind]
    missing = [name for name in needed if name not in given]
    unknown = [name for name in given if name not in (*needed, *defaults)]
    if missing or unknown:
        raise ValueError(
            f"Rotary scaling {kind!r} needs {list(needed)} and may have "
            f"{list(defaults)}. Received: scaling={scaling}"
        )
    return kind, {**defaults, **given}


def _yarn_ramp(dim, base, length, settings):
    """0 at the fast pairs, 1 at the slow ones, linear in the pair's number between."""

    def pair_of(turns):
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair_of(settings["beta_fast"]), pair_of(settings["beta_slow"])
    if settings["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001  # a step instead of a ramp
    return np.clip((np.arange(dim // 2) - first) / (last - first), 0.0, 1.0)


def rotary_angles(positions, frequencies):
    """The angle of every pair at every position.

    Args:
        positions: any shape `(...)`, integers or floats.
        frequencies: `(pairs,)`.

    Returns:
        `(..., pairs)`, float32.
    """
    frequencies = ops.convert_to_tensor(frequencies, dtype="float32")
    return ops.expand_dims(ops.cast(positions, "float32"), -1) * frequencies


def rotate(x, angles, layout="halves", factor=1.0):
    r"""Turns every pair of features by its angle, in float32.

    $$(x_a, x_b) \mapsto (x_a \cos\theta - x_b \sin\theta,\;
      x_a \sin\theta + x_b \cos\theta)$$

    Args:
        x: `(..., 2 * pairs)`.
        angles: `(..., pairs)`; broadcasts.
        layout: which features are a pair: `"halves"`, i and i + pairs (GPT-NeoX, Llama
            as Hugging Face stores it), or `"interleaved"`, 2i and 2i + 1 (the paper,
            GPT-J, Llama as Meta stores it).
        factor: on sines and cosines, see `rotary_frequencies`.

    Returns:
        The shape and dtype of `x`.
    """
    dtype, pairs = x.dtype, x.shape[-1] // 2
    sines, cosines = ops.sin(angles), ops.cos(angles)
    if factor != 1.0:
        sines, cosines = sines * factor, cosines * factor
    x = ops.cast(x, "float32")
    if layout == "halves":
        first, second = x[..., :pairs], x[..., pairs:]
    else:
        first, second = x[..., 0::2], x[..., 1::2]
    turned = (first * cosines - second * sines, first * sines + second * cosines)
    if layout == "halves":
        x = ops.concatenate(turned, axis=-1)
    else:
        x = ops.reshape(ops.stack(turned, axis=-1), ops.shape(x))
    return ops.cast(x, dtype)
