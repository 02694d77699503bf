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
    401: "cudaErrorIllegalState: the operation cannot be performed in the present state",
    700: "cudaErrorIllegalAddress: an illegal memory access was encountered",
    900: "cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing",
    901: (
        "cudaErrorStreamCaptureInvalidated: operation failed due to a previous error during capture"
    ),
    902: "cudaErrorStreamCaptureMerge: operation would result in a merge of separate capture"
    " sequences",
    903: "cudaErrorStreamCaptureUnmatched: capture was not ended in the same stream as it began",
    904: "cudaErrorStreamCaptureUnjoined: capturing stream has unjoined work",
    905: "cudaErrorStreamCaptureIsolation: dependency created on uncaptured work in another stream",
    906: (
        "cudaErrorStreamCaptureImplicit: operation would make the legacy stream depend on a"
        " capturing blocking stream"
    ),
    907: (
        "cudaErrorCapturedEvent: operation not permitted on an event last recorded in a capturing"
        " stream"
    ),
}


class CUDARuntimeError(RuntimeError):
    """A call of the CUDA runtime failed."""

    def __init__(self, status):
        self.status = status
        super().__init__(WORDS.get(status, f"cudaError{status}"))
