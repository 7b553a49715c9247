"""What the baselines stage left, as `compare` shows it: rows to set beside ours, and what made none, with its reason."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tasks import store


@dataclass(frozen=True)
class Peers:
    """rows: measured on the same model, text and tasks as ours. missing: variant -> why it has no row."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)


def load(facts: dict[str, Any], settings: dict[str, Any], wanted: Sequence[str]) -> Peers:
    """facts: what rows must have in common, see `measure.facts`, and the hashes of model and text. settings: what they must
    be made with. wanted: variants whose failure is to be told."""
    found = Peers()
    folder = store.path("baselines")
    for file in sorted(folder.glob("*/results.json")):
        row, variant = store.load_json(file), file.parent.name
        if row["kind"] == "unsupported":
            found.missing[variant] = row["reason"]
        elif row["facts"] != facts:
            other = next(k for k in facts if row["facts"].get(k) != facts[k])
            found.missing[variant] = f"measured before {other} changed; `make baselines` measures it again"
        elif row["settings"] != settings:
            other = next(k for k in settings if row["settings"].get(k) != settings[k])
            found.missing[variant] = f"made with another {other}; `make baselines` makes it again"
        else:
            spent = store.load_json(store.run_record(f"baselines/{variant}"))
            found.rows.append(row | {"variant": variant, "seconds": spent["seconds"], "peak_gib": spent["peak_gib"]})
    for file in sorted(folder.glob("*.failed.json")):
        noted = store.load_json(file)
        if noted["variant"] not in wanted:
            continue
        found.missing[noted["variant"]] = f"failed: {noted['reason']}"
        found.rows[:] = [r for r in found.rows if r["variant"] != noted["variant"]]
    return found
