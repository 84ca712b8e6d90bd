"""Rewrites of a captured graph, one a file: each leaves what it computes, in operators that runtimes have in integers.

``qtool.quantization.capturing.capture`` and ``qtool.quantization.stage`` have their order.
"""
