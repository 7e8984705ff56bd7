"""Which modules another process must import before it can load a model."""

import importlib.util
import sys

import keras

_ADVICE = (
    "The export loads the model in a process of its own, so everything in it must be "
    "importable there."
)


def modules_of(model, imports=()):
    """Names of the modules that define or register what `model` is made of.

    Args:
        model: a Keras model.
        imports: names of further modules, or the modules themselves.

    Raises:
        ValueError: something in the model cannot be imported elsewhere: it is defined
            in `__main__` or a notebook, inside a function, or is a `Lambda`.
    """
    if isinstance(imports, str) or not isinstance(imports, (list, tuple, set)):
        raise TypeError(
            f"`imports` must be a list of module names. Received: imports={imports!r}"
        )
    named = [getattr(module, "__name__", module) for module in imports]
    for name in named:
        if not isinstance(name, str) or not _is_importable(name):
            raise ValueError(
                f"`imports` must name modules that can be imported. Received: {name!r}"
            )
    found = {}
    _walk(keras.saving.serialize_keras_object(model), model.name, found, named)
    return [*dict.fromkeys([*named, *found])]


def _walk(config, owner, found, named):
    """Collects modules from a serialized object; `owner` is the nearest layer."""
    if isinstance(config, (list, tuple)):
        for item in config:
            _walk(item, owner, found, named)
    if not isinstance(config, dict):
        return
    inner = config.get("config")
    if "class_name" in config and isinstance(inner, dict):
        owner = config.get("name") or inner.get("name") or owner
    if config.get("class_name") == "__lambda__":
        raise ValueError(
            f"The layer {owner!r} holds a Python lambda, which cannot be loaded in "
            f"another process. {_ADVICE} Write a small `keras.layers.Layer` in a "
            "module and register it with "
            '`@keras.saving.register_keras_serializable(package="...")`.'
        )
    if config.get("class_name") == "function":
        _add_function(config, owner, found, named)
    elif "class_name" in config and "module" in config:
        _add_class(config, owner, found)
    for key, value in config.items():
        if key not in ("compile_config", "build_config"):
            _walk(value, owner, found, named)


def _add_function(config, owner, found, named):
    name = config["config"]
    function = keras.saving.get_registered_object(name)
    if function is not None:
        _refuse_local(function, owner)
        _add(function.__module__, f"the function {name!r}", owner, found)
    elif not named:
        raise ValueError(
            f"The layer {owner!r} uses the function {name!r}, which is not registered. "
            f"{_ADVICE} Decorate it with "
            '`@keras.saving.register_keras_serializable(package="...")` in a module.'
        )


def _add_class(config, owner, found):
    module = config["module"]
    name = config.get("registered_name")
    registered = keras.saving.get_registered_object(name) if name else None
    if registered is not None:
        _refuse_local(registered, owner)
        module = registered.__module__
    if module is None or module.split(".")[0] in ("keras", "builtins"):
        return
    _add(module, f"the class {config['class_name']!r}", owner, found)


def _refuse_local(thing, owner):
    if "<locals>" in thing.__qualname__:
        raise ValueError(
            f"The layer {owner!r} needs {thing.__qualname__!r}, which is defined "
            f"inside a function. {_ADVICE} Define it at the top level of a module."
        )


def _add(module, thing, owner, found):
    if module == "__main__":
        raise ValueError(
            f"The layer {owner!r} needs {thing}, which is defined in `__main__` (a "
            f"script or a notebook). {_ADVICE} Move it to a module, say "
            "`my_layers.py`, and import it from there."
        )
    if not _is_importable(module):
        raise ValueError(
            f"The layer {owner!r} needs {thing} of the module {module!r}, which cannot "
            f"be imported by that name. {_ADVICE}"
        )
    found[module] = True


def _is_importable(name):
    if getattr(sys.modules.get(name), "__spec__", None) is not None:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
