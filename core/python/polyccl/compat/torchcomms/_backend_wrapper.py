"""torchcomms' ``_backend_wrapper``: where some versions keep the wrapper that torch.distributed asks for."""

from .switch import BackendWrapper as _BackendWrapper

__all__ = ["_BackendWrapper"]
