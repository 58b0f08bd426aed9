"""hfjax's own loop over layers, written out in place of the derivative of a scan.

Parameters come from the host layer by layer, and a layer may be updated as soon as its gradient is
ready. `engines` compute gradients, `passes` is the loop, `layer_update` the update of a layer.
"""
