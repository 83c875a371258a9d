"""`eval`: accuracy, cross-entropy and perplexity of checkpoints, their ensemble, their average."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import torch

from .. import __version__
from ..errors import UsageError
from ..matching.models import Model
from ..report.records import Report
from ..requests.requests import EvaluateRequest, MeasureOptions, MergeRequest, Source
from ..running.arch_value import Arch
from ..running.architecture import Architecture, module_state, real_network, require_network
from ..running.evaluation import MEANS, Score, Tally, class_axis, ensemble
from ..running.factory import Network
from ..running.forward import logit_batches
from ..running.inputs import is_program, static_batch
from ..running.samples import Samples, load_samples
from ..runtime import Progress, Stopwatch, peak_rss_bytes, resolve_device, silent
from ..session.architectures import arch_of_each, arch_record
from ..session.graph_records import graph_record
from ..session.parents import Parents, assemble, open_checkpoints
from .merge import merge_tensors

State = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Evaluator:
    """A network, samples to measure it on, and where."""

    network: Network
    names: Mapping[str, str]
    samples: Samples
    batch: int
    device: str

    def state(self, model: Model) -> State:
        """A checkpoint's tensors by the module's names."""
        return module_state(self.network, self.names, model.stored)

    def of(self, architecture: Architecture) -> Evaluator:
        """The same samples for another network."""
        network = real_network(architecture)
        assert network is not None
        return replace(self, network=network, names=architecture.names)

    def at_widths_of(self, model: Model, architecture: Architecture) -> Evaluator:
        """The same, with a module that says the widths of `model` where it holds any."""
        infos, held = model.checkpoint.infos, self.network.module.state_dict()
        other = any(
            infos[self.names[name]].shape != tuple(tensor.shape)
            for name, tensor in held.items()
            if name in self.names
        )
        if not other or is_program(self.network):
            return self
        from ..running.runnable import network_at

        network = network_at(architecture, {name: model.stored(name) for name in infos})
        return replace(self, network=network)

    def outputs(self, state: State) -> Iterator[torch.Tensor]:
        """Of the network with these tensors, batch by batch."""
        return logit_batches(
            self.network, state, self.samples, batch=self.batch, device=self.device
        )

    def batches(self) -> Iterator[Samples]:
        """The samples, in batches of the size of `outputs`."""
        return self.samples.batches(self.size)

    @property
    def size(self) -> int:
        """Samples in a batch: what an exported program is bound to, or as the options say."""
        return static_batch(self.network) or self.batch

    def score(self, state: State) -> Score:
        """What the network with these tensors is worth."""
        tally = Tally()
        for logits, samples in zip(self.outputs(state), self.batches(), strict=True):
            tally.add(logits, samples)
        return tally.score()


def run_evaluate(request: EvaluateRequest, *, progress: Progress = silent) -> Report:
    """Measure every checkpoint of `request` on its samples.

    Raises:
        OtfuseError: See docs/exit-codes.md.
    """
    _check_count(request)
    watch = Stopwatch()
    device = resolve_device(request.device)
    with open_checkpoints(request.checkpoints, request.key) as checkpoints:
        with watch("graph"):
            parents = assemble(checkpoints, 0, request.arch, "cpu")
        with watch("read"):
            arch = arch_of_each(request.arch, len(checkpoints))[0]
            bench = set_up(request, parents.shared_architecture, arch, request.seed, device)
            benches = for_each(bench, parents)
            inputs = tuple(c.record() for c in checkpoints)
        names = distinct([c.label for c in checkpoints])
        with watch("evaluate"):
            if request.ensemble:
                scores = together(benches, names, parents.models, progress)
            else:
                scores = {}
                parts = zip(names, benches, parents.models, strict=True)
                for done, (name, one, model) in enumerate(parts):
                    progress("evaluate", done, len(names))
                    scores[name] = one.score(one.state(model))
            if request.average:
                last = benches[-1]
                scores["plain average"] = last.score(_plain_average(request, last))
    return Report(
        command="eval",
        version=__version__,
        inputs=inputs,
        recipe={
            "arch": arch_record(request.arch, len(request.checkpoints)),
            **measured_on(request),
            "device": device,
            "seed": request.seed,
        },
        graph=graph_record(parents.anchor.graph),
        evaluation={"samples": bench.samples.count, **measures(scores)},
        warnings=(
            *(c.remark for c in checkpoints if c.remark),
            *remarks(parents.shared_architecture, scores),
        ),
        timings=dict(watch.seconds),
        peak_rss_bytes=peak_rss_bytes(),
    )


def set_up(
    options: MeasureOptions, architecture: Architecture, arch: Arch, seed: int, device: str
) -> Evaluator:
    """The network and the samples, checked before anything is computed.

    Raises:
        UsageError: There is no network to run, or samples that it doesn't take.
        UnreadableInput: Samples that can't be read.
    """
    network = require_network(architecture, arch, "measuring")
    samples = load_samples(options.samples, network, number=options.num_samples, seed=seed)
    return Evaluator(network, architecture.names, samples, options.batch, device)


def measures(scores: Mapping[str, Score]) -> dict[str, dict[str, float | None]]:
    """Scores as the report holds them: a mapping of names to numbers for each measure."""
    measured: dict[str, dict[str, float | None]] = {
        "accuracy": {name: score.accuracy for name, score in scores.items()},
        "cross-entropy": {name: finite(score.cross_entropy) for name, score in scores.items()},
    }
    if any(score.tokens for score in scores.values()):
        measured["perplexity"] = {name: score.perplexity for name, score in scores.items()}
    return measured


def finite(value: float) -> float | None:
    """A number for the report; None for what JSON can't hold."""
    return value if isfinite(value) else None


def remarks(architecture: Architecture, scores: Mapping[str, Score]) -> tuple[str, ...]:
    """What the numbers rest on, and where they mean little."""
    warnings = [*architecture.remarks]
    if architecture.assumption:
        warnings.append(architecture.assumption)
    warnings += [
        f"{name}: the outputs are not finite everywhere, so there is no cross-entropy"
        for name, score in scores.items()
        if not isfinite(score.cross_entropy)
    ]
    return tuple(warnings)


def measured_on(options: MeasureOptions) -> dict[str, Any]:
    """The options of measuring, as the report's recipe holds them."""
    from_file = isinstance(options.samples, str) or hasattr(options.samples, "__fspath__")
    return {
        "samples": str(options.samples) if from_file else "memory",
        "num_samples": options.num_samples,
        "batch": options.batch,
    }


def distinct(labels: Sequence[str]) -> list[str]:
    """Labels as names of their own, numbered where a file was named twice."""
    names: list[str] = []
    for at, label in enumerate(labels):
        again = labels[:at].count(label)
        names.append(f"{label} ({again + 1})" if again else label)
    return names


def _check_count(request: EvaluateRequest) -> None:
    count = len(request.checkpoints)
    if not count:
        raise UsageError("nothing to measure", where="CKPT...", fix="name a checkpoint")
    for flag, wanted in (("--ensemble", request.ensemble), ("--average", request.average)):
        if wanted and count < 2:
            raise UsageError(
                "one checkpoint has no mean", where=flag, fix="name two checkpoints or more"
            )


def for_each(bench: Evaluator, parents: Parents) -> list[Evaluator]:
    """One for each model: with its own network where it has one, at its own widths."""
    benches = []
    for model in parents.models:
        architecture = parents.architecture(model.index)
        separate = model.index in parents.own_architectures
        own = bench.of(architecture) if separate else bench
        benches.append(own.at_widths_of(model, architecture))
    return benches


def together(
    benches: Sequence[Evaluator], names: Sequence[str], models: Sequence[Model], progress: Progress
) -> dict[str, Score]:
    """All checkpoints in lock step, and the means of their outputs: memory for one batch.

    Raises:
        UsageError: Programs that take batches of different size.
    """
    sizes = {sized.size for sized in benches}
    if len(sizes) > 1:
        raise UsageError(
            "programs with batches of different size",
            where=f"--ensemble: {', '.join(map(str, sorted(sizes)))} samples",
            fix="export them with one batch size",
        )
    tallies = {name: Tally() for name in (*names, *(f"ensemble ({mean})" for mean in MEANS))}
    runs = [sized.outputs(sized.state(m)) for sized, m in zip(benches, models, strict=True)]
    bench, done = benches[0], 0
    for samples, *outputs in zip(bench.batches(), *runs, strict=True):
        progress("evaluate", done, bench.samples.count)
        axis = class_axis(outputs[0], samples)
        means = [ensemble(outputs, mean=mean, axis=axis) for mean in MEANS]
        for tally, logits in zip(tallies.values(), (*outputs, *means), strict=True):
            tally.add(logits, samples)
        done += samples.count
    return {name: tally.score() for name, tally in tallies.items()}


def _plain_average(request: EvaluateRequest, bench: Evaluator) -> State:
    sources: tuple[Source, ...] = request.checkpoints
    tensors, _ = merge_tensors(
        MergeRequest(
            checkpoints=sources, align="none", arch=request.arch, key=request.key, device="cpu"
        )
    )
    return module_state(bench.network, bench.names, tensors.__getitem__)
