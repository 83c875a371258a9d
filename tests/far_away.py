"""A cluster in this very process, to which all is sent that goes to one: what we use of Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from otfuse_cli.cluster import ray_cluster
from otfuse_cli.cluster.ray_cluster import RayWorkers


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        super().__init__(f"a worker raised {cause}")
        self.cause = cause


def _nothing() -> None:
    pass


@dataclass(eq=False)
class Reference:
    """A value, or the error in its place, that is there once it is waited for."""

    make: Callable[[], Any]
    made: bool = False
    value: Any = None

    def get(self) -> Any:
        if not self.made:
            self.value, self.made = self.make(), True
            self.make = _nothing  # what it was made of is not held any longer
        return self.value


@dataclass
class InProcessRay:
    """What `RayWorkers` asks of Ray; tasks run when they are waited for, the last one first.

    Attributes:
        cpus: Of its node.
        memory: Of its node.
        before: Called before every task with its number; what it raises, the task raises.
    """

    cpus: int = 2
    memory: int = 1 << 40
    before: Callable[[int], None] = lambda number: None
    tasks: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)
    cancelled: list[Any] = field(default_factory=list)
    waiting: list[Reference] = field(default_factory=list)
    exceptions: Any = field(
        default_factory=lambda: SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)
    )

    def put(self, value: Any) -> Reference:
        return Reference(lambda: None, made=True, value=value)

    def nodes(self) -> list[dict[str, Any]]:
        offers = {"CPU": float(self.cpus), "memory": float(self.memory)}
        return [{"Alive": True, "Resources": offers}, {"Alive": False, "Resources": {"CPU": 64.0}}]

    def remote(self, function: Callable[..., Any]) -> Any:
        def submit(*args: Any) -> list[Reference]:
            number = self.tasks
            self.tasks += 1

            def run() -> Any:
                self.before(number)
                values = [a.get() if isinstance(a, Reference) else a for a in args]
                return function(*values)

            whole = Reference(run)
            self.waiting.append(whole)
            return [Reference(lambda: whole.get()[0]), Reference(lambda: whole.get()[1])]

        def options(**asked: Any) -> Any:
            self.asked.append(asked)
            return SimpleNamespace(remote=submit)

        return SimpleNamespace(options=options)

    def wait(self, references: list[Reference], timeout: float) -> tuple[Any, Any]:
        return references, []

    def get(self, reference: Reference) -> Any:
        while self.waiting and not reference.made:  # in another order than they were asked for
            task = self.waiting.pop()
            with suppress(RayError):
                task.get()
        return reference.get()

    def cancel(self, reference: Reference, force: bool) -> None:
        assert force
        self.cancelled.append(reference)


@pytest.fixture
def nearby(monkeypatch: pytest.MonkeyPatch) -> InProcessRay:
    """`--cluster` is this process: nothing is shared with it, but what was sent."""
    ray = InProcessRay()

    @contextmanager
    def workers_of(cluster: str) -> Iterator[RayWorkers]:
        yield RayWorkers(ray, ray_cluster.settings_here())

    monkeypatch.setattr(ray_cluster, "workers_of", workers_of)
    monkeypatch.setattr(ray_cluster, "_node", lambda: "here (127.0.0.1)")
    return ray
