"""Starting local ranks through torch's elastic launcher."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from adapipe.cli.exit_codes import BAD_INPUT, FAILED, INTERRUPTED
from adapipe.cli.interrupt import LAUNCHER_VARIABLE


def launch_ranks(ranks: int, arguments: Sequence[str]) -> int:
    """Run `adapipe ARGUMENTS` on `ranks` local ranks. Returns the exit code: 0, 1 if a rank failed, 2 for bad input,
    128 plus the number of the signal that ended it.

    A rank that fails says why itself; only one that was killed cannot.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per rank; also silences the launcher's notice
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # it would report what we report, at length
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.2,
    )
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    try:
        elastic_launch(config, sys.executable)("-m", "adapipe", *arguments)
    except ChildFailedError as error:
        for rank, failure in sorted(error.failures.items()):
            if failure.exitcode == -signal.SIGKILL:
                print(
                    f"adapipe: rank {rank} (stage {rank}) was killed (SIGKILL), by someone or for want of memory",
                    file=sys.stderr,
                )
        # A rank that was given bad input, or that Ctrl-C ended, has said so in its exit code.
        codes = {failure.exitcode for failure in error.failures.values()}
        return next((code for code in (BAD_INPUT, INTERRUPTED) if codes == {code}), FAILED)
    except SignalException as error:
        return 128 + error.sigval.value
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0
