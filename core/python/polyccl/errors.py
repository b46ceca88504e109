"""The errors of PolyCCL: one base class, and one class for each thing that a caller would do about it.

Every class but `Aborted`, `PeerLost` and `Mismatch` is also the built-in class that Python programs catch for such a case. The
native module raises these classes too; it looks them up here by name.
"""

from __future__ import annotations


class CommError(RuntimeError):
    """The base of all errors of PolyCCL, raised itself where no class below fits (a library's own failure, an internal one).

    The text says what happened, where (communicator, operation, rank, island) and what to try. A communicator that raised it
    is broken unless the text says otherwise.
    """


class InvalidArgument(CommError, ValueError):
    """A call was refused on this rank before anything was sent: an argument, a tensor, an option or an environment variable.

    Correct the call. The communicator stays usable.
    """


class BackendUnavailable(CommError, ImportError):
    """A backend, or the vendor library behind it, is not built, not installed, or does not load here.

    The text names the file and the build flag or package that would bring it. ``polyccl info`` shows all backends.
    """


class UnsupportedOperation(CommError, NotImplementedError):
    """The operation is valid, but no backend of this communicator can do it and no plan builds it from what they can.

    Use another dtype, reduction or backend. The communicator stays usable.
    """


class CommTimeout(CommError, TimeoutError):
    """Something was not done by its deadline: an operation, a rendezvous, a key of a store.

    The text names who is missing where that is known. Look at that rank's log first; raise the timeout only where the work
    is truly that slow. An operation that timed out breaks its communicator.
    """


class PeerLost(CommError):
    """A process that this rank depends on is gone: another rank, or the host of the store.

    The text names rank, island and host. Find out why that process ended; its own error is the cause, this one the effect.
    """


class Aborted(CommError):
    """The operation was ended by ``abort()``, on this rank or, where the text names one, on another.

    Nothing is wrong by itself. The communicator is broken; make a new one or reconfigure it.
    """


class Mismatch(CommError):
    """Ranks disagree on something that must be equal: an option, a version, or an argument of one operation.

    All ranks raise it, naming the field, the values and the ranks. Make the ranks agree.
    """


__all__ = [
    "Aborted",
    "BackendUnavailable",
    "CommError",
    "CommTimeout",
    "InvalidArgument",
    "Mismatch",
    "PeerLost",
    "UnsupportedOperation",
]
