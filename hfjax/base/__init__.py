"""What everything may use: means, paths of trees, tables of text, exits, files, progress."""
