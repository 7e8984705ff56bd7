"""What an export raises when the model cannot become the file."""


class ExportError(RuntimeError):
    """The model could not be exported, or the file does not compute what it does.

    Nothing was written: an older file at the target is as it was.
    """
