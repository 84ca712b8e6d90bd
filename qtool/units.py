"""Units that figures are told in."""

MIB = 2**20
"""Bytes of a mebibyte."""
