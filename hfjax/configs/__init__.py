"""Recipes: configurations of known models on given GPUs, YAML files for `hfjax train --recipe`."""
