"""Networks that choose by their data: traced as if they chose everything, proven as they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equivariance import replay
from otfuse_cli.errors import IncompatibleModels
from otfuse_cli.graph.model import LayerGraph
from otfuse_cli.graph.trace.chosen_rows import CHOSEN, EverythingChosen
from otfuse_cli.graph.trace.from_module import export, trace
from otfuse_cli.running.acid import acid_test, leave_one_out

SUPPRESS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
ROI_ALIGN = (
    "(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor"
)


def suppress(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """The better half of the boxes."""
    return scores.argsort(descending=True)[: max(1, len(scores) // 2)]


def cut_out(features: Tensor, boxes: Tensor, *rest: Any) -> Tensor:
    """A small map for each box: its own corner of its own sample, which is not averaged."""
    height, width = rest[1:3]
    of_box = features[boxes[:, 0].long()]
    moved = [m.roll((int(b[1]), int(b[2])), (1, 2)) for m, b in zip(of_box, boxes, strict=True)]
    return torch.stack(moved)[..., :height, :width]


@pytest.fixture(scope="module")
def operators() -> Iterator[None]:
    """Operators by the names of torchvision's, in a library of our own where it has none."""
    library = torch.library.Library("otfuse_chosen", "DEF")
    library.define("nms" + SUPPRESS)
    library.impl("nms", suppress, "CPU")
    torch.library.register_fake(
        "otfuse_chosen::nms",
        lambda boxes, *_: boxes.new_empty(
            torch.library.get_ctx().new_dynamic_size(), dtype=torch.long
        ),
        lib=library,
    )
    fragment = torch.library.Library("torchvision", "FRAGMENT")
    if not hasattr(torch.ops.torchvision, "roi_align"):
        fragment.define("roi_align" + ROI_ALIGN)
        fragment.impl("roi_align", cut_out, "CPU")
        torch.library.register_fake(
            "torchvision::roi_align",
            lambda x, boxes, scale, *size: x.new_empty(len(boxes), x.shape[1], *size[:2]),
            lib=fragment,
        )
    yield
    fragment._destroy()
    library._destroy()


class Chooser(nn.Module):
    """Rows scored by one layer; `choose` says which of them the next layers see."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.score, self.out = nn.Linear(5, 6), nn.Linear(6, 1), nn.Linear(6, 3)
        self.boxes = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.rows(x).relu()
        kept = self.choose(rows, self.score(rows)[:, 0])
        return self.out(kept)

    def choose(self, rows: Tensor, scores: Tensor) -> Tensor:
        raise NotImplementedError


class ByMask(Chooser):
    def choose(self, rows: Tensor, scores: Tensor) -> Tensor:
        kept = rows[scores > 0]
        return kept if kept.shape[0] > 0 else rows


class ByIndex(Chooser):
    def choose(self, rows: Tensor, scores: Tensor) -> Tensor:
        kept = torch.where(scores > 0)[0]
        return rows[kept[: min(len(kept), 4)]]


class ByTwo(Chooser):
    """A loop over what occurs, and what is found written into zeros."""

    def choose(self, rows: Tensor, scores: Tensor) -> Tensor:
        made = torch.zeros_like(rows)
        kinds = (scores > 0).long()
        for kind in torch.unique(kinds):
            chosen = kinds == kind
            if chosen.sum().reshape(1).nonzero().numel() >= 0:
                made[chosen] = rows[chosen] * (kind + 1)
        return made[(scores > -9).nonzero()[:, 0]]


class BySelect(Chooser):
    def choose(self, rows: Tensor, scores: Tensor) -> Tensor:
        kept = rows.masked_select((scores > 0)[:, None]).view(-1, 2, 3)
        return kept.reshape(len(kept), 6)


class BySuppression(Chooser):
    def choose(self, rows: Tensor, scores: Tensor) -> Tensor:
        kept = torch.ops.otfuse_chosen.nms(self.boxes(rows), scores, 0.5)
        return rows[kept] if kept.numel() else rows


class ByUnit(Chooser):
    """Which units are chosen depends on what they are: they can't move."""

    def choose(self, rows: Tensor, scores: Tensor) -> Tensor:
        first = rows[:, rows[0] > 0]
        width = min(first.shape[1], 6)
        return nn.functional.pad(first[:, :width], (0, 6 - width))


INPUT = (torch.randn(8, 5, generator=torch.Generator().manual_seed(0)),)


def free_units(graph: LayerGraph) -> list[str]:
    """Spaces of more than one unit that may move."""
    return [space.id for space in graph.free() if space.size > 1]


def chosen(kind: type[Chooser]) -> tuple[nn.Module, LayerGraph]:
    torch.manual_seed(0)
    net = kind().eval()
    return net, trace(net, INPUT)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ByMask, ByIndex, ByTwo, BySuppression])
def test_what_is_chosen_by_data_leaves_units_free_and_the_real_network_keeps_its_function(
    kind: type[Chooser], operators: None
) -> None:
    net, graph = chosen(kind)
    assert graph.warnings == (CHOSEN,)
    assert free_units(graph) == ["rows.weight:0"]
    assert acid_test(net, INPUT, None, graph, seed=0).passed
    used = {m.tensor for m in leave_one_out(net, INPUT, None, graph, seed=0).undetected}
    assert used <= {"boxes.weight"}


@pytest.mark.slow
def test_units_that_are_chosen_by_what_they_are_stay_in_place() -> None:
    _, graph = chosen(ByUnit)
    assert CHOSEN in graph.warnings
    assert not free_units(graph)


@pytest.mark.slow
def test_rows_that_are_counted_in_elements_stay_in_place() -> None:
    net, graph = chosen(BySelect)
    assert acid_test(net, INPUT, None, graph, seed=0).passed
    assert not free_units(graph)


@pytest.mark.slow
def test_a_program_that_is_to_be_run_is_not_traced_so() -> None:
    with pytest.raises(IncompatibleModels, match="can't be traced"):
        export(ByMask().eval(), INPUT)


def test_a_network_that_chooses_nothing_has_no_such_warning() -> None:
    assert CHOSEN not in trace(nn.Linear(3, 2), (torch.zeros(2, 3),)).warnings


@pytest.mark.parametrize(
    "value", [torch.tensor([True, False]), torch.tensor([[0.0, 2.0], [1.0, 0.0]])]
)
def test_every_position_is_one_that_is_not_zero(value: Tensor) -> None:
    with EverythingChosen():
        found = value.nonzero()
        parts = torch.where(value)
    everywhere = [tuple(at) for at in torch.ones_like(value).nonzero().tolist()]
    assert sorted(tuple(at) for at in found.tolist()) == everywhere
    assert torch.equal(torch.stack(parts, dim=1), found)


def test_all_values_are_one_value() -> None:
    x = torch.tensor([3, 1, 3])
    with EverythingChosen():
        values, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
    assert (values.tolist(), inverse.tolist(), counts.tolist()) == ([1], [0, 0, 0], [3])


def test_numbers_are_written_under_a_mask_as_ever() -> None:
    x = torch.arange(4.0)
    mode = EverythingChosen()
    with mode:
        x[x > 1] = 0.0
        y = torch.where(x > 0, x, -1.0)
    assert x.tolist() == [0, 1, 0, 0]
    assert y.tolist() == [-1, 1, -1, -1]
    assert not mode.used


def test_channels_pass_a_cut_out_of_boxes(operators: None) -> None:
    features = torch.randn(2, 3, 6, 5, dtype=torch.float64)
    boxes = torch.tensor([[0, 1, 2, 4, 4], [1, 0, 0, 3, 3], [1, 2, 1, 4, 4], [0, 0, 1, 2, 2.0]])
    align = torch.ops.torchvision.roi_align
    run = replay(lambda x, b: align(x, b, 1.0, 2, 2, 2, False), features, boxes.double())
    assert run.signature() == ".a.., b. -> ba.."
    assert max(run.errors().values()) < 1e-12
