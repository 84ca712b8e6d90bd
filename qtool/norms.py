"""Which layers keep running statistics, averages over batches that evaluation normalises by.

Each of their steps moves an average by a hundredth or a tenth of what it lacks, so in 16 bits they would stand still;
and each process's are of its own share of the batches.
"""

from __future__ import annotations

from torch import nn


def keeps_statistics(module: nn.Module) -> bool:
    """Whether ``module`` is a batch-norm, or an instance-norm that tracks statistics.

    >>> [keeps_statistics(norm) for norm in (nn.InstanceNorm1d(2), nn.InstanceNorm1d(2, track_running_stats=True))]
    [False, True]
    """
    batch, either = nn.modules.batchnorm._BatchNorm, nn.modules.batchnorm._NormBase
    return isinstance(module, batch) or (isinstance(module, either) and module.track_running_stats)
