"""The process that turns a `.keras` file into a SavedModel or a `.tflite` file.

It runs on the TensorFlow backend whatever the backend of its parent is, reads a job
(see `process.py`), and writes one JSON object a line: `{"stage": ...}`, then
`{"done": ...}` or `{"error": ..., "kind": ...}`.
"""

import importlib
import json
import os
import re
import sys
import threading
import traceback


def main(job_path):
    """Runs the job and reports its outcome on standard output."""
    send = _open_report()
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    with open(job_path) as file:
        job = json.load(file)
    try:
        run(job, send)
    except Exception as error:
        traceback.print_exc()
        send(error=str(error)[:2000], kind=type(error).__name__)
        sys.exit(1)
    send(done=True)


def run(job, send):
    """Loads, converts and (for a SavedModel) runs what it made."""
    send(stage="Loading")
    model = _load(job)
    send(stage="Tracing")
    _write_saved_model(model, job)
    if job["format"] == "litert":
        send(stage="Converting")
        try:
            content = _convert(job)
        except Exception as error:
            raise _explain(error, model) from error
        with open(job["target"], "wb") as file:
            file.write(content)
    else:
        send(stage="Reloading")
        _run_saved_model(job)


def _load(job):
    import keras

    keras.config.set_floatx(job["floatx"])
    keras.config.set_image_data_format(job["image_data_format"])
    for module in job["imports"]:
        importlib.import_module(module)
    return keras.saving.load_model(job["model"], compile=False)


def _write_saved_model(model, job):
    """One `serving_default`, by names; and `serve`, with the model's own structure."""
    import keras

    from keras_attn.export.signature import input_structure, leaf_names

    specs = {
        tensor["name"]: keras.InputSpec(
            shape=tensor["shape"], dtype=tensor["dtype"], name=tensor["name"]
        )
        for tensor in job["inputs"]
    }
    structure = input_structure(model)
    # The order of a dictionary differs by backend, and in what a model returns from
    # what it says: everything goes by name.
    inputs = leaf_names(structure, specs)

    def serve(inputs):
        return model(inputs, training=False)

    def by_name(tensors):
        flat = [tensors[name] for name in inputs]
        results = call(keras.tree.pack_sequence_as(structure, flat))
        names = leaf_names(results, job["outputs"])
        return dict(zip(names, keras.tree.flatten(results), strict=True))

    archive = keras.export.ExportArchive()
    archive.track(model)
    call = serve
    if job["format"] == "saved_model":
        packed = keras.tree.pack_sequence_as(structure, [specs[x] for x in inputs])
        call = archive.add_endpoint("serve", serve, [packed])
    archive.add_endpoint("serving_default", by_name, [specs])
    archive.write_out(job["saved_model"], verbose=False)


def _convert(job):
    """The bytes of the `.tflite` file: builtin ops or an error, never Flex."""
    import tensorflow as tf

    converter = tf.lite.TFLiteConverter.from_saved_model(
        job["saved_model"], signature_keys=["serving_default"]
    )
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS]
    converter.allow_custom_ops = False
    if job["quantization"] is not None:
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if job["quantization"] == "float16":
        converter.target_spec.supported_types = [tf.float16]
    return converter.convert()


def _run_saved_model(job):
    import numpy as np
    import tensorflow as tf

    function = tf.saved_model.load(job["saved_model"]).signatures["serving_default"]
    for case in job["cases"]:
        with np.load(case["inputs"]) as inputs:
            feeds = {name: tf.constant(inputs[name]) for name in inputs.files}
        outputs = function(**feeds)
        np.savez(case["outputs"], **{k: v.numpy() for k, v in outputs.items()})


class NoBuiltin(Exception):
    """Operations that TFLite does not have, each with the layer it came from."""


def _explain(error, model):
    """The converter's error as a `NoBuiltin`, where it is about operations."""
    found = {}
    for item in getattr(error, "errors", None) or ():
        op = item.operator.name.removeprefix("tf.")
        scope = next((c.name for c in item.location.call if "/" in c.name), "")
        if op:
            found[f"`{op}` of {_layer(scope, model)}"] = True
    if not found:
        return error
    return NoBuiltin(
        f"These operations have no builtin in TFLite: {', '.join(found)}. A device "
        "without Flex or custom kernels refuses such a file: write the layer with "
        "other `keras.ops`, or leave it out of the exported model."
    )


def _layer(scope, model):
    """`functional_1/block_1/inner_1/Cholesky@f` as the layer `'block/inner'`."""
    # No public way leads to the layers that a layer holds.
    known = {layer.name for layer in model._flatten_layers()}
    parts = scope.split("@")[0].split("/")[:-1]
    inside = [_without_suffix(part, known) for part in parts][1:]  # [0]: the model
    return f"the layer {'/'.join(inside)!r}" if inside else "an unknown layer"


def _without_suffix(part, known):
    """TensorFlow adds `_1` to a scope that it has seen before."""
    without = re.sub(r"_\d+$", "", part)
    return without if part not in known and without in known else part


def _open_report():
    """Keeps the real standard output for reports; all other prints go to stderr."""
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(**line):
        report.write(json.dumps(line) + "\n")
        report.flush()

    return send


def _end_with_the_parent():
    """Standard input closes when the parent ends, however it ends."""
    while os.read(0, 1):
        pass
    os._exit(1)
