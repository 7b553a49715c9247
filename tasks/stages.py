"""The stages and their order."""

STAGES = (
    "prepare",
    "calibrate",
    "sensitivity",
    "supernet",
    "allocate",
    "quantize",
    "finetune",
    "diagnose",
    "benchmark",
    "compare",
)
