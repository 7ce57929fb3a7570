"""Megatron-LM with stepgraph's optimizer, its whole optimizer step replayed as one CUDA graph.

    import stepgraph.megatron
    stepgraph.megatron.install()      # before Megatron builds its optimizer

Nothing of Megatron is imported before `install` or `OptimizerCudaGraphWrapper` is called.
"""

from stepgraph.megatron.cuda_graph import OptimizerCudaGraphWrapper, release_all
from stepgraph.megatron.install import install, installed, uninstall

__all__ = ["OptimizerCudaGraphWrapper", "install", "installed", "release_all", "uninstall"]
