"""Constants of the devices at hand, and what steps take of the processors of a CPU.

`calibrate` writes a file of constants; `microbenchmarks` are what it times, with the clocks of
`stopwatch`. `work` predicts the processor's seconds of a step, which fake devices share.
"""
