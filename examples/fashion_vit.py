"""A ViT tells garments apart: Fashion-MNIST, 60,000 pictures of ten classes.

    python examples/fashion_vit.py            # eight epochs on all 60,000 pictures
    python examples/fashion_vit.py --smoke    # a part of the data, under a minute

The full run reached 91.5 % of the test pictures in 31 minutes (torch, one CPU core).
Runs unchanged on TensorFlow, JAX and torch: `KERAS_BACKEND` chooses. Needs one of them
and `pip install "keras-attn[plot]"`. Without the data it says how to get them, and ends
with exit code 3.
"""

import argparse
import gzip
import pathlib
import socket
import sys
import time

import keras
import numpy as np
from class_attention import class_attention, draw_attention
from keras import layers
from matplotlib.figure import Figure

import keras_attn as ka

# fmt: off
CLASSES = [
    "T-shirt", "trouser", "pullover", "dress", "coat",
    "sandal", "shirt", "sneaker", "bag", "boot",
]
# fmt: on
DEBIAN_FOLDER = pathlib.Path("/usr/share/datasets/fashion-mnist")
NO_DATA = 3
HOW_TO_GET_IT = """\
Fashion-MNIST cannot be read: {error}
Get it in one of these ways:
  Debian, Ubuntu:  apt-get install dataset-fashion-mnist
  online:          python -c "import keras; keras.datasets.fashion_mnist.load_data()"
  by hand:         put the four *-ubyte.gz files of
                   https://github.com/zalandoresearch/fashion-mnist into a folder
                   and name it with --data"""


def main(argv=None):
    args = parse_arguments(argv)
    keras.utils.set_random_seed(args.seed)
    try:
        (train_images, train_labels), test = load_data(args.data)
    except (OSError, EOFError) as error:
        print(HOW_TO_GET_IT.format(error=error), file=sys.stderr)
        return NO_DATA
    if args.smoke:
        train_images, train_labels = train_images[:4096], train_labels[:4096]
        test = test[0][:1000], test[1][:1000]

    vit = build_vit(num_layers=2 if args.smoke else 4)
    started = time.monotonic()
    train(vit, train_images, train_labels, args.epochs or (2 if args.smoke else 8))
    seconds = time.monotonic() - started

    logits = vit.predict(test[0], batch_size=250, verbose=0)
    confusion = confusion_matrix(test[1], logits.argmax(-1))
    args.output.mkdir(parents=True, exist_ok=True)
    picture = args.output / "fashion.png"
    plot(vit, *test, confusion, picture)
    print_classes(confusion)
    print(f"\n  backend        {keras.backend.backend()}")
    print(f"  parameters     {vit.count_params():,}")
    print(f"  training       {seconds:.0f} s, {len(train_images):,} pictures")
    print(f"  test accuracy  {np.trace(confusion) / confusion.sum():.2%}")
    print(f"  picture        {picture}")
    return 0


def parse_arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a part of the data")
    parser.add_argument("--epochs", type=int, help="default: 8, or 2 with --smoke")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=pathlib.Path, help="folder of the *.gz files")
    parser.add_argument("--output", type=pathlib.Path, default="out/fashion")
    return parser.parse_args(argv)


def load_data(folder=None):
    """`(images, labels)` to train and to test, from a folder or through Keras.

    Raises:
        OSError: they are in neither place.
    """
    if folder is None and DEBIAN_FOLDER.is_dir():
        folder = DEBIAN_FOLDER
    if folder is not None:
        pairs = (
            (
                read_idx(folder / f"{part}-images-idx3-ubyte.gz"),
                read_idx(folder / f"{part}-labels-idx1-ubyte.gz"),
            )
            for part in ("train", "t10k")
        )
    else:
        pairs = download()
    return [(images[..., np.newaxis].astype("float32"), y) for images, y in pairs]


def read_idx(path):
    """The array in a gzipped IDX file of bytes."""
    with gzip.open(path) as file:
        content = file.read()
    rank = content[3]
    shape = np.frombuffer(content, ">i4", count=rank, offset=4)
    return np.frombuffer(content, "uint8", offset=4 + 4 * rank).reshape(shape)


def download():
    socket.setdefaulttimeout(15)
    try:
        return keras.datasets.fashion_mnist.load_data()
    except Exception as error:  # Keras raises a bare one
        raise OSError(str(error)) from error


def build_vit(num_layers, dim=64):
    images = keras.Input((28, 28, 1), name="images")
    x = layers.Rescaling(1 / 90, offset=-73 / 90)(images)  # mean 0, deviation 1
    # Convolutions see edges and weaves that a first layer of patches, on so few and so
    # small pictures, does not learn (https://arxiv.org/abs/2106.14881).
    for filters, strides in ((dim // 2, 1), (dim, 2), (dim, 2)):
        x = layers.Conv2D(filters, 3, strides, padding="same", use_bias=False)(x)
        x = layers.BatchNormalization(momentum=0.9)(x)
        x = layers.Activation("gelu")(x)
    x = ka.PatchEmbedding(dim, patch_size=1)(x)
    x = ka.LearnedPositionEmbedding(
        (7, 7), initializer=keras.initializers.TruncatedNormal(stddev=0.5)
    )(x)  # (batch, 7, 7, dim)
    x = ka.PrefixTokens(1)(x)  # the class token, then the patches: (batch, 50, dim)
    for index in range(num_layers):
        x = ka.EncoderBlock(
            num_heads=4,
            intermediate_dim=2 * dim,
            norm_placement="pre",
            activation="gelu",
            name=f"block_{index}",
        )(x)
    x = layers.LayerNormalization()(x)
    logits = layers.Dense(10, name="logits")(x[:, 0])
    return keras.Model(images, logits, name="fashion_vit")


def train(vit, images, labels, epochs, batch_size=128):
    """Trains on all but the last 3 %, which show the progress."""
    split = len(images) * 97 // 100
    one_hot = keras.utils.to_categorical(labels, 10)
    steps = epochs * (split // batch_size + 1)
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, steps, warmup_target=2e-3, warmup_steps=steps // 10
    )
    vit.compile(
        optimizer=keras.optimizers.AdamW(rate, weight_decay=0.05),
        loss=keras.losses.CategoricalCrossentropy(
            from_logits=True, label_smoothing=0.1
        ),
        metrics=["accuracy"],
    )
    vit.summary()
    vit.fit(
        images[:split],
        one_hot[:split],
        batch_size=batch_size,
        validation_data=(images[split:], one_hot[split:]),
        epochs=epochs,
        verbose="auto" if sys.stdout.isatty() else 2,
    )


def confusion_matrix(labels, predicted):
    """Counts, `(class, predicted class)`."""
    counts = np.zeros((10, 10), "int64")
    np.add.at(counts, (labels, predicted), 1)
    return counts


def plot(vit, images, labels, confusion, path):
    """Ten garments under the attention of the class token; what is taken for what."""
    figure = Figure(figsize=(9, 8), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(1, 1.7))
    top.suptitle("Where the class token looks (attention rollout; red is most)")
    firsts = images[[np.argmax(labels == index) for index in range(10)]]
    attention = class_attention(vit, firsts)
    for axis, name, image, weights in zip(
        top.subplots(2, 5).flat, CLASSES, firsts / 255, attention, strict=True
    ):
        draw_attention(axis, image, weights)
        axis.set_title(name, fontsize=9)

    axis = bottom.subplots()
    axis.set_title("What is taken for what: percent of each row")
    percent = 100 * confusion / np.maximum(confusion.sum(1, keepdims=True), 1)
    axis.imshow(percent, cmap="Blues", vmin=0, vmax=100, aspect="auto")
    for (row, col), value in np.ndenumerate(percent):
        if value >= 0.5:
            colour = "white" if value > 50 else "black"
            axis.text(col, row, f"{value:.0f}", ha="center", va="center", color=colour)
    axis.set_xticks(range(10), CLASSES, fontsize=9)
    axis.set_yticks(range(10), CLASSES, fontsize=9)
    axis.set_xlabel("predicted")
    axis.set_ylabel("true")
    figure.savefig(path, dpi=100, metadata={"Software": None})


def print_classes(confusion):
    print(f"\n  {'class':<10}{'precision':>10}{'recall':>10}   most often taken for")
    for index, name in enumerate(CLASSES):
        hits = confusion[index, index]
        precision = hits / max(confusion[:, index].sum(), 1)
        others = confusion[index] * (np.arange(10) != index)
        taken_for = f"{CLASSES[others.argmax()]} ({others.max()})"
        recall = hits / max(confusion[index].sum(), 1)
        print(f"  {name:<10}{precision:>10.1%}{recall:>10.1%}   {taken_for}")


if __name__ == "__main__":
    sys.exit(main())
