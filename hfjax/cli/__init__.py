"""The commands of `hfjax`: one file for each, and what several of them use."""
