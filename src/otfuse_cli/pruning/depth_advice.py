"""What has to change where a network is built, so that it has fewer blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .advice import Advice
from .renumber import NumberedModules

# What libraries call the number of blocks in a config.json; of encoders and decoders, too.
_COUNTS = (
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_blocks", "depth"),
    *("encoder_layers", "num_encoder_layers", "encoder_layer"),
    *("decoder_layers", "num_decoder_layers", "decoder_layer"),
)
# Parts of the name of a factory's argument that counts blocks.
_COUNTING = ("depth", "layer", "block", "num", "repeat")
_SIDES = ("encoder", "decoder")


def depth_advice(
    lists: Sequence[NumberedModules],
    gone: Sequence[str],
    *,
    config: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Advice:
    """What to change where a network is built.

    Args:
        lists: The numbered modules that some were taken out of.
        gone: All modules that are gone.
        config: The config.json that the network is built from, if any.
        arguments: Arguments of the factory with their defaults, if there is one.
    """
    changes = _config(lists, config or {})
    sentences = []
    for key, value in changes.items():
        listed = isinstance(value, list) and key != "depths"
        said = f"leave those of the blocks that are gone out of {key}" if listed else ""
        sentences.append(f"config.json: {said or f'set {key} to {value}'}")
    if config is not None and not changes:
        sentences.append("config.json: it has no count of blocks that is known; set it")
    sentences += _factory(lists, arguments or {})
    lists_said = [f"{each.name or 'the network'} {_change(each)}" for each in lists]
    numbered = {f"{each.stem}{number}" for each in lists for number in each.gone}
    lists_said += [f"without {name}" for name in gone if name not in numbered]
    sentences.append(f"build the network with fewer blocks: {', '.join(lists_said)}")
    return Advice(tuple(sentences), changes)


def _change(modules: NumberedModules) -> str:
    before, gone = modules.numbers, sorted(modules.gone)
    numbers = ", ".join(map(str, gone))
    return f"{len(before)} -> {len(before) - len(gone)} (without {numbers})"


def _config(lists: Sequence[NumberedModules], config: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json has to say; nothing where one number can't say it."""
    changes: dict[str, Any] = {}
    for each in lists:
        changed = dict(_of_list(each, {**config, **changes}))
        before = changes.keys() & changed.keys()
        if not changed or any(changes[key] != changed[key] and key != "depths" for key in before):
            return {}
        changes |= changed
    return changes


def _of_list(modules: NumberedModules, config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    old = len(modules.numbers)
    new = old - len(modules.gone)
    stage = _stage(modules, config.get("depths"))
    if stage is not None:
        depths = list(config["depths"])
        depths[stage] = new
        yield "depths", depths
        return
    keys = [key for key in _counts_for(modules.name, config) if config.get(key) == old]
    for key in keys:
        yield key, new
    if not keys:
        return
    stays = [at for at, number in enumerate(modules.numbers) if number not in modules.gone]
    for key, value in config.items():
        # One entry for each layer: which kind of attention it has, for example.
        if isinstance(value, list) and len(value) == old and "layer" in key:
            yield key, [value[at] for at in stays]


def _stage(modules: NumberedModules, depths: Any) -> int | None:
    """Which of the stages of a config's `depths` a list is; None where it says nothing of it."""
    if not isinstance(depths, list):
        return None
    numbers = [int(part) for part in modules.name.split(".") if part.isdecimal()]
    for stage in reversed(numbers):
        if stage < len(depths) and depths[stage] == len(modules.numbers):
            return stage
    return None


def _counts_for(path: str, config: Mapping[str, Any]) -> list[str]:
    """Keys that may count the blocks of a list: those of its side only, where it is of one."""
    parts = path.split(".")
    if "decoder" in parts:
        # A decoder has the plain key where there is none of its own.
        own = [key for key in _COUNTS if "decoder" in key]
        if any(config.get(key) is not None for key in own):
            return own
    others = [side for side in _SIDES if side not in parts]
    return [key for key in _COUNTS if not any(side in key for side in others)]


def _factory(lists: Sequence[NumberedModules], arguments: Mapping[str, Any]) -> Iterator[str]:
    """Arguments of a factory whose defaults count blocks that are fewer now."""
    for name, default in arguments.items():
        if not any(part in name.lower() for part in _COUNTING):
            continue
        numbers = default if isinstance(default, tuple | list) else (default,)
        # `type`, for a flag is an integer to Python.
        for each in lists:
            old = len(each.numbers)
            if any(type(number) is int and number == old for number in numbers):
                new = old - len(each.gone)
                yield f"the factory's argument {name}: {old} -> {new} for {each.name}"
