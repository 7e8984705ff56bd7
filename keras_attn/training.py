"""What a Transformer is trained with: warm-up, masked loss, masked accuracy."""

import keras
from keras import ops

from keras_attn.checks import check_greater, check_rate


@keras.saving.register_keras_serializable(package="keras_attn")
class InverseSquareRootWarmup(keras.optimizers.schedules.LearningRateSchedule):
    """Rises linearly for `warmup_steps`, then falls with the root of the step.

    `rate = scale * dim^-0.5 * min(step^-0.5, step * warmup_steps^-1.5)`

    Steps are counted from 1, so the first update already moves the weights. The
    peak, `scale * (dim * warmup_steps)^-0.5`, is reached at step `warmup_steps`.
    Computed in float32.

    Args:
        dim: Width of the model.
        warmup_steps: Number of updates until the peak.
        scale: Factor on the whole schedule.

    Call arguments:
        step: Number of updates already made, as the optimizer counts them (from 0).

    Raises:
        ValueError: If `dim`, `warmup_steps` or `scale` is not positive.

    Example:
    >>> schedule = InverseSquareRootWarmup(dim=256, warmup_steps=400)
    >>> round(float(schedule(399)), 6)
    0.003125

    Paper: Attention Is All You Need, section 5.3, https://arxiv.org/abs/1706.03762
    """

    def __init__(self, dim, warmup_steps=4000, scale=1.0):
        super().__init__()
        self.dim = check_greater("dim", dim, 0)
        self.warmup_steps = check_greater("warmup_steps", warmup_steps, 0)
        self.scale = check_greater("scale", scale, 0)

    def __call__(self, step):
        step = ops.cast(step, "float32") + 1.0
        falling = ops.rsqrt(step)
        rising = step * self.warmup_steps**-1.5
        return self.scale * self.dim**-0.5 * ops.minimum(falling, rising)

    def get_config(self):
        return {
            "dim": self.dim,
            "warmup_steps": self.warmup_steps,
            "scale": self.scale,
        }


@keras.saving.register_keras_serializable(package="keras_attn")
class MaskedSparseCategoricalCrossentropy(keras.losses.Loss):
    """Cross-entropy of class ids against logits, averaged over real tokens.

    With smoothing `e` over `n` classes a token costs
    `-(1 - e) * log p[label] - e / n * sum(log p)`, which is the rule of
    `torch.nn.CrossEntropyLoss(label_smoothing=e, ignore_index=ignore_id)`.

    A token is real where its label is not `ignore_id` and where the mask that Keras
    carries on the predictions, if any, is `True`. The mean is
    `sum(weight * cost) / sum(weight)` over real tokens, with weights of 1 if there is
    no `sample_weight`; it is 0 if no token is real. Padding therefore changes neither
    numerator nor denominator. Computed in float32 whatever the precision policy.

    Args:
        label_smoothing: Share of the target spread evenly over all classes, in [0, 1).
        ignore_id: Label of the tokens that do not count.
        reduction: As in `keras.losses.Loss`.
        name: Name of the loss.

    Call arguments:
        y_true: Class ids, `(batch, length)`.
        y_pred: Logits, `(batch, length, num_classes)`.
        sample_weight: `(batch,)` or `(batch, length)`.

    Raises:
        ValueError: If `label_smoothing` is outside [0, 1), or if the ranks of labels
            and logits do not differ by one.

    Example:
    >>> loss = MaskedSparseCategoricalCrossentropy()
    >>> round(float(loss([[1, 0]], [[[0.0, 0.0], [5.0, 5.0]]])), 4)
    0.6931

    Paper: Rethinking the Inception Architecture for Computer Vision, section 7,
    https://arxiv.org/abs/1512.00567
    """

    def __init__(
        self,
        label_smoothing=0.0,
        ignore_id=0,
        reduction="mean_with_sample_weight",
        name="masked_sparse_categorical_crossentropy",
    ):
        super().__init__(name=name, reduction=reduction, dtype="float32")
        self.label_smoothing = check_rate("label_smoothing", label_smoothing)
        self.ignore_id = ignore_id

    def __call__(self, y_true, y_pred, sample_weight=None):
        y_true, y_pred = _as_tensors(y_true, y_pred)
        weights = _token_weights(y_true, self.ignore_id, sample_weight)
        return super().__call__(y_true, y_pred, sample_weight=weights)

    def call(self, y_true, y_pred):
        real = _real_tokens(y_true, self.ignore_id)
        labels = ops.where(real, ops.cast(y_true, "int32"), 0)
        logits = ops.cast(y_pred, "float32")  # (batch, length, num_classes)
        picked = ops.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
        if self.label_smoothing:
            spread = ops.mean(logits, axis=-1)
            picked += self.label_smoothing * (spread - picked)
        cost = ops.logsumexp(logits, axis=-1) - picked
        return ops.where(real, cost, 0.0)  # (batch, length)

    def get_config(self):
        return {
            **super().get_config(),
            "label_smoothing": self.label_smoothing,
            "ignore_id": self.ignore_id,
        }


@keras.saving.register_keras_serializable(package="keras_attn")
class MaskedAccuracy(keras.metrics.Mean):
    """Share of real tokens whose largest logit is the label.

    Real tokens are those of `MaskedSparseCategoricalCrossentropy`. Hits and tokens
    are summed over all batches before they are divided, so batches of different
    length or padding count by their tokens.

    Args:
        ignore_id: Label of the tokens that do not count.
        name: Name of the metric.

    Call arguments:
        y_true: Class ids, `(batch, length)`.
        y_pred: Logits or probabilities, `(batch, length, num_classes)`.
        sample_weight: `(batch,)` or `(batch, length)`.

    Raises:
        ValueError: If the ranks of labels and predictions do not differ by one.

    Example:
    >>> accuracy = MaskedAccuracy()
    >>> accuracy.update_state([[1, 0]], [[[0.0, 2.0], [0.0, 2.0]]])
    >>> float(accuracy.result())
    1.0
    """

    def __init__(self, ignore_id=0, name="masked_accuracy"):
        super().__init__(name=name, dtype="float32")
        self.ignore_id = ignore_id
        self._masked_ones = _Ones(name="ones", reduction="none", dtype="float32")

    def update_state(self, y_true, y_pred, sample_weight=None):
        y_true, y_pred = _as_tensors(y_true, y_pred)
        weights = _token_weights(y_true, self.ignore_id, sample_weight)
        weights = self._masked_ones(y_true, y_pred, sample_weight=weights)
        best = ops.argmax(y_pred, axis=-1)
        hits = ops.equal(ops.cast(y_true, best.dtype), best)
        self.total.assign_add(ops.sum(ops.where(hits, weights, 0.0)))
        self.count.assign_add(ops.sum(weights))

    def get_config(self):
        return {"ignore_id": self.ignore_id, "name": self.name}


class _Ones(keras.losses.Loss):
    """1 everywhere: as a loss it obeys the mask on `y_pred`."""

    def call(self, y_true, y_pred):
        return ops.ones_like(y_true, dtype="float32")


def _real_tokens(labels, ignore_id):
    """`True` where a label counts."""
    return ops.not_equal(ops.cast(labels, "int32"), ignore_id)


def _token_weights(labels, ignore_id, sample_weight):
    """Weight of each token, 0 where the label is ignored: the shape of `labels`."""
    weights = ops.cast(_real_tokens(labels, ignore_id), "float32")
    if sample_weight is None:
        return weights
    sample_weight = ops.convert_to_tensor(sample_weight, dtype="float32")
    while len(sample_weight.shape) < len(weights.shape):
        sample_weight = sample_weight[..., None]
    return weights * sample_weight


def _as_tensors(y_true, y_pred):
    """Both as tensors, whose ranks must fit; a tensor stays, with what rides on it."""
    y_true, y_pred = (
        y if hasattr(y, "shape") else ops.convert_to_tensor(y) for y in (y_true, y_pred)
    )
    labels, predictions = tuple(y_true.shape), tuple(y_pred.shape)
    if len(predictions) != len(labels) + 1:
        raise ValueError(
            "`y_pred` must have one axis more than `y_true`, the classes. "
            f"Received: y_true.shape={labels}, y_pred.shape={predictions}"
        )
    return y_true, y_pred
