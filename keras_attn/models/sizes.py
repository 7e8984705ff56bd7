"""Published sizes, and the one rule by which a builder reads them."""

from keras_attn.checks import check_positive, check_rate

__all__ = ["resolve"]


def resolve(size, sizes, **given):
    """The settings of a named size, each replaced by what was given for it.

    Args:
        size: a key of `sizes`, or `None` when every setting is given.
        sizes: name -> settings.
        **given: the builder's arguments of those names, `None` where not given.

    Raises:
        ValueError: an unknown size, or a setting that neither gives.
    """
    if size is not None and size not in sizes:
        raise ValueError(
            f"`size` must be one of {tuple(sizes)} or `None`. Received: size={size!r}"
        )
    settings = dict(sizes.get(size, {}))
    settings.update((name, value) for name, value in given.items() if value is not None)
    missing = [name for name in given if name not in settings]
    if missing:
        raise ValueError(
            f"Without a `size` every setting must be given. Missing: {missing}"
        )
    for name, value in settings.items():
        check = check_rate if name == "dropout" else check_positive
        settings[name] = check(name, value)
    return settings
