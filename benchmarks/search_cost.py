"""What a search costs at the size of LLaMA-3-8B: environment and PPO by themselves, timed here; true losses counted, and the
GPU-hours that the count implies.

4,864 units of 256 columns; their distortions and features are drawn, kind by kind and depth by depth, from the measured
table of the model at hand, scaled to the units' weights. True losses are a formula here (the table with factors by kind and
depth) and cost nothing. Uses the artifact of sensitivity.
"""

import time
from typing import Any

import torch

from tasks import plans, store
from tasks.config import resolve
from tasks.searching import AllocateConfig
from windquant.allocate import Problem
from windquant.correction import features
from windquant.environment import Standard, static_state
from windquant.search import Search
from windquant.units import Matrix, Unit, cut, sizes, weights_in

SHAPES = {"q_proj": (4096, 4096), "k_proj": (1024, 4096), "v_proj": (1024, 4096), "o_proj": (4096, 4096),
          "gate_proj": (14336, 4096), "up_proj": (14336, 4096), "down_proj": (4096, 14336)}  # fmt: skip
BLOCKS, CHUNK, TARGET = 32, 256, 2.25
TOKENS_A_SECOND = 20_000
"""Stated, not measured: forward passes of 8 B parameters, 16 GFLOP a token, at a third of an H200's 990 TFLOP/s."""


def run(seeds: int) -> tuple[list[dict[str, Any]], list[str]]:
    table = plans.load_distortions(store.path("sensitivity") / "table.parquet")
    config = resolve(AllocateConfig(), "full")
    rows = []
    for seed in range(seeds):
        search = _search(table, config, seed)
        began = time.monotonic()
        while search.episodes < config.episodes:
            search.rollout()
        seconds, evaluations = time.monotonic() - began, len(search.loss.known)
        tokens = evaluations * (config.windows or 0) * 512
        rows.append({"units": len(search.static), "episodes": search.episodes, "seed": seed, "search_seconds": seconds,
                     "evaluations": evaluations, "tokens": tokens,
                     "gpu_hours": tokens / TOKENS_A_SECOND / 3600})  # fmt: skip
    return rows, [
        f"{config.windows} windows of 512 tokens a true loss, {TOKENS_A_SECOND} tokens a second, stated; "
        f"{torch.get_num_threads()} threads"
    ]


def _search(table: plans.Table, config: AllocateConfig, seed: int) -> Search:
    generator = torch.Generator().manual_seed(seed)
    matrices = [Matrix(f"model.layers.{i}.{_path(k)}", i, *SHAPES[k]) for i in range(BLOCKS) for k in SHAPES]
    body = cut(matrices, CHUNK)
    places = torch.tensor([_like(unit, table, generator) for unit in body])
    ratio = torch.tensor([u.weights for u in body], dtype=torch.float64) / torch.tensor(
        [table.body[p].weights for p in places.tolist()], dtype=torch.float64
    )
    D, B = table.D[places] * ratio[:, None] / ratio.sum() * len(body), sizes(body)
    f = features(body, config.depths)
    true = D * (0.3 * f @ torch.randn(f.shape[1], generator=generator, dtype=torch.float64)).exp()[:, None]
    raw = static_state(body, D, table.features[places])
    problem = Problem(D, B, int(TARGET * weights_in(body) / 8))
    return Search(problem, Standard.of(raw)(raw), f, lambda choices: true.gather(1, choices.T).sum(0), config, config, seed)


def _path(kind: str) -> str:
    return f"{'mlp' if kind in ('gate_proj', 'up_proj', 'down_proj') else 'self_attn'}.{kind}"


def _like(unit: Unit, table: plans.Table, generator: torch.Generator) -> int:
    """A measured unit of the same kind, at about the same depth."""
    last = max(u.matrix.block for u in table.body)
    near = [
        i
        for i, u in enumerate(table.body)
        if u.matrix.kind == unit.matrix.kind and abs(u.matrix.block / last - unit.matrix.block / (BLOCKS - 1)) < 0.1
    ]
    return near[int(torch.randint(len(near), (), generator=generator))]
