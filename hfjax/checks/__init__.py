"""Checks of what a user gives: settings, features together, models, optimizers, what XLA made.

Train, evaluate and the pipes call them by name, through hfjax/compose.py; no data plane does.
"""
