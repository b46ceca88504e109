"""The tests of PolyCCL."""
