"""Functions and modules of the user's, found by name. This imports and runs user code.

`pkg.mod:name` and `file.py:name`; `torchvision:NAME`, `timm:NAME`, `hf:DIR` and `diffusers:DIR` are
known places. NAME may be followed by options: `timm:resnet50,num_classes=10`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..checkpoint.config import read_config
from ..errors import UnreadableInput, UsageError
from .arch_value import Arch, Factory
from .untie import output_splits

# Places whose networks are known: packages, and what reads a model folder.
LIBRARIES = ("torchvision", "timm", "hf", "diffusers")


def names_a_module(arch: Arch) -> bool:
    """Whether `--arch` names something to build (or is it) rather than a family or a spec."""
    return not isinstance(arch, str) or ":" in arch[len(_drive(arch)) :]


def split_spec(spec: str) -> tuple[str, str]:
    """Place and name of `place:name`; the colon of a drive letter is the place's."""
    drive = _drive(spec)
    place, _, name = spec[len(drive) :].partition(":")
    return drive + place, name


def _drive(spec: str) -> str:
    """The drive letter of a Windows path, with its colon; empty for anything else."""
    match = re.match(r"[A-Za-z]:(?=[\\/]|[^:]*\.py:)", spec)
    return match[0] if match else ""


def find_callable(spec: str, *, option: str = "--arch") -> Factory:
    """What `pkg.mod:name`, `file.py:name` or a known package names, as a function to call.

    Raises:
        UnreadableInput: No such file or module, or one that can't be imported.
        UsageError: It defines no such name, or an optional package is missing.
    """
    place, name = split_spec(spec)
    kind = "factory" if option == "--arch" else "loader"
    if not name:
        raise UsageError(
            f"no {kind} named",
            where=f"{option} {spec}",
            fix=f"write pkg.mod:{kind} or file.py:{kind}",
        )
    if kind == "factory" and (known_factory := _known(place, name)) is not None:
        return known_factory
    holder = (
        _load_file(Path(place), option) if place.endswith(".py") else _load_module(place, option)
    )
    named = holder
    for part in name.split("."):
        if not hasattr(named, part):
            raise UsageError(
                f"no such {kind}",
                where=f"{option} {spec}",
                why=f"{place} defines no {name}",
                fix="name a function or a class that takes no arguments",
            )
        named = getattr(named, part)
    return named if callable(named) and not isinstance(named, nn.Module) else lambda: named


def _known(place: str, name: str) -> Factory | None:
    """A factory of a package or of a model folder; None where `place` is neither."""
    if place == "torchvision":
        return partial(_torchvision, *_with_options(name))
    if place == "timm":
        return partial(_timm, *_with_options(name))
    if place == "hf":
        return lambda: hugging_face(Path(name))
    if place == "diffusers":
        return lambda: _diffusers(Path(name))
    return None


def _with_options(text: str) -> tuple[str, dict[str, Any]]:
    """`NAME,num_classes=10` as a name and keywords; a value that Python can't read is a text."""
    name, *settings = text.split(",")
    options: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not (key.isidentifier() and equals):
            raise UsageError(
                "not an option of a network",
                where=f"--arch ...:{text}",
                fix="write NAME,option=value, for example resnet50,num_classes=10",
            )
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    return name, options


def _torchvision(name: str, options: Mapping[str, Any]) -> Any:
    models = _package("torchvision.models", "torchvision")
    taken = inspect.signature(models.get_model_builder(name)).parameters
    # Whatever would be downloaded is left out.
    nothing = {key: None for key in ("weights", "weights_backbone") if key in taken}
    return models.get_model(name, **{**nothing, **options})


def _timm(name: str, options: Mapping[str, Any]) -> Any:
    return _package("timm", "timm").create_model(name, pretrained=False, **options)


def _diffusers(folder: Path) -> Any:
    """The class that a folder's config.json names, without its weights."""
    diffusers, config = _package("diffusers", "diffusers"), _folder_config("diffusers", folder)
    name = config.get("_class_name")
    kind = getattr(diffusers, str(name), None)
    if kind is None:
        raise UsageError(
            f"diffusers has no {name}",
            where=f"--arch diffusers:{folder}",
            fix="update it, or give a factory: --arch file.py:factory",
        )
    return kind.from_config(config)


def _folder_config(place: str, folder: Path) -> Mapping[str, Any]:
    config = read_config(folder) if folder.is_dir() else None
    if config is None:
        raise UnreadableInput(
            "not a model folder",
            where=f"--arch {place}:{folder}",
            why="it has no config.json that can be read",
        )
    return config


def _package(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"{name} is not installed",
            where=f"--arch {name}:...",
            why=str(error),
            fix=f"pip install {name}",
        ) from error
    except Exception as error:  # operators built for another torch, say
        raise UsageError(
            f"{name} can't be imported",
            where=f"--arch {name}:...",
            why=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
            fix=f"install a {name} that fits your torch: python -c 'import {name}' must work",
        ) from error


def _load_file(path: Path, option: str) -> ModuleType:
    if not path.is_file():
        raise UnreadableInput("no such file", where=f"{option} {path}:...", fix="check the path")
    name = f"otfuse_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look their module up
    sys.path.insert(0, str(path.parent.resolve()))  # what lies beside the file, as python has it
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _not_importable(f"{option} {path}", error) from error
    finally:
        sys.path.pop(0)
    return module


def _load_module(name: str, option: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise _not_importable(f"{option} {name}", error) from error
    finally:
        sys.path.pop(0)


def _not_importable(where: str, error: Exception) -> UnreadableInput:
    return UnreadableInput(
        "the code can't be imported",
        where=f"{where}:...",
        why=f"{type(error).__name__}: {error}",
        fix="run it with python first",
    )


def hugging_face(
    folder: Path, *, untied: bool = False, sizes: Mapping[str, int] | None = None
) -> Any:
    """The class that a folder's config.json names, without its weights; with other `sizes`.

    Raises:
        UsageError: It is to be untied, and its class ties it whatever the config says: what is
            written would not be what is loaded.
    """
    transformers = _package("transformers", "transformers")
    said = _folder_config("hf", folder)
    if "auto_map" in said and said.get("model_type") not in transformers.CONFIG_MAPPING:
        raise UsageError(
            "a network whose code lies in the model folder",
            where=f"--arch hf:{folder}",
            why=f"transformers has no {said.get('model_type')} (auto_map), and code that comes "
            "with a checkpoint is never run",
            fix="read it, and if you trust it give it yourself: --arch file.py:factory",
        )
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    for key, size in (sizes or {}).items():
        setattr(config, key, size)
    if untied:
        config.tie_word_embeddings = False
    names = getattr(config, "architectures", None) or []
    kind = getattr(transformers, names[0], None) if names else None
    made = kind(config) if kind is not None else transformers.AutoModel.from_config(config)
    if untied and output_splits(made):
        raise UsageError(
            "the output layer can't be untied",
            where=f"--untie, {folder}",
            why=f"{type(made).__name__} ties it, whatever tie_word_embeddings says",
            fix="leave out --untie, and use --residual shared",
        )
    return made


def saved_names(module: nn.Module) -> dict[str, str]:
    """Names under which transformers saves the tensors of one of its modules, where it renames.

    Since 5.0 some classes hold other names than their files do. Tensors that are merged or split
    as well have no one name: then nothing is said.
    """
    transformers = sys.modules.get("transformers")
    try:
        if transformers is None or not isinstance(module, transformers.PreTrainedModel):
            return {}
    except Exception:  # noqa: BLE001 - it imports what it can find, which may be broken
        return {}
    names = list(module.state_dict())
    numbered = {name: torch.tensor(at) for at, name in enumerate(names)}
    try:
        loading = importlib.import_module("transformers.core_model_loading")
        saved = loading.revert_weight_conversion(module, numbered)
        original = {names[int(number)]: name for name, number in saved.items()}
    except Exception:  # noqa: BLE001 - not part of the library's public interface
        return {}
    return original if len(original) == len(saved) == len(names) else {}
