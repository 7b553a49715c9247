"""The stages and their order."""

STAGES = ("prepare", "calibrate", "sensitivity", "allocate", "quantize", "benchmark", "compare")
