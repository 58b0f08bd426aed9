"""hfjax's own loop over layers, written out in place of the derivative of a scan.

Parameters come from the host layer by layer, and a layer may be updated as soon as its gradient is
there. `planes` are the data planes, `passes` the loop, `one_layer` the update of a layer.
"""
