"""Attention over long sequences: time and memory, beside Keras' own layer.

    KERAS_BACKEND=jax python benchmarks/long_attention.py
    python benchmarks/long_attention.py --backends tensorflow jax torch

Every figure is of a fresh process that runs three forward passes, the first untimed;
memory is the greatest resident size over what it was before.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time

WINDOW, HEADS, HEAD_DIM = 256, 4, 64


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", nargs="+")
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 16384])
    parser.add_argument("--without-keras", action="store_true", help="needs 20 GB")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.measure:
        print(json.dumps(measure(**json.loads(args.measure))))
        return 0
    backends = args.backends or [os.environ.get("KERAS_BACKEND", "tensorflow")]
    kinds = ["blocked", "chunked", *([] if args.without_keras else ["keras"])]
    print(f"{HEADS} heads of {HEAD_DIM}, window {WINDOW}, batch 1, one thread")
    print(f"{'backend':<12}{'layer':<10}{'length':>8}{'seconds':>10}{'extra MB':>10}")
    for backend in backends:
        for length in args.lengths:
            for kind in kinds:
                found = in_fresh_process(backend, kind=kind, length=length)
                print(
                    f"{backend:<12}{kind:<10}{length:>8}"
                    f"{found['seconds']:>10.2f}{found['megabytes']:>10.0f}",
                    flush=True,
                )
    return 0


def in_fresh_process(backend, **settings):
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, __file__, "--measure", json.dumps(settings)],
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return {"seconds": float("nan"), "megabytes": float("nan")}
    return json.loads(done.stdout.splitlines()[-1])


def measure(kind, length):
    import keras
    import numpy as np

    import keras_attn as ka

    inputs = keras.Input((length, HEADS * HEAD_DIM))
    window = None if kind == "chunked" else WINDOW
    if kind == "keras":
        layer = keras.layers.MultiHeadAttention(HEADS, HEAD_DIM, sliding_window=window)
    else:
        layer = ka.MultiHeadAttention(
            HEADS, HEAD_DIM, sliding_window=window, implementation=kind
        )
    model = keras.Model(inputs, layer(inputs, inputs))
    small = np.zeros((1, length, HEADS * HEAD_DIM), "float32")
    x = np.random.default_rng(0).normal(size=small.shape).astype("float32")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        model.predict(x, verbose=0)
        seconds.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": min(seconds[1:]), "megabytes": (peak - before) / 1024}


if __name__ == "__main__":
    sys.exit(main())
