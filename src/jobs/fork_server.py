"""A process that imports what jobs need, once, and from which each job is forked."""

import os
from multiprocessing import forkserver
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def start() -> None:
    """Start it, if it does not run yet; it imports while this process goes on.

    Before Python 3.12 it is not told where this project is, would find nothing to import and leave it to every job.
    """
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), before)))
    forkserver.set_forkserver_preload(["src.glue.experiment"])
    forkserver.ensure_running()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before
