"""The optimizer step as one CUDA graph."""
