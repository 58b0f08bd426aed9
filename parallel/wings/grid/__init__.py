"""A grid of devices: linear maps split over two mesh axes, and what splits cost."""
