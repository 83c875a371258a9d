"""What network a checkpoint is of, where a library has it: the text that `--arch` would be.

A config.json decides at once; otherwise names and shapes do (`known_networks`). Imports no library
to tell, and never runs code that lies beside a checkpoint.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..graph.model import Shapes
from .known_networks import Known, known_network


@dataclass(frozen=True)
class Recognised:
    """A network of a library.

    Attributes:
        arch: What `--arch` says for it.
        library: What has to be installed.
        name: What the library calls it.
        classes: Size of the class axis, where that is known.
        rivals: What `--arch` says for networks with the same tensors that compute something else.
    """

    arch: str
    library: str
    name: str
    classes: int | None = None
    rivals: tuple[str, ...] = ()

    @property
    def installed(self) -> bool:
        """Whether the library is there, as far as that can be told without importing it."""
        return importlib.util.find_spec(self.library) is not None

    @property
    def source(self) -> str:
        """What a graph says that it was traced from."""
        classes = "" if self.classes is None else f", {self.classes} classes"
        return f"{self.library} {self.name}{classes}, traced"

    @property
    def hint(self) -> str:
        """What to do where the library is missing."""
        return (
            f"this is {self.name} of {self.library}: pip install {self.library}, and it will be "
            "traced and proven"
        )


def library_network(
    shapes: Shapes, config: Mapping[str, Any] | None = None, folder: Path | None = None
) -> Recognised | None:
    """The network of a library that a checkpoint is of; None where nothing says so.

    Of libraries that have the same network one that is installed is taken.

    Args:
        shapes: Of the checkpoint's tensors.
        config: What the config.json beside it says.
        folder: Where that lies.
    """
    said = None if config is None else _configured(config, folder)
    if said is not None:
        return said
    entry = known_network(shapes)
    if entry is None:
        return None
    every = [_named(entry, group, name) for group in entry.names for name in group]
    return next((one for one in every if one.installed), every[0])


def _configured(config: Mapping[str, Any], folder: Path | None) -> Recognised | None:
    """By what a config.json of timm, transformers or diffusers names."""
    name = config.get("architecture")
    if isinstance(name, str):
        classes = config.get("num_classes")
        classes = classes if isinstance(classes, int) else None
        more = "" if classes is None else f",num_classes={classes}"
        return Recognised(f"timm:{name}{more}", "timm", name, classes)
    if folder is None:
        return None
    kind = config.get("model_type")
    if isinstance(kind, str):
        names = config.get("architectures")
        made = names[0] if isinstance(names, Sequence) and names else kind
        return Recognised(f"hf:{folder}", "transformers", str(made))
    kind = config.get("_class_name")
    if isinstance(kind, str):
        return Recognised(f"diffusers:{folder}", "diffusers", kind)
    return None


def _named(entry: Known, group: Sequence[str], name: str) -> Recognised:
    library, _, model = name.partition(":")
    rivals = tuple(entry.arch(other[0]) for other in entry.names if other is not group)
    return Recognised(entry.arch(name), library, model, entry.classes or None, rivals)
