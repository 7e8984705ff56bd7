"""The models that the export tests send out, small and with primes for sizes."""

import keras
import sample_layers
from keras import layers

import keras_attn


def text_encoder():
    """One int input of any length, padding by `mask_zero`, two named outputs."""
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    x = keras_attn.TokenEmbedding(53, 12, mask_zero=True)(tokens)
    x = keras_attn.SinusoidalPositionEncoding()(x)
    x = keras_attn.EncoderBlock(num_heads=3, intermediate_dim=24)(x)
    states = layers.Dense(12, activation=sample_layers.squared_relu)(x)
    pooled = layers.GlobalAveragePooling1D()(sample_layers.Scaled()(states))
    return keras.Model(tokens, {"states": states, "pooled": pooled}, name="text")


def encoder_decoder():
    """Two int inputs of different vocabularies and lengths."""
    return keras_attn.models.Transformer(
        source_vocabulary_size=31,
        target_vocabulary_size=17,
        size=None,
        num_layers=1,
        dim=12,
        num_heads=3,
        intermediate_dim=24,
        dropout=0.1,
    )


def image_classifier():
    """A fixed, oblong image size; large enough for int8 weights to pay."""
    return keras_attn.models.VisionTransformer(
        num_classes=5,
        image_size=(14, 21),
        size=None,
        patch_size=7,
        num_layers=1,
        dim=64,
        num_heads=2,
        intermediate_dim=256,
    )


def every_attention():
    """One stack with every option of attention and every kind of block part."""
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    x = keras_attn.TokenEmbedding(53, 16, mask_zero=True)(tokens)
    bias = keras_attn.RelativePositionBias(4, num_buckets=8, max_distance=5)(x)
    x = keras_attn.DecoderBlock(
        self_attention=keras_attn.MultiHeadAttention(
            4,
            num_kv_heads=2,
            position=keras_attn.RotaryEmbedding(layout="interleaved", rotary_dim=2),
            query_key_norm="rms",
            logit_soft_cap=5.0,
            use_sinks=True,
            use_gate=True,
            sliding_window=3,
        ),
        feed_forward=keras_attn.GatedFeedForward(24),
        norm_placement="sandwich",
        normalization="rms",
        layer_scale=0.5,
    )(x)
    x = keras_attn.EncoderBlock(
        attention=keras_attn.MultiHeadAttention(
            4, position=keras_attn.AlibiBias(4), query_key_norm="l2"
        ),
        feed_forward=keras_attn.MixtureOfExperts(3, 24),
        norm_placement="pre",
    )(x, bias=bias)
    return keras.Model(tokens, x, name="every_attention")


def one_step():
    """One token through a block, its caches in and out."""
    block = keras_attn.DecoderBlock(
        intermediate_dim=24,
        self_attention=keras_attn.MultiHeadAttention(
            4, num_kv_heads=2, position=keras_attn.RotaryEmbedding(), sliding_window=5
        ),
    )
    block.build((None, None, 16))
    kept = block.make_cache(1, 5)["self_attention"]
    cache = {
        name: keras.Input(batch_shape=(None, *x.shape[1:]), dtype=x.dtype, name=name)
        for name, x in kept.items()
    }
    token = keras.Input((1, 16), name="token")
    output, left = block(token, cache={"self_attention": cache})
    outputs = {f"new_{name}": x for name, x in left["self_attention"].items()}
    return keras.Model({"token": token, **cache}, {"output": output, **outputs})


def every_vision_part():
    """A stem, shifted windows with their mask and 2-D bias, a pool; a video beside."""
    images = keras.Input((16, 24, 3), name="images")
    x = keras_attn.ConvStem(16, filters=(8, 12))(images)  # (batch, 4, 6, dim)
    x = keras_attn.LearnedPositionEmbedding((3, 5))(x)
    shifted = keras.ops.roll(x, (-1, -1), axis=(1, 2))
    shifted = keras_attn.windows.window_partition(shifted, 2)
    bias = keras_attn.RelativePositionBias2D(2, 2)(shifted[:, 0])
    mask = keras_attn.windows.shifted_window_mask(4, 6, 2, 1)[None, :, None]
    shifted = keras_attn.MultiHeadAttention(2, attention_axes=2)(
        shifted, attention_mask=mask, bias=bias[:, None]
    )
    x = x + keras_attn.windows.window_reverse(shifted, 2, 4, 6)
    x = keras_attn.PrefixTokens(2)(x)
    x = keras_attn.EncoderBlock(
        intermediate_dim=24,
        attention=keras_attn.MultiHeadAttention(
            2, position=keras_attn.RotaryEmbedding(grid=(4, 6), num_prefix_tokens=2)
        ),
    )(x)
    pooled = keras_attn.AttentionPooling(2, intermediate_dim=24)(x)
    video = keras.Input((4, 6, 6, 3), name="video")
    tubes = keras_attn.TubeletEmbedding(8, (2, 3, 3))(video)
    return keras.Model(
        {"images": images, "video": video}, {"pooled": pooled, "tubes": tubes}
    )


def without_builtin():
    """`Cholesky`, two layers deep."""
    inputs = keras.Input((6, 4), name="x")
    outputs = sample_layers.Outer(name="outer")(layers.Dense(4)(inputs))
    return keras.Model(inputs, outputs)
