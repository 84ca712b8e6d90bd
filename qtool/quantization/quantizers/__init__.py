"""Quantizers: the arithmetic from real numbers to integers and back, with gradients where it is trained."""
