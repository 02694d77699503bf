"""CUDA C++ on the processor: the emulator beside this library compiles and runs it."""

try:
    from tests.device.fake.emulator import RawModule
except ImportError:  # this folder is on the path, and the tests are not
    from emulator import RawModule

__all__ = ["RawModule"]
