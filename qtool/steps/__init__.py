"""The step loop that training, QAT and search share: a step, the order of its data, what judges it, exact resume."""
