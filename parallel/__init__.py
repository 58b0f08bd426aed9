"""The mechanisms: mesh, strategy, placement, fetch, layers, gradients. One idea a file."""
