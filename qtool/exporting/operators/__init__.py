"""Operators in ONNX that torch's exporter writes otherwise than a runtime runs them well."""
