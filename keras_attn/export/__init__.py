"""SavedModel and LiteRT files from a model of any backend, and the runner for them."""

from keras_attn.export.api import to_litert, to_saved_model
from keras_attn.export.errors import ExportError
from keras_attn.export.report import ExportReport
from keras_attn.export.runtime import LiteRTModel
from keras_attn.export.signature import Tensor

__all__ = [
    "ExportError",
    "ExportReport",
    "LiteRTModel",
    "Tensor",
    "to_litert",
    "to_saved_model",
]
