"""A small Swin Transformer, written out of the library's parts, reads digits.

    python examples/swin_digits.py            # a few minutes on two cores
    python examples/swin_digits.py --smoke    # the same path: three epochs

Attention runs inside windows of the grid; every second block shifts them, and between
the stages four neighbours become one token. Runs unchanged on TensorFlow, JAX and
torch: `KERAS_BACKEND` chooses. Needs one of them and `pip install
"keras-attn[plot,real]"`.

Reference: Liu et al., 2021, https://arxiv.org/abs/2103.14030
"""

import argparse
import pathlib
import sys
import time

import keras
import numpy as np
from keras import layers, ops
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import keras_attn as ka
from keras_attn import windows


def main(argv=None):
    args = parse_arguments(argv)
    keras.utils.set_random_seed(args.seed)
    args.output.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    train_images, test_images, train_labels, test_labels = train_test_split(
        digits.images[..., np.newaxis].astype("float32"),
        digits.target,
        test_size=0.25,
        stratify=digits.target,
        random_state=0,
    )

    swin = build_swin()
    swin.compile(
        optimizer=keras.optimizers.AdamW(3e-3, weight_decay=0.05),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    swin.summary()
    started = time.monotonic()
    swin.fit(
        train_images,
        train_labels,
        batch_size=64,
        epochs=3 if args.smoke else 20,
        verbose="auto" if sys.stdout.isatty() else 2,
    )
    seconds = time.monotonic() - started
    _, accuracy = swin.evaluate(test_images, test_labels, verbose=0)

    picture = args.output / "swin_bias.png"
    plot_bias(swin.get_layer("stage_0_block_0_bias"), picture)
    print()
    for name, value in {
        "backend": keras.backend.backend(),
        "parameters": f"{swin.count_params():,}",
        "training": f"{seconds:.0f} s",
        "held-out digits": len(test_labels),
        "accuracy": f"{accuracy:.2%}",
        "position bias": picture,
    }.items():
        print(f"  {name:<18}{value}")


def parse_arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="three epochs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=pathlib.Path, default="out/swin")
    return parser.parse_args(argv)


def build_swin(image_size=8, dim=24, num_heads=(2, 4), window_sizes=(4, 2)):
    images = keras.Input((image_size, image_size, 1), name="images")
    x = layers.Rescaling(1 / 6, offset=-5 / 6)(images)  # mean 0, deviation 1
    x = ka.PatchEmbedding(dim, patch_size=1, data_format="channels_last")(x)
    for stage, (heads, window) in enumerate(zip(num_heads, window_sizes, strict=True)):
        if stage > 0:
            x = merge_patches(x)  # half the rows and columns, twice the width
        for block, shift in enumerate((0, window // 2)):
            x = swin_block(x, heads, window, shift, f"stage_{stage}_block_{block}")
    x = layers.LayerNormalization()(x)
    x = layers.GlobalAveragePooling2D(data_format="channels_last")(x)
    return keras.Model(images, layers.Dense(10, name="logits")(x), name="swin_digits")


def swin_block(x, num_heads, window_size, shift, name):
    """Window attention, then a feed-forward, each on the normalized grid and added."""
    y = layers.LayerNormalization()(x)
    x = x + window_attention(y, num_heads, window_size, shift, name)
    y = layers.LayerNormalization()(x)
    return x + ka.FeedForward(4 * x.shape[-1], activation="gelu")(y)


def window_attention(x, num_heads, window_size, shift, name):
    """Attention inside windows that are shifted by `shift` rows and columns."""
    _, rows, cols, _ = x.shape
    mask = None
    if shift:
        x = ops.roll(x, (-shift, -shift), axis=(1, 2))
        mask = windows.shifted_window_mask(rows, cols, window_size, shift)
        mask = mask[None, :, None]  # (batch, windows, heads, query, key)
    x = windows.window_partition(x, window_size)  # (batch, windows, length, dim)
    bias = ka.RelativePositionBias2D(num_heads, window_size, name=f"{name}_bias")(
        x[:, 0]
    )  # (1, heads, query, key)
    x = ka.MultiHeadAttention(num_heads, attention_axes=2, name=f"{name}_attention")(
        x, attention_mask=mask, bias=ops.expand_dims(bias, 1)
    )
    x = windows.window_reverse(x, window_size, rows, cols)
    return ops.roll(x, (shift, shift), axis=(1, 2)) if shift else x


def merge_patches(x):
    """Each 2x2 neighbourhood becomes one token of twice the width."""
    _, rows, cols, dim = x.shape
    x = windows.window_partition(x, 2)  # (batch, rows / 2 * cols / 2, 4, dim)
    x = ops.reshape(x, (-1, rows // 2, cols // 2, 4 * dim))
    x = layers.LayerNormalization()(x)
    return layers.Dense(2 * dim, use_bias=False)(x)


def plot_bias(layer, path):
    """Draws what each head of the first block adds for every offset."""
    table = ops.convert_to_numpy(layer.table)
    rows, cols, heads = table.shape
    figure = Figure(figsize=(2.4 * heads + 1, 2.8), layout="constrained")
    figure.suptitle("Position bias of each head, by row and column offset")
    edges = (-cols / 2, cols / 2, rows / 2, -rows / 2)
    limit = np.abs(table).max()
    for head, axis in enumerate(figure.subplots(1, heads)):
        drawn = axis.imshow(
            table[..., head], cmap="RdBu_r", vmin=-limit, vmax=limit, extent=edges
        )
        axis.set_title(f"head {head}", fontsize=10)
    figure.colorbar(drawn)
    figure.savefig(path, dpi=100, metadata={"Software": None})


if __name__ == "__main__":
    main()
