"""Constants of the devices at hand.

`calibrate` writes a file of constants; `microbenchmarks` are what it times, with the clocks of
`stopwatch`.
"""
