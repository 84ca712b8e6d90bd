"""The integer reference: what a runtime makes of a QDQ file, decided and computed without it, bit for bit."""
