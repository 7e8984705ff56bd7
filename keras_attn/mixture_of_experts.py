"""A feed-forward made of experts, of which each token uses a few."""

import fractions

import keras
from keras import activations, initializers, layers, ops
from keras.saving import register_keras_serializable

from keras_attn.checks import broadcasts, check_greater, check_positive
from keras_attn.gating import gated
from keras_attn.masks import as_mask
from keras_attn.serialization import fresh, quantized_dtype

__all__ = ["MixtureOfExperts"]


@register_keras_serializable(package="keras_attn")
class MixtureOfExperts(layers.Layer):
    r"""Many feed-forwards, of which a router chooses `top_k` for each token.

    $$p = \mathrm{softmax}(x W_r), \qquad
      y = \sum_{i \in \mathrm{top}_k(p)} g_i\, \mathrm{FFN}_i(x), \qquad
      g_i = \frac{p_i}{\sum_{j \in \mathrm{top}_k(p)} p_j}$$

    With `top_k=1` the gate is $p_i$ itself, as in Switch, so that the router learns.
    The router is computed in float32 whatever the policy.

    Without `capacity_factor` no token is dropped: every expert computes every token and
    the gates choose, which is exact and costs `num_experts` feed-forwards. With it each
    expert takes, of each sample, at most `capacity_factor * top_k * tokens /
    num_experts` tokens (rounded up), and computes no more than that. It serves the
    tokens in their order, so a later token never displaces an earlier one (GShard
    serves all first choices first, and lets the future change the past); what a token
    asked of a full expert is dropped, and a token that no expert takes gives 0. The
    samples of a batch do not compete with each other.

    In training a loss is added that keeps the experts equally busy, with $f_i$ the
    share of expert $i$ in what the router asked for and $P_i$ its mean probability:

    $$\mathrm{loss} = w N \sum_{i=1}^{N} f_i P_i$$

    Masking: the mask that rides on the input, or `mask`, is applied and leaves with the
    output. Padding gives 0, takes no capacity, and counts nowhere.

    The weight `expert_counts`, `(num_experts,)`, not trainable, holds how many tokens
    each expert got in the last call in training.

    Args:
        num_experts: number of feed-forwards.
        intermediate_dim: width inside each of them.
        top_k: number of experts a token uses.
        capacity_factor: 1 gives an expert room for its fair share. `None` for no limit.
        activation: of the experts.
        use_gate: experts are gated, as `GatedFeedForward`; `activation` is the gate's.
        load_balancing_weight: $w$; 0 for no such loss.
        z_loss_weight: weight of the mean square of the router's log-sum-exp, which
            keeps its logits small ([Zoph et al., 2022](https://arxiv.org/abs/2202.08906));
            0 for no such loss.
        use_bias: whether the experts' dense layers have biases; the router has none.
        kernel_initializer: initializer of the kernels, each expert's by its own size.
        bias_initializer: initializer of the biases.

    Call arguments:
        inputs: `(batch, ..., dim)`.
        mask: `(batch, ...)`, `True` at real tokens.
        return_counts: also return what each expert got of each sample.
        training: whether losses are added and `expert_counts` is written.

    Returns:
        The shape of `inputs`; with `return_counts` a pair with the counts,
        `(batch, num_experts)`, int32.

    Raises:
        ValueError: `top_k` greater than `num_experts`, a size that is not positive, a
            mask of another shape than the tokens.

    Example:
    >>> x = keras.random.normal((2, 10, 64))
    >>> layer = MixtureOfExperts(num_experts=4, intermediate_dim=128)
    >>> output, counts = layer(x, return_counts=True)
    >>> [int(total) for total in keras.ops.sum(counts, axis=-1)]  # 10 tokens, two each
    [20, 20]

    References: [Lepikhin et al., 2021](https://arxiv.org/abs/2006.16668), two experts a
    token; [Fedus et al., 2022](https://arxiv.org/abs/2101.03961), section 2: one
    expert, capacity and the loss.
    """

    def __init__(
        self,
        num_experts,
        intermediate_dim,
        top_k=2,
        capacity_factor=None,
        activation="relu",
        use_gate=False,
        load_balancing_weight=0.01,
        z_loss_weight=0.0,
        use_bias=True,
        kernel_initializer="glorot_uniform",
        bias_initializer="zeros",
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.num_experts = check_positive("num_experts", num_experts)
        self.intermediate_dim = check_positive("intermediate_dim", intermediate_dim)
        self.top_k = check_positive("top_k", top_k)
        if self.top_k > self.num_experts:
            raise ValueError(
                "A token cannot use more experts than there are. Received: "
                f"top_k={top_k}, num_experts={num_experts}"
            )
        if capacity_factor is not None:
            check_greater("capacity_factor", capacity_factor, 0)
        self.capacity_factor = capacity_factor
        self.activation = activations.get(activation)
        self.use_gate = use_gate
        self.load_balancing_weight = _check_weight(
            "load_balancing_weight", load_balancing_weight
        )
        self.z_loss_weight = _check_weight("z_loss_weight", z_loss_weight)
        self.use_bias = use_bias
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.bias_initializer = initializers.get(bias_initializer)
        # The loaded policies of quantized layers are kept by path, the router's too.
        is_map = isinstance(self.dtype_policy, keras.dtype_policies.DTypePolicyMap)
        self.router = layers.Dense(
            self.num_experts,
            use_bias=False,
            kernel_initializer=fresh(self.kernel_initializer),
            dtype=self.dtype_policy if is_map else "float32",
            name="router",
        )
        # As fraction: the same integers on every backend.
        self._share = fractions.Fraction(
            (capacity_factor or 0) * self.top_k / self.num_experts
        ).limit_denominator(10_000)
        self._share = max(self._share, fractions.Fraction(1, 10_000))  # not rounded off
        # An expert that has room for all tokens drops none.
        self._is_limited = capacity_factor is not None and self._share < 1

    def build(self, inputs_shape):
        dim = inputs_shape[-1]
        if len(inputs_shape) < 2 or dim is None:
            raise ValueError(
                "`inputs` must have a batch and a known width. Received: "
                f"inputs_shape={tuple(inputs_shape)}"
            )
        self.router.build((None, None, dim))
        size = self.intermediate_dim
        # Axes: batch, expert, token, from features to features.
        if self._is_limited:
            equation, tokens = "betd,edf->betf", (None, self.num_experts, None, dim)
        else:
            equation, tokens = "btd,edf->betf", (None, None, dim)
        self.intermediate_dense = self._experts("intermediate_dense", equation, size)
        self.intermediate_dense.build(tokens)
        self.gate_dense = None
        if self.use_gate:
            self.gate_dense = self._experts("gate_dense", equation, size)
            self.gate_dense.build(tokens)
        self.output_dense = self._experts("output_dense", "betf,efd->betd", dim)
        self.output_dense.build((None, self.num_experts, None, size))
        self.expert_counts = self.add_weight(
            name="expert_counts",
            shape=(self.num_experts,),
            initializer="zeros",
            dtype="int32",
            trainable=False,
        )

    def call(self, inputs, mask=None, return_counts=False, training=None):
        shape = ops.shape(inputs)
        x = ops.reshape(inputs, (shape[0], -1, shape[-1]))  # (batch, token, dim)
        real = self._real_tokens(inputs, mask)  # (batch, token)
        logits = self.router(x)  # (batch, token, expert)
        probabilities = ops.softmax(logits, axis=-1)
        asked = self._choose(probabilities, real)  # (batch, token, expert), 0 or 1
        rank = ops.cumsum(asked, axis=1) - asked  # claims on the expert before
        served = self._serve(asked, rank, real)
        gates = self._gates(probabilities, asked) * ops.cast(served, "float32")
        y = self._compute(x, served, rank, gates)
        counts = ops.sum(served, axis=1)  # (batch, expert)
        if training:
            self.expert_counts.assign(ops.sum(counts, axis=0))
            self._add_losses(logits, probabilities, asked, real)
        y = ops.reshape(y, shape)
        return (y, counts) if return_counts else y

    def compute_output_shape(self, inputs_shape):
        return inputs_shape

    def compute_output_spec(
        self, inputs, mask=None, return_counts=False, training=None
    ):
        output = keras.KerasTensor(inputs.shape, dtype=self.compute_dtype)
        if not return_counts:
            return output
        shape = (inputs.shape[0], self.num_experts)
        return output, keras.KerasTensor(shape, dtype="int32")

    def get_config(self):
        return {
            **super().get_config(),
            "num_experts": self.num_experts,
            "intermediate_dim": self.intermediate_dim,
            "top_k": self.top_k,
            "capacity_factor": self.capacity_factor,
            "activation": activations.serialize(self.activation),
            "use_gate": self.use_gate,
            "load_balancing_weight": self.load_balancing_weight,
            "z_loss_weight": self.z_loss_weight,
            "use_bias": self.use_bias,
            "kernel_initializer": initializers.serialize(self.kernel_initializer),
            "bias_initializer": initializers.serialize(self.bias_initializer),
            **quantized_dtype(self),
        }

    def _real_tokens(self, inputs, mask):
        """1 at real tokens, int32, `(batch, token)`."""
        shape = ops.shape(inputs)[:-1]
        if mask is None:
            real = ops.ones(shape, dtype="int32")
        else:
            mask = as_mask(mask)
            if not broadcasts(mask.shape, inputs.shape[:-1]):
                raise ValueError(
                    "`mask` must have the shape of the input without the features, "
                    f"{tuple(inputs.shape[:-1])}. Received: mask of shape "
                    f"{tuple(mask.shape)}"
                )
            real = ops.cast(ops.broadcast_to(mask, shape), "int32")
        return ops.reshape(real, (shape[0], -1))

    def _choose(self, probabilities, real):
        """1 where a token asks for an expert, int32, `(batch, token, expert)`."""
        _, experts = ops.top_k(probabilities, self.top_k)
        chosen = ops.sum(ops.one_hot(experts, self.num_experts, dtype="int32"), axis=-2)
        return chosen * ops.expand_dims(real, -1)

    def _capacity(self, num_tokens):
        """Tokens an expert has room for, rounded up; an int or integers."""
        return -(-num_tokens * self._share.numerator // self._share.denominator)

    def _serve(self, asked, rank, real):
        """`asked` without what finds its expert full."""
        if not self._is_limited:
            return asked
        capacity = self._capacity(ops.sum(real, axis=1))  # of real tokens, (batch,)
        has_room = ops.less(rank, ops.reshape(capacity, (-1, 1, 1)))
        return asked * ops.cast(has_room, "int32")

    def _gates(self, probabilities, asked):
        """Weight of each expert for each token, float32, `(batch, token, expert)`."""
        gates = probabilities * ops.cast(asked, "float32")
        if self.top_k == 1:
            return gates
        total = ops.sum(gates, axis=-1, keepdims=True)
        return gates / ops.where(ops.equal(total, 0.0), 1.0, total)  # 0 at padding

    def _compute(self, x, served, rank, gates):
        """The sum over experts, `(batch, token, dim)`."""
        if not self._is_limited:
            y = self._run_experts(x)  # (batch, expert, token, dim)
            return ops.einsum("bte,betd->btd", ops.cast(gates, y.dtype), y)
        slots = ops.arange(self._capacity(ops.shape(x)[1]), dtype="int32")
        is_slot = ops.equal(ops.expand_dims(rank, -1), slots)
        is_slot = ops.logical_and(is_slot, ops.expand_dims(ops.equal(served, 1), -1))
        dispatch = ops.cast(is_slot, x.dtype)  # (batch, token, expert, slot)
        y = self._run_experts(ops.einsum("btes,btd->besd", dispatch, x))
        combine = dispatch * ops.expand_dims(ops.cast(gates, x.dtype), -1)
        return ops.einsum("btes,besd->btd", combine, y)

    def _run_experts(self, x):
        hidden = self.intermediate_dense(x)  # (batch, expert, token, intermediate_dim)
        if self.gate_dense is None:
            hidden = self.activation(hidden)
        else:
            hidden = gated(self.activation(self.gate_dense(x)), hidden)
        return self.output_dense(hidden)  # (batch, expert, token, dim)

    def _add_losses(self, logits, probabilities, asked, real):
        weights = ops.cast(real, "float32")
        num_real = ops.maximum(ops.sum(weights), 1.0)
        weights = ops.expand_dims(weights, -1)
        if self.load_balancing_weight:
            asked = ops.sum(ops.cast(asked, "float32"), axis=(0, 1))
            share = asked / (num_real * self.top_k)  # f
            mean = ops.sum(probabilities * weights, axis=(0, 1)) / num_real  # P
            balance = self.num_experts * ops.sum(ops.stop_gradient(share) * mean)
            self.add_loss(self.load_balancing_weight * balance)
        if self.z_loss_weight:
            z = ops.square(ops.logsumexp(logits, axis=-1, keepdims=True))
            self.add_loss(self.z_loss_weight * ops.sum(z * weights) / num_real)

    def _experts(self, name, equation, units):
        """A dense layer for each expert, their kernels stacked on the first axis."""
        initializer = fresh(self.kernel_initializer)
        if isinstance(initializer, initializers.VarianceScaling):
            # An expert's fans are its own: not the sum over all of them.
            initializer.input_axes, initializer.output_axes = (1,), (2,)
        dense = layers.EinsumDense(
            equation,
            output_shape=(self.num_experts, None, units),
            bias_axes=f"e{equation[-1]}" if self.use_bias else None,
            kernel_initializer=initializer,
            bias_initializer=fresh(self.bias_initializer),
            dtype=self.dtype_policy,
            name=name,
        )
        dense.supports_masking = True  # token by token: a mask that rides along may
        return dense


def _check_weight(name, value):
    """`value`, the weight of a loss: 0 or greater."""
    return 0.0 if value == 0 else float(check_greater(name, value, 0))
