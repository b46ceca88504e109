"""torchcomms' ``device_mesh``: PolyCCL's meshes of communicators. Importing it imports torch."""

from ...torch.mesh import init_device_mesh

__all__ = ["init_device_mesh"]
