"""Several processes: how they find each other, stop together, and are watched."""
