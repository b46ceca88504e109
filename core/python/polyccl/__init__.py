"""PolyCCL: collectives across vendors."""
