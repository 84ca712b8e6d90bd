"""Capturing: from a module of any kind to the float graph that quantization begins with, proved to be the model."""
