"""Passes over an ONNX graph: one rule a file, each with ``apply(model) -> number of changes``."""
