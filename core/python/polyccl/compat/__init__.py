"""PolyCCL under the names of other libraries, for scripts that were written for these: `polyccl.compat.torchcomms`."""
