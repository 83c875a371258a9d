"""Atoms: two descriptions of one axis agree after unification, whatever their structures."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equivariance import form_index
from otfuse_cli.graph.trace import atoms
from otfuse_cli.graph.trace.atoms import Atom, Form, Plus, Times, leaves, size_of, unify
from otfuse_cli.graph.trace.deferred import Deferred


@st.composite
def forms(draw: st.DrawFn, n: int, depth: int = 3) -> Form:
    """A random structure of `n` positions, atoms sometimes pinned."""
    kind = draw(st.sampled_from(["atom", "times", "plus"])) if depth and n > 1 else "atom"
    if kind == "times":
        divisors = [d for d in range(2, n) if n % d == 0]
        if divisors:
            outer = draw(st.sampled_from(divisors))
            return Times((draw(forms(outer, depth - 1)), draw(forms(n // outer, depth - 1))))
    if kind == "plus":
        at = draw(st.integers(1, n - 1))
        return Plus((draw(forms(at, depth - 1)), draw(forms(n - at, depth - 1))))
    return Atom(n, draw(st.sampled_from([None, None, None, "pinned"])))


def _maps(*described: Form) -> dict[Atom, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        leaf: torch.randperm(leaf.size, generator=generator)
        for form in described
        for leaf in leaves(form)
        if leaf.reason is None
    }


@pytest.mark.slow
@given(st.data(), st.sampled_from([1, 2, 6, 7, 8, 12, 24]))
@settings(max_examples=150, deadline=None)
def test_unified_forms_permute_alike(data: st.DataObject, n: int) -> None:
    a, b = data.draw(forms(n)), data.draw(forms(n))
    unify(a, b)
    assert size_of(a) == size_of(b) == n
    maps = _maps(a, b)
    assert torch.equal(form_index(a, maps), form_index(b, maps))


@pytest.mark.slow
@given(st.data(), st.sampled_from([4, 6, 12]))
@settings(max_examples=100, deadline=None)
def test_earlier_agreements_survive_later_ones(data: st.DataObject, n: int) -> None:
    a, b, c = (data.draw(forms(n)) for _ in range(3))
    unify(a, b)
    unify(b, c)
    maps = _maps(a, b, c)
    assert torch.equal(form_index(a, maps), form_index(b, maps))
    assert torch.equal(form_index(b, maps), form_index(c, maps))


def test_products_refine_by_common_factors() -> None:
    axis, heads, inner = Atom(24), Atom(4), Atom(6)
    unify(axis, Times((heads, inner)))
    unify(axis, Times((Atom(2), Atom(12))))
    assert [leaf.size for leaf in leaves(axis)] == [2, 2, 6]
    assert all(leaf.reason is None for leaf in leaves(axis))


def test_coprime_products_are_pinned() -> None:
    axis = Atom(6)
    unify(axis, Times((Atom(2), Atom(3))))
    unify(axis, Times((Atom(3), Atom(2))))
    assert atoms.is_fixed(axis)


def test_the_first_reason_stands_and_spreads() -> None:
    axis = Atom(6, "input")
    other = Times((Atom(2), Atom(3, "output")))
    unify(axis, other)
    assert [leaf.reason for leaf in leaves(axis)] == ["input", "output"]


def test_kinds_of_map_are_what_both_allow() -> None:
    a, b = Atom(3), Atom(3)
    atoms.allow_only(a, frozenset({"perm", "scale"}))
    atoms.allow_only(b, frozenset({"perm", "orth"}))
    unify(a, b)
    assert next(leaves(a)).exact == {"perm"}


def test_sizes_must_agree() -> None:
    with pytest.raises(ValueError, match="sizes 2 and 3"):
        unify(Atom(2), Atom(3))


def test_an_axis_inside_itself_is_pinned_unless_the_rest_is_single() -> None:
    axis = Atom(4)
    unify(axis, Times((Atom(1), axis)))
    assert not atoms.is_fixed(axis)


def test_a_split_by_selection_ties_nothing() -> None:
    whole, parts, inner = Atom(6), Atom(3), Atom(2)
    deferred = Deferred(whole, [parts, inner])
    first, last = deferred.select(parts, 0)[inner], deferred.select(parts, 2)[inner]
    assert [leaf.size for leaf in leaves(whole)] == [2, 2, 2]
    assert next(leaves(first)) is not next(leaves(last))


def test_a_split_that_is_also_read_whole_ties_its_parts() -> None:
    whole, parts, inner = Atom(6), Atom(3), Atom(2)
    deferred = Deferred(whole, [parts, inner])
    first = deferred.select(parts, 0)[inner]
    atoms.head(inner)
    assert next(leaves(first)) is next(leaves(inner))
    assert len({id(leaf) for leaf in leaves(whole) if leaf.size == 2}) == 1
