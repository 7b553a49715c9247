"""The stages and their order."""

STAGES = ("prepare", "calibrate", "sensitivity", "supernet", "allocate", "quantize", "finetune", "benchmark", "compare")
