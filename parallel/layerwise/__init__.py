"""The loop over layers written out.

Parameters come from the host layer by layer, and a layer may be updated as soon as its gradient is
there.
"""
