"""The error of the CUDA runtime."""

WORDS = {
    1: "cudaErrorInvalidValue: invalid argument",
    2: "cudaErrorMemoryAllocation: out of memory",
    35: "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version",
    100: "cudaErrorNoDevice: no CUDA-capable device is detected",
    101: "cudaErrorInvalidDevice: invalid device ordinal",
    201: "cudaErrorDeviceUninitialized: invalid device context",
    217: "cudaErrorPeerAccessUnsupported: peer access is not supported between these two devices",
    400: "cudaErrorInvalidResourceHandle: invalid resource handle",
    700: "cudaErrorIllegalAddress: an illegal memory access was encountered",
}


class CUDARuntimeError(RuntimeError):
    """A call of the CUDA runtime failed."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(WORDS.get(status, f"cudaError{status}"))
