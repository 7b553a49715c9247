"""What the papers print for LLaMA-3, to be set beside a run on the same model: never measured here, and tagged so.

Bits are the papers' own accounting (`effective_bits_paper`): codes, INT8 weights, FP16 skips; no scales, no positions.
Perplexity is of WikiText-2, accuracy a mean over the papers' zero-shot tasks.
"""

from dataclasses import dataclass

from tasks.job import Record

WINDQUANT, WINQ = "arXiv 2605.26660 (WINDQuant)", "arXiv 2605.17471 (WinQ)"


@dataclass(frozen=True)
class Published:
    """accuracy: a share. hours: of a GPU. gigabytes: of its memory. None: not printed. note: what to know of the number."""

    model: str
    method: str
    source: str
    bits: float | None = None
    perplexity: float | None = None
    accuracy: float | None = None
    hours: float | None = None
    gigabytes: float | None = None
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.model} {self.method}" + (f" {self.bits:g}" if self.bits else "")

    def record(self) -> Record:
        metrics = {
            "effective_bits_paper": self.bits,
            "perplexity": self.perplexity,
            "acc_mean": self.accuracy,
            "gpu_hours": self.hours,
            "peak_gpu_gib": self.gigabytes and self.gigabytes * 1e9 / 2**30,
        }
        tags = {"model": self.model, "method": self.method, "source": self.source, "note": self.note}
        return Record({k: v for k, v in metrics.items() if v is not None}, tags={k: v for k, v in tags.items() if v})


SECOND_HAND = "perplexity second-hand"
ROWS = (
    Published("LLaMA-3-1B", "WINDQuant", WINDQUANT, 2.01, 19.64, 0.4930, note=SECOND_HAND),
    Published("LLaMA-3-1B", "EfficientQAT", WINDQUANT, 2.12, accuracy=0.4658),
    Published("LLaMA-3-3B", "WINDQuant", WINDQUANT, 1.99, 10.40, 0.6198, note=SECOND_HAND),
    Published("LLaMA-3-3B", "AQLM", WINDQUANT, 2.27, accuracy=0.6186),
    Published("LLaMA-3-8B", "WINDQuant", WINDQUANT, 1.96, 7.90, 0.7022, 49.0, 17.1, SECOND_HAND),
    Published("LLaMA-3-8B", "AQLM", WINDQUANT, 2.27, accuracy=0.6904),
    Published("LLaMA-3-8B", "EfficientQAT", WINDQUANT, accuracy=0.5552),
    Published("LLaMA-3-8B", "ParetoQ", WINDQUANT, hours=1777.0),
    Published("LLaMA-3-8B", "LLM-QAT", WINDQUANT, gigabytes=126.9),
    Published("LLaMA-3-70B", "WINDQuant", WINDQUANT, 2.02, accuracy=0.7148, note="another reading of the paper has 0.7346"),
    *(Published("LLaMA-1B", method, WINQ, bits, perplexity)
      for bits, *pair in ((1, 16.9, 15.3), (1.58, 14.0, 12.9), (2, 12.5, 11.9))
      for method, perplexity in zip(("ParetoQ", "WinQ"), pair, strict=True)),
)  # fmt: skip
