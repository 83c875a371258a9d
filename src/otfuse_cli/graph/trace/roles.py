"""What a traced network uses the axes of its tensors for, and what that says can't move."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..derived_tensors import UNUSED, power_vectors
from ..model import Role
from . import atoms
from .atoms import Atom
from .call import Origin, forms_of
from .deferred import instances
from .label_operations import Propagation

UNMADE = "one position that no tensor makes"


def settled_roles(propagation: Propagation) -> dict[Origin, set[Role]]:
    """Roles of tensor axes, once what they say can't move is pinned."""
    roles = _roles(propagation)
    _pin_unused(propagation, roles)
    _pin_unmade(propagation, roles)
    return roles


def _roles(propagation: Propagation) -> dict[Origin, set[Role]]:
    roles: dict[Origin, set[Role]] = {}
    for event in propagation.log.roles:
        roles.setdefault(event.origin, set()).add(event.role)
    readers = {name for (name, _), seen in roles.items() if Role.CONSUME in seen}
    # What a norm is computed with makes no units of the weight that it reads.
    vectors: set[str] = set()
    normed: list[set[str]] = []
    for power in power_vectors(propagation.shapes):
        vectors.update(power.tensors)
        normed.append({power.source, *power.tensors})
    waiting: list[tuple[frozenset[Origin], frozenset[Origin], int]] = []
    for left, right, step in propagation.log.weight_products:
        names = {name for name, _ in left | right}
        if not any(names <= one for one in normed):
            waiting.append((left, right, step))
        for origin in left | right:
            if origin[0] in vectors:
                roles.setdefault(origin, set()).add(Role.VECTOR)
    # Of two tensors multiplied together (low-rank factors), the one that reads data makes the
    # shared units, and the other is then known to read. A chain of factors is decided one after
    # the other; where nothing tells, the first product that waits is read from left to right.
    while waiting:
        ready = [product for product in waiting if _reads(product[0] | product[1], readers)]
        for left, right, _ in ready or waiting[:1]:
            maker, reader = (left, right) if _reads(left, readers) else (right, left)
            for origin in maker:
                roles.setdefault(origin, set()).add(Role.PRODUCE)
            for origin in reader:
                roles.setdefault(origin, set()).add(Role.CONSUME)
            readers |= {name for name, _ in reader}
        done = ready or waiting[:1]
        waiting = [item for item in waiting if item not in done]
    return roles


def _reads(origins: Iterable[Origin], readers: set[str]) -> bool:
    return any(name in readers for name, _ in origins)


def _pin_unused(propagation: Propagation, roles: Mapping[Origin, set[Role]]) -> None:
    # A bias of what is computed from weights alone (learned queries that meet one another) has no
    # role, but is used where what is computed meets data.
    used = {name for name, _ in roles} | propagation.log.used
    for name, labels in propagation.state.items():
        if name not in used:
            for label in labels:
                atoms.pin(label.form, UNUSED)
    seen: set[Atom] = set()
    for axis_labels in propagation.log.live:
        for axes in instances(forms_of(axis_labels)):
            for form in axes:
                seen.update(atoms.leaves(form))
    for labels in propagation.state.values():
        for label in labels:
            for leaf in atoms.leaves(label.form):
                if leaf not in seen:  # the end of a table that is longer than any input
                    leaf.reason = leaf.reason or UNUSED


def _pin_unmade(propagation: Propagation, roles: Mapping[Origin, set[Role]]) -> None:
    """A single position that no tensor makes is no unit: an axis that the input was given."""
    alone: dict[Atom, bool] = {}
    for name, labels in propagation.state.items():
        for d, label in enumerate(labels):
            read = roles.get((name, d), set()) <= {Role.CONSUME, Role.FIXED}
            for leaf in atoms.leaves(label.form):
                if leaf.size == 1:
                    alone[leaf] = alone.get(leaf, True) and read
    for leaf, unmade in alone.items():
        if unmade:
            leaf.reason = leaf.reason or UNMADE
