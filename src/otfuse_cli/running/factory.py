"""The user's module: found by name, built, with inputs to trace it on. This executes user code.

`pkg.mod:factory` and `file.py:factory` call a function (or a module class) without arguments, or
with the checkpoint's shapes; `torchvision:NAME`, `timm:NAME` and `hf:DIR` build a known one. A
factory returns a module, or a module and example inputs (a tensor, a tuple of arguments, or a dict
of keywords). From Python, the factory or the module itself may be given.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..errors import IncompatibleModels, UnreadableInput, UsageError
from ..graph.model import Shapes
from ..graph.trace.export_settings import eval_mode
from .arch_value import Arch, Factory, arch_label, called_with, copied, takes_shapes
from .meta import all_on_meta
from .untie import output_splits, untie


@dataclass(frozen=True)
class Network:
    """A module and what to call it with.

    Attributes:
        source: What `--arch` says, or what messages call it.
        module: In eval mode.
        args: Example inputs.
        kwargs: Example keyword inputs.
        untied: Its output layer has a weight of its own.
        given: The object that was given in place of a name.
        shapes: Of the checkpoint that it was built for, where its factory takes them.
    """

    source: str
    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    untied: bool = False
    given: Arch | None = None
    shapes: Shapes | None = None

    def again(self, shapes: Shapes | None = None) -> Network:
        """Built again, on the CPU; for other `shapes`, where its factory takes them."""
        arch = self.source if self.given is None else self.given
        wanted = self.shapes if self.shapes is None or shapes is None else shapes
        return build(arch, device="cpu", untied=self.untied, shapes=wanted)


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
    found = re.match(r"[A-Za-z]:(?=[\\/]|[^:]*\.py:)", spec)
    return found[0] if found else ""


def factory_arguments(arch: Arch) -> dict[str, Any]:
    """Arguments of the user's factory that have defaults; none for a network of another kind."""
    if isinstance(arch, str):
        place, _ = split_spec(arch)
        if not names_a_module(arch) or place in ("torchvision", "timm", "hf"):
            return {}
        arch = find_callable(arch)
    if isinstance(arch, nn.Module):
        return {}
    try:
        parameters = inspect.signature(arch).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def build(
    arch: Arch, *, device: str, untied: bool = False, shapes: Shapes | None = None
) -> Network:
    """Build the module that `arch` names, in eval mode, on `device` (`meta` holds no weights).

    Args:
        arch: A name, a factory, or a module (of the latter two, a copy of what they give).
        device: Where.
        untied: With an output layer that shares nothing with an embedding.
        shapes: Of the checkpoint's tensors, for a factory that takes them.

    Raises:
        UnreadableInput: No such file, folder or module.
        UsageError: The file has no such factory, or an optional package is missing.
        IncompatibleModels: The factory failed, or returned no module.
    """
    source, where = arch_label(arch), f"--arch {arch_label(arch)}"
    factory: Factory
    if not isinstance(arch, str):
        factory = (lambda: arch) if isinstance(arch, nn.Module) else arch
    elif untied and arch.startswith("hf:"):
        factory = partial(_hugging_face, Path(arch.removeprefix("hf:")), untied=True)
    else:
        factory = find_callable(arch)
    shaped = shapes is not None and takes_shapes(factory)
    call = factory if shapes is None else called_with(factory, shapes)
    try:
        with torch.device(device):
            made = call()
    except (UsageError, UnreadableInput):
        raise
    except Exception as error:
        raise _failed(error, where, shaped=shaped) from error
    if not isinstance(arch, str):
        made = copied(made, device)
    module, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module):
        raise IncompatibleModels(
            "the factory returned no module",
            where=where,
            why=f"it returned a {type(module).__name__}",
            fix="return a torch.nn.Module, or a module and example inputs",
        )
    module.eval()
    if device == "meta":
        all_on_meta(module)
    if untied:
        untie(module)
    args, kwargs = _inputs(module, inputs, where, device)
    given = None if isinstance(arch, str) else arch
    return Network(source, module, args, kwargs, untied, given, shapes if shaped else None)


def _failed(error: Exception, where: str, *, shaped: bool) -> IncompatibleModels:
    fix = "it must work without arguments and return a torch.nn.Module"
    if shaped:
        fix = (
            "it was called with the checkpoint's shapes (a dict of tensor names to tuples), since "
            "it takes one argument, or one called shapes: read the widths from it"
        )
    return IncompatibleModels(
        "the factory failed",
        where=where,
        why=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
        fix=fix,
    )


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
    if kind == "factory" and (known := _known(place, name)) is not None:
        return known
    holder = (
        _load_file(Path(place), option) if place.endswith(".py") else _load_module(place, option)
    )
    found = holder
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(
                f"no such {kind}",
                where=f"{option} {spec}",
                why=f"{place} defines no {name}",
                fix="name a function or a class that takes no arguments",
            )
        found = getattr(found, part)
    return found if callable(found) and not isinstance(found, nn.Module) else lambda: found


def _known(place: str, name: str) -> Factory | None:
    """A factory of a package or of a model folder; None where `place` is neither."""
    if place == "torchvision":
        return lambda: _package("torchvision.models", "torchvision").get_model(name, weights=None)
    if place == "timm":
        return lambda: _package("timm", "timm").create_model(name, pretrained=False)
    if place == "hf":
        return lambda: _hugging_face(Path(name))
    return None


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


def _load_file(path: Path, option: str) -> ModuleType:
    if not path.is_file():
        raise UnreadableInput("no such file", where=f"{option} {path}:...", fix="check the path")
    name = f"otfuse_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look their module up
    sys.path.insert(0, str(path.parent.resolve()))
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


def _hugging_face(folder: Path, *, untied: bool = False) -> Any:
    """The class that a folder's config.json names, without its weights.

    Raises:
        UsageError: It is to be untied, and its class ties it whatever the config says: what is
            written would not be what is loaded.
    """
    transformers = _package("transformers", "transformers")
    if not (folder / "config.json").is_file():
        raise UnreadableInput(
            "not a model folder", where=f"--arch hf:{folder}", why="it has no config.json"
        )
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
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
        found = {names[int(number)]: name for name, number in saved.items()}
    except Exception:  # noqa: BLE001 - not part of the library's public interface
        return {}
    return found if len(found) == len(saved) == len(names) else {}


def _inputs(
    module: nn.Module, inputs: Any, where: str, device: str
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if inputs is None:
        return _guess(module, where, device)
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})


def _guess(module: nn.Module, where: str, device: str) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Example inputs from the first layer; the first that the module accepts."""
    tried = []
    with torch.device(device), torch.no_grad():
        for args, kwargs in _candidates(module):
            try:
                with eval_mode(module):
                    module(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - whatever the user's forward raises
                tried.append(str(error).strip().partition("\n")[0])
                continue
            return args, kwargs
    raise IncompatibleModels(
        "no example inputs",
        where=where,
        why=f"guessed ones did not run: {tried[-1]}" if tried else "its first layer is unknown",
        fix="let the factory return the module and example inputs: return net, (x,)",
    )


def _candidates(module: nn.Module) -> Iterator[tuple[tuple[Any, ...], Mapping[str, Any]]]:
    if dummy := getattr(module, "dummy_inputs", None):
        main = getattr(module, "main_input_name", None)
        yield (), {k: v for k, v in dummy.items() if main in (None, k)}
    for layer in module.modules():
        match layer:
            case nn.Conv1d() | nn.Conv2d() | nn.Conv3d():
                axes = len(layer.kernel_size)
                # Networks of transformers say what they take, and refuse the rest.
                said = getattr(getattr(module, "config", None), "image_size", None)
                if isinstance(said, int) and axes == 2:
                    yield (torch.rand(2, layer.in_channels, said, said),), {}
                for size in (32, 64, 224, 28, 96, 299) if axes < 3 else (16, 32):
                    yield (torch.rand(2, layer.in_channels, *(size,) * axes),), {}
                return
            case nn.Linear():
                yield (torch.rand(2, layer.in_features),), {}
                yield (torch.rand(2, 5, layer.in_features),), {}
                return
            case nn.Embedding():
                yield (torch.zeros(2, 7, dtype=torch.long),), {}
                yield (), {"input_ids": torch.zeros(2, 7, dtype=torch.long)}
                return
            case nn.LSTM() | nn.GRU() | nn.RNN():
                yield (torch.rand(3, 2, layer.input_size),), {}
                return
