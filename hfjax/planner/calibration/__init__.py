"""Constants of the available devices.

`calibrate` writes a file of constants; `microbenchmarks` are the programs that it times, with the
clocks of `stopwatch`.
"""
