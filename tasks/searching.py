"""Allocators that ask for true losses: PPO with its curriculum, and evolution.

A plan's true loss is the KL divergence from the reference, nats a token, on training text, of the model composed of the
supernet's units, or of its matrices rounded with error feedback, which takes longer. KL varies far less from
text to text than the negative log-likelihood. The best plans are confirmed on other training text, the plan each search
started from among them; those of error feedback as the engine rounds them, block after block, which takes longer again.
"""

import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from tasks import interrupts, models, plans, progress, store
from tasks.config import by_effort
from tasks.errors import UserError, first_line
from tasks.job import Job, Record
from tasks.statistics import Protector, Statistics
from windquant.allocate import ALLOCATORS, Problem, Target, lagrangian
from windquant.candidates import Candidates, Fed
from windquant.correction import features
from windquant.engine import Engine
from windquant.environment import CONTEXT, STATIC, Standard, static_state
from windquant.errors import InputError, above_zero
from windquant.evolution import evolution
from windquant.grids import WIDTHS
from windquant.ppo import Policy, PPOConfig
from windquant.search import Counted, Search, SearchConfig, key
from windquant.streams import compute_fast
from windquant.supernet import Composed

log = logging.getLogger("windquant")
SEARCHES = ("ppo", "evolution")
POLICY = {"version": 1, "static": list(STATIC), "context": list(CONTEXT)}
"""What a policy's file says of the state it was learned on."""


@dataclass(frozen=True)
class AllocateConfig(Target, SearchConfig, PPOConfig):
    """Of `Target`, and of the searches (`SearchConfig`, `PPOConfig`). allocator: a name of `allocate.ALLOCATORS`, or `ppo`
    or `evolution`. loss: of plans `composed` of the supernet's units, or of matrices rounded with error `feedback`.
    curriculum: targets that PPO learns before its own. policy: a saved one to start from, of another target or another
    model. windows: of training text that true losses are measured on. finalists: plans to confirm on as many others.
    epsilon: nats of degradation that the multiplier of quality is steered by."""

    allocator: str = "lagrangian"
    loss: Literal["composed", "feedback"] = "composed"
    curriculum: list[float] = field(default_factory=lambda: [3.0, 2.5])
    policy: str | None = None
    windows: int | None = by_effort(demo=16, full=64)
    finalists: int = 4
    epsilon: float = 1.0

    def __post_init__(self) -> None:
        for part in (Target, SearchConfig, PPOConfig):
            part.__post_init__(self)
        names = (*ALLOCATORS, *SEARCHES)
        if self.allocator not in names:
            raise InputError(f"allocator '{self.allocator}' is unknown; choose one of {', '.join(names)}")
        above_zero(self, "finalists", "epsilon", *["windows"] * (self.windows is not None))
        if self.allocator in SEARCHES and not self.episodes and (self.policy is None or self.allocator != "ppo"):
            raise InputError("episodes 0 takes ppo's policy as it is, and none is given; name one, or raise episodes")
        for bits in self.curriculum:
            if not 0 < bits <= 16.5:
                raise InputError(f"curriculum holds {bits:g}, which is not a number of bits between 0 and 16.5")


@dataclass(frozen=True)
class Found:
    """A plan and what it took. loss, confirmed: KL to the reference, nats a token, on the search's and on other text."""

    choice: Tensor
    loss: float
    confirmed: float
    evaluations: int
    seconds: float


class Searching:
    """What searches share: the problem's table, states and features, and true losses, none asked for twice, kept in the
    scratch store."""

    def __init__(self, config: AllocateConfig, table: plans.Table, target: float, job: Job, record: Record) -> None:
        self.config, self.table, self.target, self.job, self.record = config, table, target, job, record
        if config.loss == "composed":
            self._check(store.load_json(store.path("supernet") / "manifest.json"))
        raw = static_state(table.body, table.D, table.features)
        self.standard = Standard.of(raw)
        self.static, self.f = self.standard(raw), features(table.body, config.depths)
        self.origin = ""
        self.loss, self.other = self._losses()

    def _check(self, manifest: dict[str, float]) -> None:
        if not manifest["steps"]:
            return
        low, high = manifest["lowest_bits"], manifest["highest_bits"]
        for bits in (self.target, *self.curriculum):
            if not low <= bits <= high:
                raise UserError(
                    f"{bits:.4g} bits lie outside what the supernet was learned for, {low:g} to {high:g}; widen "
                    f"supernet.lowest_bits and highest_bits, or change allocate's target or curriculum"
                )

    @property
    def curriculum(self) -> list[float]:
        return self.config.curriculum if self.config.allocator == "ppo" and self.config.episodes else []

    def problem(self, target: float) -> Problem:
        return Problem(self.table.D, self.table.B, self.table.budget(target))

    def ppo(self) -> Found:
        """Stage after stage of the curriculum, each from the policy of the one before."""
        start, evaluations = self._start(), 0
        with self.job.scratch.clock("ppo") as clock:
            for i, target in enumerate((*self.curriculum, self.target)):
                search = self._learn(i, target, start)
                start, evaluations = search.policy, evaluations + len(search.loss.known)
            self._save(search.policy)
            found = self._confirm(search.loss, search.plan(), search.first)
        return replace(found, evaluations=evaluations, seconds=clock.seconds)

    def _learn(self, stage: int, target: float, start: Policy | None) -> Search:
        config, label = self.config, f"search-{stage}{self.origin}"
        search = Search(self.problem(target), self.static, self.f, self.loss, config, config, self.job.common.seed, start,
                        config.epsilon)  # fmt: skip
        curves: dict[str, list[float]] = {}
        if self.job.scratch.has(label):
            kept = self.job.scratch.get(label)
            curves = {name.removeprefix("curve."): t.tolist() for name, t in kept.items() if name.startswith("curve.")}
            search.load(kept)
        report = progress.bar(f"PPO at {target:g} bits")
        report(search.episodes, config.episodes)
        while search.episodes < config.episodes:
            for name, value in search.rollout().items():
                curves.setdefault(name, []).append(value)
            drawn = {f"curve.{name}": torch.tensor(values, dtype=torch.float64) for name, values in curves.items()}
            self.job.scratch.put(label, search.state() | drawn)
            last = {name: values[-1] for name, values in curves.items()}
            log.info(
                "%g bits, episode %d: best loss %.4f, policy's %.4f; %.2f %% of the budget, mu %.2f, entropy %.3f, KL %.3f, "
                "clipped %.2f, explained %.2f",
                target, last["episodes"], last["best_loss"], last["policy_loss"], 100 * last["budget_used"], last["mu"],
                last["entropy"], last["kl"], last["clip_fraction"], last["explained_variance"],
            )  # fmt: skip
            report(search.episodes, config.episodes)
        search.loss(search.plan()[None])  # what the last update made of it
        self.record.children[f"ppo {stage}, {target:g} bits"] = Record(
            params={"target_bits": target, "allocator": "ppo"}, curves=curves, tags={"allocator": "ppo"}
        )
        return search

    def evolution(self, evaluations: int) -> Found:
        problem, counted, report = self.problem(self.target), Counted(self.loss), progress.bar("evolution")
        with self.job.scratch.clock("evolution") as clock:
            evolution(problem, counted, evaluations - 1, self.config.losses, self.job.generator(), report)
            found = self._confirm(counted, lagrangian(problem, self.job.generator()))
        return replace(found, evaluations=len(counted.known), seconds=clock.seconds)

    def _confirm(self, losses: Counted, *others: Tensor) -> Found:
        """The best of the finalists and of others, on text that the search has not seen. The last of these is the plan that
        it started from. The least losses are those of good luck, too; a policy's plan rests on all of them."""
        choices = torch.cat([losses.best(self.config.finalists)[0], torch.stack(others)])
        confirmed = self.other(choices)
        best = int(confirmed.argmin())
        if best == len(choices) - 1:
            log.warning("on other text no plan of the search beats the one it started from, which is taken")
        return Found(choices[best], float(losses(choices[best, None])), float(confirmed[best]), 0, 0.0)

    def score(self, choices: Tensor) -> list[Found]:
        """Of plans (n, units) that were made without true losses."""
        found, report = [], progress.bar("plans to compare with")
        for i, choice in enumerate(choices):
            found.append(Found(choice, float(self.loss(choice[None])), float(self.other(choice[None])), 0, 0.0))
            report(i + 1, len(choices))
        return found

    def _losses(self) -> tuple[Counted, Counted]:
        """On the search's text, and on other text."""
        folder, device = store.path("prepare"), self.job.device
        model = models.reference(folder / "model", device)
        if compute_fast(device):
            model = model.bfloat16()
        ids = store.load_tensors(folder / "windows" / "train.safetensors")["ids"].long()
        wanted = self.config.windows or 1
        if len(ids) < 2 * wanted:
            raise UserError(
                f"allocate.windows {wanted} asks for {2 * wanted} windows of training text, half of them to confirm plans "
                f"on, and there are {len(ids)}; lower it, or bring more text"
            )
        picked = ids[torch.randperm(len(ids), generator=self.job.generator())[: 2 * wanted]].split(wanted)
        if self.config.loss == "composed":
            net, confirm = Composed(model, self.table.body, units_of), self._set
        else:
            statistics, confirm = Statistics(), self._treat
            net = Fed(model, self.table.body, statistics.moment, Protector(self.table.protection, statistics))
        own, other = picked
        return self._kept("losses", net, own, self._set), self._kept("losses-other", net, other, confirm)

    def _kept(self, name: str, net: Candidates, windows: Tensor, set_plan: Callable[[Candidates, Tensor], None]) -> Counted:
        """Losses on a text, that survive an interruption."""
        reference = [p.half().cpu() for p in net.log_probabilities(windows)]  # every logit of every token is kept

        @torch.no_grad()
        def measure(choices: Tensor) -> Tensor:
            found, report = [], progress.bar("true losses") if len(choices) > 1 else _silent
            for choice in choices:
                interrupts.check()
                set_plan(net, choice)
                counted.known[key(choice)] = _finite(net.divergence(windows, reference))
                found.append(counted.known[key(choice)])
                self.job.scratch.put(name, counted.state())
                report(len(found), len(choices))
            return torch.tensor(found, dtype=torch.float64)

        counted = Counted(measure)
        if self.job.scratch.has(name):
            counted.load(self.job.scratch.get(name))
        return counted

    def _set(self, net: Candidates, choice: Tensor) -> None:
        net.set([WIDTHS[c] for c in choice.tolist()])

    def _treat(self, net: Candidates, choice: Tensor) -> None:
        """Set the model to what the engine's error feedback makes of a plan."""
        folder, plan = store.path("prepare"), self.table.plan(choice)
        ids = store.load_tensors(folder / "windows" / "calibration.safetensors")["ids"].long()
        engine = Engine(models.walk(folder / "model", self.job.device), plan.of, plan.header["chunk_size"], None,
                        self.job.common.seed, store.Memory(), "plan", log.debug, Protector(plan.protection))  # fmt: skip
        net.replaced()
        for block in engine.run(ids, progress.bar("error feedback of a plan, block after block")):
            for name, matrix in block.items():
                net.layers[name].weight.copy_(matrix.dequantize())

    def _save(self, policy: Policy) -> None:
        tensors = {f"policy.{name}": t for name, t in policy.state_dict().items()}
        tensors |= {"standard.mean": self.standard.mean, "standard.std": self.standard.std}
        store.save_tensors(self.job.out / "policy.safetensors", tensors)
        store.save_json(self.job.out / "policy.json", POLICY | {"temperature": self.config.temperature})

    def _start(self) -> Policy | None:
        """The policy that params name; its states are standardised as they were when it learned."""
        if self.config.policy is None:
            return None
        file = Path(self.config.policy)
        if store.path("allocate") in file.parents:
            raise UserError(
                f"allocate.policy {file} lies where this stage writes; copy it, and its .json, to a place of yours"
            )
        policy, self.standard = load_policy(file)
        self.origin = f"-{store.hash_file(file)[:16]}"  # DVC does not track the file
        self.static = self.standard(static_state(self.table.body, self.table.D, self.table.features))
        return policy


def _silent(done: int, total: int) -> None:
    pass


def _finite(loss: float) -> float:
    if not math.isfinite(loss):
        raise InputError("the true loss of a plan is NaN or Inf: check the model's weights and the training text")
    return loss


def load_policy(file: Path) -> tuple[Policy, Standard]:
    """A policy.safetensors with its policy.json beside it. Raises UserError when it knows other states than this release."""
    other = "; give the policy.safetensors of a search, with the policy.json beside it, or set allocate.policy to null"
    try:
        said, tensors = json.loads(file.with_suffix(".json").read_text()), load_file(file)
        theirs = {name: said[name] for name in (*POLICY, "temperature")}
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as e:
        raise UserError(f"allocate.policy {file} is not a policy ({first_line(e)}){other}") from e
    if {name: theirs[name] for name in POLICY} != POLICY:
        raise UserError(
            f"{file} was learned on states of version {theirs['version']} ({', '.join(theirs['static'])}), this release's "
            f"have version {POLICY['version']}; learn it again, or set allocate.policy to null"
        )
    policy = Policy(len(STATIC) + len(CONTEXT), said["temperature"])
    policy.load_state_dict({n.removeprefix("policy."): t for n, t in tensors.items() if n.startswith("policy.")})
    return policy, Standard(tensors["standard.mean"], tensors["standard.std"])


def units_of(block: int) -> dict[str, Tensor]:
    """Of the supernet, mapped from its file."""
    file = store.path("supernet") / f"block-{block}.safetensors"
    with safe_open(file, "pt") as f:
        return {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
