"""The device as an object."""

from cupy.cuda import runtime


class Device:
    """A device by its number."""

    def __init__(self, device):
        self.id = int(device)

    def use(self):
        """Make it the current one."""
        runtime.setDevice(self.id)
