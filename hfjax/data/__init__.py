"""Token files on disk and the rows that a run reads from them. Knows no mesh and no model."""
