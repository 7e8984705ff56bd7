"""Layers of a user's own, importable by the process that converts."""

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="sample")
class Scaled(keras.layers.Layer):
    """Registered: found from the model itself."""

    def __init__(self, **options):
        super().__init__(**options)
        self.supports_masking = True

    def call(self, inputs):
        return inputs * 0.5


@keras.saving.register_keras_serializable(package="sample")
def squared_relu(x):
    return ops.square(ops.relu(x))


@keras.saving.register_keras_serializable(package="sample")
class Factor(keras.layers.Layer):
    """Uses an operation that TFLite does not have."""

    def call(self, inputs):
        square = ops.matmul(ops.transpose(inputs, (0, 2, 1)), inputs)
        return ops.cholesky(square + ops.eye(inputs.shape[-1]))


@keras.saving.register_keras_serializable(package="sample")
class Outer(keras.layers.Layer):
    """Holds the guilty layer inside."""

    def build(self, input_shape):
        self.factor = Factor(name="inner_factor")
        self.factor.build(input_shape)

    def call(self, inputs):
        return self.factor(inputs)


def unregistered(x):
    return ops.relu(x)
