"""`hfjax memory`: what a training step would take, compiled before it runs."""
