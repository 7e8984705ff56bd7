"""Stochastic depth: whole residual branches dropped at random in training."""

import keras
from keras import layers
from keras.saving import register_keras_serializable

from keras_attn.checks import check_positive, check_rate

__all__ = ["StochasticDepth", "stochastic_depth_rates"]


def stochastic_depth_rates(num_layers, max_rate):
    """One rate a block, growing linearly from 0 to `max_rate`.

    The first block, which all others build on, is always kept. (The paper counts from
    `max_rate / num_layers`; starting at 0 is what most code since then does.)

    Args:
        num_layers: number of blocks.
        max_rate: rate of the last block, in `[0, 1)`.

    Returns:
        A tuple of `num_layers` floats.

    Example:
    >>> stochastic_depth_rates(5, 0.2)
    (0.0, 0.05, 0.1, 0.15000000000000002, 0.2)
    """
    last = check_positive("num_layers", num_layers) - 1
    max_rate = check_rate("max_rate", max_rate)
    return tuple(max_rate * index / max(last, 1) for index in range(num_layers))


@register_keras_serializable(package="keras_attn")
class StochasticDepth(layers.Layer):
    r"""Sets whole samples to 0 at random; on a residual branch, skips it for them.

    $$y_b = \frac{z_b}{1 - \mathrm{rate}}\, x_b, \qquad
      z_b \sim \mathrm{Bernoulli}(1 - \mathrm{rate})$$

    In training alone. What is kept is scaled up, so that the mean stays and inference
    needs no scaling; the paper scales down in inference instead. Masks pass through.

    Args:
        rate: probability that a sample is dropped, in `[0, 1)`.
        seed: seed of the draws.

    Call arguments:
        inputs: `(batch, ...)`.
        training: whether samples are dropped.

    Returns:
        The shape of `inputs`.

    Example:
    >>> x = keras.ops.ones((1000, 2))
    >>> y = StochasticDepth(0.5, seed=1)(x, training=True)
    >>> sorted({tuple(row) for row in keras.ops.convert_to_numpy(y).tolist()})
    [(0.0, 0.0), (2.0, 2.0)]

    Reference: [Huang et al., 2016](https://arxiv.org/abs/1603.09382), section 3.
    """

    def __init__(self, rate, seed=None, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.rate = check_rate("rate", rate)
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(seed)
        self.built = True  # it holds no weights

    def call(self, inputs, training=None):
        if not training or not self.rate:
            return inputs
        one_a_sample = (None, *(1 for _ in inputs.shape[1:]))
        return keras.random.dropout(
            inputs, self.rate, noise_shape=one_a_sample, seed=self.seed_generator
        )

    def compute_output_shape(self, inputs_shape):
        return inputs_shape

    def get_config(self):
        return {**super().get_config(), "rate": self.rate, "seed": self.seed}
