"""Experts on several devices: which device holds which expert."""
