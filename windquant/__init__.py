"""windquant: mixed-precision quantization of language models to about two bits a weight.

Pure numerics on tensors and modules; files, tracking and orchestration live in `tasks` and `flows`.
"""

__version__ = "0.1.0"
