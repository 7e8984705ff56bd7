"""`import keras_attn` costs next to nothing and brings in no other framework."""

import json
import os
import subprocess
import sys

import pytest

LIMIT = 0.15  # seconds over `import keras`

COST = """
import json, sys, time
import keras
start = time.perf_counter()
import keras_attn
print(json.dumps([time.perf_counter() - start, sorted(sys.modules)]))
"""

FRAMEWORKS = {"tensorflow", "jax", "torch"}
HEAVY = {"matplotlib", "keras_hub", "sklearn", "ai_edge_litert", "pytest", "scipy"}


def run(code, backend):
    return json.loads(
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout.splitlines()[-1]
    )


def test_the_cost_is_small_and_no_framework_comes_in():
    """The best of three, so that a busy machine does not fail it."""
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    pytest.importorskip(backend)
    seconds = []
    for _ in range(3):
        cost, names = run(COST, backend)
        seconds.append(cost)
        if cost < LIMIT:
            break
    assert min(seconds) < LIMIT
    only_keras = set(run(COST.replace("import keras_attn\n", ""), backend)[1])
    added = {name.split(".")[0] for name in set(names) - only_keras}
    assert added & (FRAMEWORKS | HEAVY) == set()
    assert "keras_attn" in added
    if backend != "tensorflow":
        loaded = {name.split(".")[0] for name in names}
        assert loaded & FRAMEWORKS <= {backend} | (
            FRAMEWORKS & {name.split(".")[0] for name in only_keras}
        )


def test_every_public_name_is_there_and_documented():
    import keras_attn

    assert sorted(keras_attn.__all__) == keras_attn.__all__
    for name in keras_attn.__all__:
        assert getattr(keras_attn, name).__doc__, name
    for module in (
        keras_attn.cache,
        keras_attn.encodings,
        keras_attn.masks,
        keras_attn.models,
        keras_attn.windows,
    ):
        for name in module.__all__:
            assert hasattr(module, name), name
