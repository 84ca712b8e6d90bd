"""Units that figures are told in, and that are sums of others."""

MIB = 2**20
"""Bytes of a mebibyte."""
