"""The version of PolyCCL: the one place that states it. Packaging, the build and ``polyccl.__version__`` read it from here."""

__version__ = "0.1.0"
