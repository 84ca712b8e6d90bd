"""Contracts: what accuracy may be lost, what each unit loses, and the search for the cheapest that keeps them."""
