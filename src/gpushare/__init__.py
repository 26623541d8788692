"""gpushare: share GPUs in space under CUDA MPS on Kubernetes."""

__version__ = "0.1.0"
