"""Ways from several networks to one on inputs: refit, output layer, grafting, joint fusion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ..checkpoint.replaced import Replaced
from ..errors import UsageError
from ..fusion.average import Aligned
from ..fusion.choose_by_readers import ends_at_outputs
from ..fusion.fused import Fused
from ..fusion.joint import choices, fresh_outputs, joined_value, union, with_absent
from ..fusion.joint_heads import add_heads
from ..fusion.joint_stream import StreamParent, reduce_streams
from ..fusion.recompute import renew_all
from ..graph.analysis.fit_targets import fits
from ..graph.analysis.streams import PostNorm, has_heads, in_heads, normed_stream, require_untied
from ..matching.alignment import Alignment
from ..matching.canonical import canonical
from ..matching.models import Model
from ..report.records import RefitRecord
from ..requests.recipe import Recipe
from ..requests.requests import ImproveOptions
from ..running.runnable import graph_at
from .bench import Bench, Tensors, seen_units

# A fit that agrees with its teacher this often is not tried again from another start.
_ENOUGH = 0.98

Fitted = tuple[Tensors, tuple[RefitRecord, ...], tuple[str, ...]]


@dataclass(frozen=True)
class Ways:
    """Ways from the parents to one network at the anchor's widths.

    Attributes:
        bench: The parents, their shares, all inputs.
        fused: The average.
        recipe: How units were matched.
        options: Of the fits.
        teachers: What a refit aims at instead of the parents' mean.
    """

    bench: Bench
    fused: Fused
    recipe: Recipe
    options: ImproveOptions
    teachers: Sequence[Aligned] | None = None

    @property
    def left(self) -> frozenset[str]:
        """Tensors that stay the anchor's (`--skip`, `--only`)."""
        names = self.fused.whole.checkpoint.infos
        return frozenset(name for name in names if self.fused.selection.keeps(name))

    def refit(self, bench: Bench) -> Fitted:
        """The average, every layer fitted to the parents' mean on the inputs of `bench`.

        Under teachers, where that falls short, the anchor itself is another start; the one that
        agrees more is kept.
        """
        average = bench.average(self.fused)
        if self.teachers is None:
            return self._refit(bench, average, self.fused.sources)
        first = self._refit(bench, average, self.teachers)
        agreement = bench.agreement(first[0])
        if agreement >= _ENOUGH:
            return first
        anchor_alone = bench.average(replace(self.fused, sources=(), repair=None))
        second = self._refit(bench, anchor_alone, self.teachers)
        return second if bench.agreement(second[0]) > agreement else first

    def _refit(self, bench: Bench, tensors: Tensors, aims: Sequence[Aligned]) -> Fitted:
        parents = bench.run_parents(aims)
        fitted, remarks = bench.refit(parents, tensors, self.options.ridge, left=self.left)
        return tensors, fitted, remarks

    def head(self, bench: Bench) -> Fitted:
        """The anchor, its output layers alone fitted to the ensemble.

        Raises:
            UsageError: It has none that can be fitted.
        """
        tensors = dict(bench.tensors[bench.anchor])
        plan, _ = fits(bench.programs[bench.anchor])
        graph = bench.parents.anchor.graph
        ends = [fit for fit in plan if ends_at_outputs(graph, fit.layer.weight)]
        outer = {name for fit in ends for name in fit.tensors}
        if not outer or not outer.isdisjoint(self.left):
            raise UsageError(
                "there is no output layer that can be fitted alone",
                where="--blend head",
                why="it is kept from the anchor"
                if outer
                else "it is tied, used twice, or not linear",
                fix="use --blend average",
            )
        parents = bench.run_parents(self.teachers or self.fused.sources)
        left = frozenset(tensors) - outer
        fitted, _ = bench.refit(parents, tensors, self.options.ridge, left=left)
        return tensors, fitted, ()

    def graft(self, bench: Bench, share: float) -> Fitted:
        """The anchor, a share of its least useful units given to the other parents' best.

        Raises:
            IncompatibleModels: Units that can't be seen one by one.
            UsageError: Heads; tensors that are to stay the anchor's; an anchor without a share.
        """
        models = self._counted(bench)
        anchor = bench.parents.anchor
        if self.left or has_heads(anchor.graph) or models[0] is not anchor:
            raise UsageError(
                "no units of the anchor can be given to other parents",
                where="--blend graft",
                why="heads and streams move as wholes, --skip and --only keep tensors, and an "
                "anchor of weight 0 has no units to keep",
                fix="use --blend joint",
            )
        return self._joint_units(bench, models, share=share)

    def joint(self, bench: Bench) -> Fitted:
        """The union of the parents, reduced and fitted on the inputs of `bench`.

        Raises:
            IncompatibleModels: Units that can't be seen one by one.
            UsageError: Tensors that are to stay the anchor's.
        """
        if self.left:
            raise UsageError(
                "--blend joint makes all tensors anew",
                where="--skip, --only",
                fix="use --blend average",
            )
        graph = bench.parents.anchor.graph
        if not has_heads(graph):
            return self._joint_units(bench, self._counted(bench))
        try:
            normed_stream(graph)
        except PostNorm as error:
            return self._joint_post_norm(bench, error)
        except UsageError as error:
            raise _no_joint(error) from error
        return self._joint_stream(bench)

    def _counted(self, bench: Bench) -> list[Model]:
        """Models with a share, the anchor first: without one it gives its shape and nothing else.

        Where there are heads, widths alone don't tell how many: the graph is the model's own.
        """
        anchor, named = bench.parents.anchor, bench.parents.named_anchor
        models = []
        sources = sorted((a.model for a in self.fused.sources), key=lambda m: m.index != named)
        for model in (anchor, *sources):
            if bench.weights[model.index] <= 0:
                continue
            ours = model.index not in bench.parents.own_architectures  # theirs are traced already
            if ours and has_heads(anchor.graph) and model.graph.sizes != anchor.graph.sizes:
                graph = graph_at(bench.parents.shared_architecture, bench.tensors[model.index])
                model = replace(model, graph=graph)
            models.append(model)
        return models

    def _joint_units(
        self, bench: Bench, models: Sequence[Model], *, share: float | None = None
    ) -> Fitted:
        """Units of all parents one by one; heads as wholes."""
        anchor, device = bench.parents.anchor, bench.runtime.device
        runs = [bench.run_parent(m, bench.weights[m.index]) for m in models]
        seed, merges = self.recipe.seed, share is None
        seen = seen_units(bench, bench.samples, post=True, seed=seed, models=models, before=merges)
        graph, observed = anchor.graph, with_absent([seen[m.index] for m in models])
        chosen, merged = choices(graph, observed, runs, without=in_heads(graph), other_share=share)
        del seen, observed  # not held during the fits
        runs = [replace(r, alignment=maps) for r, maps in zip(runs, chosen, strict=True)]
        read: Mapping[str, Tensor] = {}
        if has_heads(graph):
            runs, read = add_heads(graph, runs, bench.samples, device=device)
        parts = [
            (m, r.alignment or Alignment({}), r.weight) for m, r in zip(models, runs, strict=True)
        ]
        others = bench.parents.counterparts
        tensors: Tensors = {}
        for name in anchor.checkpoint.infos:
            joined = read[name] if name in read else union(name, anchor, parts, others=others)
            tensors[name] = joined.to(device)
        renew_all(anchor.graph, tensors)
        aims = [
            replace(r, alignment=Alignment({**m.maps, **bases}))
            for r, (_, m, _), bases in zip(runs, parts, merged, strict=True)
        ]
        fresh = fresh_outputs(graph, runs)
        fitted, remarks = bench.refit(
            aims, tensors, self.options.ridge, aim=joined_value, fresh=fresh
        )
        return tensors, fitted, remarks

    def _joint_post_norm(self, bench: Bench, error: PostNorm) -> Fitted:
        """Transformers whose stream has axes of its own: its units are chosen, not directions."""
        try:
            require_untied(bench.parents.anchor.graph)
            tensors, fitted, remarks = self._joint_units(bench, self._counted(bench))
        except UsageError as refused:
            raise _no_joint(refused) from refused
        said = f"--blend joint: {error.what} at {error.where}: units of the stream were chosen"
        return tensors, fitted, (said, *remarks)

    def _joint_stream(self, bench: Bench) -> Fitted:
        """Pre-norm transformers: parents in canonical form, a joint basis for the stream."""
        anchor = bench.parents.anchor
        parts = []
        for model in self._counted(bench):
            model_stream = normed_stream(model.graph)
            settled = canonical(bench.tensors[model.index], model.graph, model_stream)
            held = replace(model, checkpoint=Replaced(model.checkpoint, settled))
            tensors = {n: t.float() if t.is_floating_point() else t for n, t in settled.items()}
            run = replace(bench.run_parent(held, bench.weights[model.index]), tensors=tensors)
            parts.append(StreamParent(held, model_stream, run))
        ridge, device = self.options.ridge, bench.runtime.device
        alike = [part.run for part in parts if part.other is None]
        named = alike[0] if alike else bench.run_parent(anchor, 0.0)
        reduced = reduce_streams(anchor, parts, bench.samples, ridge, device=device, named=named)
        renew_all(anchor.graph, reduced.tensors)
        fitted, remarks = bench.refit(
            [replace(p.run, alignment=a) for p, a in zip(parts, reduced.alignments, strict=True)],
            reduced.tensors,
            ridge,
            aim=joined_value,
            stress=reduced.stress,
        )
        return reduced.tensors, fitted, remarks


def _no_joint(error: UsageError) -> UsageError:
    """Why there is no joint fusion of some transformers."""
    fix = error.fix or "use --residual shared"
    return UsageError(
        f"no joint fusion of these transformers: {error.what}",
        where=error.where,
        why=error.why,
        fix=fix.replace("--residual shared", "--blend average"),
    )
