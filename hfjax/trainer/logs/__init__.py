"""What a run logs: metrics, and lines about its progress.

`trackers` receive metrics: `metrics_file` (metrics.jsonl, which every run has, with its
`loss_plot`), TensorBoard, Weights & Biases, the user's own. `console` has the lines of a run, its
speed and its progress bar.
"""
