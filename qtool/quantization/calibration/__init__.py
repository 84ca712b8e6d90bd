"""Calibration: what observers see of the data, kept until every range estimator has read it."""
