"""Where the class token of a trained ViT looks; shared by the image examples."""

import keras
import numpy as np
from keras import ops

import keras_attn as ka


def class_attention(vit, images):
    """How much the class token sees of every patch, over all blocks: `(batch, tokens)`.

    Attention rollout (Abnar and Zuidema, 2020): the attention of each block, averaged
    over its heads, half of it the residual connection, times that of the blocks below.
    """
    blocks = [layer for layer in vit.layers if isinstance(layer, ka.EncoderBlock)]
    into_blocks = keras.Model(vit.input, [block.input for block in blocks])
    inputs = keras.tree.flatten(into_blocks(images))
    rollout = np.eye(inputs[0].shape[1])
    for block, x in zip(blocks, inputs, strict=True):
        x = block.attention_residual.norm(x)
        _, scores = block.attention(x, return_attention_scores=True)
        attention = ops.convert_to_numpy(scores).mean(axis=1)  # (batch, query, key)
        rollout = (attention + np.eye(attention.shape[-1])) / 2 @ rollout
    return rollout[:, 0, 1:]


def draw_attention(axis, image, weights):
    """Draws the ink of a square image, from 0 to 1, over the heat of its patches."""
    side, rows = len(image), round(len(weights) ** 0.5)
    extent = (-0.5, side - 0.5, side - 0.5, -0.5)
    heat = weights.reshape(rows, rows)
    axis.imshow(heat, cmap="YlOrRd", extent=extent, interpolation="bicubic")
    axis.imshow(np.zeros((side, side)), cmap="gray", alpha=0.85 * image.squeeze(-1))
    axis.axis("off")
