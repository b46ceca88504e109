"""torch's own tests of torch.distributed, run on PolyCCL: see README.md."""
