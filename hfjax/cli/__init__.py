"""The commands of hfjax: one file for each, and what several of them use.

`train` has train, eval and generate, `model_files` inspect and export; then `launch`, `data`,
`schedule`, `kernels`, `recipes` and `demo`. `arguments` reads command lines, `log_handler` shows
what the library logs, `draw_timeline` draws boxes in time.
"""
