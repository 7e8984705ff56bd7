"""What every test needs, the same on TensorFlow, JAX and torch."""

import os
import random

# JAX compiles every operation it meets: without optimization that takes half as long.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    " --xla_llvm_disable_expensive_passes=true",
)

import keras
import numpy as np
import pytest


@pytest.fixture(autouse=True)
def clean_slate():
    """The same random numbers and layer names in every test, in any order."""
    keras.utils.clear_session(free_memory=False)
    random.seed(7)  # what Keras takes seeds from; `set_random_seed` imports TensorFlow


@pytest.fixture
def policy():
    """Sets the dtype policy for one test: `policy("mixed_float16")`."""
    before = keras.config.dtype_policy()
    yield keras.config.set_dtype_policy
    keras.config.set_dtype_policy(before)


@pytest.fixture
def gradients():
    """`gradients(function, *arrays)`: of `sum(function(*arrays))`, in numpy."""
    return {
        "tensorflow": _tensorflow_gradients,
        "jax": _jax_gradients,
        "torch": _torch_gradients,
    }[keras.backend.backend()]


def _tensorflow_gradients(function, *arrays):
    import tensorflow as tf

    inputs = [tf.convert_to_tensor(array) for array in arrays]
    with tf.GradientTape() as tape:
        for x in inputs:
            tape.watch(x)
        total = keras.ops.sum(function(*inputs))
    return [np.asarray(gradient) for gradient in tape.gradient(total, inputs)]


def _jax_gradients(function, *arrays):
    import jax

    def total(*inputs):
        return keras.ops.sum(function(*inputs))

    inputs = [jax.numpy.asarray(array) for array in arrays]
    found = jax.grad(total, argnums=tuple(range(len(inputs))))(*inputs)
    return [np.asarray(gradient) for gradient in found]


def _torch_gradients(function, *arrays):
    import torch

    inputs = [torch.tensor(array, requires_grad=True) for array in arrays]
    keras.ops.sum(function(*inputs)).backward()
    return [x.grad.numpy() for x in inputs]
