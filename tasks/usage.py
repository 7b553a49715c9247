"""What a process has taken so far, its children included."""

import resource

import torch

WHO = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


def cpu_seconds() -> float:
    return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, WHO))


def peak_rss_gib() -> float:
    """Of the largest process."""
    return max(resource.getrusage(who).ru_maxrss for who in WHO) / 2**20


def gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def peak_gpu_gib() -> float:
    """Of this process, on the device it works on; 0 without one."""
    return torch.cuda.max_memory_allocated() / 2**30 if gpus() else 0.0
