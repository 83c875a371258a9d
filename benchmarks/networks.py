"""Layer graphs of real networks: whether one is found, and whether it is right.

    python benchmarks/networks.py --results results.jsonl
    python benchmarks/networks.py --results results.jsonl --table

Needs torchvision, timm and transformers; nothing is downloaded. Every network is traced in a
process of its own, with a limit of memory and of time. Then all of its free units are permuted at
random, on weights and statistics drawn anew: the outputs must stay (docs/methods/proof.md). Results
are appended to a file, and what is in there is not done again. `--table` writes docs/networks.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import resource
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import network_configs
import network_libraries
from network_table import document

DOCUMENT = Path(__file__).parents[1] / "docs" / "networks.md"
SEED = 16
TIMM, TRANSFORMERS = 120, 100  # networks
MEMORY, CPU_SECONDS = 8 << 30, 240
WALL_SECONDS = 4 * CPU_SECONDS  # on a busy machine
META_ONLY = 300e6  # parameters from which on values aren't held
IN_FLOAT32 = 50e6  # from which on two states in float64 would take too much memory and time
LARGEST_TYPE = 30e6  # of a small config; more means that it was not made small

Say = Callable[..., None]


def main() -> None:
    """Run what the results lack, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, required=True, help="JSON lines, appended to")
    parser.add_argument("--only", default="", help="regular expression of LIBRARY/NAME")
    parser.add_argument("--first", type=int, help="stop after as many networks")
    parser.add_argument("--table", action="store_true", help="write docs/networks.md and stop")
    options = parser.parse_args()
    if options.table:
        DOCUMENT.write_text(document(read_results(options.results)), encoding="utf-8")
        return
    _prepare()
    done = {result["name"] for result in read_results(options.results)}
    waiting = [
        name
        for name in choice(options.results.with_suffix(".choice.json"))
        if name not in done and re.search(options.only, name)
    ]
    for at, name in enumerate(waiting[: options.first], start=1):
        result = in_process(name)
        with options.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        print(f"{at}/{len(waiting)} {name}: {_line(result)}", flush=True)


def read_results(path: Path) -> list[dict[str, Any]]:
    """The last result of every network."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return list({result["name"]: result for result in map(json.loads, lines)}.values())


def choice(kept: Path) -> list[str]:
    """LIBRARY/NAME of every network, the fast ones and one of each family first.

    Args:
        kept: Where the choice is kept, since it takes minutes to count parameters.
    """
    if kept.exists():
        names: list[str] = json.loads(kept.read_text(encoding="utf-8"))
        return names
    sizes: dict[str, float] = {}

    def counted(name: str) -> float:
        if name not in sizes:
            sizes[name] = parameters_of(name)
        return sizes[name]

    drawn = network_libraries.chosen_members(
        network_libraries.timm_families(), TIMM, SEED, lambda name: counted(f"timm/{name}")
    )
    listed = network_libraries.torchvision_names()
    by_library = [
        _one_of_each_first(sorted((f"timm/{n}" for n in drawn), key=counted)),
        _one_of_each_first(sorted((f"torchvision/{n}" for n in listed), key=counted)),
    ]
    # By the place in its own library: whatever is there when the run is stopped has some of each.
    places = [(at / len(names), name) for names in by_library for at, name in enumerate(names)]
    types = network_configs.chosen_types(TRANSFORMERS, SEED, network_configs.heads())
    names = [*(f"transformers/{kind}" for kind in types), *(name for _, name in sorted(places))]
    kept.write_text(json.dumps(names), encoding="utf-8")
    return names


def _one_of_each_first(names: Sequence[str]) -> list[str]:
    """In the order given, but first ones of their families before second ones."""
    seen: Counter[str] = Counter()
    ranked = []
    for at, name in enumerate(names):
        family = network_libraries.family_of(name)
        ranked.append((seen[family], at, name))
        seen[family] += 1
    return [name for *_, name in sorted(ranked)]


def parameters_of(name: str) -> float:
    """Parameters, counted on the meta device; infinite where it can't be built there."""
    import torch

    try:
        with torch.device("meta"):
            return sum(p.numel() for p in build(name).parameters())
    except Exception:  # noqa: BLE001 - whatever a library raises
        return float("inf")


def build(name: str) -> Any:
    """The network LIBRARY/NAME, in eval mode."""
    library, _, inner = name.partition("/")
    makers = {
        "torchvision": network_libraries.build_torchvision,
        "timm": network_libraries.build_timm,
        "transformers": network_configs.build,
    }
    return makers[library](inner)


def in_process(name: str, work: Callable[[str, Say], None] | None = None) -> dict[str, Any]:
    """What `work` (`measure`) says of one network in a forked process, up to its limits."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(name, theirs, work or measure))
    process.start()
    theirs.close()
    result: dict[str, Any] = {"name": name, "status": "not built", "reason": ""}
    end = time.monotonic() + WALL_SECONDS
    while ours.poll(max(0.0, end - time.monotonic())):
        try:
            result |= ours.recv()
        except EOFError:
            break
    process.join(max(0.1, end - time.monotonic()))
    late = process.is_alive()
    if late:
        process.kill()
        process.join()
    if (late or process.exitcode) and not result["reason"]:
        late = late or process.exitcode == -signal.SIGXCPU
        result["reason"] = f"more than {CPU_SECONDS} s" if late else "the process died"
    return result


def _child(name: str, pipe: Any, work: Callable[[str, Say], None]) -> None:
    # Address space that torch's libraries take before anything is computed doesn't count.
    taken = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = MEMORY + taken * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    warnings.simplefilter("ignore")

    def say(**facts: Any) -> None:
        pipe.send(facts)

    with (
        Path(os.devnull).open("w", encoding="utf-8") as nothing,
        redirect_stdout(nothing),
        redirect_stderr(nothing),
    ):
        work(name, say)
    pipe.close()


def measure(name: str, say: Say) -> None:
    """Build, run, trace and check one network; `say` what is known after every step."""
    import torch

    from otfuse_cli.running.meta import all_on_meta

    torch.manual_seed(0)
    count = parameters_of(name)
    if name.startswith("transformers/") and LARGEST_TYPE < count < float("inf"):
        say(reason=f"its config is not made small: {count / 1e6:.0f} M parameters")
        return
    try:
        with torch.device("meta" if META_ONLY < count < float("inf") else "cpu"):
            network = build(name)
    except Exception as error:  # noqa: BLE001 - whatever a library raises
        say(reason=_reason(error))
        return
    count = sum(p.numel() for p in network.parameters())
    if count > META_ONLY:  # some can be built on the CPU only
        all_on_meta(network)
    say(status="not run", parameters=count)
    try:
        args, kwargs = _runnable(name, network)
    except Exception as error:  # noqa: BLE001
        say(reason=_reason(error))
        return
    say(status="not traced", input=_shapes(args, kwargs))
    graph = _traced(network, args, kwargs, say)
    if graph is None:
        return
    if count > META_ONLY:
        say(reason=f"more than {META_ONLY / 1e6:.0f} M parameters, traced without values")
        return
    _check(network, args, kwargs, graph, say)


def _runnable(name: str, network: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The first inputs that the network runs on; the error of the last where it runs on none."""
    import torch

    library, _, inner = name.partition("/")
    device = next(network.parameters()).device
    if library == "transformers":
        kwargs = network_configs.inputs(inner, network)
        with torch.no_grad():
            network(**kwargs)
        return (), kwargs
    failure: Exception = ValueError("no inputs to try")
    for args in network_libraries.candidate_inputs(library, inner, network):
        moved = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), args)
        try:
            with torch.no_grad():
                network(*moved)
        except Exception as error:  # noqa: BLE001
            failure = error
            continue
        return moved, {}
    raise failure


def _traced(network: Any, args: Any, kwargs: Any, say: Say) -> Any:
    from otfuse_cli.graph.trace.from_module import trace
    from otfuse_cli.runtime import peak_rss_bytes

    cpu = time.process_time()
    try:
        graph = trace(network, args, kwargs)
    except Exception as error:  # noqa: BLE001
        say(reason=_reason(error), cpu=time.process_time() - cpu)
        return None
    say(
        status="traced",
        cpu=time.process_time() - cpu,
        peak=peak_rss_bytes(),
        touched=touched_share(network, graph),
        held=held_shares(network, graph),
        spaces=len(list(graph.free())),
        warnings=list(graph.warnings),
        twin="left out",
    )
    return graph


def touched_share(network: Any, graph: Any) -> float:
    """The share of parameters in tensors with a free axis; a space of one unit can't move."""
    free = {space.id for space in graph.free() if space.size > 1}
    touched = {
        name
        for tensor in graph.tensors.values()
        if tensor.units & free
        for name in (tensor.name, *tensor.aliases)
    }
    numbers = dict(network.named_parameters())
    moved = sum(p.numel() for name, p in numbers.items() if name in touched)
    return moved / max(1, sum(p.numel() for p in numbers.values()))


def held_shares(network: Any, graph: Any) -> dict[str, float]:
    """Parameters in tensors without a free axis, as shares of all, by the first reason for it."""
    free = {space.id for space in graph.free() if space.size > 1}
    numbers = {name: p.numel() for name, p in network.named_parameters()}
    shares: Counter[str] = Counter()
    for tensor in graph.tensors.values():
        if tensor.units & free or tensor.name not in numbers:
            continue
        reasons = [graph.spaces[unit].pinned for unit in sorted(tensor.units)]
        reason = next(filter(None, reasons), "positions")
        shares[reason] += numbers[tensor.name] / sum(numbers.values())
    return dict(shares)


def _check(network: Any, args: Any, kwargs: Any, graph: Any, say: Say) -> None:
    import torch

    from otfuse_cli.running.acid import acid_test

    large = sum(p.numel() for p in network.parameters()) > IN_FLOAT32
    dtype = torch.float32 if large else torch.float64

    def error_of(spaces: set[str] | None) -> Any:
        return acid_test(
            network, args, kwargs, graph, seed=SEED, draws=1, dtype=dtype, spaces=spaces
        )

    try:
        result = error_of(None)
    except Exception as error:  # noqa: BLE001
        say(reason=_reason(error))
        return
    kept = "kept" if result.passed else "not kept"
    say(twin=kept, error=result.max_error, allowed=result.threshold, reason="")
    wrong = []
    for space in graph.free() if not result.passed else ():
        alone = error_of({space.id} | ({space.per} if space.per else set()))
        if not alone.passed:
            tensors = ", ".join(f"{tensor}:{dim}" for tensor, dim in graph.members[space.id][:4])
            wrong.append(f"{space.id} ({tensors}): {alone.max_error:.1e}")
            say(wrong=wrong)


def _reason(error: Exception) -> str:
    """One line: what, where and why of ours, type and first line of others; no paths of ours."""
    from otfuse_cli.errors import OtfuseError

    if isinstance(error, OtfuseError):
        said = [error.what]
        said += [f"{k}: {v}" for k in ("where", "why") if (v := getattr(error, k)) is not None]
        text = "; ".join(said)
    else:
        text = f"{type(error).__name__}: {str(error).strip()}"
    text = re.sub(r"(?:/[^\s/:]+)+/site-packages/", "", " ".join(text.split()))
    return text if len(text) < 600 else f"{text[:600]} ..."


def _shapes(args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    import torch

    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    return ", ".join("x".join(map(str, x.shape)) for x in leaves if isinstance(x, torch.Tensor))


def _line(result: dict[str, Any]) -> str:
    if result["status"] != "traced":
        return f"{result['status']}: {result['reason'][:200]}"
    error = f" {result['error']:.1e}" if "error" in result else f" ({result['reason'][:100]})"
    return f"traced in {result['cpu']:.1f} s, {result['touched']:.0%}, twin {result['twin']}{error}"


def _prepare() -> None:
    """Import once what every process needs."""
    import torch

    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    network_libraries.make_importable()
    import timm
    import torchvision
    import transformers

    import otfuse_cli.graph.trace.from_module
    import otfuse_cli.running.acid

    del timm, torchvision, otfuse_cli
    transformers.logging.set_verbosity_error()


if __name__ == "__main__":
    main()
