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
import zipfile


def main(job_path):
    """Runs the job and reports its outcome on standard output."""
    send = _open_report()
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    with open(job_path) as file:
        job = json.load(file)
    try:
        run(job, send)
    except Exception as error:
        import traceback

        traceback.print_exc()
        send(error=_explain(error, job), kind=type(error).__name__)
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
        content = _convert(job)
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

    specs = {
        tensor["name"]: keras.InputSpec(
            shape=tensor["shape"], dtype=tensor["dtype"], name=tensor["name"]
        )
        for tensor in job["inputs"]
    }
    structure = keras.tree.map_structure(lambda _: None, model.input)

    def serve(inputs):
        return model(inputs, training=False)

    def by_name(tensors):
        flat = [tensors[name] for name in specs]
        outputs = call(keras.tree.pack_sequence_as(structure, flat))
        return dict(zip(job["outputs"], keras.tree.flatten(outputs), strict=True))

    archive = keras.export.ExportArchive()
    archive.track(model)
    call = serve
    if job["format"] == "saved_model":
        packed = keras.tree.pack_sequence_as(structure, list(specs.values()))
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


def _explain(error, job):
    """The converter's error as ops and the layers they came from."""
    found = {}
    for item in getattr(error, "errors", None) or ():
        op = item.operator.name.removeprefix("tf.")
        scope = next((c.name for c in item.location.call if "/" in c.name), "")
        found[f"`{op}` of {_layer(scope, job)}"] = bool(op)
    ops = [text for text, has_op in found.items() if has_op]
    if not ops:
        return str(error)[:2000] or repr(error)
    return (
        "These operations have no builtin in TFLite: " + ", ".join(ops) + ". "
        "A device without Flex or custom kernels refuses such a file; write the layer "
        "with other `keras.ops`, or leave it out of the exported model."
    )


def _layer(scope, job):
    """`functional_1/block_1/inner_1/Cholesky@f` as the layer `'block/inner'`."""
    parts = scope.split("@")[0].split("/")[:-1]
    known = _known_names(job["model"])
    names = [_known_name(part, known) for part in parts]
    names = [name for name in names if name] or parts
    inside = names[1:] or names  # the first is the model itself
    return f"the layer {'/'.join(inside)!r}" if inside else "an unknown layer"


def _known_name(part, known):
    """TensorFlow adds `_1` to a scope that it has seen before."""
    without = re.sub(r"_\d+$", "", part)
    return part if part in known else without if without in known else part


def _known_names(path):
    with zipfile.ZipFile(path) as archive:
        config = json.loads(archive.read("config.json"))
    names = set()

    def walk(item):
        if isinstance(item, dict):
            names.update(v for k, v in item.items() if k == "name" and type(v) is str)
            item = list(item.values())
        if isinstance(item, list):
            for value in item:
                walk(value)

    walk(config)
    return names


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
