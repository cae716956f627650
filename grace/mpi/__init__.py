"""Exchange of NumPy gradients between processes over MPI, by mpi4py and without a framework.

Importing this package imports mpi4py, which starts MPI; importing grace does not.
"""

from grace.mpi.exchange import MPIExchange
from grace.mpi.transport import MPITransport

__all__ = ["MPIExchange", "MPITransport"]
