"""Draws configurations of an attention layer and holds each to the oracle.

    KERAS_BACKEND=jax python tests/fuzz.py --minutes 10

`make fuzz` runs it on every backend. It prints how many configurations it tried, and
the seed of one that failed, with which `--seed` draws it again.
"""

import argparse
import itertools
import sys
import time

import numpy as np
from configurations import POSITIONS, Configuration, check_cache, check_oracle


def drawn(seed):
    """A configuration and how a cache is fed, or `None` where there is no cache."""
    random = np.random.default_rng(seed)

    def one_of(*choices):
        return choices[random.integers(len(choices))]

    heads = one_of(1, 2, 4, 6)
    length = int(random.integers(1, 9))
    settings = {
        "batch": int(random.integers(1, 4)),
        "length": length,
        "width": int(random.integers(1, 9)),
        "num_heads": heads,
        "key_dim": one_of(2, 4, 6),
        "num_kv_heads": one_of(*(n for n in (1, 2, 3, 6) if heads % n == 0), None),
        # Not 1: of heads of size 1, as many as tokens, Keras' own dense layer adds the
        # bias to the wrong axis on TensorFlow.
        "value_dim": one_of(None, 2, 5),
        "position": one_of(None, *POSITIONS),
        "query_key_norm": one_of(None, "rms", "layer", "l2"),
        "logit_soft_cap": one_of(None, None, 1.5),
        "use_sinks": one_of(False, True),
        "use_gate": one_of(False, True),
        "use_bias": one_of(True, False),
        "sliding_window": one_of(None, None, 1, 3, (2, 0), (0, 3)),
        "bias": one_of(None, None, "shared", "row", "head", "full"),
        "causal": one_of(False, True),
        "seed": seed,
    }
    if length > 1:
        settings["mask"] = one_of(None, "left", "right")
    if one_of(True, False, False):
        settings["keys"] = int(random.integers(2, 9))
    if one_of(True, False, False):
        settings["attention_mask"] = one_of("row", "head")
    plain = settings["bias"] is None and "attention_mask" not in settings
    if plain and "keys" not in settings and settings["sliding_window"] is not None:
        settings["implementation"] = one_of(None, "blocked", "chunked")
    is_cached = settings["causal"] and "keys" not in settings
    is_cached = is_cached and (plain or settings.get("mask") is None)
    chunks = []
    while is_cached and sum(chunks) < length:
        chunks.append(int(random.integers(1, length - sum(chunks) + 1)))
    rolling = plain and settings["sliding_window"] is not None and one_of(True, False)
    return settings, chunks, rolling


def check(seed):
    settings, chunks, rolling = drawn(seed)
    forced = settings.pop("implementation", None)
    check_oracle(Configuration.of(**settings), tolerance=2e-5)
    if forced is not None:  # which give no scores
        configuration = Configuration.of(**settings, implementation=forced)
        call = configuration.call_arguments()
        expected, _ = configuration.expected(**call)
        output = configuration.layer(configuration.x, **call)
        np.testing.assert_allclose(output_of(output), expected, rtol=2e-5, atol=2e-5)
    if chunks:
        check_cache(Configuration.of(**settings), chunks, rolling, tolerance=2e-5)


def output_of(x):
    import keras

    return keras.ops.convert_to_numpy(x)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, help="this configuration alone")
    parser.add_argument("--first", type=int, default=1_000, help="seed of the first")
    args = parser.parse_args(argv)
    import keras

    backend = keras.backend.backend()
    if args.seed is not None:
        print(drawn(args.seed))
        check(args.seed)
        return 0
    end, failed = time.monotonic() + 60 * args.minutes, []
    for seed in itertools.count(args.first):
        if time.monotonic() > end:
            break
        try:
            check(seed)
        except Exception as error:
            failed.append(seed)
            print(f"\n{backend}: seed {seed} failed: {drawn(seed)}\n{error}")
        tried = seed - args.first + 1
        if tried % 10 == 0 and sys.stdout.isatty():
            print(f"\r{backend}: {tried} configurations", end="", flush=True)
    print(f"\r{backend}: {tried} configurations tried, {len(failed)} failed {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
