"""torchrun for `--ranks` (mopd/ranks.py) and `mopd launch`: the same processes, but what a rank said last is not buried under
torchrun's own traceback, and the job ends with the status of the rank that failed first, or 128 + N after signal N."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main


def run(arguments: Sequence[str]) -> int:
    """torchrun with these arguments; returns the exit status."""
    try:
        main(list(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        print(f"rank {rank} of this job was ended by {signal.Signals(-failure.exitcode).name}; the same command goes on from "
              "its last checkpoint, if it saved one", file=sys.stderr)
        return 128 - failure.exitcode
    except SignalException as error:
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
