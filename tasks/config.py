"""What every section of params.yaml has in common: strict types, and defaults that the `effort` dial sets.

A field whose default depends on the effort is declared with `by_effort(...)`: None in params.yaml (or leaving the key
out) means the effort's value, any number given stands.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

Effort = Literal["demo", "full"]
T = TypeVar("T")


def by_effort(demo: Any, full: Any) -> Any:
    return field(default=None, metadata={"demo": demo, "full": full})


def resolve(config: T, effort: Effort) -> T:
    """The config with the effort's values where None was given."""
    missing = {
        f.name: f.metadata[effort]
        for f in fields(config)  # pyright: ignore[reportArgumentType]
        if effort in f.metadata and getattr(config, f.name) is None
    }
    return replace(config, **missing) if missing else config  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class Common:
    """Tracked by every stage.

    seed: of every random choice. effort: `demo` keeps `make run` short on two cores, `full` is for a GPU; both only set
    defaults. device: `auto` takes CUDA when there is one. threads: of CPU tensor operations, in all; 0 takes every core.
    Results are repeatable bit for bit at one number of threads.
    """

    seed: int = 0
    effort: Effort = "demo"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.threads <= 1024:
            raise ValueError(f"threads {self.threads} is not between 0 and 1024; 0 takes every core")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed {self.seed} is not a whole number from 0 to 2^63 - 1")
