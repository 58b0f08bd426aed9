"""A loss scale as DeepSpeed's ZeRO has it, in plain Python: what hfjax's is compared with."""

from hfjax import LossScale


class Simulated:
    """DeepSpeed's DynamicLossScaler, told anew."""

    def __init__(self, settings: LossScale):
        self.settings, self.scale, self.left = settings, settings.initial, settings.hysteresis
        self.step, self.last, self.skipped, self.stopped = 0, -1, 0, False

    def after(self, overflow: bool) -> float:
        """Take a step; return the scale of the next."""
        given = self.settings
        if overflow:
            if given.hysteresis == 1 or self.left == 1:
                self.stopped = self.stopped or self.scale == given.minimum
                self.scale = max(self.scale / 2, given.minimum)
            else:
                self.left -= 1
            self.last, self.skipped = self.step, self.skipped + 1
        else:
            if given.consecutive:
                self.left = given.hysteresis
            assert given.window is not None
            stable = self.step - self.last - 1
            if stable > 0 and stable % given.window == 0:
                self.left = self.left if given.consecutive else given.hysteresis
                self.scale = min(self.scale * 2, given.maximum)
        self.step += 1
        return self.scale
