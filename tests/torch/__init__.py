"""PolyCCL under torch.distributed: every call, and what is built on top of it."""
