"""The formats there are. Each is a module of this room; a new one is added here."""

from __future__ import annotations

from .dcp import DISTRIBUTED
from .folder import MODEL_FOLDER
from .format import FileFormat, FolderFormat, OutputFormat
from .safetensors_file import SAFETENSORS
from .safetensors_writer import SAFETENSORS_OUTPUT
from .shards import FOLDER_OUTPUT
from .torch_legacy import TORCH_LEGACY
from .torch_writer import TORCH_OUTPUT
from .torch_zip import TORCH_ZIP

# The first one that claims an input reads it.
FILE_FORMATS: tuple[FileFormat, ...] = (TORCH_ZIP, SAFETENSORS, TORCH_LEGACY)
FOLDER_FORMATS: tuple[FolderFormat, ...] = (DISTRIBUTED, MODEL_FOLDER)
OUTPUT_FORMATS: tuple[OutputFormat, ...] = (SAFETENSORS_OUTPUT, TORCH_OUTPUT, FOLDER_OUTPUT)


def output_format(suffix: str) -> OutputFormat:
    """How an output of this suffix, one of `output_names.SUFFIXES` or none, is written."""
    return next(output for output in OUTPUT_FORMATS if suffix in output.suffixes)
